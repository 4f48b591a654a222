// The windows of images as the rows of a matrix, and the rows of a matrix as windows that are added up in images.
//
// A row has the numbers of one window: for each of its pixels all channels. It ends with zeros, so that its length is a
// multiple of 8. A thread of `patches` writes 8 numbers, 16 bytes; one of `folded` has a pixel of an image and adds what
// the windows have there, in a fixed order: the same input gives the same bits. It is compiled for the geometry of one
// layer: CHANNELS, TALL and WIDE of a window; STEP, PAD and APART (stride, padding, dilation), DOWN and ACROSS.

#include "half.cuh"

#define GROUPS ((CHANNELS * TALL * WIDE + 7) / 8)  // of 8 numbers in a row

__device__ __forceinline__ float widened(unsigned short bits) {
#ifdef FP16
  float value;
  asm("{.reg .f16 half; mov.b16 half, %1; cvt.f32.f16 %0, half;}" : "=f"(value) : "h"(bits));
  return value;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ unsigned short narrowed(float value) { return (unsigned short)rounded(value, 0.f); }

// An image by the distances between its numbers.
#define IMAGE int height, int width, int by_image, int by_channel, int by_row, int by_column

// `wide`: the image is in fp32. A block has places of one line of windows.
extern "C" __global__ void patches(
    const void* __restrict__ image, Eight* __restrict__ rows, int down, int across, int wide, IMAGE) {
  int at = blockIdx.x * blockDim.x + threadIdx.x, column = at / GROUPS, number = at % GROUPS * 8, line = blockIdx.y;
  if (column >= across) return;
  int top = line * STEP_DOWN - PAD_DOWN, left = column * STEP_ACROSS - PAD_ACROSS, base = blockIdx.z * by_image;
  u32 bits[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int channel = (number + j) % CHANNELS, pixel = (number + j) / CHANNELS;
    int from = top + pixel / WIDE * APART_DOWN, over = left + pixel % WIDE * APART_ACROSS;
    bool there = pixel < TALL * WIDE && from >= 0 && from < height && over >= 0 && over < width;
    int place = base + channel * by_channel + from * by_row + over * by_column;
    bits[j] = !there ? 0 : wide ? narrowed(((const float*)image)[place]) : ((const unsigned short*)image)[place];
  }
  Eight packed;
#pragma unroll
  for (int j = 0; j < 4; j++) packed.pair[j] = bits[2 * j] | bits[2 * j + 1] << 16;
  rows[((blockIdx.z * down + line) * across + column) * GROUPS + number / 8] = packed;
}

// A block has pixels of one line of an image. Where windows have no gaps, only every STEPth of their pixels is there.
extern "C" __global__ void folded(
    const unsigned short* __restrict__ rows, void* __restrict__ image, int down, int across, int wide, IMAGE) {
  const bool solid = APART_DOWN == 1 && APART_ACROSS == 1;
  int over = blockIdx.x * blockDim.x + threadIdx.x, from = blockIdx.y;
  if (over >= width) return;
  int low = from + PAD_DOWN, far = over + PAD_ACROSS;
  float sums[CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) sums[c] = 0.f;
#pragma unroll
  for (int i = 0; i < TALL; i += solid ? STEP_DOWN : 1) {
    int y = solid ? i + low % STEP_DOWN : i, line = low - y * APART_DOWN;
    if (y >= TALL || line < 0 || line % STEP_DOWN || line / STEP_DOWN >= down) continue;
#pragma unroll
    for (int k = 0; k < WIDE; k += solid ? STEP_ACROSS : 1) {
      int x = solid ? k + far % STEP_ACROSS : k, column = far - x * APART_ACROSS;
      if (x >= WIDE || column < 0 || column % STEP_ACROSS || column / STEP_ACROSS >= across) continue;
      int window = (blockIdx.z * down + line / STEP_DOWN) * across + column / STEP_ACROSS;
      const unsigned short* numbers = rows + window * GROUPS * 8 + (y * WIDE + x) * CHANNELS;
#pragma unroll
      for (int c = 0; c < CHANNELS; c++) sums[c] += widened(numbers[c]);
    }
  }
  int place = blockIdx.z * by_image + from * by_row + over * by_column;
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) {
    if (wide) ((float*)image)[place + c * by_channel] = sums[c];
    else ((unsigned short*)image)[place + c * by_channel] = narrowed(sums[c]);
  }
}

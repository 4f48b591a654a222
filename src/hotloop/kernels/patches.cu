// The windows of images as the rows of a matrix, and the rows of a matrix as windows that are added up in images.
//
// A row has the numbers of one window: for each of its pixels all channels. It ends with zeros, so that its length is a
// multiple of 8. A thread of `patches` writes 8 numbers, 16 bytes; one of `folded` has a pixel of an image and adds what
// the windows have there, in a fixed order: the same input gives the same bits.

typedef unsigned int u32;
typedef long long i64;

struct __align__(16) Eight { u32 pair[4]; };  // numbers of two bytes


__device__ __forceinline__ float widened(unsigned short bits) {
#ifdef FP16
  float value;
  asm("{.reg .f16 half; mov.b16 half, %1; cvt.f32.f16 %0, half;}" : "=f"(value) : "h"(bits));
  return value;
#else
  return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ unsigned short rounded(float value) {
  u32 pair;
#ifdef FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(value));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(value));
#endif
  return (unsigned short)pair;
}

#define WINDOWS \
  int channels, int height, int width, int by_image, int by_channel, int by_row, int by_column, int tall, int wide, \
  int down, int across, int step_down, int step_across, int pad_down, int pad_across, int apart_down, int apart_across

// `wide_numbers`: the image is in fp32.
extern "C" __global__ void __launch_bounds__(256) patches(
    const void* __restrict__ image, Eight* __restrict__ rows, int all, int groups, int wide_numbers, WINDOWS) {
  for (int at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256) {
    int row = at / groups, number = (at - row * groups) * 8;
    int rest = row / across, column = row - rest * across, which = rest / down, line = rest - which * down;
    int pixel = number / channels, channel = number - pixel * channels, y = pixel / wide, x = pixel - y * wide;
    int top = line * step_down - pad_down, left = column * step_across - pad_across;
    u32 bits[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int from = top + y * apart_down, over = left + x * apart_across;
      bool there = y < tall && from >= 0 && from < height && over >= 0 && over < width;
      int place = which * by_image + channel * by_channel + from * by_row + over * by_column;
      bits[j] = !there ? 0 : wide_numbers ? rounded(((const float*)image)[place]) : ((const unsigned short*)image)[place];
      if (++channel == channels) {
        channel = 0;
        if (++x == wide) { x = 0; y++; }
      }
    }
    Eight packed;
#pragma unroll
    for (int j = 0; j < 4; j++) packed.pair[j] = bits[2 * j] | bits[2 * j + 1] << 16;
    rows[at] = packed;
  }
}

// An image has fewer than 8 channels. Where windows have no gaps, only every `step`th of their pixels lies on a pixel.
extern "C" __global__ void __launch_bounds__(256) folded(
    const unsigned short* __restrict__ rows, void* __restrict__ image, int pixels, int length, int wide_numbers, WINDOWS) {
  for (int at = blockIdx.x * 256 + threadIdx.x; at < pixels; at += gridDim.x * 256) {
    int rest = at / width, over = at - rest * width, which = rest / height, from = rest - which * height;
    int low = from + pad_down, far = over + pad_across;
    bool solid = apart_down == 1 && apart_across == 1;
    int hop_down = solid ? step_down : 1, hop_across = solid ? step_across : 1;
    int first = solid ? far % step_across : 0;
    float sums[8];
#pragma unroll
    for (int c = 0; c < 8; c++) sums[c] = 0.f;
    for (int y = solid ? low % step_down : 0; y < tall; y += hop_down) {
      int line = low - y * apart_down;
      if (line < 0) break;
      if (!solid && line % step_down) continue;
      line /= step_down;
      if (line >= down) continue;
      for (int x = first; x < wide; x += hop_across) {
        int column = far - x * apart_across;
        if (column < 0) break;
        if (!solid && column % step_across) continue;
        column /= step_across;
        if (column >= across) continue;
        const unsigned short* window = rows + ((which * down + line) * across + column) * length + (y * wide + x) * channels;
#pragma unroll
        for (int c = 0; c < 8; c++)
          if (c < channels) sums[c] += widened(window[c]);
      }
    }
    int place = which * by_image + from * by_row + over * by_column;
#pragma unroll
    for (int c = 0; c < 8; c++)
      if (c < channels) {
        if (wide_numbers) ((float*)image)[place + c * by_channel] = sums[c];
        else ((unsigned short*)image)[place + c * by_channel] = rounded(sums[c]);
      }
  }
}

// Convolutions in which each channel has a window of its own, of images whose channels lie together.
//
// A thread has CHANNELS of them, 8 or 2, and strips of 4 pixels of a line: what it reads of a line serves for all four.
// Sums are made in a fixed order: the same input gives the same bits. It is compiled for the geometry of one layer: TALL
// and WIDE of a window; STEP, PAD and APART (stride, padding, dilation), DOWN and ACROSS. STEP is 1 or 2.

#include "half.cuh"

#define STRIP 4
#define TAPS (TALL * WIDE)
#define LANES (64 / CHANNELS)  // threads of a block beside one another, at most
#define THREADS 256
#define WARPS (THREADS / 32)
#define REACH ((STRIP - 1) * STEP_ACROSS + (WIDE - 1) * APART_ACROSS + 1)  // pixels under the windows of a strip

#if CHANNELS == 8
typedef Eight Some;
__device__ __forceinline__ Some packed(const float* from) { return pack(from); }
#else
typedef u32 Some;
__device__ __forceinline__ Some packed(const float* from) { return rounded(from[0], from[1]); }
#endif

// A pixel of a line, or zeros beyond its ends. It is read in any case: a branch would hold up the reads after it.
__device__ __forceinline__ void read(In<Some> line, int place, int length, int groups, float* to) {
  bool there = place >= 0 && place < length;
  unpack(line[(there ? place : 0) * groups], to);
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) to[c] = there ? to[c] : 0.f;
}

// Which number of a window is at a place of its line; -1 where none is.
__device__ constexpr int tap_at(int place) {
  return place < 0 || place % APART_ACROSS || place / APART_ACROSS >= WIDE ? -1 : place / APART_ACROSS;
}

__device__ constexpr int below(int number, int step) {
  return number >= 0 ? number / step : -((step - 1 - number) / step);
}

// The windows of the channels of a block.
__device__ __forceinline__ void fetch(float (*window)[LANES * CHANNELS], In<float> weight, int channels) {
  int first = blockIdx.y * blockDim.x * CHANNELS, count = blockDim.x * CHANNELS;
  for (int at = threadIdx.y * blockDim.x + threadIdx.x; at < TAPS * count; at += THREADS) {
    int channel = at / TAPS, tap = at % TAPS;
    window[tap][channel] = first + channel < channels ? weight[(first + channel) * TAPS + tap] : 0.f;
  }
  __syncthreads();
}

__device__ __forceinline__ void take(float (*to)[CHANNELS], const float (*line)[LANES * CHANNELS]) {
#pragma unroll
  for (int k = 0; k < WIDE; k++)
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) to[k][c] = line[k][threadIdx.x * CHANNELS + c];
}

// Images of `height` and `width` go in; `down` and `across` is how many windows there are.
#define SIZES int images, int height, int width, int down, int across, int channels

// A line of strips: of the output, from the image under its windows; or BACK, of the image's gradient, from that of the
// windows in which its pixels lie. `height` and `width` are those of what is written, `down` and `across` of what is read.
template <bool BACK>
__device__ __forceinline__ void convolve(In<Some> from, In<float> weight, In<float> bias, Out<Some> to, SIZES) {
  const int first = BACK ? below(PAD_ACROSS - (WIDE - 1) * APART_ACROSS, STEP_ACROSS) : 0;
  const int last = BACK ? below(STRIP - 1 + PAD_ACROSS, STEP_ACROSS) : REACH - 1;
  __shared__ float window[TAPS][LANES * CHANNELS];
  fetch(window, weight, channels);
  int groups = channels / CHANNELS, group = blockIdx.y * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  int strips = (width + STRIP - 1) / STRIP, count = images * height * strips;
  float start[CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) start[c] = bias ? bias[group * CHANNELS + c] : 0.f;
  for (int at = blockIdx.x * blockDim.y + threadIdx.y; at < count; at += gridDim.x * blockDim.y) {
    int column = at % strips * STRIP, line = at / strips % height, number = at / strips / height;
    float sums[STRIP][CHANNELS];
#pragma unroll
    for (int o = 0; o < STRIP; o++)
#pragma unroll
      for (int c = 0; c < CHANNELS; c++) sums[o][c] = start[c];
#pragma unroll 1
    for (int i = 0; i < TALL; i++) {
      int low = BACK ? line + PAD_DOWN - i * APART_DOWN : line * STEP_DOWN - PAD_DOWN + i * APART_DOWN;
      int row = BACK ? low / STEP_DOWN : low;
      if (low < 0 || (BACK && low % STEP_DOWN) || row >= down) continue;
      const Some* pixels = from + (number * down + row) * across * groups + group;
      float tap[WIDE][CHANNELS];
      take(tap, window + i * WIDE);
#pragma unroll
      for (int m = first; m <= last; m++) {
        int over = BACK ? column / STEP_ACROSS + m : column * STEP_ACROSS - PAD_ACROSS + m;
        float value[CHANNELS];
        read(pixels, over, across, groups, value);
#pragma unroll
        for (int o = 0; o < STRIP; o++) {
          const int k = tap_at(BACK ? o + PAD_ACROSS - m * STEP_ACROSS : m - o * STEP_ACROSS);
          if (k < 0) continue;
#pragma unroll
          for (int c = 0; c < CHANNELS; c++) sums[o][c] += value[c] * tap[k][c];
        }
      }
    }
    Some* strip = to + ((number * height + line) * width + column) * groups + group;
#pragma unroll
    for (int o = 0; o < STRIP; o++)
      if (column + o < width) strip[o * groups] = packed(sums[o]);
  }
}

extern "C" __global__ void forward(In<Some> image, In<float> weight, In<float> bias, Out<Some> output, SIZES) {
  convolve<false>(image, weight, bias, output, images, down, across, height, width, channels);
}

extern "C" __global__ void of_image(In<Some> gradient, In<float> weight, Out<Some> image, SIZES) {
  convolve<true>(gradient, weight, nullptr, image, images, height, width, down, across, channels);
}

// The gradients of a line of the windows, blockIdx.z, and with the first line those of the bias: sums of the strips that
// a block has seen. A row of `sums` for each block: TAPS numbers of each channel, then its bias.
extern "C" __global__ void of_weight(In<Some> image, In<Some> gradient, Out<float> sums, SIZES) {
  __shared__ float held[WARPS][(WIDE + 1) * CHANNELS][LANES];
  int groups = channels / CHANNELS, group = blockIdx.y * blockDim.x + threadIdx.x, i = blockIdx.z;
  int strips = (across + STRIP - 1) / STRIP, count = group < groups ? images * down * strips : 0;
  float own[WIDE + 1][CHANNELS] = {};
  for (int at = blockIdx.x * blockDim.y + threadIdx.y; at < count; at += gridDim.x * blockDim.y) {
    int column = at % strips * STRIP, line = at / strips % down, number = at / strips / down;
    int from = line * STEP_DOWN - PAD_DOWN + i * APART_DOWN;
    bool there = from >= 0 && from < height;
    if (!there && i) continue;
    const Some* given = gradient + (number * down + line) * across * groups + group;
    float slope[STRIP][CHANNELS];
#pragma unroll
    for (int o = 0; o < STRIP; o++) {
      read(given, column + o, across, groups, slope[o]);
#pragma unroll
      for (int c = 0; c < CHANNELS; c++) own[WIDE][c] += slope[o][c];
    }
    if (!there) continue;
    const Some* pixels = image + (number * height + from) * width * groups + group;
#pragma unroll
    for (int j = 0; j < REACH; j++) {
      float value[CHANNELS];
      read(pixels, column * STEP_ACROSS - PAD_ACROSS + j, width, groups, value);
#pragma unroll
      for (int o = 0; o < STRIP; o++) {
        const int k = tap_at(j - o * STEP_ACROSS);
        if (k < 0) continue;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) own[k][c] += value[c] * slope[o][c];
      }
    }
  }
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k <= WIDE; k++)
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
      float sum = own[k][c];
      for (int apart = blockDim.x; apart < 32; apart *= 2) sum += __shfl_xor_sync(FULL, sum, apart);
      if (thread % 32 < blockDim.x) held[thread / 32][k * CHANNELS + c][threadIdx.x] = sum;
    }
  __syncthreads();
  for (int at = thread; at < (WIDE + 1) * CHANNELS * blockDim.x; at += THREADS) {
    int lane = at % blockDim.x, number = at / blockDim.x, k = number / CHANNELS;
    int channel = (blockIdx.y * blockDim.x + lane) * CHANNELS + number % CHANNELS;
    if (channel >= channels || (k == WIDE && i)) continue;
    float sum = 0.f;
    for (int warp = 0; warp < WARPS; warp++) sum += held[warp][number][lane];
    sums[(blockIdx.x * (TAPS + 1) + (k == WIDE ? TAPS : i * WIDE + k)) * channels + channel] = sum;
  }
}

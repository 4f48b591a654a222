// Rows of numbers: layer normalisation of each row, and sums over all rows.
//
// A thread reads 8 numbers of a row at once. All arithmetic is in fp32. Sums are made in a fixed order: the same input
// gives the same bits. With WIDTH it is compiled for the normalisation of rows of this length, else for sums.

#include "half.cuh"

#ifdef WIDTH

#define THREADS 256
#define GROUPS (WIDTH / 8)  // in a row
#define TOGETHER (WIDTH <= 1024 ? 32 : WIDTH <= 4096 ? 128 : 256)  // threads that share a row
#define ROWS (THREADS / TOGETHER)  // that a block has at once
#define EACH ((GROUPS + TOGETHER - 1) / TOGETHER)  // groups of a thread

// Eight numbers of a tensor, which is in fp32 or in two bytes.
__device__ __forceinline__ void read(const void* from, bool is_wide, i64 at, float* to) {
  if (is_wide) {
    const float4* four = (const float4*)from + 2 * at;
    float4 low = four[0], high = four[1];
    to[0] = low.x; to[1] = low.y; to[2] = low.z; to[3] = low.w;
    to[4] = high.x; to[5] = high.y; to[6] = high.z; to[7] = high.w;
  } else {
    unpack(((const Eight*)from)[at], to);
  }
}

__device__ __forceinline__ void write(void* to, bool is_wide, i64 at, const float* from) {
  if (is_wide) {
    float4* four = (float4*)to + 2 * at;
    four[0] = make_float4(from[0], from[1], from[2], from[3]);
    four[1] = make_float4(from[4], from[5], from[6], from[7]);
  } else {
    ((Eight*)to)[at] = pack(from);
  }
}

// Two sums over the threads that share a row.
__device__ __forceinline__ void sum_row(float& first, float& second) {
#pragma unroll
  for (int far = 16; far; far >>= 1) {
    first += __shfl_xor_sync(FULL, first, far);
    second += __shfl_xor_sync(FULL, second, far);
  }
  if (TOGETHER > 32) {
    __shared__ float shared[2][THREADS / 32];
    int warp = threadIdx.x / 32, own = threadIdx.x / TOGETHER * (TOGETHER / 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) { shared[0][warp] = first; shared[1][warp] = second; }
    __syncthreads();
    first = second = 0.f;
#pragma unroll
    for (int i = 0; i < TOGETHER / 32; i++) { first += shared[0][own + i]; second += shared[1][own + i]; }
  }
}

// y, and the same in two bytes. `moments` are the mean of each row and one over its standard deviation.
extern "C" __global__ void __launch_bounds__(THREADS) layer_norm(
    const void* __restrict__ x, int is_wide, Out<float> y, Out<Eight> half, In<float> weight, In<float> bias,
    Out<float> moments, int rows, float eps) {
  int lane = threadIdx.x % TOGETHER;
  for (i64 base = (i64)blockIdx.x * ROWS; base < rows; base += (i64)gridDim.x * ROWS) {
    i64 row = base + threadIdx.x / TOGETHER;
    bool there = row < rows;
    float v[EACH][8], sum = 0.f, square = 0.f, none = 0.f;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      int group = lane + k * TOGETHER;
      if (there && group < GROUPS) {
        read(x, is_wide, row * GROUPS + group, v[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[k][j];
      }
    }
    sum_row(sum, none);
    float mean = sum / WIDTH;
#pragma unroll
    for (int k = 0; k < EACH; k++)
      if (there && lane + k * TOGETHER < GROUPS)
#pragma unroll
        for (int j = 0; j < 8; j++) { v[k][j] -= mean; square += v[k][j] * v[k][j]; }
    sum_row(square, none);
    float scale = rsqrtf(square / WIDTH + eps);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      int group = lane + k * TOGETHER;
      if (there && group < GROUPS) {
        float w[8], b[8];
        if (weight) read(weight, true, group, w);
        if (bias) read(bias, true, group, b);
#pragma unroll
        for (int j = 0; j < 8; j++) v[k][j] = v[k][j] * scale * (weight ? w[j] : 1.f) + (bias ? b[j] : 0.f);
        write(y, true, row * GROUPS + group, v[k]);
        half[row * GROUPS + group] = pack(v[k]);
      }
    }
    if (there && lane == 0) { moments[2 * row] = mean; moments[2 * row + 1] = scale; }
  }
}

// The gradient of x, and for each block its share in those of weight and bias: two rows of `partial`. The gradient comes
// for y, for `half`, or for both.
extern "C" __global__ void __launch_bounds__(THREADS, EACH > 3 ? 1 : 2) layer_norm_gradient(
    const void* __restrict__ x, int is_wide, In<float> wide, In<Eight> half, In<float> weight, In<float> moments,
    void* __restrict__ result, Out<float> partial, int rows) {
  int lane = threadIdx.x % TOGETHER, own = threadIdx.x / TOGETHER;
  float for_weight[EACH][8], for_bias[EACH][8];
#pragma unroll
  for (int k = 0; k < EACH; k++)
#pragma unroll
    for (int j = 0; j < 8; j++) for_weight[k][j] = for_bias[k][j] = 0.f;
  for (i64 base = (i64)blockIdx.x * ROWS; base < rows; base += (i64)gridDim.x * ROWS) {
    i64 row = base + own;
    bool there = row < rows;
    float mean = there ? moments[2 * row] : 0.f, scale = there ? moments[2 * row + 1] : 0.f;
    float v[EACH][8], g[EACH][8], sum = 0.f, product = 0.f;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      int group = lane + k * TOGETHER;
      if (there && group < GROUPS) {
        i64 at = row * GROUPS + group;
        float w[8], more[8];
        read(x, is_wide, at, v[k]);
        if (wide) read(wide, true, at, g[k]);
        if (half) {
          unpack(half[at], more);
#pragma unroll
          for (int j = 0; j < 8; j++) g[k][j] = wide ? g[k][j] + more[j] : more[j];
        }
        if (weight) read(weight, true, group, w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          v[k][j] = (v[k][j] - mean) * scale;
          for_weight[k][j] += g[k][j] * v[k][j];
          for_bias[k][j] += g[k][j];
          if (weight) g[k][j] *= w[j];
          sum += g[k][j];
          product += g[k][j] * v[k][j];
        }
      }
    }
    sum_row(sum, product);
    sum /= WIDTH;
    product /= WIDTH;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      int group = lane + k * TOGETHER;
      if (there && group < GROUPS) {
#pragma unroll
        for (int j = 0; j < 8; j++) g[k][j] = scale * (g[k][j] - sum - v[k][j] * product);
        write(result, is_wide, row * GROUPS + group, g[k]);
      }
    }
  }
  partial += (i64)blockIdx.x * 2 * WIDTH;
  __shared__ float shared[ROWS > 1 ? 2 * WIDTH : 1];
  for (int turn = 0; turn < ROWS; turn++) {  // one row of threads after the other adds its sums
    if (own == turn)
#pragma unroll
      for (int k = 0; k < EACH; k++) {
        int first = (lane + k * TOGETHER) * 8;
        if (first < WIDTH)
#pragma unroll
          for (int j = 0; j < 8; j++) {
            float w = for_weight[k][j], b = for_bias[k][j];
            if (ROWS > 1 && turn) { w += shared[first + j]; b += shared[WIDTH + first + j]; }
            if (turn == ROWS - 1) {
              partial[first + j] = w;
              partial[WIDTH + first + j] = b;
            } else {
              shared[first + j] = w;
              shared[WIDTH + first + j] = b;
            }
          }
      }
    __syncthreads();
  }
}

#else

// For each block the sums over its rows: a thread has 8 columns, a block 256 of them.
extern "C" __global__ void __launch_bounds__(512) partial_sums(In<Eight> x, Out<float> partial, int rows, int groups) {
  __shared__ float shared[16][256];
  int group = blockIdx.y * 32 + threadIdx.x;
  float sums[8];
#pragma unroll
  for (int j = 0; j < 8; j++) sums[j] = 0.f;
  if (group < groups) {
    i64 step = (i64)gridDim.x * 16, row = (i64)blockIdx.x * 16 + threadIdx.y;
    for (; row + 3 * step < rows; row += 4 * step) {
      Eight several[4];
#pragma unroll
      for (int k = 0; k < 4; k++) several[k] = x[(row + k * step) * groups + group];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float v[8];
        unpack(several[k], v);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += v[j];
      }
    }
    for (; row < rows; row += step) {
      float v[8];
      unpack(x[row * groups + group], v);
#pragma unroll
      for (int j = 0; j < 8; j++) sums[j] += v[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j++) shared[threadIdx.y][threadIdx.x * 8 + j] = sums[j];
  __syncthreads();
  int thread = threadIdx.y * 32 + threadIdx.x, column = blockIdx.y * 256 + thread;
  if (thread < 256 && column < 8 * groups) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 16; i++) sum += shared[i][thread];
    partial[(i64)blockIdx.x * 8 * groups + column] = sum;
  }
}

// The sums over the rows of fp32 numbers, 32 columns in a block.
extern "C" __global__ void __launch_bounds__(512) sums(In<float> partial, Out<float> result, int rows, int columns) {
  __shared__ float shared[16][33];
  int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0.f;
  if (column < columns)
    for (int i = threadIdx.y; i < rows; i += 16) sum += partial[(i64)i * columns + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= columns) return;
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) sum += shared[i][threadIdx.x];
  result[column] = sum;
}

#endif

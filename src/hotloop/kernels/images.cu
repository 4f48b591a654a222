// Batch and group normalisation, bias, activation, residual sum and max pooling of images whose channels lie together.
//
// An image tensor is a matrix here: a row for each pixel, `groups` groups of 8 channels. A thread has one group, so
// that it reads 16 bytes at once, and goes down the rows. All arithmetic is in fp32. Sums are made in a fixed order:
// the same input gives the same bits.
//
// The rows are cut into slices, the last dimension of a grid, each with scales of its own: all of a batch is one slice
// where it is normalised over the batch, and each image is one where it is normalised by itself.
//
// It is compiled in parts, as they are needed: what knows no activation; with GROUPS, what groups of channels need on
// top of it; with KIND the activation's kernels; with SIDE as well the pooling of such windows.

#include "half.cuh"

struct __align__(8) Places { unsigned char of[8]; };

#define WARPS 16

// One number of a tensor, by its place.
__device__ __forceinline__ float number(In<Eight> x, i64 at) {
  Eight one = {{reinterpret_cast<const unsigned short*>(x)[at], 0, 0, 0}};
  float all[8];
  unpack(one, all);
  return all[0];
}

#ifdef KIND
// The share of a standard normal distribution below z, to 1e-7 (Abramowitz and Stegun, 7.1.26), with exp(-z * z / 2),
// which the density needs as well. erff() takes twice as long, and GELU would then be no longer bound by memory.
__device__ __forceinline__ float share_below(float z, float& bell) {
  bell = __expf(-0.5f * z * z);
  float t = __fdividef(1.f, 1.f + 0.23164190f * fabsf(z));
  float tail = bell * t * (0.12741480f + t * (-0.14224837f + t * (0.71070687f + t * (-0.72657601f + t * 0.53070271f))));
  return z > 0.f ? 1.f - tail : tail;
}

// 0: none, 1: ReLU or leaky ReLU, 2: GELU, 3: GELU by tanh, 4: SiLU.
__device__ __forceinline__ float activation(float z, float slope) {
  if (KIND == 1) return z > 0.f ? z : slope != 0.f ? slope * z : z != z ? z : 0.f;
  if (KIND == 2) { float bell; return z * share_below(z, bell); }
  if (KIND == 3) return 0.5f * z * (1.f + tanhf(0.79788456f * (z + 0.044715f * z * z * z)));
  if (KIND == 4) return z / (1.f + __expf(-z));
  return z;
}

__device__ __forceinline__ float derivative(float z, float slope) {
  if (KIND == 1) return z > 0.f ? 1.f : slope;
  if (KIND == 2) { float bell, below = share_below(z, bell); return below + z * 0.39894228f * bell; }
  if (KIND == 3) {
    float t = tanhf(0.79788456f * (z + 0.044715f * z * z * z));
    return 0.5f * (1.f + t) + 0.5f * z * (1.f - t * t) * 0.79788456f * (1.f + 0.134145f * z * z);
  }
  if (KIND == 4) {
    float s = 1.f / (1.f + __expf(-z));
    return s * (1.f + z * (1.f - s));
  }
  return 1.f;
}
#endif

__device__ __forceinline__ void load8(const float* from, int group, float* to) {
  const float4* four = reinterpret_cast<const float4*>(from) + 2 * group;
  float4 low = four[0], high = four[1];
  to[0] = low.x; to[1] = low.y; to[2] = low.z; to[3] = low.w;
  to[4] = high.x; to[5] = high.y; to[6] = high.z; to[7] = high.w;
}

// The 16 sums of each thread, added over the threads of a block that have the same group, as one row of `partial`.
__device__ __forceinline__ void sum_block(float* sums, Out<float> partial, int groups) {
  __shared__ float shared[WARPS * 16 * 32];
  int across = blockDim.x, thread = threadIdx.y * across + threadIdx.x, lane = thread & 31, warp = thread >> 5;
  for (int far = 16; far >= across; far >>= 1)
#pragma unroll
    for (int j = 0; j < 16; j++) sums[j] += __shfl_xor_sync(FULL, sums[j], far);
  if (lane < across)
#pragma unroll
    for (int j = 0; j < 16; j++) shared[(warp * 16 + j) * across + lane] = sums[j];
  __syncthreads();
  int channels = 8 * groups;
  for (int i = thread; i < 16 * across; i += 32 * WARPS) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w * 16 * across + i];
    int j = i / across, group = blockIdx.y * across + i % across;
    i64 row = ((i64)blockIdx.z * gridDim.x + blockIdx.x) * 2 + j / 8;
    if (group < groups) partial[row * channels + group * 8 + j % 8] = sum;
  }
}

#ifndef KIND

// One thread of a row of 32 for each channel: the sums of all blocks of a slice.
__device__ __forceinline__ bool sum_partials(In<float> partial, int blocks, int channels, float& first, float& second) {
  __shared__ float shared[2][16][33];
  partial += (i64)blockIdx.z * blocks * 2 * channels;
  int channel = blockIdx.x * 32 + threadIdx.x;
  float a = 0.f, b = 0.f;
  if (channel < channels)
    for (int i = threadIdx.y; i < blocks; i += 16) {
      a += partial[(i64)i * 2 * channels + channel];
      b += partial[((i64)i * 2 + 1) * channels + channel];
    }
  shared[0][threadIdx.y][threadIdx.x] = a;
  shared[1][threadIdx.y][threadIdx.x] = b;
  __syncthreads();
  if (threadIdx.y || channel >= channels) return false;
  first = second = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) { first += shared[0][i][threadIdx.x]; second += shared[1][i][threadIdx.x]; }
  return true;
}

#ifndef GROUPS

// Sums of x - pivot and of its square, where the pivot is in the first pixel: what is subtracted lies near the mean, so
// that the variance does not drown in it. Of `together` channels that are normalised as one, it is the first one's.
extern "C" __global__ void __launch_bounds__(512, 2) statistics(
    In<Eight> x, Out<float> partial, int rows, int groups, int together) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  float sums[16];
#pragma unroll
  for (int j = 0; j < 16; j++) sums[j] = 0.f;
  if (group < groups) {
    i64 first = (i64)blockIdx.z * rows;
    float pivot[8];
#pragma unroll
    for (int j = 0; j < 8; j++) pivot[j] = number(x, first * 8 * groups + (8 * group + j) / together * together);
    x += first * groups;
    i64 step = (i64)gridDim.x * blockDim.y, row = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    for (; row + 3 * step < rows; row += 4 * step) {
      Eight read[4];
#pragma unroll
      for (int k = 0; k < 4; k++) read[k] = x[(row + k * step) * groups + group];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float v[8];
        unpack(read[k], v);
#pragma unroll
        for (int j = 0; j < 8; j++) { float d = v[j] - pivot[j]; sums[j] += d; sums[8 + j] += d * d; }
      }
    }
    for (; row < rows; row += step) {
      float v[8];
      unpack(x[row * groups + group], v);
#pragma unroll
      for (int j = 0; j < 8; j++) { float d = v[j] - pivot[j]; sums[j] += d; sums[8 + j] += d * d; }
    }
  }
  sum_block(sums, partial, groups);
}

// Rows of `scales`: the factor and the summand of the normalisation, the mean, and one over the standard deviation.
// `shift` is a bias that was left out before: it moves the mean, and is taken away with it.
extern "C" __global__ void __launch_bounds__(512) normalization(
    In<float> partial, int blocks, int channels, int rows, In<Eight> x, In<float> weight, In<float> bias,
    In<float> shift, Out<float> running_mean, Out<float> running_var, Out<i64> tracked, float momentum, float eps,
    Out<float> scales) {
  float sum, square;
  if (!sum_partials(partial, blocks, channels, sum, square)) return;
  int channel = blockIdx.x * 32 + threadIdx.x;
  float far = sum / rows, variance = fmaxf(square / rows - far * far, 0.f), mean = number(x, channel) + far;
  if (sum != sum) mean = variance = sum;
  float deviation = rsqrtf(variance + eps), factor = weight[channel] * deviation;
  scales[channel] = factor;
  scales[channels + channel] = bias[channel] - mean * factor;
  scales[2 * channels + channel] = mean;
  scales[3 * channels + channel] = deviation;
  float true_mean = shift ? mean + shift[channel] : mean;
  running_mean[channel] += momentum * (true_mean - running_mean[channel]);
  running_var[channel] += momentum * (variance * ((float)rows / (rows - 1)) - running_var[channel]);
  if (channel == 0) *tracked += 1;
}

// The rows of `scales` for a bias alone, which may be another one for each image.
extern "C" __global__ void shift_scales(In<float> bias, int channels, Out<float> scales) {
  int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  scales += (i64)blockIdx.z * 4 * channels;
  scales[channel] = scales[3 * channels + channel] = 1.f;
  scales[channels + channel] = bias[(i64)blockIdx.z * channels + channel];
  scales[2 * channels + channel] = 0.f;
}

// Gradients of weight and bias. Through the statistics the gradient of x gets slant * x + level: rows of `through`.
// The gradient of a `shift` that the mean takes away again is zero. Without a weight there is a bias alone.
extern "C" __global__ void __launch_bounds__(512) normalization_gradient(
    In<float> partial, int blocks, int channels, int rows, In<float> scales, Out<float> weight, Out<float> bias,
    Out<float> shift, Out<float> through) {
  float sum, product;
  if (!sum_partials(partial, blocks, channels, sum, product)) return;
  int channel = blockIdx.x * 32 + threadIdx.x;
  bias[(i64)blockIdx.z * channels + channel] = sum;
  if (!weight) return;
  float factor = scales[channel], deviation = scales[3 * channels + channel];
  weight[channel] = product * deviation;
  float slant = -factor * deviation * deviation * product / rows;
  through[channel] = slant;
  through[channels + channel] = -factor * sum / rows - slant * scales[2 * channels + channel];
  if (shift) shift[channel] = 0.f;
}

#else

// The sums of a warp, in all of its threads.
__device__ __forceinline__ void sum_warp(float& first, float& second) {
  for (int far = 16; far; far >>= 1) {
    first += __shfl_xor_sync(FULL, first, far);
    second += __shfl_xor_sync(FULL, second, far);
  }
}

// The same rows for each image, whose channels are normalised `together` at once: a warp has such a group of one image.
// `shift` was left out of x; it has a row for each image, `shift_step` apart. It moves the channels of a group apart,
// so that it counts. `away` gets each channel's sum of x + shift - mean, for the gradient of `shift`.
extern "C" __global__ void group_normalization(
    In<float> partial, int blocks, int channels, int rows, int together, In<Eight> x, In<float> weight, In<float> bias,
    In<float> shift, int shift_step, float eps, Out<float> scales, Out<float> away) {
  int lane = threadIdx.x, image = blockIdx.z, start = (blockIdx.x * blockDim.y + threadIdx.y) * together;
  if (start >= channels) return;
  partial += (i64)image * blocks * 2 * channels + start;
  if (shift) shift += (i64)image * shift_step + start;
  float sum = 0.f, square = 0.f;
  for (int i = lane; i < blocks * together; i += 32) {
    int block = i / together, j = i % together;
    float s = partial[(i64)block * 2 * channels + j], q = partial[((i64)block * 2 + 1) * channels + j];
    float b = shift ? shift[j] : 0.f;
    if (block == 0) { sum += rows * b; square += rows * b * b; }
    sum += s;
    square += q + 2.f * b * s;
  }
  sum_warp(sum, square);
  float count = (float)rows * together, far = sum / count, variance = fmaxf(square / count - far * far, 0.f);
  float pivot = number(x, (i64)image * rows * channels + start), mean = pivot + far;
  if (sum != sum) mean = variance = sum;
  float deviation = rsqrtf(variance + eps);
  scales += (i64)image * 4 * channels + start;
  for (int j = lane; j < together; j += 32) {
    float b = shift ? shift[j] : 0.f, factor = weight[start + j] * deviation;
    scales[j] = factor;
    scales[channels + j] = bias[start + j] - (mean - b) * factor;
    scales[2 * channels + j] = mean - b;
    scales[3 * channels + j] = deviation;
    if (away) {
      float s = 0.f;
      for (int block = 0; block < blocks; block++) s += partial[(i64)block * 2 * channels + j];
      away[(i64)image * channels + start + j] = s + rows * (b - far);
    }
  }
}

// The same for each image: `shares` are its shares in the gradients of bias and weight, `shift` is its gradient there.
extern "C" __global__ void group_gradient(
    In<float> partial, int blocks, int channels, int rows, int together, In<float> scales, In<float> away,
    Out<float> shares, Out<float> shift, Out<float> through) {
  int lane = threadIdx.x, image = blockIdx.z, start = (blockIdx.x * blockDim.y + threadIdx.y) * together;
  if (start >= channels) return;
  partial += (i64)image * blocks * 2 * channels + start;
  scales += (i64)image * 4 * channels + start;
  shares += (i64)image * 2 * channels + start;
  through += (i64)image * 2 * channels + start;
  float deviation = scales[3 * channels], level = 0.f, slant = 0.f;
  for (int j = lane; j < together; j += 32) {
    float sum = 0.f, product = 0.f;
    for (int block = 0; block < blocks; block++) {
      sum += partial[(i64)block * 2 * channels + j];
      product += partial[((i64)block * 2 + 1) * channels + j];
    }
    shares[j] = sum;
    shares[channels + j] = product * deviation;
    level += scales[j] * sum;
    slant += scales[j] * product;
  }
  sum_warp(level, slant);
  float count = (float)rows * together;
  level = -level / count;
  slant = -slant * deviation * deviation / count;
  for (int j = lane; j < together; j += 32) {
    through[j] = slant;
    through[channels + j] = level - slant * scales[2 * channels + j];
    i64 at = (i64)image * channels + start + j;
    if (shift) shift[at] = scales[j] * shares[j] + slant * away[at] + rows * level;
  }
}

// The gradients of bias and weight: the sums of the shares of all images.
extern "C" __global__ void __launch_bounds__(512) share_sums(
    In<float> shares, int images, int channels, Out<float> weight, Out<float> bias) {
  float sum, product;
  if (!sum_partials(shares, images, channels, sum, product)) return;
  int channel = blockIdx.x * 32 + threadIdx.x;
  bias[channel] = sum;
  weight[channel] = product;
}

#endif

#elif !defined(SIDE)

// y = activation(factor * x + summand + residual).
extern "C" __global__ void __launch_bounds__(512, 2) forward(
    In<Eight> x, In<Eight> residual, Out<Eight> y, In<float> scales, int rows, int groups, float slope) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  scales += (i64)blockIdx.z * 32 * groups;
  float factor[8], summand[8];
  load8(scales, group, factor);
  load8(scales + 8 * groups, group, summand);
  i64 step = (i64)gridDim.x * blockDim.y, first = (i64)blockIdx.z * rows;
#pragma unroll 2
  for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) {
    i64 at = (first + row) * groups + group;
    float v[8], r[8];
    unpack(x[at], v);
    if (residual) unpack(residual[at], r);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float z = factor[j] * v[j] + summand[j];
      v[j] = activation(residual ? z + r[j] : z, slope);
    }
    y[at] = pack(v);
  }
}

// The gradient before the activation, summed, and summed with x - mean. It is told by the output y where there is a
// residual (then the activation is none or ReLU), else by x. `before` gets it where somebody needs it.
extern "C" __global__ void __launch_bounds__(512, 2) gradient_sums(
    In<Eight> gradient, In<Eight> x, In<Eight> y, Out<Eight> before, In<float> scales, Out<float> partial, int rows,
    int groups, float slope) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  float sums[16];
#pragma unroll
  for (int j = 0; j < 16; j++) sums[j] = 0.f;
  if (group < groups) {
    scales += (i64)blockIdx.z * 32 * groups;
    float factor[8], summand[8], mean[8];
    load8(scales, group, factor);
    load8(scales + 8 * groups, group, summand);
    load8(scales + 16 * groups, group, mean);
    i64 step = (i64)gridDim.x * blockDim.y, first = (i64)blockIdx.z * rows;
    for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) {
      i64 at = (first + row) * groups + group;
      float g[8], v[8], out[8];
      unpack(gradient[at], g);
      unpack(x[at], v);
      if (y) unpack(y[at], out);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        if (KIND) g[j] *= derivative(y ? out[j] : factor[j] * v[j] + summand[j], slope);
        sums[j] += g[j];
        sums[8 + j] += g[j] * (v[j] - mean[j]);
      }
      if (before) before[at] = pack(g);
    }
  }
  sum_block(sums, partial, groups);
}

// The gradient of x.
extern "C" __global__ void __launch_bounds__(512, 2) backward(
    In<Eight> gradient, In<Eight> x, Out<Eight> result, In<float> scales, In<float> through, int rows,
    int groups, float slope) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  scales += (i64)blockIdx.z * 32 * groups;
  through += (i64)blockIdx.z * 16 * groups;
  float factor[8], summand[8], slant[8], level[8];
  load8(scales, group, factor);
  load8(scales + 8 * groups, group, summand);
  load8(through, group, slant);
  load8(through + 8 * groups, group, level);
  i64 step = (i64)gridDim.x * blockDim.y, first = (i64)blockIdx.z * rows;
  for (i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) {
    i64 at = (first + row) * groups + group;
    float g[8], v[8];
    unpack(gradient[at], g);
    unpack(x[at], v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (KIND) g[j] *= derivative(factor[j] * v[j] + summand[j], slope);
      g[j] = factor[j] * g[j] + slant[j] * v[j] + level[j];
    }
    result[at] = pack(g);
  }
}

#else

// The largest of each window of SIDE x SIDE, where windows do not overlap, of x or of activation(factor * x + summand).
// `place` says which one it was, `chosen` the x there. As in PyTorch the first of equal ones is taken, and NaN wins.
extern "C" __global__ void __launch_bounds__(256, 3) pool_forward(
    In<Eight> x, Out<Eight> y, Out<Eight> chosen, Out<Places> place, In<float> scales, int windows, int height,
    int width, int groups, float slope) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  int down = height / SIDE, across = width / SIDE;
  float factor[8], summand[8];
  if (scales) {
    load8(scales, group, factor);
    load8(scales + 8 * groups, group, summand);
  }
  i64 step = (i64)gridDim.x * blockDim.y;
  for (i64 window = (i64)blockIdx.x * blockDim.y + threadIdx.y; window < windows; window += step) {
    int column = window % across, line = (window / across) % down;
    i64 image = window / ((i64)across * down);
    i64 corner = (image * height + (i64)line * SIDE) * width + (i64)column * SIDE;
    float best[8], raw[8];
    Places where;
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
      for (int k = 0; k < SIDE; k++) {
        float v[8], z[8];
        unpack(x[(corner + (i64)i * width + k) * groups + group], v);
#pragma unroll
        for (int j = 0; j < 8; j++) z[j] = scales ? activation(factor[j] * v[j] + summand[j], slope) : v[j];
        if (scales) { Eight as_stored = pack(z); unpack(as_stored, z); }
#pragma unroll
        for (int j = 0; j < 8; j++)
          if ((i == 0 && k == 0) || z[j] > best[j] || z[j] != z[j]) {
            best[j] = z[j];
            raw[j] = v[j];
            where.of[j] = i * SIDE + k;
          }
      }
    i64 at = window * groups + group;
    y[at] = pack(best);
    place[at] = where;
    if (chosen) chosen[at] = pack(raw);
  }
}

// The gradient of x. Pixels beyond the last whole window get what the statistics give them, or zero.
extern "C" __global__ void __launch_bounds__(256, 3) pool_backward(
    In<Eight> gradient, In<Eight> x, In<Eight> chosen, In<Places> place, Out<Eight> result, In<float> scales,
    In<float> through, int images, int height, int width, int groups, float slope) {
  int group = blockIdx.y * blockDim.x + threadIdx.x;
  if (group >= groups) return;
  int down = height / SIDE, across = width / SIDE;
  int all_down = (height + SIDE - 1) / SIDE, all_across = (width + SIDE - 1) / SIDE;
  float factor[8], summand[8], slant[8], level[8];
  if (scales) {
    load8(scales, group, factor);
    load8(scales + 8 * groups, group, summand);
    }
  if (through) {
    load8(through, group, slant);
    load8(through + 8 * groups, group, level);
  }
  i64 step = (i64)gridDim.x * blockDim.y, windows = (i64)images * all_down * all_across;
  for (i64 window = (i64)blockIdx.x * blockDim.y + threadIdx.y; window < windows; window += step) {
    int column = window % all_across, line = (window / all_across) % all_down;
    i64 image = window / ((i64)all_across * all_down);
    bool whole = line < down && column < across;
    float g[8];
    Places where;
    if (whole) {
      i64 at = ((image * down + line) * across + column) * groups + group;
      unpack(gradient[at], g);
      where = place[at];
      if (scales) {
        float v[8];
        unpack(chosen[at], v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (KIND) g[j] *= derivative(factor[j] * v[j] + summand[j], slope);
          g[j] *= factor[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
      for (int k = 0; k < SIDE; k++) {
        int row = line * SIDE + i, place_across = column * SIDE + k;
        if (row >= height || place_across >= width) continue;
        i64 at = ((image * height + row) * (i64)width + place_across) * groups + group;
        float v[8];
        if (through) unpack(x[at], v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          float here = whole && where.of[j] == i * SIDE + k ? g[j] : 0.f;
          v[j] = through ? here + slant[j] * v[j] + level[j] : here;
        }
        result[at] = pack(v);
      }
  }
}

#endif

// Numbers of two bytes, bf16 or with FP16 those of it, which a thread reads and writes eight at once.

typedef unsigned int u32;
typedef long long i64;

struct __align__(16) Eight { u32 pair[4]; };

template <typename T> using In = const T* __restrict__;
template <typename T> using Out = T* __restrict__;

#define FULL 0xffffffffu  // all threads of a warp

__device__ __forceinline__ void unpack(u32 pair, float* to) {
#ifdef FP16
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(to[0]), "=f"(to[1]) : "r"(pair));
#else
  to[0] = __uint_as_float(pair << 16);
  to[1] = __uint_as_float(pair & 0xffff0000u);
#endif
}

// Read at once: of the members of a struct, the compiler may make four reads.
__device__ __forceinline__ void unpack(const Eight& from, float* to) {
  uint4 all = *(const uint4*)&from;
  unpack(all.x, to);
  unpack(all.y, to + 2);
  unpack(all.z, to + 4);
  unpack(all.w, to + 6);
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 pair;
#ifdef FP16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ __forceinline__ Eight pack(const float* from) {
  Eight to;
#pragma unroll
  for (int i = 0; i < 4; i++) to.pair[i] = rounded(from[2 * i], from[2 * i + 1]);
  return to;
}

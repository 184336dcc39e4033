// Vectors of this machine, number formats, and threads: what all CPU kernels are written with.
//
// The vector extensions of GCC and Clang serve AVX2, AVX-512 and NEON alike; intrinsics stand where compilers must not
// choose, above all for multiply-add, which has to round once everywhere or bits would depend on the row count.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#define UNROLL _Pragma("GCC unroll 16")
// Keeps a value in its register. GCC would load it again for every use, which halves the speed of a product.
#if defined(__x86_64__)
#define HOLD(value) asm("" : "+v"(value))
#elif defined(__aarch64__)
#define HOLD(value) asm("" : "+w"(value))
#else
#define HOLD(value)
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float VecAt __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalfAt __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

using bf16 = uint16_t;

// Results of rows that nobody wants stay as they are: zeros for 112 of 128 rows take a third of the time that 16 rows need.
// A build with SPEC_JAX_POISON fills them with NaN, so that tests find who reads them.
template <typename T>
inline void leave([[maybe_unused]] T* results, [[maybe_unused]] int64_t count) {
#if defined(SPEC_JAX_POISON)
  std::memset(results, 0xff, sizeof(T) * count);
#endif
}

inline Vec load(const float* p) { return *reinterpret_cast<const VecAt*>(p); }
inline Vec load(const bf16* p) {
#if defined(__AVX512F__)  // GCC converts in halves without being told
  return reinterpret_cast<Vec>(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
#else
  return reinterpret_cast<Vec>(__builtin_convertvector(*reinterpret_cast<const HalfAt*>(p), Bits) << 16);
#endif
}
inline void store(float* p, Vec v) { *reinterpret_cast<VecAt*>(p) = v; }
inline Vec splat(float v) {  // not Vec{} + v, which is an addition: -0 would change
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_set1_ps(v));
#elif defined(__AVX__)
  return reinterpret_cast<Vec>(_mm256_set1_ps(v));
#else
  return Vec{v, v, v, v};
#endif
}

// a * b + c, rounded once where the machine can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_fmadd_ps(a, b, c));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(_mm256_fmadd_ps(a, b, c));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(vfmaq_f32(c, a, b));
#else
  return a * b + c;
#endif
}

// Whether a comparison holds in any lane.
inline bool any(Ints holds) {
#if defined(__AVX512F__)
  const __m512i bits = reinterpret_cast<__m512i>(holds);
  return _mm512_test_epi32_mask(bits, bits) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(holds)) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(holds)) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= holds[i];
  return bits != 0;
#endif
}

inline float widen(float v) { return v; }
inline float widen(bf16 v) {
  uint32_t bits = static_cast<uint32_t>(v) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline void narrow(float v, float* out) { *out = v; }
inline void narrow(float v, bf16* out) {  // to nearest, ties to even, as XLA rounds
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  *out = std::isnan(v) ? 0x7fc0 : static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp of lanes <= 0, to about one unit in the last place; 0 far below.
inline Vec exp_negative(Vec x) {
  const Vec low = splat(-87.0f);
  const Ints tiny = x < low;
  x = tiny ? low : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which then are the lowest bits
  const Vec shifted = fma(x, splat(1.44269504f), magic);
  const Vec power = shifted - magic;
  const Vec r = fma(power, splat(2.12194440e-4f), fma(power, splat(-0.693359375f), x));
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  Vec p = splat(1.9875691500e-4f);
  UNROLL for (int i = 0; i < 5; ++i) p = fma(p, r, splat(kTerms[i]));
  p = fma(p, r * r, r) + 1.0f;
  p = p * reinterpret_cast<Vec>((reinterpret_cast<Bits>(shifted) + 127) << 23);
  return tiny ? Vec{} : p;
}

// Runs task(0) .. task(count - 1) on the calling thread and on XLA's pool. The caller starts at once and takes whatever
// no other thread has taken, so that a thread that wakes late, or never, costs nothing but its share.
template <typename Task>
void parallel(ffi::ThreadPool& pool, int64_t count, const Task& task) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, &task] {  // `task` is touched only while the caller still waits
    for (int64_t i; (i = shared->next.fetch_add(1)) < count;) {
      task(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::remove_const_t<decltype(work)>(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 10000) std::this_thread::yield();
  }
}

}  // namespace

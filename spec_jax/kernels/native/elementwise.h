// What stands between the products: root-mean-square norms and SwiGLU, row by row.

#pragma once

#include "lanes.h"

namespace {

template <typename T>
ffi::Error norm(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Buffer<ffi::PRED> active, float eps,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto dims = x.dimensions();
  const int64_t size = dims[dims.size() - 1], inner = x.element_count() / size / dims[0];
  const T* gain = static_cast<const T*>(weight.untyped_data());
  for (int64_t i = 0; i < dims[0] * inner; ++i) {
    const T* from = static_cast<const T*>(x.untyped_data()) + i * size;
    T* to = static_cast<T*>(y->untyped_data()) + i * size;
    if (!active.typed_data()[i / inner]) {
      leave(to, size);
      continue;
    }
    Vec sums[4] = {};  // four chains of additions side by side; the order is the same for every row
    int64_t k = 0;
    for (; k + 4 * kLanes <= size; k += 4 * kLanes) {
      UNROLL for (int i = 0; i < 4; ++i) {
        const Vec v = load(from + k + i * kLanes);
        sums[i] = fma(v, v, sums[i]);
      }
    }
    const Vec four = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += four[lane];
    for (; k < size; ++k) sum += static_cast<double>(widen(from[k])) * widen(from[k]);
    const float scale = 1.0f / std::sqrt(static_cast<float>(sum / size) + eps);
    for (k = 0; k < size; ++k) {
      T scaled;
      narrow(widen(from[k]) * scale, &scaled);
      narrow(widen(scaled) * widen(gain[k]), to + k);
    }
  }
  return ffi::Error::Success();
}

ffi::Error Norm_(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Buffer<ffi::PRED> active, float eps,
                 ffi::Result<ffi::AnyBuffer> y) {
  return x.element_type() == ffi::F32 ? norm<float>(x, weight, active, eps, y) : norm<bf16>(x, weight, active, eps, y);
}

// --- SwiGLU -----------------------------------------------------------------------------------------------------------

// x / (1 + exp(-x)), from the exponential of -|x| alone, which cannot overflow.
inline Vec silu(Vec x) {
  const Ints negative = x < Vec{};
  const Vec e = exp_negative(negative ? x : -x);
  return x * (negative ? e : splat(1.0f)) / (e + 1.0f);
}

template <typename T>
ffi::Error swiglu(ffi::ThreadPool& pool, ffi::AnyBuffer& x, ffi::Buffer<ffi::PRED>& active,
                  ffi::Result<ffi::AnyBuffer>& y) {
  const int64_t size = y->dimensions()[1];
  parallel(pool, x.dimensions()[0], [&](int64_t row) {
    const T* gate = static_cast<const T*>(x.untyped_data()) + row * 2 * size;
    T* to = static_cast<T*>(y->untyped_data()) + row * size;
    if (!active.typed_data()[row]) return leave(to, size);
    for (int64_t k = 0; k < size; k += kLanes) {
      const int count = static_cast<int>(std::min<int64_t>(kLanes, size - k));
      Vec g = {}, up = {};
      if (count == kLanes) {
        g = load(gate + k), up = load(gate + size + k);
      } else {
        for (int i = 0; i < count; ++i) g[i] = widen(gate[k + i]), up[i] = widen(gate[size + k + i]);
      }
      const Vec out = silu(g) * up;
      for (int i = 0; i < count; ++i) narrow(out[i], to + k + i);
    }
  });
  return ffi::Error::Success();
}

ffi::Error Swiglu_(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::PRED> active,
                   ffi::Result<ffi::AnyBuffer> y) {
  return x.element_type() == ffi::F32 ? swiglu<float>(pool, x, active, y) : swiglu<bf16>(pool, x, active, y);
}

}  // namespace

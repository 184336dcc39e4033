// Root-mean-square norms, row by row.

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
      std::memset(to, 0, sizeof(T) * size);
      continue;
    }
    double sum = 0;  // wide enough that its order hardly matters
    for (int64_t k = 0; k < size; ++k) sum += static_cast<double>(widen(from[k])) * widen(from[k]);
    const float scale = 1.0f / std::sqrt(static_cast<float>(sum / size) + eps);
    for (int64_t k = 0; k < size; ++k) {
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

}  // namespace

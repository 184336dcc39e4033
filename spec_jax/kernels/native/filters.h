// The least score that min_p, top_k and top_p leave of a row: a score as it is, so that whoever compares with it later
// meets the very same number. Ties at a cut are all kept. As for all kernels, a row's result is its own.

#pragma once

#include <functional>
#include <utility>

#include "choice.h"

namespace {

// Calls take(score, id) for every score in [low, beyond), in the order of the ids.
template <typename Take>
void scores_between(const float* scores, int64_t size, float low, float beyond, const Take& take) {
  const Vec floor = splat(low), ceiling = splat(beyond);
  for (int64_t at = 0; at < size; at += kLanes) {
    const Vec x = scores_at(scores, at, size);
    if (!any((x >= floor) & (x < ceiling))) continue;
    for (int64_t i = at; i < std::min(size, at + kLanes); ++i) {
      if (scores[i] >= low && scores[i] < beyond) take(scores[i], i);
    }
  }
}

// The k-th best score, 1 <= k <= size. `tops` are the best scores of blocks of ids.
float kth_best(const float* scores, int64_t size, int64_t k, std::vector<float> tops) {
  std::vector<float> found;
  float bound = -INFINITY;
  if (k <= static_cast<int64_t>(tops.size())) {  // as many blocks hold a score at least as good as this one
    std::nth_element(tops.begin(), tops.begin() + (k - 1), tops.end(), std::greater<float>());
    bound = tops[k - 1];
  }
  scores_between(scores, size, bound, INFINITY, [&](float score, int64_t) { found.push_back(score); });
  std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
  return found[k - 1];
}

// One row's masses exp((score - peak) / temperature) of the scores from `low` on, and their sums.
struct Masses {
  const float* scores;
  int64_t size;
  std::vector<float>& values;
  double total = 0;

  Masses(const float* scores, int64_t size, float peak, float low, float temperature)
      : scores(scores), size(size), values(scratch()) {
    values.resize(size + kLanes);
    const float scale = 1 / temperature;
    const Vec top = splat(peak), floor = splat(low);
    double sums[1];
    add<1>(sums, [&](int64_t at, Vec* sum) __attribute__((always_inline)) {
      const Vec x = scores_at(scores, at, size), mass = x >= floor ? exp_negative((x - top) * scale) : Vec{};
      store(values.data() + at, mass);
      sum[0] += mass;
    });
    total = sums[0];
  }

  // What the scores that are at least as large as each of the thresholds hold together.
  template <int kCount>
  void above(const float* thresholds, double* sums) const {
    add<kCount>(sums, [&](int64_t at, Vec* sum) __attribute__((always_inline)) {
      const Vec x = scores_at(scores, at, size), mass = load(values.data() + at);
      UNROLL for (int i = 0; i < kCount; ++i) sum[i] += x >= splat(thresholds[i]) ? mass : Vec{};
    });
  }

 private:
  // Memory of its size costs more to get and give back than the masses cost to compute.
  static std::vector<float>& scratch() {
    static thread_local std::vector<float> values;
    return values;
  }

  // Adds up what step(first id, sums) adds to sums of vectors: in float32 within a block of ids, in float64 over blocks.
  template <int kCount, typename Step>
  void add(double* sums, const Step& step) const {
    typedef double Wide __attribute__((vector_size(kLanes * 8)));
    Wide wide[kCount] = {};
    for (int64_t begin = 0; begin < size; begin += kIds) {
      Vec sum[kCount] = {};
      const int64_t end = std::min(size, begin + kIds);
      for (int64_t at = begin; at < end; at += kLanes) step(at, sum);
      for (int i = 0; i < kCount; ++i) wide[i] += __builtin_convertvector(sum[i], Wide);
    }
    for (int i = 0; i < kCount; ++i) {
      sums[i] = 0;
      for (int lane = 0; lane < kLanes; ++lane) sums[i] += wide[i][lane];
    }
  }
};

// The largest of the scores from `low` on for which those that are at least as large hold `share` of their mass; `low`
// where rounding leaves none.
float nucleus(const float* scores, int64_t size, float peak, float low, float temperature, double share) {
  const Masses masses(scores, size, peak, low, temperature);
  const double goal = share * masses.total;
  // Between two thresholds the mass passes the goal. Nine times closer a pass, three passes, and few scores lie there.
  constexpr int kCount = 8;
  float least = std::max(low, peak - 88 * temperature), high = peak, beyond = INFINITY;
  double above = 0;  // mass of the scores from `beyond` on
  for (int pass = 0; pass < 3; ++pass) {
    float thresholds[kCount];
    double sums[kCount];
    for (int i = 0; i < kCount; ++i) thresholds[i] = least + (high - least) * (i + 1) / (kCount + 1);
    masses.above<kCount>(thresholds, sums);
    for (int i = 0; i < kCount; ++i) {  // ascending
      if (sums[i] >= goal) {
        least = thresholds[i];
      } else {
        high = beyond = thresholds[i], above = sums[i];
        break;
      }
    }
  }
  std::vector<std::pair<float, float>> found;  // scores and masses
  scores_between(scores, size, least, beyond, [&](float score, int64_t id) {
    found.emplace_back(score, masses.values[id]);
  });
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [score, mass] : found) {
    above += mass;
    if (above >= goal) return score;
  }
  return low;
}

ffi::Error Cuts_(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::S32> index,
                 ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::S32> top_k, ffi::Buffer<ffi::F32> top_p,
                 ffi::Buffer<ffi::F32> min_p, int64_t size, ffi::Result<ffi::Buffer<ffi::F32>> cut) {
  const int64_t stride = scores.dimensions()[1];
  parallel(pool, index.element_count(), [&](int64_t i) {
    float& low = cut->typed_data()[i] = -INFINITY;
    if (index.typed_data()[i] < 0) return;
    const float* from = scores.typed_data() + index.typed_data()[i] * stride;
    const float warmth = temperature.typed_data()[i];
    std::vector<float> tops;
    const float peak = best_of(size, tops, [&](int64_t at) { return scores_at(from, at, size); }).peak;
    if (!(std::abs(peak) < INFINITY)) return;  // nothing to choose from, or broken
    low = std::min(peak, peak + warmth * std::log(min_p.typed_data()[i]));
    const int64_t k = top_k.typed_data()[i];
    if (k > 0 && k < size) low = std::max(low, kth_best(from, size, k, tops));
    if (top_p.typed_data()[i] < 1) {
      low = std::max(low, nucleus(from, size, peak, low, warmth, top_p.typed_data()[i]));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

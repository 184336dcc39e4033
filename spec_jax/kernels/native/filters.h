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

// Adds up what step(first id, sums) adds to kCount sums of vectors: in float32 within a block of ids, in float64 over
// blocks.
template <int kCount, typename Step>
inline void add_up(int64_t size, double* sums, const Step& step) {
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

// The largest score s in [least, peak] for which the weights of the scores that are at least as large as s reach the
// goal; -inf where they do not. weight(first id) are kLanes weights, which are not negative.
template <typename Weight>
float reaching(const float* scores, int64_t size, float least, float peak, double goal, const Weight& weight) {
  constexpr int kCount = 8;         // thresholds of a pass: the range becomes nine times smaller
  constexpr size_t kEnough = 1024;  // scores that are few enough to be sorted
  float high = peak, beyond = INFINITY;
  double above = 0;  // weights of the scores from `beyond` on
  std::vector<std::pair<float, float>> found;  // scores and weights
  for (;;) {
    float thresholds[kCount];
    double sums[kCount];
    for (int i = 0; i < kCount; ++i) thresholds[i] = least + (high - least) / (kCount + 1) * (i + 1);
    // In halves, so that nothing overflows where scores differ by more than a float holds.
    if (!(high - least < INFINITY)) std::fill_n(thresholds, kCount, least / 2 + high / 2);
    add_up<kCount>(size, sums, [&](int64_t at, Vec* sum) __attribute__((always_inline)) {
      const Vec x = scores_at(scores, at, size), w = weight(at);
      UNROLL for (int i = 0; i < kCount; ++i) sum[i] += x >= splat(thresholds[i]) ? w : Vec{};
    });
    const float before = least, until = high;
    for (int i = 0; i < kCount; ++i) {  // ascending
      if (sums[i] >= goal) {
        least = thresholds[i];
      } else {
        high = beyond = thresholds[i], above = sums[i];
        break;
      }
    }
    found.clear();
    scores_between(scores, size, least, beyond, [&](float score, int64_t id) {
      if (found.size() <= kEnough) found.emplace_back(score, weight(id / kLanes * kLanes)[id % kLanes]);
    });
    if (found.size() <= kEnough) break;
    if (least == before && high == until) {  // nothing lies between: equal scores, or those of the peak and just below
      double more = 0;
      add_up<1>(size, &more, [&](int64_t at, Vec* sum) __attribute__((always_inline)) {
        const Vec x = scores_at(scores, at, size);
        sum[0] += (x > splat(least)) & (x < splat(beyond)) ? weight(at) : Vec{};
      });
      return above + more >= goal ? high : least;
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [score, w] : found) {
    above += w;
    if (above >= goal) return score;
  }
  return -INFINITY;
}

// The k-th best score, k >= 1, or -inf where there are fewer (a row with NaN in it). `tops` are the best scores of blocks
// of ids, `least` the least score that counts.
float kth_best(const float* scores, int64_t size, int64_t k, float least, float peak, std::vector<float> tops) {
  if (k <= static_cast<int64_t>(tops.size())) {  // as many blocks hold a score at least as good as this one
    std::nth_element(tops.begin(), tops.begin() + (k - 1), tops.end(), std::greater<float>());
    least = std::max(least, tops[k - 1]);
  }
  const Vec one = splat(1.0f);
  return reaching(scores, size, least, peak, static_cast<double>(k), [&](int64_t) { return one; });
}

// The largest of the scores from `low` on for which those that are at least as large hold `share` of their mass; -inf
// where rounding leaves none.
float nucleus(const float* scores, int64_t size, float low, float peak, float temperature, double share) {
  // Memory of this size costs more to get and give back than the masses cost to compute.
  static thread_local std::vector<float> masses;
  masses.resize(size + kLanes);
  const float scale = 1 / temperature;
  const Vec top = splat(peak), floor = splat(low);
  double total = 0;
  add_up<1>(size, &total, [&](int64_t at, Vec* sum) __attribute__((always_inline)) {
    const Vec x = scores_at(scores, at, size), mass = x >= floor ? exp_negative((x - top) * scale) : Vec{};
    store(masses.data() + at, mass);
    sum[0] += mass;
  });
  // Beyond 88 the masses are zero.
  return reaching(scores, size, std::max(low, peak - 88 * temperature), peak, share * total,
                  [&](int64_t at) __attribute__((always_inline)) { return load(masses.data() + at); });
}

// The least of the scores of a row that are numbers.
inline float least_of(const float* scores, int64_t size) {
  Vec least = splat(INFINITY);
  for (int64_t at = 0; at < size; at += kLanes) {
    const Vec x = scores_at(scores, at, size);
    least = (x < least) & (x > splat(-INFINITY)) ? x : least;
  }
  float out = least[0];
  for (int i = 1; i < kLanes; ++i) out = std::min(out, least[i]);
  return out;
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
    const float least = least_of(from, size);  // where the search begins, however little is cut
    const int64_t k = top_k.typed_data()[i];
    if (k > 0 && k < size) low = std::max(low, kth_best(from, size, k, least, peak, tops));
    if (top_p.typed_data()[i] < 1) {
      low = std::max(low, nucleus(from, size, std::max(low, least), peak, warmth, top_p.typed_data()[i]));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

// What verification asks of a row of scores: the law it stands for as a few numbers, and the token that is chosen.
//
// Every row is computed from its own scores, key and options alone, in one order, so that its bits depend on no other
// row; rows go to threads whole.

#pragma once

#include "lanes.h"

namespace {

constexpr int64_t kIds = 256;  // ids whose best score is noted, so that the best of all is looked for in one of them

// log of lanes that are positive and normal, to about one unit in the last place, near 1 too.
inline Vec log_positive(Vec x) {
  const Bits bits = reinterpret_cast<Bits>(x);
  // x = m * 2^power with m in [sqrt(1/2), sqrt(2)).
  const Bits shifted = bits - 0x3f3504f3u;
  const Ints power = reinterpret_cast<Ints>(shifted) >> 23;
  const Vec m = reinterpret_cast<Vec>((shifted & 0x007fffffu) + 0x3f3504f3u);
  const Vec r = m - 1.0f, e = __builtin_convertvector(power, Vec);
  constexpr float kTerms[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                              -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  Vec p = splat(7.0376836292e-2f);
  UNROLL for (int i = 0; i < 8; ++i) p = fma(p, r, splat(kTerms[i]));
  const Vec square = r * r;
  Vec y = p * r * square;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(square, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), r + y);
}

template <int kBits>
inline Bits rotated(Bits x) {
  return (x << kBits) | (x >> (32 - kBits));
}

// Threefry-2x32 with 20 rounds (Salmon et al. 2011) of the counters (0, first), (0, first + 1), ..., both words folded
// together: the bits that jax.random makes of a key for an array.
inline Bits random_bits(uint32_t key0, uint32_t key1, uint32_t first) {
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1bd11bdau};
  Bits x0 = Bits{} + keys[0], x1;
  UNROLL for (int i = 0; i < kLanes; ++i) x1[i] = i;
  x1 += first + keys[1];
#define ROUND(n)        \
  x0 += x1;             \
  x1 = rotated<n>(x1) ^ x0;
#define ROUNDS(i, a, b, c, d)                    \
  ROUND(a) ROUND(b) ROUND(c) ROUND(d)            \
  x0 += keys[(i) % 3];                           \
  x1 += keys[((i) + 1) % 3] + static_cast<uint32_t>(i);
  ROUNDS(1, 13, 15, 26, 6)
  ROUNDS(2, 17, 29, 16, 24)
  ROUNDS(3, 13, 15, 26, 6)
  ROUNDS(4, 17, 29, 16, 24)
  ROUNDS(5, 13, 15, 26, 6)
#undef ROUNDS
#undef ROUND
  return x0 ^ x1;
}

// Standard Gumbel noise of kLanes ids from `first` on, from the uniforms of jax.random.gumbel.
inline Vec gumbel(uint32_t key0, uint32_t key1, uint32_t first) {
  const Bits bits = (random_bits(key0, key1, first) >> 9) | 0x3f800000u;
  const Vec tiny = splat(1.17549435e-38f), u = reinterpret_cast<Vec>(bits) - 1.0f;
  return -log_positive(-log_positive(u > tiny ? u : tiny));
}

// kLanes scores from `at` on, -inf beyond the row.
inline Vec scores_at(const float* scores, int64_t at, int64_t size) {
  if (at + kLanes <= size) return load(scores + at);
  Vec x = splat(-INFINITY);
  for (int64_t i = at; i < size; ++i) x[i - at] = scores[i];
  return x;
}

inline float largest(Vec x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = std::max(out, x[i]);
  return out;
}

struct Best {
  int64_t token;  // the lowest id of the largest score; -1 where all are -inf
  float peak, lead;
};

// Calls see(at, score(at)) for all ids, kLanes at a time, and finds the best score. score(at) is called again for those
// of the best block.
template <typename Score>
Best best_of(int64_t size, std::vector<float>& tops, const Score& score) {
  const int64_t blocks = (size + kIds - 1) / kIds;
  tops.resize(blocks);
  int64_t best = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    Vec top = splat(-INFINITY);
    const int64_t end = std::min(size, (b + 1) * kIds);
    for (int64_t at = b * kIds; at < end; at += kLanes) {
      const Vec x = score(at);
      top = x > top ? x : top;
    }
    tops[b] = largest(top);
    if (tops[b] > tops[best]) best = b;
  }
  Best found{-1, tops[best], INFINITY};
  if (found.peak == -INFINITY) return found;
  float rest = -INFINITY;
  for (int64_t b = 0; b < blocks; ++b) rest = b == best ? rest : std::max(rest, tops[b]);
  for (int64_t at = best * kIds; at < std::min(size, (best + 1) * kIds); at += kLanes) {
    const Vec x = score(at);
    for (int i = 0; i < kLanes; ++i) {
      if (found.token < 0 && x[i] == found.peak) {
        found.token = at + i;
      } else {
        rest = std::max(rest, x[i]);
      }
    }
  }
  found.lead = rest == -INFINITY ? INFINITY : found.peak - rest;
  return found;
}

// The rows of one call: scores [rows, stride], of which the first `size` ids of row index[i] are entry i, if it is not
// negative. A temperature of 0 is greedy, and knows no filter; scores below `cut` are filtered out of the others.
struct Entries {
  const float* scores;
  int64_t stride, size;
  const int32_t* index;
  const float *temperature, *cut;

  const float* row(int64_t i) const { return scores + index[i] * stride; }

  // The best score of a row, and whether the row holds NaN or +inf, from which no token can be chosen.
  Best best(int64_t i, std::vector<float>& tops, bool& broken) const {
    const float* from = row(i);
    Ints bad = {};
    const Vec infinity = splat(INFINITY);
    const Best found = best_of(size, tops, [&](int64_t at) __attribute__((always_inline)) {
      const Vec x = scores_at(from, at, size);
      bad |= ~(x < infinity);
      return x;
    });
    broken = any(bad);
    return found;
  }
};

// The law of every entry: the best score and the logarithm of the sum of exp((score - best) / temperature) over the
// scores that are left, or of greedy entries the choice and its lead.
ffi::Error Laws_(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::S32> index,
                 ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::F32> cut, int64_t size,
                 ffi::Result<ffi::Buffer<ffi::F32>> peak, ffi::Result<ffi::Buffer<ffi::F32>> total,
                 ffi::Result<ffi::Buffer<ffi::S32>> token, ffi::Result<ffi::Buffer<ffi::F32>> lead,
                 ffi::Result<ffi::Buffer<ffi::PRED>> broken) {
  const Entries e{scores.typed_data(), scores.dimensions()[1], size,
                  index.typed_data(),  temperature.typed_data(), cut.typed_data()};
  parallel(pool, index.element_count(), [&](int64_t i) {
    peak->typed_data()[i] = 0, total->typed_data()[i] = 0, lead->typed_data()[i] = INFINITY;
    token->typed_data()[i] = -1, broken->typed_data()[i] = false;
    if (e.index[i] < 0) return;
    std::vector<float> tops;
    const Best best = e.best(i, tops, broken->typed_data()[i]);
    if (e.temperature[i] == 0) {
      token->typed_data()[i] = static_cast<int32_t>(best.token), lead->typed_data()[i] = best.lead;
      return;
    }
    const float* from = e.row(i);
    const float scale = 1 / e.temperature[i];
    const Vec top = splat(best.peak), floor = splat(e.cut[i]);
    Vec sums[4] = {};  // four chains of additions side by side; the order is the same for every row
    auto mass = [&](int64_t at) __attribute__((always_inline)) {
      const Vec x = scores_at(from, at, size);
      return x >= floor ? exp_negative((x - top) * scale) : Vec{};
    };
    int64_t at = 0;
    for (; at + 4 * kLanes <= size; at += 4 * kLanes) {
      UNROLL for (int j = 0; j < 4; ++j) sums[j] += mass(at + j * kLanes);
    }
    for (; at < size; at += kLanes) sums[0] += mass(at);
    const Vec four = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += four[lane];
    const bool none = best.peak == -INFINITY;
    peak->typed_data()[i] = none ? 0 : best.peak;
    total->typed_data()[i] = none ? INFINITY : static_cast<float>(std::log(sum));
  });
  return ffi::Error::Success();
}

// The token of every entry: the best score, or the best of (score - best) / temperature + noise among those that are
// left. -1 where none is; 0 with a lead of NaN where the row is broken. Without the subtraction a low temperature would
// leave no digits for the noise.
ffi::Error Choice_(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> scores, ffi::Buffer<ffi::S32> index,
                   ffi::Buffer<ffi::F32> temperature, ffi::Buffer<ffi::F32> cut, ffi::Buffer<ffi::U32> keys,
                   int64_t size, ffi::Result<ffi::Buffer<ffi::S32>> token, ffi::Result<ffi::Buffer<ffi::F32>> lead) {
  const Entries e{scores.typed_data(), scores.dimensions()[1], size,
                  index.typed_data(),  temperature.typed_data(), cut.typed_data()};
  parallel(pool, index.element_count(), [&](int64_t i) {
    token->typed_data()[i] = -1, lead->typed_data()[i] = INFINITY;
    if (e.index[i] < 0) return;
    std::vector<float> tops;
    bool broken;
    Best best = e.best(i, tops, broken);
    if (e.temperature[i] > 0 && !broken && best.token >= 0) {
      const float* from = e.row(i);
      const uint32_t* key = keys.typed_data() + 2 * i;
      const Vec floor = splat(e.cut[i]), peak = splat(best.peak), warmth = splat(e.temperature[i]);
      best = best_of(size, tops, [&](int64_t at) __attribute__((always_inline)) {
        const Vec x = scores_at(from, at, size);
        const Vec noisy = (x - peak) / warmth + gumbel(key[0], key[1], static_cast<uint32_t>(at));
        return x >= floor ? noisy : splat(-INFINITY);
      });
      best.lead *= e.temperature[i];
    }
    token->typed_data()[i] = broken ? 0 : static_cast<int32_t>(best.token);
    lead->typed_data()[i] = broken ? NAN : best.lead;
  });
  return ffi::Error::Success();
}

}  // namespace

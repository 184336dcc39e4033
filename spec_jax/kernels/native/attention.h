// Softmax attention of a few query rows over a ragged cache. Rows share the reads of a block of keys, not their sums.
//
// A query sees the committed slots and then its ancestors in flight, in the order of their depth, and nothing else: so
// its bits depend neither on the width nor on the batch, and a row of a tree is computed like the same row of a chain.

#pragma once

#include "lanes.h"

namespace {

inline Vec shuffle(Vec a, Vec b, Ints from) {
#if defined(__clang__)
  Vec out;
  UNROLL for (int i = 0; i < kLanes; ++i) out[i] = from[i] < kLanes ? a[from[i]] : b[from[i] - kLanes];
  return out;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

template <int kBit>
inline __attribute__((always_inline)) Vec pair(Vec a, Vec b) {
  Ints low, high;
  UNROLL for (int i = 0; i < kLanes; ++i) {
    low[i] = i & kBit ? kLanes + i - kBit : i;
    high[i] = i & kBit ? kLanes + i : i + kBit;
  }
  return shuffle(a, b, low) + shuffle(a, b, high);
}

// Adds up the lanes of kLanes vectors: lane i of the result is the sum of sums[i]. Lanes that differ in one bit are added
// at a time, which is the same order for every vector.
template <int kBit = kLanes / 2>
inline __attribute__((always_inline)) Vec sum_lanes(const Vec* sums) {
  if constexpr (kBit == 0) {
    return sums[0];
  } else {
    return pair<kBit>(sum_lanes<kBit / 2>(sums), sum_lanes<kBit / 2>(sums + kBit));
  }
}

// One query against the slots it sees, which stand at positions 0, 1, 2, ... of its own text.
template <typename T>
struct Query {
  const float* q;   // [head_dim], scaled
  const T* k;       // [capacity, head_dim] of one sequence and KV head
  const T* v;
  int start;              // committed slots
  const int* flight;      // slots of the ancestors in flight
  int count;              // start + ancestors
  int head_dim;
  float* scores;          // [count rounded up to whole vectors]
  float* sums;            // [head_dim], zeros at first
  T* out;                 // [head_dim]

  int64_t slot(int position) const { return position < start ? position : flight[position - start]; }

  // Scores of positions from..to-1; `from` is a multiple of kLanes.
  void score(int from, int to) const {
    const int whole = head_dim / kLanes * kLanes;
    for (int first = from; first < std::min(to, count); first += kLanes) {
      const T* rows[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) rows[i] = k + slot(std::min(first + i, count - 1)) * head_dim;
      Vec dots[kLanes] = {};
      for (int d = 0; d < whole; d += kLanes) {
        const Vec x = load(q + d);
        UNROLL for (int i = 0; i < kLanes; ++i) dots[i] = fma(x, load(rows[i] + d), dots[i]);
      }
      Vec total = sum_lanes(dots);
      for (int d = whole; d < head_dim; ++d) {
        UNROLL for (int i = 0; i < kLanes; ++i) total[i] += q[d] * widen(rows[i][d]);
      }
      store(scores + first, total);
    }
  }

  // Turns scores into weights and returns their sum.
  float soften() const {
    float peak = scores[0];
    Vec peaks = splat(peak);
    int whole = 0;
    for (; whole + kLanes <= count; whole += kLanes) {
      const Vec x = load(scores + whole);
      peaks = x > peaks ? x : peaks;
    }
    for (int p = whole; p < count; ++p) peak = std::max(peak, scores[p]);
    for (int i = 0; i < kLanes; ++i) peak = std::max(peak, peaks[i]);
    Vec total = {};
    for (int p = 0; p < count; p += kLanes) {
      Vec weight = exp_negative(load(scores + p) - peak);
      for (int i = count - p; i < kLanes; ++i) weight[i] = 0;  // the last vector may be partly empty
      store(scores + p, weight);
      total += weight;
    }
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    return sum;
  }

  template <int kVecs>
  void weigh(int d, int from, int to) const {
    Vec part[kVecs];
    UNROLL for (int i = 0; i < kVecs; ++i) part[i] = load(sums + d + i * kLanes);
    for (int p = from; p < to; ++p) {
      const T* row = v + slot(p) * head_dim + d;
      const Vec weight = splat(scores[p]);
      UNROLL for (int i = 0; i < kVecs; ++i) part[i] = fma(weight, load(row + i * kLanes), part[i]);
    }
    UNROLL for (int i = 0; i < kVecs; ++i) store(sums + d + i * kLanes, part[i]);
  }

  // Adds the weighted values of positions from..to-1, in this order.
  void weigh(int from, int to) const {
    to = std::min(to, count);
    int d = 0;
    for (; d + 8 * kLanes <= head_dim; d += 8 * kLanes) weigh<8>(d, from, to);
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) weigh<2>(d, from, to);
    for (; d + kLanes <= head_dim; d += kLanes) weigh<1>(d, from, to);
    for (; d < head_dim; ++d) {
      for (int p = from; p < to; ++p) sums[d] += scores[p] * widen(v[slot(p) * head_dim + d]);
    }
  }
};

constexpr int kBlock = 64;  // positions whose keys or values stay in the cache while all queries of a task use them
constexpr int kRows = 4;    // rows of a task at most

struct Shape {
  int64_t batch, width, heads, head_dim, kv_heads, capacity, words;
  bool one_mask;
};

template <typename T>
ffi::Error attention(ffi::ThreadPool& pool, const Shape& s, const T* q, const T* k_new, const T* v_new, T* k, T* v,
                     const int32_t* start, const uint32_t* ancestors, const bool* active, const bool* write, T* out) {
  const int64_t per_row = s.kv_heads * s.head_dim;
  for (int64_t row = 0; row < s.batch * s.width; ++row) {
    const int64_t b = row / s.width, slot = start[b] + row % s.width;
    if (!active[row] || !write[b] || slot < 0 || slot >= s.capacity) continue;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const int64_t to = ((b * s.kv_heads + h) * s.capacity + slot) * s.head_dim, from = row * per_row + h * s.head_dim;
      std::memcpy(k + to, k_new + from, sizeof(T) * s.head_dim);
      std::memcpy(v + to, v_new + from, sizeof(T) * s.head_dim);
    }
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const int64_t group = s.heads / s.kv_heads, all = s.batch * s.kv_heads * s.width;
  const int64_t rows = std::clamp<int64_t>(all / (2 * std::max<int64_t>(pool.num_threads(), 1)), 1, kRows);
  const int64_t pieces = (s.width + rows - 1) / rows;
  parallel(pool, s.batch * s.kv_heads * pieces, [&](int64_t task) {
    const int64_t b = task / pieces / s.kv_heads, h = task / pieces % s.kv_heads, first = task % pieces * rows;
    const int64_t last = std::min(first + rows, s.width), cache = (b * s.kv_heads + h) * s.capacity * s.head_dim;
    const int committed = static_cast<int>(std::clamp<int64_t>(start[b], 0, s.capacity));
    std::vector<std::vector<int>> flights(last - first);
    std::vector<Query<T>> queries;
    const int64_t own = 2 * s.head_dim + committed + s.width + kLanes;  // floats of a query
    std::vector<float> scratch(static_cast<size_t>((last - first) * group * own));
    float* free = scratch.data();
    int longest = 0;
    for (int64_t w = first; w < last; ++w) {
      const int64_t row = b * s.width + w;
      T* to = out + (row * s.heads + h * group) * s.head_dim;
      std::vector<int>& flight = flights[w - first];
      const uint32_t* seen = ancestors + ((s.one_mask ? 0 : b) * s.width + w) * s.words;
      for (int64_t j = 0; j < s.width && committed + j < s.capacity; ++j) {
        if (seen[j / 32] >> (j % 32) & 1) flight.push_back(static_cast<int>(committed + j));
      }
      const int count = committed + static_cast<int>(flight.size());
      if (!active[row] || count == 0) {
        std::memset(to, 0, sizeof(T) * group * s.head_dim);
        continue;
      }
      longest = std::max(longest, count);
      for (int64_t g = 0; g < group; ++g) {
        const T* from = q + (row * s.heads + h * group + g) * s.head_dim;
        float *scaled = free, *sums = scaled + s.head_dim, *scores = sums + s.head_dim;
        free += own;
        for (int64_t d = 0; d < s.head_dim; ++d) scaled[d] = widen(from[d]) * scale;
        queries.push_back({scaled, k + cache, v + cache, committed, flight.data(), count,
                           static_cast<int>(s.head_dim), scores, sums, to + g * s.head_dim});
      }
    }
    for (int p = 0; p < longest; p += kBlock) {
      for (const Query<T>& query : queries) query.score(p, p + kBlock);
    }
    std::vector<float> totals;
    for (const Query<T>& query : queries) totals.push_back(query.soften());
    for (int p = 0; p < longest; p += kBlock) {
      for (const Query<T>& query : queries) query.weigh(p, p + kBlock);
    }
    for (size_t i = 0; i < queries.size(); ++i) {
      const float one = 1.0f / totals[i];
      for (int64_t d = 0; d < s.head_dim; ++d) narrow(queries[i].sums[d] * one, queries[i].out + d);
    }
  });
  return ffi::Error::Success();
}

ffi::Error Attention_(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_new, ffi::AnyBuffer v_new,
                      ffi::AnyBuffer, ffi::AnyBuffer, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::U32> ancestors,
                      ffi::Buffer<ffi::PRED> active, ffi::Buffer<ffi::PRED> write, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v) {
  const auto d = q.dimensions(), c = k->dimensions(), a = ancestors.dimensions();
  const Shape s{d[0], d[1], d[2], d[3], c[1], c[2], a[2], a[0] == 1};
  const auto run = [&](auto type) {
    using T = decltype(type);
    return attention<T>(pool, s, static_cast<const T*>(q.untyped_data()), static_cast<const T*>(k_new.untyped_data()),
                        static_cast<const T*>(v_new.untyped_data()), static_cast<T*>(k->untyped_data()),
                        static_cast<T*>(v->untyped_data()), start.typed_data(), ancestors.typed_data(),
                        active.typed_data(), write.typed_data(), static_cast<T*>(out->untyped_data()));
  };
  return q.element_type() == ffi::F32 ? run(float{}) : run(bf16{});
}

}  // namespace

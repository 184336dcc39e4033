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
// at a time, which is the same order for every vector. Vectors that already hold the sums of kHeld are gone on with.
template <int kBit = kLanes / 2, int kHeld = 1>
inline __attribute__((always_inline)) Vec sum_lanes(const Vec* sums) {
  if constexpr (kBit < kHeld) {
    return sums[0];
  } else {
    return pair<kBit>(sum_lanes<kBit / 2, kHeld>(sums), sum_lanes<kBit / 2, kHeld>(sums + kBit / kHeld));
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
    for (int p = 0; p < whole; p += kLanes) {
      const Vec weight = exp_negative(load(scores + p) - peak);
      store(scores + p, weight);
      total += weight;
    }
    if (whole < count) {
      Vec weight = exp_negative(load(scores + whole) - peak);
      for (int i = count - whole; i < kLanes; ++i) weight[i] = 0;
      store(scores + whole, weight);
      total += weight;
    }
    float sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    return sum;
  }
};

// The functions below take up to kSide queries of one sequence and KV head side by side, so that a key or value that is
// loaded once serves all of them; every sum is still that of a single query. kShared: the positions are committed, hence
// in the same slots for all queries. Ancestors in flight are each query's own, and go one query at a time.

constexpr int kSide = 3;  // their sums over kKeys keys or kKeys vectors of values fill 16 registers
constexpr int kKeys = 4;

inline __attribute__((always_inline)) Vec held(Vec value) {
  HOLD(value);
  return value;
}

// Scores of positions from..to-1, a multiple of kLanes both unless the last vector is partly empty.
template <int kQueries, bool kShared, typename T>
void score(const Query<T>* queries, int from, int to) {
  const int head_dim = queries->head_dim, whole = head_dim / kLanes * kLanes;
  for (int first = from; first < to; first += kLanes) {
    const auto key = [&](int i) __attribute__((always_inline)) {
      const int64_t slot = kShared ? first + i : queries->slot(std::min(first + i, to - 1));
      return queries->k + slot * head_dim;
    };
    Vec parts[kQueries][kLanes / kKeys];
    UNROLL for (int part = 0; part < kLanes / kKeys; ++part) {
      const T* keys[kKeys];
      UNROLL for (int i = 0; i < kKeys; ++i) keys[i] = key(part * kKeys + i);
      Vec dots[kQueries][kKeys] = {};
      for (int d = 0; d < whole; d += kLanes) {
        Vec x[kQueries];
        UNROLL for (int j = 0; j < kQueries; ++j) x[j] = held(load(queries[j].q + d));
        UNROLL for (int i = 0; i < kKeys; ++i) {
          const Vec y = held(load(keys[i] + d));
          UNROLL for (int j = 0; j < kQueries; ++j) dots[j][i] = fma(x[j], y, dots[j][i]);
        }
      }
      UNROLL for (int j = 0; j < kQueries; ++j) parts[j][part] = sum_lanes<kKeys / 2>(dots[j]);
    }
    UNROLL for (int j = 0; j < kQueries; ++j) {
      Vec total = sum_lanes<kLanes / 2, kKeys>(parts[j]);
      for (int d = whole; d < head_dim; ++d) {
        for (int i = 0; i < kLanes; ++i) total[i] += queries[j].q[d] * widen(key(i)[d]);
      }
      store(queries[j].scores + first, total);
    }
  }
}

// Adds the weighted values of positions from..to-1, in this order, to dimensions d .. d + kVecs * kLanes - 1.
template <int kQueries, bool kShared, int kVecs, typename T>
void weigh(const Query<T>* queries, int d, int from, int to) {
  Vec part[kQueries][kVecs];
  UNROLL for (int j = 0; j < kQueries; ++j) {
    UNROLL for (int i = 0; i < kVecs; ++i) part[j][i] = load(queries[j].sums + d + i * kLanes);
  }
  for (int p = from; p < to; ++p) {
    const T* row = queries->v + (kShared ? p : queries->slot(p)) * queries->head_dim + d;
    if (kShared) {
      constexpr int kLine = 64 / sizeof(T);
      UNROLL for (int i = 0; i < kVecs * kLanes; i += kLine) __builtin_prefetch(row + 8 * queries->head_dim + i);
    }
    Vec weight[kQueries];
    UNROLL for (int j = 0; j < kQueries; ++j) weight[j] = held(splat(queries[j].scores[p]));
    UNROLL for (int i = 0; i < kVecs; ++i) {
      const Vec value = held(load(row + i * kLanes));
      UNROLL for (int j = 0; j < kQueries; ++j) part[j][i] = fma(weight[j], value, part[j][i]);
    }
  }
  UNROLL for (int j = 0; j < kQueries; ++j) {
    UNROLL for (int i = 0; i < kVecs; ++i) store(queries[j].sums + d + i * kLanes, part[j][i]);
  }
}

template <int kQueries, bool kShared, typename T>
void weigh(const Query<T>* queries, int from, int to) {
  const int head_dim = queries->head_dim;
  int d = 0;
  for (; d + kKeys * kLanes <= head_dim; d += kKeys * kLanes) weigh<kQueries, kShared, kKeys>(queries, d, from, to);
  for (; d + kLanes <= head_dim; d += kLanes) weigh<kQueries, kShared, 1>(queries, d, from, to);
  for (; d < head_dim; ++d) {
    for (int j = 0; j < kQueries; ++j) {
      const Query<T>& query = queries[j];
      for (int p = from; p < to; ++p) {
        query.sums[d] += query.scores[p] * widen(query.v[query.slot(p) * head_dim + d]);
      }
    }
  }
}

template <int kValue>
using Int = std::integral_constant<int, kValue>;
template <bool kValue>
using Flag = std::integral_constant<bool, kValue>;

constexpr int kBlock = 64;  // positions whose keys or values stay in the cache while all queries of a task use them
constexpr int kRows = 2;    // rows of a task at most

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
  const int64_t most = std::clamp<int64_t>(all / (2 * std::max<int64_t>(pool.num_threads(), 1)), 1, kRows);
  const int64_t pieces = (s.width + most - 1) / most, rows = (s.width + pieces - 1) / pieces;
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
      if (!active[row]) {
        leave(to, group * s.head_dim);
        continue;
      }
      if (count == 0) {
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
    // work(queries, from, to) for all positions of all queries, block by block.
    const auto blocks = [&](auto work) {
      const int shared = committed / kLanes * kLanes;  // committed positions that fill whole vectors
      for (int p = 0; p < longest; p += kBlock) {
        const int end = std::min(p + kBlock, shared), count = static_cast<int>(queries.size());
        for (int i = 0, size; p < end && i < count; i += size) {
          size = std::min(count - i, kSide);
          switch (size) {
            case 1: work(Int<1>(), Flag<true>(), &queries[i], p, end); break;
            case 2: work(Int<2>(), Flag<true>(), &queries[i], p, end); break;
            case 3: work(Int<3>(), Flag<true>(), &queries[i], p, end); break;
          }
        }
        for (const Query<T>& query : queries) {
          const int from = std::max(p, shared), to = std::min(p + kBlock, query.count);
          if (from < to) work(Int<1>(), Flag<false>(), &query, from, to);
        }
      }
    };
    blocks([](auto size, auto shared, auto... at) { score<size(), shared()>(at...); });
    std::vector<float> totals;
    for (const Query<T>& query : queries) totals.push_back(query.soften());
    blocks([](auto size, auto shared, auto... at) { weigh<size(), shared()>(at...); });
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

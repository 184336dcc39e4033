// Products, norms and attention of a few rows on a CPU, as custom calls of XLA.
//
// Every result is computed from its own row alone, in one fixed order, so its bits depend neither on how many rows there
// are nor on which other rows run: what XLA's products give only at measured row counts (exactness E2) holds here by
// construction. Rows whose `active` flag is off are not computed at all; their results are zeros.
//
// Written with the vector extensions of GCC and Clang; the compiler chooses AVX2, AVX-512 or NEON for this machine.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
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

std::vector<int> active_rows(ffi::Buffer<ffi::PRED>& active) {
  std::vector<int> rows;
  for (size_t r = 0; r < active.element_count(); ++r) {
    if (active.typed_data()[r]) rows.push_back(static_cast<int>(r));
  }
  return rows;
}

// --- products ---------------------------------------------------------------------------------------------------------

constexpr int kPanel = 16;     // outputs that lie together: weights are [outputs / kPanel, inputs, kPanel]
constexpr int kGroup = 6;      // rows that share one pass over a panel: their sums fill the registers
constexpr int kGroups = 3;     // passes over one chunk before the next one
constexpr int kChunk = 192;    // inputs per chunk: a chunk of a panel stays in the first-level cache between passes
constexpr int kAhead = 64;     // inputs between a load and its prefetch where there is one pass

// sums[r][0..15] += x[k][r] * panel[k][0..15] for k0 <= k < k1, k ascending, one accumulator per sum. Fetches one line
// of `ahead` per kPasses inputs.
template <int kRows, int kPanels, int kPasses, typename Weight>
inline __attribute__((always_inline)) void tile(const Weight* panel, size_t stride, const float* x, int k0, int k1,
                                                float* sums, const Weight* ahead) {
  constexpr int kVecs = kPanel / kLanes, kAll = kPanels * kVecs;
  Vec sum[kRows][kAll];
  UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kAll; ++v) {
    sum[r][v] = k0 ? load(sums + r * kPanels * kPanel + v * kLanes) : Vec{};
  }
  const Weight* from = panel + static_cast<size_t>(k0) * kPanel;
  x += static_cast<size_t>(k0) * kRows;
  auto step = [&]() __attribute__((always_inline)) {
    Vec weight[kAll];
    UNROLL for (int v = 0; v < kAll; ++v) {
      weight[v] = load(from + (v / kVecs) * stride + (v % kVecs) * kLanes);
      HOLD(weight[v]);
    }
    UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec value = splat(x[r]);
      UNROLL for (int v = 0; v < kAll; ++v) sum[r][v] += value * weight[v];
    }
    from += kPanel;
    x += kRows;
  };
  int k = k0;
  for (; k + kPasses <= k1; k += kPasses, ahead += kPanel) {
    UNROLL for (int p = 0; p < kPanels; ++p) __builtin_prefetch(ahead + p * stride);
    UNROLL for (int u = 0; u < kPasses; ++u) step();
  }
  for (; k < k1; ++k) step();
  UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kAll; ++v) {
    store(sums + r * kPanels * kPanel + v * kLanes, sum[r][v]);
  }
}

// Rows that go through a panel together, at most kGroup: x is [inputs, count], so that one pointer serves them all.
struct Group {
  const float* x;
  int first, count;
};

// One panel, kPasses groups: every chunk of the panel is read from memory once and used by all of them, and while they
// use it, they fetch the next one.
template <int kPasses, typename Weight>
void panel_product(const Weight* panel, const Group* groups, int inputs, float* sums) {
  const int chunk = kPasses == 1 ? inputs : kChunk;
  for (int k = 0; k < inputs; k += chunk) {
    const int end = std::min(k + chunk, inputs), share = (end - k) / kPasses;
    float* to = sums;
    for (int pass = 0; pass < kPasses; ++pass) {
      const Group& g = groups[pass];
      const Weight* ahead = panel + static_cast<size_t>(kPasses == 1 ? kAhead : end + pass * share) * kPanel;
      switch (g.count) {
#define ROWS(n)                                                   \
  case n:                                                         \
    tile<n, 1, kPasses>(panel, 0, g.x, k, end, to, ahead);        \
    break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
      }
      to += g.count * kPanel;
    }
  }
}

template <typename Weight, typename Out>
struct Product {
  const Weight* weight;
  const Out* bias;  // null: none
  Out* out;
  const std::vector<Group>& groups;
  const std::vector<int>& rows;  // where the results of the groups' rows go
  int inputs, outputs;

  const Weight* panel(int64_t p) const { return weight + p * static_cast<int64_t>(inputs) * kPanel; }

  void write(int64_t p, int row, const float* sums) const {
    const int64_t first = p * kPanel;
    const int count = static_cast<int>(std::min<int64_t>(kPanel, outputs - first));
    Out* to = out + static_cast<int64_t>(rows[row]) * outputs + first;
    for (int i = 0; i < count; ++i) narrow(bias ? sums[i] + widen(bias[first + i]) : sums[i], to + i);
  }

  void panels(int64_t from, int64_t to) const {
    float sums[kGroup * kGroups * kPanel];
    int64_t p = from;
    if (rows.size() == 1) {  // two panels side by side hide the latency of the one row's sums
      const size_t stride = static_cast<size_t>(inputs) * kPanel;
      for (; p + 2 <= to; p += 2) {
        tile<1, 2, 1>(panel(p), stride, groups[0].x, 0, inputs, sums, panel(p) + kAhead * kPanel);
        write(p, 0, sums);
        write(p + 1, 0, sums + kPanel);
      }
    }
    for (; p < to; ++p) {
      for (size_t first = 0; first < groups.size(); first += kGroups) {
        const size_t passes = std::min<size_t>(groups.size() - first, kGroups);
        const Group* g = groups.data() + first;
        if (passes == 1) {
          panel_product<1>(panel(p), g, inputs, sums);
        } else if (passes == 2) {
          panel_product<2>(panel(p), g, inputs, sums);
        } else {
          panel_product<3>(panel(p), g, inputs, sums);
        }
        const int begin = g[0].first, end = g[passes - 1].first + g[passes - 1].count;
        for (int r = begin; r < end; ++r) write(p, r, sums + (r - begin) * kPanel);
      }
    }
  }
};

template <typename In, typename Out>
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias,
                   ffi::Buffer<ffi::PRED> active, ffi::Result<ffi::AnyBuffer> y) {
  const int inputs = static_cast<int>(x.dimensions()[1]), outputs = static_cast<int>(y->dimensions()[1]);
  const std::vector<int> rows = active_rows(active);
  // Groups of nearly equal size, each with its inputs side by side.
  const int count = static_cast<int>(rows.size()), wanted = (count + kGroup - 1) / kGroup;
  std::vector<float> wide(static_cast<size_t>(count) * inputs);
  std::vector<Group> groups;
  for (int i = 0, first = 0; i < wanted; ++i) {
    const int size = count / wanted + (i < count % wanted);
    float* to = wide.data() + static_cast<size_t>(first) * inputs;
    for (int r = 0; r < size; ++r) {
      const In* from = static_cast<const In*>(x.untyped_data()) + static_cast<int64_t>(rows[first + r]) * inputs;
      for (int k = 0; k < inputs; ++k) to[static_cast<size_t>(k) * size + r] = widen(from[k]);
    }
    groups.push_back({to, first, size});
    first += size;
  }
  Out* out = static_cast<Out*>(y->untyped_data());
  for (size_t r = 0; r < active.element_count(); ++r) {
    if (!active.typed_data()[r]) std::memset(out + static_cast<int64_t>(r) * outputs, 0, sizeof(Out) * outputs);
  }
  if (rows.empty()) return ffi::Error::Success();
  const Product<In, Out> task{static_cast<const In*>(weight.untyped_data()),
                              bias.element_count() ? static_cast<const Out*>(bias.untyped_data()) : nullptr,
                              out, groups, rows, inputs, outputs};
  const int64_t panels = weight.dimensions()[0];
  // Even numbers of panels, small enough that the threads end together, large enough to be worth taking.
  const int64_t unit = std::max<int64_t>(2, std::min<int64_t>(32, panels / (pool.num_threads() * 8) / 2 * 2));
  parallel(pool, (panels + unit - 1) / unit,
           [&](int64_t i) { task.panels(i * unit, std::min((i + 1) * unit, panels)); });
  return ffi::Error::Success();
}

ffi::Error Product_(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias,
                    ffi::Buffer<ffi::PRED> active, ffi::Result<ffi::AnyBuffer> y) {
  if (x.element_type() == ffi::F32) return product<float, float>(pool, x, weight, bias, active, y);
  if (y->element_type() == ffi::F32) return product<bf16, float>(pool, x, weight, bias, active, y);
  return product<bf16, bf16>(pool, x, weight, bias, active, y);
}

// --- norms ------------------------------------------------------------------------------------------------------------

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

// --- attention --------------------------------------------------------------------------------------------------------

// Adds up the lanes of kLanes vectors: lane i of the result is the sum of sums[i]. Lanes that differ in one bit are added
// at a time, which is the same order for every vector.
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

template <int kBit = kLanes / 2>
inline __attribute__((always_inline)) Vec sum_lanes(const Vec* sums) {
  if constexpr (kBit == 0) {
    return sums[0];
  } else {
    return pair<kBit>(sum_lanes<kBit / 2>(sums), sum_lanes<kBit / 2>(sums + kBit));
  }
}

// exp of lanes <= 0, to about one unit in the last place; 0 far below.
inline Vec exp_negative(Vec x) {
  const Vec low = splat(-87.0f);
  const Ints tiny = x < low;
  x = tiny ? low : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec power = (x * 1.44269504f + magic) - magic;
  const Vec r = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
  p = p * reinterpret_cast<Vec>(exponent);
  return tiny ? Vec{} : p;
}

// One query against the slots it sees, which stand at positions 0, 1, 2, ... of its own text: the committed slots, and
// then its ancestors in flight in the order of their depth. So a row of a tree is computed like the same row of a chain.
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
  T* out;                 // [head_dim]

  int64_t slot(int position) const { return position < start ? position : flight[position - start]; }

  void score() const {
    const int whole = head_dim / kLanes * kLanes;
    for (int first = 0; first < count; first += kLanes) {
      const T* rows[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) rows[i] = k + slot(std::min(first + i, count - 1)) * head_dim;
      Vec sums[kLanes] = {};
      for (int d = 0; d < whole; d += kLanes) {
        const Vec x = load(q + d);
        UNROLL for (int i = 0; i < kLanes; ++i) sums[i] += x * load(rows[i] + d);
      }
      Vec total = sum_lanes(sums);
      for (int d = whole; d < head_dim; ++d) {
        UNROLL for (int i = 0; i < kLanes; ++i) total[i] += q[d] * widen(rows[i][d]);
      }
      store(scores + first, total);
    }
  }

  // Turns scores into weights and returns their sum.
  float soften() const {
    float peak = scores[0];
    for (int p = 1; p < count; ++p) peak = std::max(peak, scores[p]);
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
  void weigh(int d, float scale) const {
    Vec sums[kVecs] = {};
    for (int p = 0; p < count; ++p) {
      const T* row = v + slot(p) * head_dim + d;
      const Vec weight = splat(scores[p]);
      UNROLL for (int i = 0; i < kVecs; ++i) sums[i] += weight * load(row + i * kLanes);
    }
    UNROLL for (int i = 0; i < kVecs; ++i) {
      for (int lane = 0; lane < kLanes; ++lane) narrow(sums[i][lane] * scale, out + d + i * kLanes + lane);
    }
  }

  void run() const {
    score();
    const float scale = 1.0f / soften();
    int d = 0;
    for (; d + 8 * kLanes <= head_dim; d += 8 * kLanes) weigh<8>(d, scale);
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) weigh<2>(d, scale);
    for (; d + kLanes <= head_dim; d += kLanes) weigh<1>(d, scale);
    for (; d < head_dim; ++d) {
      float sum = 0;
      for (int p = 0; p < count; ++p) sum += scores[p] * widen(v[slot(p) * head_dim + d]);
      narrow(sum * scale, out + d);
    }
  }
};

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
  const int64_t group = s.heads / s.kv_heads;
  parallel(pool, s.batch * s.width * s.kv_heads, [&](int64_t task) {
    // One sequence and KV head after another, so that neighbours in time read the same keys.
    const int64_t row = task / (s.kv_heads * s.width) * s.width + task % s.width, h = task / s.width % s.kv_heads;
    const int64_t b = row / s.width, w = row % s.width;
    T* to = out + (row * s.heads + h * group) * s.head_dim;
    const int committed = static_cast<int>(std::min<int64_t>(start[b], s.capacity));
    std::vector<int> flight;
    const uint32_t* seen = ancestors + ((s.one_mask ? 0 : b) * s.width + w) * s.words;
    for (int64_t j = 0; j < s.width && committed + j < s.capacity; ++j) {
      if (seen[j / 32] >> (j % 32) & 1) flight.push_back(static_cast<int>(committed + j));
    }
    const int count = committed + static_cast<int>(flight.size());
    if (!active[row] || count == 0) {
      std::memset(to, 0, sizeof(T) * group * s.head_dim);
      return;
    }
    std::vector<float> scratch(s.head_dim + count + kLanes);
    for (int64_t g = 0; g < group; ++g) {
      const T* from = q + (row * s.heads + h * group + g) * s.head_dim;
      for (int64_t d = 0; d < s.head_dim; ++d) scratch[d] = widen(from[d]) * scale;
      const int64_t cache = (b * s.kv_heads + h) * s.capacity * s.head_dim;
      Query<T>{scratch.data(), k + cache, v + cache, committed, flight.data(), count, static_cast<int>(s.head_dim),
               scratch.data() + s.head_dim, to + g * s.head_dim}
          .run();
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

// --- bandwidth --------------------------------------------------------------------------------------------------------

// Reads the whole buffer once, as fast as the threads of XLA's pool can: what a step that reads every weight is bound by.
ffi::Error Read_(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  constexpr int64_t kPiece = 1 << 16;
  const int64_t count = x.element_count(), pieces = (count + kPiece - 1) / kPiece;
  std::vector<float> sums(pieces);
  parallel(pool, pieces, [&](int64_t piece) {
    const float* p = x.typed_data() + piece * kPiece;
    const int64_t size = std::min(kPiece, count - piece * kPiece) / (4 * kLanes) * (4 * kLanes);
    Vec sum[4] = {};
    for (int64_t i = 0; i < size; i += 4 * kLanes) {
      for (int64_t line = 0; line < 4 * kLanes; line += kPanel) __builtin_prefetch(p + i + line + kAhead * kPanel);
      UNROLL for (int j = 0; j < 4; ++j) sum[j] += load(p + i + j * kLanes);
    }
    const Vec total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int lane = 0; lane < kLanes; ++lane) sums[piece] += total[lane];
  });
  float total = 0;
  for (float sum : sums) total += sum;
  y->typed_data()[0] = total;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxProduct, Product_,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxNorm, Norm_,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Attr<float>("eps")
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxAttention, Attention_,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecJaxRead, Read_,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

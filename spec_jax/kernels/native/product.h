// Products of a few rows with packed weights [outputs / kPanel, inputs, kPanel].
//
// Every sum has one accumulator and adds its inputs in ascending order, however many rows and panels go side by side, so
// its bits depend neither on the row count nor on the vector width. The weights are read from memory once, in order, and
// fetched ahead; what limits a product of up to about eight rows is the memory alone.

#pragma once

#include "lanes.h"

namespace {

std::vector<int> active_rows(ffi::Buffer<ffi::PRED>& active) {
  std::vector<int> rows;
  for (size_t r = 0; r < active.element_count(); ++r) {
    if (active.typed_data()[r]) rows.push_back(static_cast<int>(r));
  }
  return rows;
}

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
      UNROLL for (int v = 0; v < kAll; ++v) sum[r][v] = fma(value, weight[v], sum[r][v]);
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
    if constexpr (std::is_same_v<Out, float>) {
      if (count == kPanel && !bias) {
        std::memcpy(to, sums, sizeof(float) * kPanel);
        return;
      }
    }
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
    if (!active.typed_data()[r]) leave(out + static_cast<int64_t>(r) * outputs, outputs);
  }
  if (rows.empty()) return ffi::Error::Success();
  const Product<In, Out> task{static_cast<const In*>(weight.untyped_data()),
                              bias.element_count() ? static_cast<const Out*>(bias.untyped_data()) : nullptr,
                              out, groups, rows, inputs, outputs};
  const int64_t panels = weight.dimensions()[0];
  // Even numbers of panels, small enough that the threads end together, large enough to be worth taking.
  const int64_t unit = std::max<int64_t>(2, std::min<int64_t>(32, panels / (std::max<int64_t>(pool.num_threads(), 1) * 8) / 2 * 2));
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

}  // namespace

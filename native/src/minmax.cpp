// The smallest and largest finite element of each set, and how many elements are not finite.
//
// call.low and call.high hold the bounds of every set, (inf, -inf) to begin with; call.nonfinite counts. Minimum and maximum do
// not depend on order, so that threads meet only where they share a set: there bounds are merged atomically.
#include <atomic>

#include "detent/arithmetic.hpp"
#include "detent/bounds.hpp"

namespace {

template <class T>
inline void merge(T* low, T* high, const Bounds<T>& bounds, bool shared) {
  if (!shared) {
    *low = bounds.low < *low ? bounds.low : *low;
    *high = bounds.high > *high ? bounds.high : *high;
    return;
  }
  std::atomic_ref<T> shared_low(*low), shared_high(*high);
  T seen = shared_low.load(std::memory_order_relaxed);
  while (bounds.low < seen && !shared_low.compare_exchange_weak(seen, bounds.low, std::memory_order_relaxed)) {
  }
  seen = shared_high.load(std::memory_order_relaxed);
  while (bounds.high > seen && !shared_high.compare_exchange_weak(seen, bounds.high, std::memory_order_relaxed)) {
  }
}

// One element per set along the row: the row's bounds are taken element by element.
template <class T>
void take_row(const T* __restrict x, T* __restrict low, T* __restrict high, int64_t count, int64_t& nonfinite) {
  int found = 0;  // as wide as the data: a row is at most kChunk long
  for (int64_t i = 0; i < count; ++i) {
    const T v = x[i];
    const bool good = finite(v);
    const T below = good ? v : std::numeric_limits<T>::infinity(), above = good ? v : -std::numeric_limits<T>::infinity();
    low[i] = below < low[i] ? below : low[i];
    high[i] = above > high[i] ? above : high[i];
    found += !good;
  }
  nonfinite += found;
}

constexpr int64_t kWide = 4 * kChunk;

// Sets of single elements along a row: bounds of rows that share their sets are kept apart until a row with other sets comes.
// Rows too wide for that are merged a chunk at a time.
template <class In>
void run_by_element(const Call& call, int64_t begin, int64_t end, int64_t& nonfinite) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  T *low = static_cast<T*>(call.low), *high = static_cast<T*>(call.high);
  alignas(64) T wide[kChunk], lows[kWide], highs[kWide];
  Cursor cursor(call.layout, begin);
  for (int64_t at = begin; at < end;) {
    const int64_t offset = cursor.offset, first = call.layout.cols <= kWide ? 0 : cursor.col;
    const int64_t width = least(call.layout.cols - first, first || call.layout.cols > kWide ? kChunk : kWide);
    for (int64_t i = 0; i < width; ++i) {
      lows[i] = std::numeric_limits<T>::infinity();
      highs[i] = -std::numeric_limits<T>::infinity();
    }
    do {
      const int64_t start = cursor.col - first;
      const int64_t count = least(least(width - start, end - at), kChunk);
      take_row(load(in + at, count, wide), lows + start, highs + start, count, nonfinite);
      cursor.advance(count);
      at += count;
    } while (at < end && cursor.offset == offset && call.layout.cols <= kWide);
    T *to_low = low + offset + first, *to_high = high + offset + first;
    for (int64_t i = 0; i < width; ++i) merge(to_low + i, to_high + i, Bounds<T>{lows[i], highs[i]}, true);
  }
}

template <class In>
void run_by_block(const Call& call, int64_t begin, int64_t end, int64_t& nonfinite) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  T *low = static_cast<T*>(call.low), *high = static_cast<T*>(call.high);
  alignas(64) T wide[kChunk];
  Cursor cursor(call.layout, begin);
  for (int64_t at = begin; at < end;) {
    const int64_t set = cursor.set(), run = least(cursor.run(), end - at);
    if (!call.shared && run <= kShort) {
      // Whole groups belong to this range alone.
      const int64_t groups = least(cursor.whole_blocks(end - at), kChunk / call.layout.block);
      if (groups > 1) {
        bounds_of_groups(load(in + at, groups * run, wide), groups, run, low + set, high + set, nonfinite);
        cursor.advance_blocks(groups);
        at += groups * run;
        continue;
      }
    }
    const Bounds<T> bounds = bounds_of_run(in + at, run, wide, nonfinite);
    // A run that ends inside this range belongs to it alone, where every set is one run.
    merge(low + set, high + set, bounds, call.shared || at == begin || at + run == end);
    cursor.advance(run);
    at += run;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void minmax(const Call& call, int64_t begin, int64_t end) {
  int64_t nonfinite = 0;
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    if (call.layout.block == 1 && call.shared) return run_by_element<In>(call, begin, end, nonfinite);
    return run_by_block<In>(call, begin, end, nonfinite);
  });
  if (nonfinite) call.nonfinite->fetch_add(nonfinite, std::memory_order_relaxed);
}

}  // namespace detent::DETENT_LEVEL

// The smallest and largest finite element of each set, and the number of non-finite elements.
//
// call.low and call.high are the bounds of every set, initially (inf, -inf); call.nonfinite is a counter. Minimum and
// maximum do not depend on the order of elements. Threads that share a set merge their bounds atomically, or a row at a
// time under a lock.
#include <atomic>

#include "detent/arithmetic.hpp"
#include "detent/bounds.hpp"

namespace {

// A number that several threads may change, like std::atomic_ref, which some standard libraries still lack.
template <class T>
class Shared {
 public:
  explicit Shared(T& value) : value_(value) {}

#if defined(__GNUC__)
  T load() const {
    T seen;
    __atomic_load(&value_, &seen, __ATOMIC_RELAXED);
    return seen;
  }
  // Compare-and-swap: stores `wanted` if the value is `seen`; otherwise loads the value into `seen` and returns false.
  bool exchange(T& seen, T wanted) {
    return __atomic_compare_exchange(&value_, &seen, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
#else
  T load() const { return std::atomic_ref<T>(value_).load(std::memory_order_relaxed); }
  bool exchange(T& seen, T wanted) {
    return std::atomic_ref<T>(value_).compare_exchange_weak(seen, wanted, std::memory_order_relaxed);
  }
#endif

 private:
  T& value_;
};

template <class T>
inline void merge(T* low, T* high, const Bounds<T>& bounds, bool shared) {
  if (!shared) {
    *low = bounds.low < *low ? bounds.low : *low;
    *high = bounds.high > *high ? bounds.high : *high;
    return;
  }
  Shared<T> shared_low(*low), shared_high(*high);
  T seen = shared_low.load();
  while (bounds.low < seen && !shared_low.exchange(seen, bounds.low)) {
  }
  seen = shared_high.load();
  while (bounds.high > seen && !shared_high.exchange(seen, bounds.high)) {
  }
}

// Each element of the row has its own set: bounds are updated element by element.
template <class T>
void take_row(const T* __restrict x, T* __restrict low, T* __restrict high, int64_t count, int64_t& nonfinite) {
  int found = 0;  // as wide as the data, for vectors; a row has at most kChunk elements
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

// Updates the bounds by four rows of the same sets. Returns whether all elements are finite; if not, the bounds are
// undefined.
template <class T>
bool take_four_rows(const T* x, T* __restrict low, T* __restrict high, int64_t cols) {
  int bad = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const T a = x[i], b = x[cols + i], c = x[2 * cols + i], d = x[3 * cols + i];
    const T ab = a < b ? a : b, cd = c < d ? c : d, below = ab < cd ? ab : cd;
    const T over_ab = a > b ? a : b, over_cd = c > d ? c : d, above = over_ab > over_cd ? over_ab : over_cd;
    low[i] = below < low[i] ? below : low[i];
    high[i] = above > high[i] ? above : high[i];
    bad |= (a - a) + (b - b) + ((c - c) + (d - d)) != T(0);
  }
  return bad == 0;
}

constexpr int64_t kWide = 4 * kChunk;

// Updates lows and highs by rows of the same sets, from the cursor's row to `end`. Returns the position where it
// stopped, or -1 if the fast version met a non-finite element.
template <class In>
int64_t take_rows(const Call& call, int64_t at, int64_t end, bool careful, compute_t<In>* lows, compute_t<In>* highs,
                  int64_t& nonfinite) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  const int64_t cols = call.layout.cols;
  alignas(64) T wide[kChunk];
  Cursor cursor(call.layout, at);
  const int64_t offset = cursor.offset;
  do {
    if constexpr (std::is_same_v<In, T>) {
      if (!careful && cursor.col == 0) {
        const int64_t rows = least(cursor.equal_rows(), (end - at) / cols) / 4 * 4;
        for (int64_t row = 0; row < rows; row += 4, at += 4 * cols) {
          if (!take_four_rows(in + at, lows, highs, cols)) return -1;
          for (int i = 0; i < 4; ++i) cursor.advance(cols);
        }
        if (rows) continue;
      }
    }
    const int64_t count = least(least(cols - cursor.col, end - at), kChunk);
    take_row(load(in + at, count, wide), lows + cursor.col, highs + cursor.col, count, nonfinite);
    cursor.advance(count);
    at += count;
  } while (at < end && cursor.offset == offset);
  return at;
}

template <class T>
void clear(T* lows, T* highs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    lows[i] = std::numeric_limits<T>::infinity();
    highs[i] = -std::numeric_limits<T>::infinity();
  }
}

template <class T>
void merge_row(const T* __restrict lows, const T* __restrict highs, T* __restrict low, T* __restrict high, int64_t count,
               detent::Lock& merging) {
  const Held held(merging);
  for (int64_t i = 0; i < count; ++i) {
    low[i] = lows[i] < low[i] ? lows[i] : low[i];
    high[i] = highs[i] > high[i] ? highs[i] : high[i];
  }
}

// Each element of a row has its own set: bounds of rows with the same sets are collected in a buffer until a row with
// different sets follows. Rows too wide for the buffer are merged a chunk at a time.
template <class In>
void run_by_element(const Call& call, int64_t begin, int64_t end, int64_t& nonfinite) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  T *low = static_cast<T*>(call.low), *high = static_cast<T*>(call.high);
  alignas(64) T wide[kChunk], lows[kWide], highs[kWide];
  for (int64_t at = begin; at < end;) {
    const Cursor cursor(call.layout, at);
    int64_t set = cursor.offset, width = call.layout.cols, next;
    if (width <= kWide) {
      clear(lows, highs, width);
      int64_t found = 0;
      next = take_rows<In>(call, at, end, false, lows, highs, found);
      if (next < 0) {
        clear(lows, highs, width);
        found = 0;
        next = take_rows<In>(call, at, end, true, lows, highs, found);
      }
      nonfinite += found;
    } else {
      set += cursor.col;
      width = least(least(width - cursor.col, end - at), kChunk);
      clear(lows, highs, width);
      take_row(load(in + at, width, wide), lows, highs, width, nonfinite);
      next = at + width;
    }
    merge_row(lows, highs, low + set, high + set, width, *call.merging);
    at = next;
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
      // Only this range updates the bounds of whole groups.
      const int64_t groups = least(cursor.whole_blocks(end - at), kGroups<In> / call.layout.block);
      if (groups > 1) {
        bounds_of_groups(load(in + at, groups * run, wide), groups, run, low + set, high + set, nonfinite);
        cursor.advance_blocks(groups);
        at += groups * run;
        continue;
      }
    }
    const Bounds<T> bounds = bounds_of_run(in + at, run, wide, nonfinite);
    // If every set is one run, only this range updates the bounds of a run that begins and ends inside of it.
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

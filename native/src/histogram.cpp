// Counts the elements of each set in each bin. A bin is a sign, an exponent and the leading `bits` bits of a mantissa,
// the upper bits of a float, so the range need not be known in advance. Numbers below the smallest normal float have
// bins of equal width, starting at zero. Finite numbers above the largest float are rejected; infinities and NaN are
// left out.
//
// Counts are [row][set][bin], and call.rows maps each sign and exponent to its row, or to -1. Elements without a row
// are not counted, and call.missed is set for their sign and exponent. With weights, the weights are added up.
#include <bit>
#include <cstring>

#include "detent/arithmetic.hpp"
#include "detent/bounds.hpp"
#include "detent/sums.hpp"

namespace {

using detent::kExponents;

constexpr int kNonfinite = 255;

inline uint32_t row_key(uint32_t key, int bits) { return key >> bits; }

// Computes the bin of each number: sign, exponent as in a float, mantissa. Returns whether all are in the range of a
// float.
inline bool find_keys(const float* x, uint32_t* keys, int64_t count, int bits) {
  for (int64_t i = 0; i < count; ++i) keys[i] = std::bit_cast<uint32_t>(x[i] + 0.0f) >> (23 - bits);  // makes -0 a +0
  return true;
}

inline bool find_keys(const double* x, uint32_t* keys, int64_t count, int bits) {
  constexpr uint64_t kShift = 1023 - 127;
  const double tiny = 0x1p-126, bins = std::ldexp(0x1p126, bits);
  bool good = true;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = std::bit_cast<uint64_t>(x[i] + 0.0);
    const uint32_t sign = static_cast<uint32_t>(word >> 63) << (8 + bits);
    const double size = std::fabs(x[i]);
    const uint64_t exponent = word >> 52 & 2047;
    uint32_t key;
    if (size < tiny) {
      key = static_cast<uint32_t>(size * bins);
    } else if (exponent >= kShift + kNonfinite) {
      good &= exponent == 2047;
      key = static_cast<uint32_t>(kNonfinite) << bits;
    } else {
      key = static_cast<uint32_t>(((word & ~(uint64_t{1} << 63)) - (kShift << 52)) >> (52 - bits));
    }
    keys[i] = sign | key;
  }
  return good;
}

// Counts of one thread for a single set, in its own tables with an entry for every key; only a few entries are used.
// Negative numbers and the second table are shifted, because CPUs confuse addresses that differ by a multiple of 4096
// (4K aliasing).
class Table {
 public:
  static constexpr int64_t kShift = 272;

  // Number of zero doubles that a table needs.
  static int64_t size(int bits) { return (int64_t{kExponents} << bits) + 2 * kShift; }

  Table(const Call& call, double* zeros)
      : call_(call),
        width_(int64_t{1} << call.bits),
        counts_(reinterpret_cast<uint32_t*>(zeros)),
        second_(counts_ + kExponents * width_ + 2 * kShift),
        sums_(reinterpret_cast<int64_t*>(zeros)) {}

  // Converts keys to indices in the tables.
  void place(uint32_t* keys, int64_t count) const {
    const int sign = call_.bits + 8;
    for (int64_t i = 0; i < count; ++i) keys[i] += (keys[i] >> sign) * static_cast<uint32_t>(kShift);
  }

  // Adjacent elements use different tables, so that equal elements do not have to wait for each other.
  void count(const uint32_t* __restrict places, int64_t count) {
    uint32_t *first = counts_, *second = second_;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      ++first[places[i]];
      ++second[places[i + 1]];
      ++first[places[i + 2]];
      ++second[places[i + 3]];
    }
    for (; i < count; ++i) ++first[places[i]];
  }

  void weigh(const uint32_t* places, const int64_t* weights, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums_[places[i]] += weights[i];
  }

  // Adds the rows to the set's counts and resets them. Returns whether no other counts are left.
  bool empty_into(int64_t* counts, int64_t all) {
    for (int row = 0; row < kExponents; ++row) {
      const bool finite = row % 256 != kNonfinite;
      if (finite && call_.rows[row] < 0) continue;
      int64_t* to = finite ? counts + call_.rows[row] * width_ : nullptr;
      const int64_t start = row * width_ + row / 256 * kShift;
      for (int64_t i = 0; i < width_; ++i) {
        const int64_t found = take(start + i);
        if (to) to[i] += found;
        all -= found;
      }
    }
    return all == 0;
  }

  // Whether non-finite elements were counted; unknown for weighted elements.
  bool has_nonfinite() const {
    bool found = weighted();
    for (const int row : {kNonfinite, kNonfinite + 256}) {
      const int64_t start = row * width_ + row / 256 * kShift;
      for (int64_t i = 0; i < width_; ++i) found |= counts_[start + i] != 0 || second_[start + i] != 0;
    }
    return found;
  }

  // Resets the counts without a row.
  void clear() { std::memset(sums_, 0, static_cast<size_t>(size(call_.bits)) * sizeof(double)); }

 private:
  bool weighted() const { return call_.weights != nullptr; }

  int64_t take(int64_t place) {
    if (weighted()) {
      const int64_t sum = sums_[place];
      sums_[place] = 0;
      return sum;
    }
    uint32_t &first = counts_[place], &second = second_[place];
    const int64_t count = static_cast<int64_t>(first) + second;
    first = second = 0;
    return count;
  }

  const Call& call_;
  int64_t width_;
  uint32_t *counts_, *second_;
  int64_t* sums_;  // or one table of sums, in the same memory
};

void mark(const Call& call, const uint32_t* keys, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t row = row_key(keys[i], call.bits);
    if (call.rows[row] < 0 && row % 256 != kNonfinite) call.missed[row] = 1;
  }
}

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Updates the bounds by all elements except NaN; infinities count.
template <class T>
inline void take_extremes(const T* x, int64_t count, Bounds<T>& bounds) {
  constexpr int kLanes = 32;
  T low[kLanes], high[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    low[j] = bounds.low;
    high[j] = bounds.high;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
      high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
    }
  }
  for (; i < count; ++i) take(bounds, x[i], x[i]);
  for (int j = 0; j < kLanes; ++j) take(bounds, low[j], high[j]);
}

// All elements are one set, which threads share: each thread counts into its own table, and updates the bounds.
template <class In>
void run_whole(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  constexpr int64_t kFlush = int64_t{1} << 30;  // elements that fit a 32-bit count
  const In* in = static_cast<const In*>(call.x);
  alignas(64) T wide[kChunk];
  alignas(64) uint32_t keys[kChunk];
  Table table(call, detent::borrowed_zeros(Table::size(call.bits)));
  Bounds<T> bounds;
  int64_t nonfinite = 0;
  bool good = true;
  for (int64_t from = begin; from < end; from += kFlush) {
    const int64_t to = least(end, from + kFlush);
    int64_t all = 0;
    for (int64_t at = from; at < to; at += kChunk) {
      const int64_t count = least(to - at, kChunk);
      const T* x = load(in + at, count, wide);
      take_extremes(x, count, bounds);
      good &= find_keys(x, keys, count, call.bits);
      table.place(keys, count);
      if (call.weights) {
        table.weigh(keys, call.weights + at, count);
        for (int64_t i = 0; i < count; ++i) all += call.weights[at + i];
      } else {
        table.count(keys, count);
        all += count;
      }
    }
    if (bounds.low == -kInfinity<T> || bounds.high == kInfinity<T> || table.has_nonfinite()) {
      bounds = {};
      nonfinite = 0;
      for (int64_t at = begin; at < to; at += kChunk) {
        const Bounds<T> part = bounds_of_run(in + at, least(to - at, kChunk), wide, nonfinite);
        take(bounds, part.low, part.high);
      }
    }
    const Held held(*call.merging);
    // With weights of zero, the sum does not show elements without a row.
    if (table.empty_into(call.counts, all) && !call.weights) continue;
    for (int64_t at = from; at < to; at += kChunk) {
      const int64_t count = least(to - at, kChunk);
      find_keys(load(in + at, count, wide), keys, count, call.bits);
      mark(call, keys, count);
    }
    table.clear();
  }
  const Held held(*call.merging);
  T &low = *static_cast<T*>(call.low), &high = *static_cast<T*>(call.high);
  low = bounds.low < low ? bounds.low : low;
  high = bounds.high > high ? bounds.high : high;
  *call.nonfinite += nonfinite;
  if (!good) *call.refused = true;
}

// Several sets. Each set belongs to one piece of work: a box of a few columns, or a box of one set.
template <class In>
void run_sets(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  const int bits = call.bits;
  const bool columns = call.tile > 1;
  const int64_t width = int64_t{1} << bits;
  const uint32_t mask = static_cast<uint32_t>(width) - 1;
  alignas(64) T wide[kChunk];
  alignas(64) uint32_t keys[kChunk];
  uint8_t missed[kExponents] = {};
  bool good = true;
  Boxes boxes(call.layout, columns ? call.tile : call.layout.block, begin);
  for (int64_t box = begin; box < end; ++box, boxes.next()) {
    int64_t* counts = call.counts + boxes.set() * width;
    boxes.runs(0, boxes.count(), [&](int64_t start, int64_t length, int64_t) {
      for (int64_t done = 0; done < length; done += kChunk) {
        const int64_t at = start + done, count = least(length - done, kChunk);
        good &= find_keys(load(in + at, count, wide), keys, count, bits);
        for (int64_t i = 0; i < count; ++i) {
          const uint32_t exponent = row_key(keys[i], bits);
          const int64_t row = call.rows[exponent];
          if (row < 0) {
            missed[exponent] = 1;
            continue;
          }
          counts[(row * call.sets + (columns ? i : 0)) * width + (keys[i] & mask)] += call.weights ? call.weights[at + i] : 1;
        }
      }
    });
  }
  missed[kNonfinite] = missed[kNonfinite + 256] = 0;
  const Held held(*call.merging);
  for (int i = 0; i < kExponents; ++i) call.missed[i] |= missed[i];
  if (!good) *call.refused = true;
}

}  // namespace

namespace detent::DETENT_LEVEL {

void histogram(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    if (call.sets == 1) return run_whole<decltype(in)>(call, begin, end);
    return run_sets<decltype(in)>(call, begin, end);
  });
}

}  // namespace detent::DETENT_LEVEL

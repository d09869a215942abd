// Chunks: pieces of an array that fit the L1 cache, each with the scales and zero points of its elements.
//
// A chunk inside one set is uniform: one scale, one zero point. A chunk of equal short sets is grouped. Any other chunk
// has a scale and zero point per element: read directly from the parameters if each element is its own set, else
// expanded into a buffer.
// A caller that has no buffer may request chunks larger than kChunk. It gets them only if the parameters need no buffer
// either. Every chunk except the last of a range starts and ends at a multiple of 8 elements, so packed codes
// fill whole bytes. Internal linkage, as in half.hpp.
#pragma once

#include <type_traits>

#include "detent/arithmetic.hpp"
#include "detent/call.hpp"
#include "detent/cursor.hpp"
#include "detent/half.hpp"

namespace {

using detent::Call;
using detent::Division;

// Holds a lock until it is destroyed.
class Held {
 public:
  explicit Held(detent::Lock& lock) : lock_(lock) { lock_.lock(); }
  ~Held() { lock_.unlock(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  detent::Lock& lock_;
};

constexpr int64_t kChunk = 1024;
constexpr int64_t kLongChunk = 4 * kChunk;
constexpr int64_t kLong = 128;   // a run of at least this many elements is a separate chunk
constexpr int64_t kRow = 4 * kChunk;  // the inverses of a row of up to this many columns are cached
constexpr int64_t kGroup = 256;  // equal sets of up to this many elements share a chunk

template <class In>
using compute_t = std::conditional_t<std::is_same_v<In, double>, double, float>;

enum class Spread { uniform, grouped, by_element };

// The parameters of one chunk. Inverses are valid only if quotients use the reciprocal or may be corrected.
template <class T>
struct Params {
  Spread spread;
  bool invertible;                     // whether corrected quotients are valid for all scales
  T scale, inverse, zero;              // used if uniform
  const T *scales, *inverses, *zeros;  // used if not uniform: one per group, or one per element
  int64_t group;                       // elements of a group, a multiple of kStride
};

// Tells the compiler that the iterations of the next loop do not depend on one another.
#if defined(__clang__)
#define DETENT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define DETENT_INDEPENDENT _Pragma("GCC ivdep")
#else
#define DETENT_INDEPENDENT
#endif

// A loop that is compiled once for all callers. Callers pass a whole chunk, so the cost of the call is negligible.
#if defined(__GNUC__)
#define DETENT_LOOP __attribute__((noinline))
#else
#define DETENT_LOOP
#endif

constexpr int kStride = 16;  // short groups are processed in strides of this many elements

// Calls body(i, unit, zero) for every element of a chunk, in loops that the compiler vectorizes if body is plain
// arithmetic on arrays at i. Two arrays are either identical or do not overlap.
template <class T, class Body>
inline void each(const Params<T>& p, int64_t count, Body body) {
  if (p.spread == Spread::uniform) {
    const Unit<T> unit{p.scale, p.inverse};
    const T zero = p.zero;
    DETENT_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) body(i, unit, zero);
  } else if (p.spread == Spread::grouped) {
    const int64_t group = p.group;
    for (int64_t at = 0, set = 0; at < count; at += group, ++set) {
      const Unit<T> unit{p.scales[set], p.inverses[set]};
      const T zero = p.zeros[set];
      for (int64_t i = at; i < at + group; i += kStride) {
        DETENT_INDEPENDENT
        for (int j = 0; j < kStride; ++j) body(i + j, unit, zero);
      }
    }
  } else {
    const T *__restrict scales = p.scales, *__restrict inverses = p.inverses, *__restrict zeros = p.zeros;
    DETENT_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) body(i, Unit<T>{scales[i], inverses[i]}, zeros[i]);
  }
}

// The zero point of one element, for code that need not be fast.
template <class T>
inline T zero_at(const Params<T>& p, int64_t i) {
  return p.spread == Spread::uniform ? p.zero : p.zeros[p.spread == Spread::grouped ? i / p.group : i];
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
class Chunks {
 public:
  // Inverses are computed only if quotients are needed, once for all consecutive rows of the same sets.
  Chunks(const Call& call, int64_t begin, int64_t limit = kChunk, bool quotients = true)
      : cursor_(call.layout, begin),
        limit_(limit),
        cols_(call.layout.cols),
        scale_(static_cast<const T*>(call.scale)),
        zero_(static_cast<const T*>(call.zero)),
        by_element_(call.layout.block == 1),
        long_rows_(by_element_ && cols_ > kRow),
        inverts_(quotients && (call.division == Division::reciprocal || (kFused && !long_rows_))),
        groups_(call.layout.block % kStride == 0),
        no_zero_(call.no_zero) {
    if (no_zero_) {
      for (int64_t i = 0; i < kChunk; ++i) zeros_[i] = T(0);
    }
  }

  // Sets the parameters of the next elements; returns the number of these elements, at most `rest`.
  int64_t next(int64_t rest, Params<T>& params) {
    const int64_t run = cursor_.run();
    if (groups_ && run <= kGroup) {
      const int64_t groups = cursor_.whole_blocks(rest);
      if (groups > 1) return equal_sets(groups, params);
    }
    if (run >= kLong || run >= rest) return one_set(least(run, rest), rest, params);
    if (by_element_ && (cursor_.rest_of_row() >= kLong || cursor_.rest_of_row() >= rest)) {
      return own_sets(least(cursor_.rest_of_row(), rest), rest, params);
    }
    return many_sets(rest, params);
  }

 private:
  static int64_t whole_bytes(int64_t count, int64_t limit, int64_t rest) {
    count = least(count, limit);
    return count < rest ? count / 8 * 8 : count;
  }

  int64_t one_set(int64_t count, int64_t rest, Params<T>& params) {
    count = whole_bytes(count, limit_, rest);
    const int64_t set = cursor_.set();
    const T scale = scale_[set];
    params = {Spread::uniform, is_invertible(scale), scale, T(1) / scale, zero_[set], nullptr, nullptr, nullptr, 0};
    cursor_.advance(count);
    return count;
  }

  int64_t equal_sets(int64_t groups, Params<T>& params) {
    const int64_t block = cursor_.run(), set = cursor_.set();
    groups = least(groups, limit_ / block);
    params = {Spread::grouped, false, T(0), T(0), T(0), scale_ + set, scale_ + set, zero_ + set, block};
    if (inverts_) {
      params.inverses = inverses_;
      params.invertible = invert(scale_ + set, inverses_, groups);
    }
    cursor_.advance_blocks(groups);
    return groups * block;
  }

  int64_t own_sets(int64_t count, int64_t rest, Params<T>& params) {
    count = whole_bytes(count, inverts_ && long_rows_ ? kChunk : limit_, rest);
    const int64_t set = cursor_.set();
    params = {Spread::by_element, false, T(0), T(0), T(0), scale_ + set, scale_ + set, zero_ + set, 0};
    if (inverts_ && long_rows_) {
      params.inverses = inverses_;
      params.invertible = invert(scale_ + set, inverses_, count);
    } else if (inverts_) {
      params.inverses = row_inverses() + cursor_.col;
      params.invertible = row_invertible_;
    }
    cursor_.advance(count);
    return count;
  }

  int64_t many_sets(int64_t rest, Params<T>& params) {
    const int64_t count = least(rest, kChunk);
    bool invertible = inverts_;
    for (int64_t done = 0; done < count;) {
      const int64_t set = cursor_.set();
      int64_t part;
      if (by_element_) {
        part = least(cursor_.rest_of_row(), count - done);
        copy(scale_ + set, scales_ + done, part);
        if (!no_zero_) copy(zero_ + set, zeros_ + done, part);
        if (inverts_ && long_rows_) {
          invertible &= invert(scale_ + set, inverses_ + done, part);
        } else if (inverts_) {
          copy(row_inverses() + cursor_.col, inverses_ + done, part);
          invertible &= row_invertible_;
        }
      } else {
        part = least(cursor_.run(), count - done);
        spread(scale_[set], scales_ + done, part);
        if (!no_zero_) spread(zero_[set], zeros_ + done, part);
        if (inverts_) spread(T(1) / scale_[set], inverses_ + done, part);
        invertible &= is_invertible(scale_[set]);
      }
      cursor_.advance(part);
      done += part;
    }
    params = {Spread::by_element, invertible, T(0), T(0), T(0), scales_, inverts_ ? inverses_ : scales_, zeros_, 0};
    return count;
  }

  static void copy(const T* from, T* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }

  // Short runs mostly have a multiple of 8 elements, for which the inner loop is a few stores.
  static void spread(T value, T* out, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int j = 0; j < 8; ++j) out[i + j] = value;
    }
    for (; i < count; ++i) out[i] = value;
  }

  static bool is_invertible(T scale) { return scale >= kLeastInvertible<T> && scale <= kMostInvertible<T>; }

  // Returns whether all scales are invertible.
  static bool invert(const T* scales, T* inverses, int64_t count) {
    int outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      inverses[i] = T(1) / scales[i];
      outside |= !(scales[i] >= kLeastInvertible<T>);
      outside |= !(scales[i] <= kMostInvertible<T>);
    }
    return !outside;
  }

  // The inverses of the current row's sets, each of one column.
  const T* row_inverses() {
    if (row_ != cursor_.offset) {
      row_ = cursor_.offset;
      row_invertible_ = invert(scale_ + row_, row_inverses_, cols_);
    }
    return row_inverses_;
  }

  Cursor cursor_;
  int64_t limit_, cols_;
  const T* scale_;
  const T* zero_;
  bool by_element_, long_rows_, inverts_, groups_, no_zero_;
  bool row_invertible_ = false;
  int64_t row_ = -1;  // the first set in row_inverses_
  alignas(64) T scales_[kChunk];
  alignas(64) T zeros_[kChunk];
  alignas(64) T inverses_[kChunk];
  alignas(64) T row_inverses_[kRow];
};

// Reads a chunk that is still in the cache. One comparison checks two elements.
template <class T>
DETENT_LOOP bool has_nan(const T* x, int64_t count) {
  const int64_t half = count / 2;
  int missing = x[count - 1] != x[count - 1];
  for (int64_t i = 0; i < half; ++i) missing |= std::isunordered(x[i], x[half + i]);
  return missing != 0;
}

// The next elements in the compute type: the array itself if it has that type, else a widened copy.
template <class In>
inline const compute_t<In>* load(const In* in, int64_t count, compute_t<In>* buffer) {
  if constexpr (std::is_same_v<In, compute_t<In>>) {
    return in;
  } else {
    widen_all(in, buffer, count);
    return buffer;
  }
}

// The results in the data's type. If the format has no signed zeros, a tiny value that rounds to zero becomes +0.
template <class In>
inline void store(const compute_t<In>* y, In* out, int64_t count, bool signed_zeros) {
  narrow_all(y, out, count);
  if (signed_zeros) return;
  for (int64_t i = 0; i < count; ++i) out[i].bits = out[i].bits == 0x8000 ? 0 : out[i].bits;
}

}  // namespace

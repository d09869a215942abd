// Chunks: an array cut into pieces that fit the first cache, each with the scales and zero points of its elements.
//
// A chunk that lies in one set is uniform: one scale, one zero point. One that is made of equal short sets is grouped. Any
// other has one of each per element, taken straight from the parameters where they lie element by element, or spread into a
// buffer where sets are short.
// Who needs no buffer of a chunk's size may ask for chunks beyond kChunk, which come where the parameters need none either.
// Every chunk but the last of a range starts and ends at a multiple of 8 elements, so that packed codes fill whole bytes.
// Internal linkage, as in half.hpp.
#pragma once

#include <type_traits>

#include "detent/call.hpp"
#include "detent/cursor.hpp"
#include "detent/half.hpp"

namespace {

using detent::Call;
using detent::Division;

constexpr int64_t kChunk = 1024;
constexpr int64_t kLongChunk = 16 * kChunk;
constexpr int64_t kLong = 128;   // from this many elements on, a run is a chunk of its own
constexpr int64_t kGroup = 256;  // up to this many elements, equal sets share a chunk

template <class In>
using compute_t = std::conditional_t<std::is_same_v<In, double>, double, float>;

enum class Spread { uniform, grouped, by_element };

// The parameters of one chunk. `divisor` is what x is divided by, or multiplied with where the division is by reciprocal.
template <class T>
struct Params {
  Spread spread;
  T scale, divisor, zero;              // where uniform
  const T *scales, *divisors, *zeros;  // where not: per group, or per element
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

// A loop that is compiled once for all who call it. They hand over a whole chunk, so that the call costs nothing.
#if defined(__GNUC__)
#define DETENT_LOOP __attribute__((noinline))
#else
#define DETENT_LOOP
#endif

constexpr int kStride = 16;  // short groups are worked on in strides of this many elements

// Calls body(i, scale, divisor, zero) for every element of a chunk, in loops that become vector code where body is plain
// arithmetic on arrays at i. Arrays are the same or do not overlap.
template <class T, class Body>
inline void each(const Params<T>& p, int64_t count, Body body) {
  if (p.spread == Spread::uniform) {
    const T scale = p.scale, divisor = p.divisor, zero = p.zero;
    DETENT_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) body(i, scale, divisor, zero);
  } else if (p.spread == Spread::grouped) {
    const int64_t group = p.group;
    for (int64_t at = 0, set = 0; at < count; at += group, ++set) {
      const T scale = p.scales[set], divisor = p.divisors[set], zero = p.zeros[set];
      for (int64_t i = at; i < at + group; i += kStride) {
        DETENT_INDEPENDENT
        for (int j = 0; j < kStride; ++j) body(i + j, scale, divisor, zero);
      }
    }
  } else {
    const T *__restrict scales = p.scales, *__restrict divisors = p.divisors, *__restrict zeros = p.zeros;
    DETENT_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) body(i, scales[i], divisors[i], zeros[i]);
  }
}

// The zero point of one element, where there is no hurry.
template <class T>
inline T zero_at(const Params<T>& p, int64_t i) {
  return p.spread == Spread::uniform ? p.zero : p.zeros[p.spread == Spread::grouped ? i / p.group : i];
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
class Chunks {
 public:
  Chunks(const Call& call, int64_t begin, int64_t limit = kChunk)
      : cursor_(call.layout, begin),
        limit_(limit),
        scale_(static_cast<const T*>(call.scale)),
        zero_(static_cast<const T*>(call.zero)),
        reciprocal_(call.division == Division::reciprocal),
        by_element_(call.layout.block == 1),
        groups_(call.layout.block % kStride == 0),
        no_zero_(call.no_zero) {
    if (no_zero_) {
      for (int64_t i = 0; i < kChunk; ++i) zeros_[i] = T(0);
    }
  }

  // The parameters of the next elements; returns how many, at most `rest`.
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
    params = {Spread::uniform, scale, reciprocal_ ? T(1) / scale : scale, zero_[set], nullptr, nullptr, nullptr, 0};
    cursor_.advance(count);
    return count;
  }

  int64_t equal_sets(int64_t groups, Params<T>& params) {
    const int64_t block = cursor_.run(), set = cursor_.set();
    groups = least(groups, (reciprocal_ ? kChunk : limit_) / block);
    params = {Spread::grouped, T(0), T(0), T(0), scale_ + set, scale_ + set, zero_ + set, block};
    cursor_.advance_blocks(groups);
    invert(groups, params);
    return groups * block;
  }

  int64_t own_sets(int64_t count, int64_t rest, Params<T>& params) {
    count = whole_bytes(count, reciprocal_ ? kChunk : limit_, rest);
    const int64_t set = cursor_.set();
    params = {Spread::by_element, T(0), T(0), T(0), scale_ + set, scale_ + set, zero_ + set, 0};
    cursor_.advance(count);
    invert(count, params);
    return count;
  }

  int64_t many_sets(int64_t rest, Params<T>& params) {
    const int64_t count = least(rest, kChunk);
    for (int64_t done = 0; done < count;) {
      const int64_t set = cursor_.set();
      int64_t part;
      if (by_element_) {
        part = least(cursor_.rest_of_row(), count - done);
        for (int64_t i = 0; i < part; ++i) scales_[done + i] = scale_[set + i];
        if (!no_zero_) {
          for (int64_t i = 0; i < part; ++i) zeros_[done + i] = zero_[set + i];
        }
      } else {
        part = least(cursor_.run(), count - done);
        spread(scale_[set], scales_ + done, part);
        if (!no_zero_) spread(zero_[set], zeros_ + done, part);
      }
      cursor_.advance(part);
      done += part;
    }
    params = {Spread::by_element, T(0), T(0), T(0), scales_, scales_, zeros_, 0};
    invert(count, params);
    return count;
  }

  // Short runs mostly have a multiple of 8 elements, for which the inner loop is a few stores.
  static void spread(T value, T* out, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (int j = 0; j < 8; ++j) out[i + j] = value;
    }
    for (; i < count; ++i) out[i] = value;
  }

  void invert(int64_t count, Params<T>& params) {
    if (!reciprocal_) return;
    for (int64_t i = 0; i < count; ++i) divisors_[i] = T(1) / params.scales[i];
    params.divisors = divisors_;
  }

  Cursor cursor_;
  int64_t limit_;
  const T* scale_;
  const T* zero_;
  bool reciprocal_, by_element_, groups_, no_zero_;
  alignas(64) T scales_[kChunk];
  alignas(64) T divisors_[kChunk];
  alignas(64) T zeros_[kChunk];
};

// The next elements as the compute type: the array itself where it has that type, a widened copy where not.
template <class In>
inline const compute_t<In>* load(const In* in, int64_t count, compute_t<In>* buffer) {
  if constexpr (std::is_same_v<In, compute_t<In>>) {
    return in;
  } else {
    widen_all(in, buffer, count);
    return buffer;
  }
}

// The results in the data's type. Where zeros have no sign, a tiny value that rounds to zero is a positive zero.
template <class In>
inline void store(const compute_t<In>* y, In* out, int64_t count, bool signed_zeros) {
  narrow_all(y, out, count);
  if (signed_zeros) return;
  for (int64_t i = 0; i < count; ++i) out[i].bits = out[i].bits == 0x8000 ? 0 : out[i].bits;
}

}  // namespace

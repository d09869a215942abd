// Bounds: the smallest and largest finite number of consecutive elements. Internal linkage, as in half.hpp.
#pragma once

#include <cstring>
#include <limits>

#include "detent/chunks.hpp"

namespace {

template <class T>
struct Bounds {
  T low = std::numeric_limits<T>::infinity();
  T high = -std::numeric_limits<T>::infinity();
};

template <class T>
inline void take(Bounds<T>& bounds, T low, T high) {
  bounds.low = low < bounds.low ? low : bounds.low;
  bounds.high = high > bounds.high ? high : bounds.high;
}

template <class T>
inline bool finite(T x) {
  return x - x == T(0);
}

// Updates the bounds by the finite elements, and subtracts their number. NaN loses every comparison. Infinities are
// rare, so they get a second pass. The sum of x - x detects them, because x - x is 0 only for finite x.
template <int lanes, class T>
Bounds<T> bounds_of(const T* __restrict x, int64_t count, int64_t& nonfinite) {
  Bounds<T> all;
  T low[lanes], high[lanes], zero[lanes];
  for (int j = 0; j < lanes; ++j) {
    low[j] = all.low;
    high[j] = all.high;
    zero[j] = T(0);
  }
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    for (int j = 0; j < lanes; ++j) {
      const T v = x[i + j];
      low[j] = v < low[j] ? v : low[j];
      high[j] = v > high[j] ? v : high[j];
      zero[j] += v - v;
    }
  }
  for (int width = lanes / 2; width; width /= 2) {
    for (int j = 0; j < width; ++j) {
      low[j] = low[j + width] < low[j] ? low[j + width] : low[j];
      high[j] = high[j + width] > high[j] ? high[j + width] : high[j];
      zero[j] += zero[j + width];
    }
  }
  all = {low[0], high[0]};
  for (; i < count; ++i) {
    take(all, x[i], x[i]);
    zero[0] += x[i] - x[i];
  }
  if (zero[0] == T(0)) return all;
  all = Bounds<T>{};
  for (i = 0; i < count; ++i) {
    if (finite(x[i])) {
      take(all, x[i], x[i]);
    } else {
      ++nonfinite;
    }
  }
  return all;
}

// Short groups are reduced eight at a time: first the columns of eight groups in vectors of eight lanes, then the lanes
// in three steps that exchange them between two vectors. This uses the vector extensions of GCC and Clang, which exist
// for every CPU; without them, short groups are much slower.
#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
#define DETENT_SHUFFLES 1
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
template <class T>
using Lanes = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

// By reference, because the ABI for vectors wider than those of the instruction set is not fixed.
struct Lower {
  template <class V>
  void operator()(V& bound, const V& x) const { bound = x < bound ? x : bound; }
};
struct Higher {
  template <class V>
  void operator()(V& bound, const V& x) const { bound = x > bound ? x : bound; }
};

// Stores the bound over the lanes of v[i] in lane i of v[0].
template <class V, class Take>
inline void across(V* v, Take take) {
  for (int i = 0; i < 4; ++i) {
    const V a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    take(v[i], __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15));
  }
  for (int i = 0; i < 2; ++i) {
    const V a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    take(v[i], __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15));
  }
  const V a = v[0], b = v[1];
  v[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
  take(v[0], __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
}

// Computes the bounds of eight groups of `size` elements, a multiple of 8. Returns whether all elements are finite; if
// not, the bounds are undefined.
template <class T>
inline bool bounds_of_eight(const T* x, int64_t size, T* low, T* high) {
  using V = Lanes<T>;
  V lows[8], highs[8], zero = {};
  for (int group = 0; group < 8; ++group, x += size) {
    V first;
    std::memcpy(&first, x, sizeof first);
    lows[group] = highs[group] = first;
    zero += first - first;
    for (int64_t i = 8; i < size; i += 8) {
      V next;
      std::memcpy(&next, x + i, sizeof next);
      Lower()(lows[group], next);
      Higher()(highs[group], next);
      zero += next - next;
    }
  }
  across(lows, Lower());
  across(highs, Higher());
  std::memcpy(low, lows, sizeof(V));
  std::memcpy(high, highs, sizeof(V));
  T sum = T(0);
  for (int i = 0; i < 8; ++i) sum += zero[i];
  return sum == T(0);
}
#endif

constexpr int64_t kShort = 512;  // groups up to this size are reduced eight at a time

// Computes the bounds of consecutive groups of `size` elements.
template <class T>
void bounds_of_groups(const T* x, int64_t groups, int64_t size, T* low, T* high, int64_t& nonfinite) {
  int64_t group = 0;
#if defined(DETENT_SHUFFLES)
  for (; size % 8 == 0 && group + 8 <= groups; group += 8) {
    if (bounds_of_eight(x + group * size, size, low + group, high + group)) continue;
    for (int64_t i = group; i < group + 8; ++i) {
      const Bounds<T> bounds = bounds_of<32>(x + i * size, size, nonfinite);
      low[i] = bounds.low;
      high[i] = bounds.high;
    }
  }
#endif
  for (; group < groups; ++group) {
    const Bounds<T> bounds = bounds_of<32>(x + group * size, size, nonfinite);
    low[group] = bounds.low;
    high[group] = bounds.high;
  }
}

// Number of short groups per call; if elements are widened first, as many groups as fit the buffer.
template <class In>
constexpr int64_t kGroups = std::is_same_v<In, compute_t<In>> ? kLongChunk : kChunk;

// Computes the bounds of any number of consecutive elements.
template <class In>
Bounds<compute_t<In>> bounds_of_run(const In* in, int64_t run, compute_t<In>* buffer, int64_t& nonfinite) {
  if constexpr (std::is_same_v<In, compute_t<In>>) return bounds_of<32>(in, run, nonfinite);
  Bounds<compute_t<In>> bounds;
  for (int64_t done = 0; done < run;) {
    const int64_t count = least(run - done, kChunk);
    const Bounds<compute_t<In>> part = bounds_of<32>(load(in + done, count, buffer), count, nonfinite);
    take(bounds, part.low, part.high);
    done += count;
  }
  return bounds;
}

}  // namespace

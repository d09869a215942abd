// Bounds: the smallest and largest finite of a run of numbers. Internal linkage, as in half.hpp.
#pragma once

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

// The bounds of the finite elements, and their number taken off. NaN loses every comparison; infinities are rare enough for
// a second look, which a sum of zeros asks for: x - x is 0 unless x is not finite.
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

// The bounds of a run of any length.
template <class In>
Bounds<compute_t<In>> bounds_of_run(const In* in, int64_t run, compute_t<In>* buffer, int64_t& nonfinite) {
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

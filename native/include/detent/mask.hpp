// Mask: where a gradient passes, for the estimators that select. Internal linkage, as in half.hpp.
#pragma once

#include "detent/chunks.hpp"
#include "detent/codec.hpp"

namespace {

using detent::Mask;

// Calls body(i, pass) for every element; the loops are branchless where body is.
template <class Codec, class T, class Body>
inline void by_code(const Codec codec, const Params<T>& p, const T* __restrict x, int64_t count, Body body) {
  if (p.uniform) {
    const T divisor = p.divisor, zero = p.zero;
    for (int64_t i = 0; i < count; ++i) body(i, codec.inside(x[i], divisor, zero));
  } else {
    const T *__restrict divisors = p.divisors, *__restrict zeros = p.zeros;
    for (int64_t i = 0; i < count; ++i) body(i, codec.inside(x[i], divisors[i], zeros[i]));
  }
}

template <bool exclusive, class T, class Body>
inline void by_value(const Params<T>& p, const T* __restrict x, int64_t count, T qmin, T qmax, Body body) {
  for (int64_t i = 0; i < count; ++i) {
    const T scale = p.uniform ? p.scale : p.scales[i], zero = p.uniform ? p.zero : p.zeros[i];
    const T low = (qmin - zero) * scale, high = (qmax - zero) * scale;
    body(i, exclusive ? (x[i] > low) & (x[i] < high) : (x[i] >= low) & (x[i] <= high));
  }
}

// By code or by value, as the call says.
template <class Codec, class T, class Body>
inline void with_mask(const Codec& codec, const Call& call, const Params<T>& p, const T* x, int64_t count, Body body) {
  if (call.mask == Mask::code) return by_code(codec, p, x, count, body);
  if (call.exclusive) return by_value<true>(p, x, count, T(call.qmin), T(call.qmax), body);
  return by_value<false>(p, x, count, T(call.qmin), T(call.qmax), body);
}

}  // namespace

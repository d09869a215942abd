// Mask: where a gradient passes, for Identity and Clipped. Internal linkage, as in half.hpp.
#pragma once

#include <cstring>

#include "detent/bits.hpp"
#include "detent/chunks.hpp"
#include "detent/codec.hpp"

namespace {

using detent::Mask;

// Calls body(i, pass) for every element, by code or by value as in the call. Body is plain arithmetic, as for `each`.
template <class Codec, class T, class Body>
inline void with_mask(const Codec codec, const Call& call, const Params<T>& p, const T* x, int64_t count, Body body) {
  if (call.mask == Mask::code) {
    return with_quickest(codec, p.invertible, [&](const auto quickest) {
      each(p, count, [=](int64_t i, Unit<T> unit, T zero) { body(i, quickest.inside(x[i], unit, zero)); });
    });
  }
  const bool exclusive = call.exclusive;
  const T qmin = T(call.qmin), qmax = T(call.qmax);
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) {
    const T low = (qmin - zero) * unit.scale, high = (qmax - zero) * unit.scale;
    const bool strictly = (x[i] > low) & (x[i] < high), within = (x[i] >= low) & (x[i] <= high);
    body(i, exclusive ? strictly : within);
  });
}

// One bit per element: whether its gradient passes.
template <class Codec, class T>
DETENT_LOOP inline void write_mask(const Codec& codec, const Call& call, const Params<T>& p, const T* x, uint8_t* bits, int64_t count) {
  uint8_t pass[kChunk];
  if (call.mask == Mask::identity) {
    std::memset(pass, 1, static_cast<size_t>(count));
  } else {
    uint8_t* to = pass;
    with_mask(codec, call, p, x, count, [=](int64_t i, bool inside) { to[i] = inside; });
  }
  pack_bits(pass, bits, count, 1);
}

}  // namespace

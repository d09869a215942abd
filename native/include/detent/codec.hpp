// Codec: one number's way to its code, and to the value of that code, for every kind of format.
//
//   ratio(x, divisor)         t: x in units of the scale
//   code(x, divisor, zero)    the code; that of NaN is any
//   value(x, divisor, zero)   the value at scale 1, zero point taken off; NaN stays NaN
//   inside(x, divisor, zero)  whether x is not clamped
//
// A codec is a few numbers that a loop keeps in registers. Internal linkage, as in half.hpp.
#pragma once

#include <bit>

#include "detent/arithmetic.hpp"

namespace {

using detent::Kind;

template <class Rule, class T>
struct Integers {
  static constexpr bool signed_zeros = false;  // whether a result may be a negative zero

  explicit Integers(const Call& call)
      : low(T(call.qmin)), high(T(call.qmax)), first(low + T(call.exclusive)), last(high - T(call.exclusive)) {}

  static T ratio(T x, T divisor) { return Rule::division == Division::divide ? x / divisor : x * divisor; }

  int32_t code(T x, T divisor, T zero) const {
    return static_cast<int32_t>(x == x ? clamped(unclamped<Rule>(x, divisor, zero), low, high) : low);
  }

  T value(T x, T divisor, T zero) const {
    return clamped(unclamped<Rule>(x, divisor, zero), low, high) - zero + T(0);  // + 0: no negative zero
  }

  // Codes before clamping are whole numbers, so that exclusive bounds are inclusive ones a step further in.
  bool inside(T x, T divisor, T zero) const {
    const T u = unclamped<Rule>(x, divisor, zero);
    return (u >= first) & (u <= last);
  }

  int32_t fill_code(bool lowest, T zero) const { return static_cast<int32_t>(lowest ? low : zero); }

  T low, high, first, last;
};

// What small floats and codebooks share: no zero point, division by the scale, and a mask by the ratio.
template <class T>
struct Ratios {
  explicit Ratios(const Call& call) : low(T(call.qmin)), high(T(call.qmax)), exclusive(call.exclusive) {}

  static T ratio(T x, T divisor) { return x / divisor; }

  bool inside(T x, T divisor, T) const {
    const T t = ratio(x, divisor);
    return exclusive ? (t > low) & (t < high) : (t >= low) & (t <= high);
  }

  T low, high;
  bool exclusive;
};

// Sign, exponent and mantissa. A magnitude is a whole number of steps of its binade; below the normals the step stays.
template <class T>
struct SmallFloats : Ratios<T> {
  static constexpr bool signed_zeros = true;
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  static constexpr int kMantissa = std::is_same_v<T, double> ? 52 : 23;
  static constexpr Bits kBias = std::is_same_v<T, double> ? 1023 : 127;
  static constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  static constexpr Bits kExponent = (kSign - 1) >> kMantissa << kMantissa;

  explicit SmallFloats(const Call& call)
      : Ratios<T>(call),
        top(T(call.largest)),
        smallest((kBias + static_cast<Bits>(call.min_exponent)) << kMantissa),
        mantissa(call.mantissa),
        sign(call.bits - 1) {}

  int32_t encode(T t) const {
    const Bits exponent = exponent_of(t);
    const Bits binades = (exponent - smallest) >> (kMantissa - mantissa);
    const int32_t negative = static_cast<int32_t>(std::bit_cast<Bits>(t) >> (8 * sizeof(T) - 1));
    return static_cast<int32_t>(steps(t, exponent)) + static_cast<int32_t>(binades) + (negative << sign);
  }

  int32_t code(T x, T divisor, T) const { return encode(this->ratio(x, divisor)); }

  T value(T x, T divisor, T) const {
    const T t = this->ratio(x, divisor);
    const Bits exponent = exponent_of(t);
    const T size = steps(t, exponent) * step(exponent);
    const T y = std::bit_cast<T>(std::bit_cast<Bits>(size) | (std::bit_cast<Bits>(t) & kSign));
    return t == t ? y : t;
  }

  int32_t fill_code(bool lowest, T) const { return encode(lowest ? this->low : T(0)); }

  T top;
  Bits smallest;
  int mantissa, sign;

 private:
  T magnitude(T t) const {
    const T size = std::fabs(t);
    return size < top ? size : top;
  }

  Bits exponent_of(T t) const {
    const Bits exponent = std::bit_cast<Bits>(magnitude(t)) & kExponent;
    return exponent > smallest ? exponent : smallest;
  }

  T step(Bits exponent) const { return std::bit_cast<T>(exponent - (Bits(mantissa) << kMantissa)); }

  // Exact but for the rounding to a whole number: the step is a power of two.
  T steps(T t, Bits exponent) const {
    const Bits inverse = (2 * kBias << kMantissa) - (exponent - (Bits(mantissa) << kMantissa));
    return std::rint(magnitude(t) * std::bit_cast<T>(inverse));
  }
};

// Sixteen ascending levels; a code is the number of bounds below the ratio.
template <class T>
struct Codebook : Ratios<T> {
  static constexpr bool signed_zeros = false;
  static constexpr int kBounds = 15;

  explicit Codebook(const Call& call) : Ratios<T>(call) {
    for (int i = 0; i < kBounds; ++i) {
      bounds[i] = static_cast<const T*>(call.bounds)[i];
      levels[i] = static_cast<const T*>(call.levels)[i];
    }
    levels[kBounds] = static_cast<const T*>(call.levels)[kBounds];
  }

  int32_t encode(T t) const {
    int32_t code = 0;
    for (int i = 0; i < kBounds; ++i) code += t > bounds[i];
    return code;
  }

  int32_t code(T x, T divisor, T) const { return encode(this->ratio(x, divisor)); }

  T value(T x, T divisor, T) const {
    const T t = this->ratio(x, divisor);
    T y = levels[0];
    for (int i = 0; i < kBounds; ++i) y = t > bounds[i] ? levels[i + 1] : y;
    return t == t ? y : t;
  }

  int32_t fill_code(bool lowest, T) const { return encode(lowest ? this->low : T(0)); }

  T bounds[kBounds], levels[kBounds + 1];
};

// Calls body(codec) with the codec of the call, for data of compute type T.
template <class T, class Body>
inline void with_codec(const Call& call, Body body) {
  switch (call.kind) {
    case Kind::integers: return with_rules(call, [&](auto rule) { body(Integers<decltype(rule), T>(call)); });
    case Kind::small_floats: return body(SmallFloats<T>(call));
    case Kind::codebook: return body(Codebook<T>(call));
  }
}

}  // namespace

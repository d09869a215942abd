// Codec: encodes a number to its code, and to the value of that code, for every kind of format.
//
//   ratio(x, unit)         t: x divided by the scale
//   code(x, unit, zero)    the code; for NaN, an arbitrary code
//   value(x, unit, zero)   the value at scale 1 (code minus zero point); NaN stays NaN
//   inside(x, unit, zero)  whether x is in range, so that its code is not clamped
//   twin()                 a codec with equal results that uses corrected quotients instead of divisions
//
// A codec has only a few members, so a loop can keep them in registers. Internal linkage, as in half.hpp.
#pragma once

#include <bit>

#include "detent/arithmetic.hpp"

namespace {

using detent::Kind;

template <ZeroPoint zero_rule, class T>
struct QuickIntegers;

template <class Rule, class T>
struct Integers {
  static constexpr bool signed_zeros = false;  // whether a result may be a negative zero
  // There is no twin for floor, which distinguishes a tiny negative quotient from zero. There is none for half_away,
  // because it is rarely used.
  static constexpr bool has_twin = Rule::quotient == Quotient::divide && Rule::rounding == Rounding::half_even;
  using Twin = QuickIntegers<Rule::zero_point, T>;

  explicit Integers(const Call& call)
      : low(T(call.qmin)), high(T(call.qmax)), first(low + T(call.exclusive)), last(high - T(call.exclusive)) {}

  T ratio(T x, Unit<T> unit) const { return quotient<Rule::quotient>(x, unit); }

  int32_t code(T x, Unit<T> unit, T zero) const {
    return static_cast<int32_t>(x == x ? clamped(unclamped<Rule>(x, unit, zero), low, high) : low);
  }

  T value(T x, Unit<T> unit, T zero) const {
    return clamped(unclamped<Rule>(x, unit, zero), low, high) - zero + T(0);  // + 0 turns -0 into +0
  }

  // Codes before clamping are integers, so exclusive bounds equal inclusive bounds that are one code narrower.
  bool inside(T x, Unit<T> unit, T zero) const {
    const T u = unclamped<Rule>(x, unit, zero);
    return (u >= first) & (u <= last);
  }

  int32_t fill_code(bool lowest, T zero) const { return static_cast<int32_t>(lowest ? low : zero); }

  Twin twin() const { return Twin(low, high, first, last); }
  static bool twin_is_safe() { return true; }  // codes have at most 16 bits

  T low, high, first, last;
};

// Clamps x to the values of the lowest and highest code instead of clamping codes. This is equivalent: rounding is
// monotone, and the value of a code, divided by the scale, rounds to that code.
template <ZeroPoint zero_rule, class T>
struct QuickIntegers {
  using Rule = Rules<Quotient::corrected, zero_rule, Rounding::half_even>;
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  static constexpr T kWhole = std::is_same_v<T, double> ? T(3ll << 51) : T(3 << 22);  // a number whose ulp is 1

  QuickIntegers(T low_, T high_, T first_, T last_) : low(low_), high(high_), first(first_), last(last_) {}

  // Adding kWhole rounds to an integer, which is then in the lowest bits. NaN becomes the lowest value.
  int32_t code(T x, Unit<T> unit, T zero) const {
    const T lowest = (low - zero) * unit.scale, highest = (high - zero) * unit.scale;
    const T raised = x > lowest ? x : lowest, within = raised < highest ? raised : highest;
    const T t = quotient<Quotient::corrected>(within, unit);
    const bool before = zero_rule == ZeroPoint::before_round;
    const Bits bits = std::bit_cast<Bits>((before ? t + zero : t) + kWhole) - std::bit_cast<Bits>(kWhole);
    return static_cast<int32_t>(bits) + (before ? 0 : static_cast<int32_t>(zero));
  }

  T value(T x, Unit<T> unit, T zero) const {
    const T within = clamped(x, (low - zero) * unit.scale, (high - zero) * unit.scale);
    const T t = quotient<Quotient::corrected>(within, unit);
    if constexpr (zero_rule == ZeroPoint::after_round) {
      return std::rint(t) + T(0);  // + zero and - zero are left out: both are exact
    } else {
      return std::rint(t + zero) - zero + T(0);
    }
  }

  // The clamp range is two codes wider, so that the mask can still detect codes outside of the range.
  bool inside(T x, Unit<T> unit, T zero) const {
    const T nearby = clamped(x, (low - zero - T(2)) * unit.scale, (high - zero + T(2)) * unit.scale);
    const T u = unclamped<Rule>(nearby, unit, zero);
    return (u >= first) & (u <= last);
  }

  T low, high, first, last;
};

// Base class of float formats and codebooks: no zero point, division by the scale, and a mask by the ratio.
template <Quotient how, class T>
struct Ratios {
  static constexpr bool has_twin = how == Quotient::divide;

  explicit Ratios(const Call& call)
      : low(T(call.qmin)), high(T(call.qmax)), reach(T(2) * (-low > high ? -low : high)), exclusive(call.exclusive) {}

  T ratio(T x, Unit<T> unit) const {
    if constexpr (how == Quotient::corrected) return quotient<how>(clamped(x, -reach * unit.scale, reach * unit.scale), unit);
    return quotient<how>(x, unit);
  }

  bool twin_is_safe() const { return reach <= T(1 << 20); }

  bool inside(T x, Unit<T> unit, T) const {
    const T t = ratio(x, unit);
    return exclusive ? (t > low) & (t < high) : (t >= low) & (t <= high);
  }

  T low, high, reach;
  bool exclusive;
};

// Sign, exponent and mantissa. A magnitude is an integer multiple of the step of its binade; subnormals have the step
// of the smallest normal numbers.
template <Quotient how, class T>
struct SmallFloats : Ratios<how, T> {
  using Twin = SmallFloats<Quotient::corrected, T>;
  static constexpr bool signed_zeros = true;
  using Bits = std::conditional_t<std::is_same_v<T, double>, uint64_t, uint32_t>;
  static constexpr int kMantissa = std::is_same_v<T, double> ? 52 : 23;
  static constexpr Bits kBias = std::is_same_v<T, double> ? 1023 : 127;
  static constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
  static constexpr Bits kExponent = (kSign - 1) >> kMantissa << kMantissa;

  explicit SmallFloats(const Call& call)
      : Ratios<how, T>(call),
        top(T(call.largest)),
        smallest((kBias + static_cast<Bits>(call.min_exponent)) << kMantissa),
        mantissa(call.mantissa),
        sign(call.bits - 1) {}

  int32_t code(T x, Unit<T> unit, T) const { return encode(this->ratio(x, unit), x); }

  T value(T x, Unit<T> unit, T) const {
    const T t = this->ratio(x, unit);
    const Bits exponent = exponent_of(t);
    const T size = steps(t, exponent) * step(exponent);
    const T y = std::bit_cast<T>(std::bit_cast<Bits>(size) | (std::bit_cast<Bits>(x) & kSign));
    return t == t ? y : t;
  }

  int32_t fill_code(bool lowest, T) const { return lowest ? encode(this->low, this->low) : 0; }

  Twin twin() const { return std::bit_cast<Twin>(*this); }

  T top;
  Bits smallest;
  int mantissa, sign;

 private:
  // The sign is taken from x, because a corrected ratio may lose the sign of a zero.
  int32_t encode(T t, T x) const {
    const Bits exponent = exponent_of(t);
    const Bits binades = (exponent - smallest) >> (kMantissa - mantissa);
    const int32_t negative = static_cast<int32_t>(std::bit_cast<Bits>(x) >> (8 * sizeof(T) - 1));
    return static_cast<int32_t>(steps(t, exponent)) + static_cast<int32_t>(binades) + (negative << sign);
  }

  T magnitude(T t) const {
    const T size = std::fabs(t);
    return size < top ? size : top;
  }

  Bits exponent_of(T t) const {
    const Bits exponent = std::bit_cast<Bits>(magnitude(t)) & kExponent;
    return exponent > smallest ? exponent : smallest;
  }

  T step(Bits exponent) const { return std::bit_cast<T>(exponent - (Bits(mantissa) << kMantissa)); }

  // Exact except for the rounding to an integer, because the step is a power of two.
  T steps(T t, Bits exponent) const {
    const Bits inverse = (2 * kBias << kMantissa) - (exponent - (Bits(mantissa) << kMantissa));
    return std::rint(magnitude(t) * std::bit_cast<T>(inverse));
  }
};

// A codebook of sixteen ascending levels; a code is the number of rounding boundaries below the ratio.
template <Quotient how, class T>
struct Codebook : Ratios<how, T> {
  using Twin = Codebook<Quotient::corrected, T>;
  static constexpr bool signed_zeros = false;
  static constexpr int kBounds = 15;

  explicit Codebook(const Call& call) : Ratios<how, T>(call) {
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

  int32_t code(T x, Unit<T> unit, T) const { return encode(this->ratio(x, unit)); }

  T value(T x, Unit<T> unit, T) const {
    const T t = this->ratio(x, unit);
    T y = levels[0];
    for (int i = 0; i < kBounds; ++i) y = t > bounds[i] ? levels[i + 1] : y;
    return t == t ? y : t;
  }

  int32_t fill_code(bool lowest, T) const { return encode(lowest ? this->low : T(0)); }

  Twin twin() const { return std::bit_cast<Twin>(*this); }

  T bounds[kBounds], levels[kBounds + 1];
};

// Calls body(codec), with the codec's twin if it exists and is valid for the scales.
template <class Codec, class Body>
inline void with_quickest(const Codec& codec, bool invertible, Body body) {
  if constexpr (kFused && Codec::has_twin) {
    if (invertible && codec.twin_is_safe()) return body(codec.twin());
  }
  body(codec);
}

// Calls body(codec) with the codec of the call, for data of compute type T.
template <class T, class Body>
inline void with_codec(const Call& call, Body body) {
  switch (call.kind) {
    case Kind::integers: return with_rules(call, [&](auto rule) { body(Integers<decltype(rule), T>(call)); });
    case Kind::small_floats: return body(SmallFloats<Quotient::divide, T>(call));
    case Kind::codebook: return body(Codebook<Quotient::divide, T>(call));
  }
}

}  // namespace

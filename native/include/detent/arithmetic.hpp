// Arithmetic: from a number x to its code, as docs/numerics.md defines it. Each operation rounds once; the compiler
// must not contract or reassociate (see CMakeLists.txt). Internal linkage, as in half.hpp.
#pragma once

#include <cmath>
#include <type_traits>

#include "detent/call.hpp"
#include "detent/half.hpp"

namespace {

using detent::Call;
using detent::Division;
using detent::Dtype;
using detent::Rounding;
using detent::ZeroPoint;

// How x / s is computed. `corrected` gives the same codes as `divide`, and is much faster.
enum class Quotient { divide, reciprocal, corrected };

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFused = true;  // a fused multiply-add is one instruction
#else
constexpr bool kFused = false;
#endif

// The scale, and 1 / scale rounded once.
template <class T>
struct Unit {
  T scale, inverse;
};

template <class T>
constexpr T power_of_two(int exponent) {
  T power = 1;
  for (int i = 0; i < (exponent < 0 ? -exponent : exponent); ++i) power *= exponent < 0 ? T(0.5) : T(2);
  return power;
}

// The scales for which `corrected` is valid: products and remainders neither overflow nor lose bits.
template <class T>
constexpr int kInvertible = std::is_same_v<T, double> ? 400 : 60;
template <class T>
constexpr T kLeastInvertible = power_of_two<T>(-kInvertible<T>);
template <class T>
constexpr T kMostInvertible = power_of_two<T>(kInvertible<T>);

// NaN stays NaN.
template <class T>
inline T clamped(T u, T low, T high) {
  const T raised = u < low ? low : u;
  return raised > high ? high : raised;
}

// x divided by the scale.
//
// `corrected` is Markstein's division: with an inverse that is rounded once, the first quotient is off by less than 1.5
// ulp, and adding remainder * inverse with one rounding gives the rounded quotient. (The remainder is exact unless the
// first quotient is off by more than one ulp; then its rounding error does not move the sum across a midpoint.) In
// float, this holds for an invertible scale and quotients from 2^-30 to 2^20, in double for a far larger range. Smaller
// quotients may lose bits and the sign of a zero, which does not change the nearest code. Larger quotients and infinity
// must be clamped before. native/tests/test_quotients.cpp checks the corner cases.
template <Quotient how, class T>
inline T quotient(T x, Unit<T> unit) {
  if constexpr (how == Quotient::divide) {
    return x / unit.scale;
  } else if constexpr (how == Quotient::reciprocal) {
    return x * unit.inverse;
  } else {
    const T first = x * unit.inverse;
    return std::fma(std::fma(first, -unit.scale, x), unit.inverse, first);
  }
}

// The rules that a loop is compiled for.
template <Quotient Q, ZeroPoint Z, Rounding R>
struct Rules {
  static constexpr Quotient quotient = Q;
  static constexpr ZeroPoint zero_point = Z;
  static constexpr Rounding rounding = R;
};

template <class Rule, class T>
inline T rounded(T t) {
  if constexpr (Rule::rounding == Rounding::half_even) {
    return std::rint(t);
  } else if constexpr (Rule::rounding == Rounding::floor) {
    return std::floor(t);
  } else {
    const T size = std::fabs(t);
    const T whole = std::floor(size);
    const T nearest = whole + (size - whole >= T(0.5) ? T(1) : T(0));
    return t < T(0) ? -nearest : nearest;
  }
}

// The code before clamping.
template <class Rule, class T>
inline T unclamped(T x, Unit<T> unit, T zero) {
  const T t = quotient<Rule::quotient>(x, unit);
  if constexpr (Rule::zero_point == ZeroPoint::after_round) {
    return rounded<Rule>(t) + zero;
  } else {
    return rounded<Rule>(t + zero);
  }
}

// Calls body(Rules<...>{}) for the rules of the call.
template <class Body>
inline void with_rules(const Call& call, Body body) {
  const auto with_rounding = [&](auto how, auto zero_point) {
    constexpr Quotient Q = decltype(how)::value;
    constexpr ZeroPoint Z = decltype(zero_point)::value;
    switch (call.rounding) {
      case Rounding::half_even: return body(Rules<Q, Z, Rounding::half_even>{});
      case Rounding::half_away: return body(Rules<Q, Z, Rounding::half_away>{});
      case Rounding::floor: return body(Rules<Q, Z, Rounding::floor>{});
    }
  };
  const auto with_zero_point = [&](auto how) {
    if (call.zero_point == ZeroPoint::after_round) {
      return with_rounding(how, std::integral_constant<ZeroPoint, ZeroPoint::after_round>{});
    }
    return with_rounding(how, std::integral_constant<ZeroPoint, ZeroPoint::before_round>{});
  };
  if (call.division == Division::divide) {
    return with_zero_point(std::integral_constant<Quotient, Quotient::divide>{});
  }
  return with_zero_point(std::integral_constant<Quotient, Quotient::reciprocal>{});
}

// Calls body(In{}) with the type of the data.
template <class Body>
inline void with_dtype(const Call& call, Body body) {
  switch (call.dtype) {
    case Dtype::f16: return body(f16{});
    case Dtype::bf16: return body(bf16{});
    case Dtype::f32: return body(float{});
    case Dtype::f64: return body(double{});
  }
}

}  // namespace

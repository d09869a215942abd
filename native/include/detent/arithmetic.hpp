// Arithmetic: one number's way from x to its code, as the numeric contract writes it. Each operation rounds once; the
// compiler must not contract or reassociate (see CMakeLists.txt). Internal linkage, as in half.hpp.
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

// The rules that a loop is compiled for.
template <Division D, ZeroPoint Z, Rounding R>
struct Rules {
  static constexpr Division division = D;
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

// The code before clamping. `divisor` is the scale or its reciprocal.
template <class Rule, class T>
inline T unclamped(T x, T divisor, T zero) {
  const T t = Rule::division == Division::divide ? x / divisor : x * divisor;
  if constexpr (Rule::zero_point == ZeroPoint::after_round) {
    return rounded<Rule>(t) + zero;
  } else {
    return rounded<Rule>(t + zero);
  }
}

// NaN stays NaN.
template <class T>
inline T clamped(T u, T low, T high) {
  const T raised = u < low ? low : u;
  return raised > high ? high : raised;
}

// Calls body(Rules<...>{}) for the rules of the call.
template <class Body>
inline void with_rules(const Call& call, Body body) {
  const auto with_rounding = [&](auto division, auto zero_point) {
    constexpr Division D = decltype(division)::value;
    constexpr ZeroPoint Z = decltype(zero_point)::value;
    switch (call.rounding) {
      case Rounding::half_even: return body(Rules<D, Z, Rounding::half_even>{});
      case Rounding::half_away: return body(Rules<D, Z, Rounding::half_away>{});
      case Rounding::floor: return body(Rules<D, Z, Rounding::floor>{});
    }
  };
  const auto with_zero_point = [&](auto division) {
    if (call.zero_point == ZeroPoint::after_round) {
      return with_rounding(division, std::integral_constant<ZeroPoint, ZeroPoint::after_round>{});
    }
    return with_rounding(division, std::integral_constant<ZeroPoint, ZeroPoint::before_round>{});
  };
  if (call.division == Division::divide) {
    return with_zero_point(std::integral_constant<Division, Division::divide>{});
  }
  return with_zero_point(std::integral_constant<Division, Division::reciprocal>{});
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

// Scale rule: derives scale and zero point from a range [low, high]. The scale is computed in double and rounded once
// to its type; the zero point uses the rounded scale. Results equal those of detent.scale_rule bit for bit. Internal
// linkage, as in half.hpp.
#pragma once

#include <cmath>
#include <limits>

#include "detent/arithmetic.hpp"
#include "detent/call.hpp"

namespace {

using detent::Call;
using detent::ScaleRule;
using detent::Symmetric;
using detent::ZeroRange;

inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }

// Everything that depends only on the rule is computed once, so the loop over sets has no branches. Bounds have type B:
// with float bounds, a corrected quotient in double neither overflows nor loses bits.
template <class B, Symmetric kind, bool half_away>
struct Deriver {
  static constexpr Quotient how = kFused && std::is_same_v<B, float> ? Quotient::corrected : Quotient::divide;

  explicit Deriver(const Call& call) : qmin(call.qmin), qmax(call.qmax), zero_point(call.rule.zero_point) {
    const ScaleRule& rule = call.rule;
    const double infinity = std::numeric_limits<double>::infinity();
    below = qmin - zero_point;
    above = qmax - zero_point;
    divisor = kind == Symmetric::affine || kind == Symmetric::half_span ? qmax - qmin : above;
    if (kind == Symmetric::half_span) divisor /= 2;
    unit = {divisor, 1 / divisor};
    lowest = rule.include_zero ? 0.0 : infinity;
    highest = rule.include_zero ? 0.0 : -infinity;
    floor = rule.zero_range == ZeroRange::width ? rule.floor / divisor : rule.zero_range == ZeroRange::eps ? rule.floor : 0.0;
    at_zero = rule.zero_range == ZeroRange::unit_at_qmin ? qmin : smaller(larger(0.0, qmin), qmax);
    refused = rule.zero_range == ZeroRange::error ? 0.0 : -1.0;
  }

  // NaN is possible for a set without finite elements; derive rejects it.
  double exact(double low, double high) const {
    if constexpr (kind == Symmetric::affine) {
      return quotient<how>(larger(high, highest), unit) - quotient<how>(smaller(low, lowest), unit);
    } else if constexpr (kind == Symmetric::tight) {
      const double top = high / above;
      return below != 0 ? larger(low / below, top) : top;
    } else {
      return quotient<how>(larger(std::fabs(low), std::fabs(high)), unit);
    }
  }

  // Computes the scale, representable in T, and the zero point; returns 0 if the range is valid. Everything is in
  // double, with sums in place of logical operators, because compilers do not vectorize those.
  template <class T>
  double derive(double low, double high, double& scale, double& zero) const {
    const double floored = larger(exact(low, high), floor);
    const bool empty = floored == 0;
    const double rounded = static_cast<double>(static_cast<T>(empty ? 1.0 : floored));
    scale = larger(rounded, static_cast<double>(std::numeric_limits<T>::min()));
    if constexpr (kind == Symmetric::affine) {
      const double place = qmin - smaller(low, lowest) / scale;
      const double inside = smaller(larger(nearest(place), qmin), qmax);
      zero = (empty ? at_zero : inside) + 0.0;
    } else {
      zero = zero_point;
    }
    const double limit = static_cast<double>(std::numeric_limits<T>::max());
    return (low <= high ? 0.0 : 1.0) + (scale <= limit ? 0.0 : 1.0) + (floored != refused ? 0.0 : 1.0);
  }

  static double nearest(double place) {
    if constexpr (!half_away) return std::rint(place);
    const double size = std::fabs(place), whole = std::floor(size);
    const double away = whole + (size - whole >= 0.5 ? 1.0 : 0.0);
    return place < 0 ? -away : away;
  }

  double qmin, qmax, zero_point, below, above, divisor, lowest, highest, floor, at_zero, refused;
  Unit<double> unit;
};

}  // namespace

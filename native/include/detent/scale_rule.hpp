// Scale rule: from a range [low, high] to a scale and zero point, in double, rounded once to the scale's type; the zero point
// uses the stored scale. The same arithmetic as detent.scale_rule. Internal linkage, as in half.hpp.
#pragma once

#include <cmath>
#include <limits>

#include "detent/call.hpp"

namespace {

using detent::Call;
using detent::ScaleRule;
using detent::Symmetric;
using detent::ZeroRange;

inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }

template <Symmetric kind>
struct Deriver {
  explicit Deriver(const Call& call) : rule(call.rule), qmin(call.qmin), qmax(call.qmax) {
    below = qmin - rule.zero_point;
    above = qmax - rule.zero_point;
    divisor = kind == Symmetric::affine || kind == Symmetric::half_span ? qmax - qmin : above;
    if (kind == Symmetric::half_span) divisor /= 2;
    at_zero = rule.zero_range == ZeroRange::unit_at_qmin ? qmin : smaller(larger(0.0, qmin), qmax);
    floor = rule.zero_range == ZeroRange::width ? rule.floor / divisor : rule.floor;
    floors = rule.zero_range == ZeroRange::eps || rule.zero_range == ZeroRange::width;
  }

  double exact(double low, double high) const {
    if constexpr (kind == Symmetric::affine) {
      const double lowest = rule.include_zero ? smaller(low, 0.0) : low;
      const double highest = rule.include_zero ? larger(high, 0.0) : high;
      return highest / divisor - lowest / divisor;
    } else if constexpr (kind == Symmetric::tight) {
      const double ends = below != 0 ? larger(low / below, high / above) : high / above;
      return larger(ends, 0.0);
    } else {
      return larger(std::fabs(low), std::fabs(high)) / divisor;
    }
  }

  // Returns whether the range gives parameters.
  template <class T>
  bool operator()(T low, T high, T& scale, T& zero) const {
    const double raw = exact(static_cast<double>(low), static_cast<double>(high));
    const bool empty = (raw == 0) & !floors;
    const double wanted = empty ? 1.0 : floors ? larger(raw, floor) : raw;
    const T rounded = static_cast<T>(wanted);
    scale = rounded > std::numeric_limits<T>::min() ? rounded : std::numeric_limits<T>::min();
    if constexpr (kind == Symmetric::affine) {
      const double lowest = rule.include_zero ? smaller(static_cast<double>(low), 0.0) : static_cast<double>(low);
      const double place = qmin - lowest / static_cast<double>(scale);
      const double size = std::fabs(place), whole = std::floor(size);
      const double away = whole + (size - whole >= 0.5 ? 1.0 : 0.0);
      const double nearest = rule.half_away ? (place < 0 ? -away : away) : std::rint(place);
      zero = static_cast<T>(empty ? at_zero : smaller(larger(nearest, qmin), qmax)) + T(0);
    } else {
      zero = static_cast<T>(rule.zero_point);
    }
    const bool refused = empty & (rule.zero_range == ZeroRange::error);
    return (low <= high) & (scale <= std::numeric_limits<T>::max()) & !refused;
  }

  ScaleRule rule;
  double qmin, qmax, below, above, divisor, at_zero, floor;
  bool floors;
};

}  // namespace

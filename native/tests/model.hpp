// Model: implements docs/numerics.md for one element, one set or one sum at a time. It is written for clarity and uses
// no code of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "detent/call.hpp"

namespace model {

using namespace detent;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A 16-bit float, described by the widths of its fields. For rounding, infinity counts as the next power of two.
template <int kMantissa, int kBias>
struct Small {
  using Compute = float;
  static constexpr uint32_t kInfinity = (0x7FFFu >> kMantissa) << kMantissa;
  uint16_t bits;

  static double magnitude(uint32_t code) {
    const int exponent = static_cast<int>(code >> kMantissa);
    const uint32_t fraction = code & ((1u << kMantissa) - 1);
    if (exponent == 0) return std::ldexp(fraction, 1 - kBias - kMantissa);
    return std::ldexp(fraction + (1u << kMantissa), exponent - kBias - kMantissa);
  }

  float value() const {
    const uint32_t code = bits & 0x7FFF;
    const double size = code < kInfinity    ? magnitude(code)
                        : code == kInfinity ? model::kInfinity
                                            : kNaN;
    return static_cast<float>(bits & 0x8000 ? -size : size);
  }

  // The nearest number; for ties, the number with the even code.
  static Small nearest(float x) {
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return {static_cast<uint16_t>(sign | 0x7FFF)};
    const double size = std::fabs(static_cast<double>(x));
    uint32_t low = 0, high = kInfinity + 1;  // magnitude(low) <= size < magnitude(high)
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (magnitude(middle) <= size ? low : high) = middle;
    }
    if (low < kInfinity) {
      const double below = size - magnitude(low), above = magnitude(low + 1) - size;
      if (above < below || (above == below && low % 2 == 1)) ++low;
    }
    return {static_cast<uint16_t>(sign | low)};
  }
};

using Half = Small<10, 15>;
using Brain = Small<7, 127>;

template <class In>
struct ComputeOf {
  using type = In;
};
template <int kMantissa, int kBias>
struct ComputeOf<Small<kMantissa, kBias>> {
  using type = float;
};
template <class In>
using Compute = typename ComputeOf<In>::type;

template <class In>
Compute<In> value_of(In x) {
  if constexpr (std::is_floating_point_v<In>) {
    return x;
  } else {
    return x.value();
  }
}

template <class In>
In nearest(Compute<In> x) {
  if constexpr (std::is_floating_point_v<In>) {
    return x;
  } else {
    return In::nearest(x);
  }
}

// Equal bits, or both NaN.
template <class In>
bool same(In a, In b) {
  if (std::isnan(value_of(a)) || std::isnan(value_of(b))) return std::isnan(value_of(a)) && std::isnan(value_of(b));
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// A format other than integers. `values` are the finite values that encoding rounds to, ascending, without sign if
// codes have a sign bit; `levels` is the value of every code.
struct Format {
  Kind kind;
  int bits, mantissa, min_exponent;
  std::vector<double> values, levels;

  // The nearest value. For ties, a float rounds to the even code, a codebook to the lower value.
  int encode(double t) const {
    const bool floats = kind == Kind::small_floats;
    const double size = floats ? std::fabs(t) : t;
    size_t code = 0;
    for (; code + 1 < values.size(); ++code) {
      const double middle = (values[code] + values[code + 1]) / 2;
      if (size < middle || (size == middle && !(floats && code % 2 == 1))) break;
    }
    return static_cast<int>(code) + (floats && std::signbit(t) ? 1 << (bits - 1) : 0);
  }
};

// A sign bit, exponent and mantissa; the last codes are special.
inline Format small_float(int exponent, int mantissa, const std::vector<double>& specials) {
  const int bias = (1 << (exponent - 1)) - 1, codes = (1 << (exponent + mantissa)) - static_cast<int>(specials.size());
  std::vector<double> values;
  for (int code = 0; code < codes; ++code) {
    const int power = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    values.push_back(std::ldexp(fraction + (power ? 1 << mantissa : 0), std::max(power, 1) - bias - mantissa));
  }
  std::vector<double> levels = values;
  levels.insert(levels.end(), specials.begin(), specials.end());
  for (size_t i = 0, count = levels.size(); i < count; ++i) levels.push_back(-levels[i]);
  return {Kind::small_floats, 1 + exponent + mantissa, mantissa, 1 - bias, values, levels};
}

inline Format codebook(const std::vector<double>& values) { return {Kind::codebook, 4, 0, 0, values, values}; }

// float8_e4m3fn, float8_e5m2, float4_e2m1fn and nf4.
inline const Format kFormats[] = {
    small_float(4, 3, {kNaN}),
    small_float(5, 2, {kInfinity, kNaN, kNaN, kNaN}),
    small_float(2, 1, {}),
    codebook({-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
              -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
              0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0}),
};

// A call, and the format of its codes if it is not an integer format.
struct Case : Call {
  const Format* format = nullptr;
};

inline int64_t set_of(const Layout& layout, int64_t position) {
  int64_t row = position / layout.cols, set = position % layout.cols / layout.block;
  for (int i = layout.lead - 1; i >= 0; --i) {
    set += row % layout.axis[i].size / layout.axis[i].block * layout.axis[i].stride;
    row /= layout.axis[i].size;
  }
  return set;
}

template <class T>
T ratio(const Case& c, T x, T scale) {
  const T reciprocal = T(1) / scale;
  return c.division == Division::divide ? x / scale : x * reciprocal;
}

template <class T>
T unclamped(const Case& c, T x, T scale, T zero) {
  const auto round = [&](T t) {
    switch (c.rounding) {
      case Rounding::half_even: return std::nearbyint(t);
      case Rounding::half_away: return std::round(t);
      default: return std::floor(t);
    }
  };
  const T t = ratio(c, x, scale);
  if (c.zero_point == ZeroPoint::before_round) return round(t + zero);
  return round(t) + zero;
}

// The code as a number; NaN if x is NaN and there is no fill.
template <class T>
T code(const Case& c, T x, T scale, T zero) {
  if (std::isnan(x)) {
    if (c.fill == Fill::none) return x;
    if (c.format) return static_cast<T>(c.format->encode(c.fill == Fill::qmin ? c.qmin : 0.0));
    return c.fill == Fill::qmin ? T(c.qmin) : zero;
  }
  if (c.format) return static_cast<T>(c.format->encode(static_cast<double>(ratio(c, x, scale))));
  return std::clamp(unclamped(c, x, scale, zero), T(c.qmin), T(c.qmax));
}

// The value of a code at scale 1; NaN for a NaN code.
template <class T>
T meaning(const Case& c, T code, T zero) {
  if (!c.format) return code - zero;
  return std::isnan(code) ? code : static_cast<T>(c.format->levels.at(static_cast<size_t>(code)));
}

// Converts a result from the compute type to the data's type. Only float formats have negative zeros.
template <class In>
In finished(const Case& c, Compute<In> y) {
  const In result = nearest<In>(y);
  return value_of(result) == 0 && c.kind != Kind::small_floats ? nearest<In>(Compute<In>(0)) : result;
}

template <class In>
In dequantized(const Case& c, Compute<In> code, Compute<In> scale, Compute<In> zero) {
  return finished<In>(c, meaning(c, code, zero) * scale);
}

// A fill replaces NaN by the value of the lowest code, or by 0.
template <class In>
In fake_quantized(const Case& c, In x, Compute<In> scale, Compute<In> zero) {
  using T = Compute<In>;
  if (std::isnan(value_of(x)) && c.fill == Fill::zero_point) return nearest<In>(T(0));
  if (std::isnan(value_of(x)) && c.fill == Fill::qmin) return finished<In>(c, (T(c.qmin) - zero) * scale);
  return dequantized<In>(c, code(c, value_of(x), scale, zero), scale, zero);
}

// Whether u lies between low and high.
template <class T>
bool between(T low, T u, T high, bool exclusive) {
  return exclusive ? low < u && u < high : low <= u && u <= high;
}

template <class T>
bool in_range(const Case& c, T x, T scale, T zero, bool exclusive) {
  const T u = c.format ? ratio(c, x, scale) : unclamped(c, x, scale, zero);
  return between(T(c.qmin), u, T(c.qmax), exclusive);
}

template <class T>
bool passes(const Case& c, T x, T scale, T zero) {
  if (c.mask == Mask::identity) return true;
  if (c.mask != Mask::value) return in_range(c, x, scale, zero, c.exclusive);
  return between((T(c.qmin) - zero) * scale, x, (T(c.qmax) - zero) * scale, c.exclusive);
}

template <class In>
In gradient(const Case& c, In g, In x, Compute<In> scale, Compute<In> zero) {
  using T = Compute<In>;
  T slope = 1;
  if (c.mask == Mask::hard_tanh) {
    const T center = static_cast<T>(((c.qmin + c.qmax) / 2 - double(zero)) * double(scale));
    const T half = static_cast<T>((c.qmax - c.qmin) / 2 * double(scale));
    slope = T(1) - std::fabs((value_of(x) - center) / half);
    if (!(slope > 0)) slope = 0;
  } else if (!passes(c, value_of(x), scale, zero)) {
    slope = 0;
  }
  if (c.mask != Mask::hard_tanh && c.grad == Grad::fake) return slope != 0 ? g : nearest<In>(T(0));
  T y = slope == 0 ? T(0) : c.mask == Mask::hard_tanh ? value_of(g) * slope : value_of(g);
  if (c.grad == Grad::quantize) y = y / scale;
  return nearest<In>(y);
}

// The terms of one element in the gradients of scale and zero point.
struct Terms {
  double scale, zero;
};

template <class T>
Terms learned_terms(const Case& c, T g, T x, T scale, T zero) {
  if (std::isnan(x)) return {0.0, 0.0};
  const double value = double(meaning(c, code(c, x, scale, zero), zero));
  const bool inside = in_range(c, x, scale, zero, false);
  return {double(g) * (inside ? value - double(ratio(c, x, scale)) : value), inside ? 0.0 : -double(scale) * double(g)};
}

// Halves added until one number is left.
inline double folded(std::vector<double> terms, size_t padded) {
  terms.resize(padded, 0.0);
  for (size_t half = padded / 2; half; half /= 2) {
    for (size_t i = 0; i < half; ++i) terms[i] += terms[i + half];
  }
  return terms[0];
}

// The sums of blocks, and their sum in the fixed accumulation order.
inline std::vector<double> block_sums(const std::vector<double>& terms) {
  std::vector<double> sums;
  for (auto at = terms.begin(); at != terms.end();) {
    const auto end = at + std::min<int64_t>(kLeaf, terms.end() - at);
    sums.push_back(folded({at, end}, kLeaf));
    at = end;
  }
  return sums;
}

inline double sum_of_blocks(const std::vector<double>& sums) {
  size_t padded = 1;
  while (padded < sums.size()) padded *= 2;
  return folded(sums, padded);
}

// Scale and zero point of a range; empty if the range is invalid.
template <class T>
struct Derived {
  bool good;
  T scale, zero;
};

template <class T>
Derived<T> derived(const Case& c, double low, double high) {
  if (!(low <= high)) return {false, T(0), T(0)};
  const ScaleRule& rule = c.rule;
  const bool affine = rule.symmetric == Symmetric::affine;
  if (affine && rule.include_zero) {
    low = std::fmin(low, 0.0);
    high = std::fmax(high, 0.0);
  }
  const double steps = c.qmax - c.qmin, below = c.qmin - rule.zero_point, above = c.qmax - rule.zero_point;
  double exact = 0, divisor = above;
  switch (rule.symmetric) {
    case Symmetric::affine: divisor = steps, exact = high / steps - low / steps; break;
    case Symmetric::qmax: exact = std::fmax(std::fabs(low), std::fabs(high)) / above; break;
    case Symmetric::half_span: divisor = steps / 2, exact = std::fmax(std::fabs(low), std::fabs(high)) / divisor; break;
    case Symmetric::tight:
      exact = std::fmax(high / above, 0.0);
      if (below != 0) exact = std::fmax(exact, low / below);
      break;
  }
  bool unit = false;
  switch (rule.zero_range) {
    case ZeroRange::eps: exact = std::fmax(exact, rule.floor); break;
    case ZeroRange::width: exact = std::fmax(exact, rule.floor / divisor); break;
    default: unit = exact == 0;
  }
  if (unit && rule.zero_range == ZeroRange::error) return {false, T(0), T(0)};
  const T scale = std::fmax(static_cast<T>(unit ? 1.0 : exact), std::numeric_limits<T>::min());
  if (std::isinf(scale)) return {false, T(0), T(0)};
  if (!affine) return {true, scale, static_cast<T>(rule.zero_point)};
  const double at_zero = rule.zero_range == ZeroRange::unit_at_qmin ? c.qmin : std::clamp(0.0, c.qmin, c.qmax);
  const double place = c.qmin - low / static_cast<double>(scale);
  const double rounded = rule.half_away ? std::round(place) : std::nearbyint(place);
  return {true, scale, static_cast<T>(unit ? at_zero : std::clamp(rounded, c.qmin, c.qmax)) + T(0)};
}

// Histograms

// The row and bin of a number: a row for its sign and exponent, with bins of equal width. Non-finite numbers and those
// outside the range of a float get the row of infinity, where nothing is counted.
struct Bin {
  int row;
  int64_t place;
};

inline Bin bin_of(double value, int bits) {
  constexpr int kInfinite = 255, kNegative = 256;
  const int sign = value < 0 ? kNegative : 0;
  const double size = std::fabs(value), smallest = std::ldexp(1.0, -126);
  if (!(size < std::ldexp(1.0, 128))) return {sign + kInfinite, 0};
  int exponent = size < smallest ? 0 : 1;
  while (std::ldexp(smallest, exponent) <= size) ++exponent;
  const double start = exponent ? std::ldexp(smallest, exponent - 1) : 0.0, width = exponent ? start : smallest;
  return {sign + exponent, static_cast<int64_t>((size - start) / width * std::ldexp(1.0, bits))};
}

// The integral of |x - level|^norm from a to b.
inline long double part_of_error(long double a, long double b, long double level, int norm) {
  const auto below = [&](long double x) {
    const long double distance = x - level;
    return norm == 2 ? distance * distance * distance / 3 : distance * std::fabs(distance) / 2;
  };
  return below(b) - below(a);
}

// The error of ascending levels on mass that is evenly spread from a to b: the sum over all levels, each integrated
// where it is the nearest level.
inline double grid_error(const std::vector<double>& levels, int norm, double a, double b, double mass) {
  long double error = 0;
  for (size_t i = 0; i < levels.size(); ++i) {
    const long double first = i ? (static_cast<long double>(levels[i - 1]) + levels[i]) / 2 : -kInfinity;
    const long double last = i + 1 < levels.size() ? (static_cast<long double>(levels[i]) + levels[i + 1]) / 2 : kInfinity;
    const long double from = std::max<long double>(a, first), to = std::min<long double>(b, last);
    if (a < b && from < to) error += part_of_error(from, to, levels[i], norm) * mass / (static_cast<long double>(b) - a);
    if (!(a < b) && from == a && a <= last) {
      const long double distance = std::fabs(a - static_cast<long double>(levels[i]));
      return static_cast<double>(mass * (norm == 2 ? distance * distance : distance));
    }
  }
  return static_cast<double>(error);
}

}  // namespace model

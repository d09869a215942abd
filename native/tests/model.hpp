// The model: the numeric contract for one element at a time, written for clarity, sharing no arithmetic with the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "detent/call.hpp"

namespace model {

using namespace detent;

// A 16-bit float by the widths of its fields. The code of infinity counts as the next power of two where numbers round.
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
                        : code == kInfinity ? std::numeric_limits<double>::infinity()
                                            : std::numeric_limits<double>::quiet_NaN();
    return static_cast<float>(bits & 0x8000 ? -size : size);
  }

  // The nearest number; of two equally near ones the one with the even code.
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

// Equal bits, or NaN both.
template <class In>
bool same(In a, In b) {
  if (std::isnan(value_of(a)) || std::isnan(value_of(b))) return std::isnan(value_of(a)) && std::isnan(value_of(b));
  return std::memcmp(&a, &b, sizeof a) == 0;
}

inline int64_t set_of(const Layout& layout, int64_t position) {
  int64_t row = position / layout.cols, set = position % layout.cols / layout.block;
  for (int i = layout.lead - 1; i >= 0; --i) {
    set += row % layout.axis[i].size / layout.axis[i].block * layout.axis[i].stride;
    row /= layout.axis[i].size;
  }
  return set;
}

template <class T>
T unclamped(const Call& call, T x, T scale, T zero) {
  const auto round = [&](T t) {
    switch (call.rounding) {
      case Rounding::half_even: return std::nearbyint(t);
      case Rounding::half_away: return std::round(t);
      default: return std::floor(t);
    }
  };
  const T reciprocal = T(1) / scale;
  const T t = call.division == Division::divide ? x / scale : x * reciprocal;
  if (call.zero_point == ZeroPoint::before_round) return round(t + zero);
  return round(t) + zero;
}

// The code as a number; NaN where x is NaN and nothing is filled in.
template <class T>
T code(const Call& call, T x, T scale, T zero) {
  if (std::isnan(x)) {
    if (call.fill == Fill::none) return x;
    return call.fill == Fill::qmin ? T(call.qmin) : zero;
  }
  const T u = unclamped(call, x, scale, zero);
  return u < T(call.qmin) ? T(call.qmin) : u > T(call.qmax) ? T(call.qmax) : u;
}

template <class In>
In dequantized(Compute<In> code, Compute<In> scale, Compute<In> zero) {
  In y = nearest<In>((code - zero) * scale);
  if (value_of(y) == 0) y = nearest<In>(Compute<In>(0));  // no negative zero
  return y;
}

template <class T>
bool passes(const Call& call, T x, T scale, T zero) {
  if (call.mask == Mask::identity) return true;
  T low = T(call.qmin), high = T(call.qmax), u = x;
  if (call.mask == Mask::value) {
    low = (low - zero) * scale;
    high = (high - zero) * scale;
  } else {
    u = unclamped(call, x, scale, zero);
  }
  return call.exclusive ? low < u && u < high : low <= u && u <= high;
}

template <class In>
In gradient(const Call& call, In g, In x, Compute<In> scale, Compute<In> zero) {
  using T = Compute<In>;
  T slope = 1;
  if (call.mask == Mask::hard_tanh) {
    const T center = static_cast<T>(((call.qmin + call.qmax) / 2 - double(zero)) * double(scale));
    const T half = static_cast<T>((call.qmax - call.qmin) / 2 * double(scale));
    slope = T(1) - std::fabs((value_of(x) - center) / half);
    if (!(slope > 0)) slope = 0;
  } else if (!passes(call, value_of(x), scale, zero)) {
    slope = 0;
  }
  if (call.mask != Mask::hard_tanh && call.grad == Grad::fake) return slope != 0 ? g : nearest<In>(T(0));
  T y = slope == 0 ? T(0) : call.mask == Mask::hard_tanh ? value_of(g) * slope : value_of(g);
  if (call.grad == Grad::quantize) y = y / scale;
  return nearest<In>(y);
}

}  // namespace model

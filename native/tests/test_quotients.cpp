// Checks that corrected quotients equal divisions bit for bit. This is proved except for two corner cases, which are
// tested exhaustively. First, inverses that are off by nearly half an ulp, where the scale's mantissa is all ones.
// Second, first quotients that are off by nearly 1.5 ulp, where x and the scale are both just below a power of two.
// Other cases are random.
#include <bit>
#include <cinttypes>
#include <cstdio>
#include <random>

#include "detent/arithmetic.hpp"

namespace {

template <class T>
struct Shape;
template <>
struct Shape<float> {
  using Bits = uint32_t;
  static constexpr int mantissa = 23;
};
template <>
struct Shape<double> {
  using Bits = uint64_t;
  static constexpr int mantissa = 52;
};

int64_t tried = 0, different = 0;

template <class T>
void check(T x, T scale) {
  const T divided = x / scale, size = std::fabs(divided);
  if (size < std::ldexp(T(1), -30) || size > std::ldexp(T(1), 20)) return;
  const T corrected = quotient<Quotient::corrected>(x, Unit<T>{scale, T(1) / scale});
  ++tried;
  if (std::bit_cast<typename Shape<T>::Bits>(corrected) == std::bit_cast<typename Shape<T>::Bits>(divided)) return;
  if (++different <= 10) {
    std::printf("%a / %a is %a, not %a\n", static_cast<double>(x), static_cast<double>(scale), static_cast<double>(divided),
                static_cast<double>(corrected));
  }
}

// A number between 1 and 2 from the bits of its mantissa.
template <class T>
T between_1_and_2(typename Shape<T>::Bits mantissa) {
  using Bits = typename Shape<T>::Bits;
  const Bits low = (Bits(1) << Shape<T>::mantissa) - 1;
  return std::bit_cast<T>(static_cast<Bits>((std::bit_cast<Bits>(T(1)) & ~low) | (mantissa & low)));
}

template <class T>
void corners() {
  using Bits = typename Shape<T>::Bits;
  constexpr Bits ones = (Bits(1) << Shape<T>::mantissa) - 1;
  for (Bits a = 0; a < 2048; ++a) {
    for (Bits b = 0; b < 2048; ++b) {
      check(between_1_and_2<T>(ones - a), between_1_and_2<T>(ones - b));
      check(between_1_and_2<T>(a), between_1_and_2<T>(ones - b));
      check(between_1_and_2<T>(ones - a), between_1_and_2<T>(b));
    }
  }
}

// Random invertible scales, quotients of every relevant magnitude, and quotients near the midpoint of two codes.
template <class T>
void at_random(int64_t count) {
  std::mt19937_64 dice(7);
  const auto any = [&] { return between_1_and_2<T>(static_cast<typename Shape<T>::Bits>(dice())); };
  for (int64_t i = 0; i < count; ++i) {
    const int exponent = static_cast<int>(dice() % (2 * kInvertible<T>)) - kInvertible<T>;
    const T scale = std::ldexp(any(), exponent);
    const T sign = dice() % 2 ? T(1) : T(-1);
    check(sign * std::ldexp(any(), exponent + static_cast<int>(dice() % 48) - 28), scale);
    T tie = (static_cast<T>(dice() % 65536) + T(0.5)) * scale;
    for (int steps = static_cast<int>(dice() % 4); steps; --steps) {
      tie = std::nextafter(tie, dice() % 2 ? T(0) : scale * T(1e6));
    }
    check(sign * tie, scale);
  }
}

}  // namespace

int main() {
  for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
    check(between_1_and_2<float>(mantissa), between_1_and_2<float>(~0u));
  }
  corners<float>();
  corners<double>();
  at_random<float>(20'000'000);
  at_random<double>(5'000'000);
  std::printf("%" PRId64 " quotients compared, %" PRId64 " differences\n", tried, different);
  return different ? 1 : 0;
}

// Arrays: inputs of kernels, filled at random, and outputs, compared with the model.
#pragma once

#include <atomic>
#include <utility>

#include "tester.hpp"

namespace testing {

class Arrays : public Tester {
 protected:
  // Scales, zero points and tables of the rules, in the compute type.
  void place_rules(Case& c, int64_t sets) {
    c.saw_nan = &saw_nan_;
    saw_nan_.store(false);
    if (c.dtype == Dtype::f64) return place_rules_of<double>(c, sets);
    return place_rules_of<float>(c, sets);
  }

  template <class In>
  static model::Compute<In> scale(const Case& c, int64_t index) {
    return read<model::Compute<In>>(c.scale, model::set_of(c.layout, index));
  }
  template <class In>
  static model::Compute<In> zero(const Case& c, int64_t index) {
    return read<model::Compute<In>>(c.zero, model::set_of(c.layout, index));
  }

  // Fills an array with codes, ties, numbers next to ties, and some special values, in guarded memory; and makes a
  // copy.
  template <class In>
  std::vector<In> data(const Case& c, Place place, const void*& pointer, bool special = true) {
    using T = model::Compute<In>;
    using Limits = std::numeric_limits<T>;
    constexpr T kSpecial[] = {T(0), -T(0), Limits::infinity(), -Limits::infinity(), Limits::denorm_min(), -Limits::min() / 4,
                              Limits::max(), T(6e-8), T(-65519), Limits::quiet_NaN()};
    const int64_t specials = 9 + dice_.below(2);  // every other array contains NaN
    const bool constant = dice_() % 16 == 0;
    std::vector<In> x;
    for (int64_t i = 0; i < c.layout.size; ++i) {
      T y = static_cast<T>(any_ratio(c)) * scale<In>(c, i);
      const unsigned nudge = dice_() % 4;
      if (nudge < 2) y = std::nextafter(y, nudge ? T(1e30) : T(-1e30));
      if (special && dice_() % 16 == 0) y = kSpecial[dice_.below(specials)];
      x.push_back(constant && i ? x[0] : model::nearest<In>(y));
    }
    pointer = array<In>(place, x);
    return x;
  }

  std::vector<uint8_t> random_bytes(int64_t count) {
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < count; ++i) bytes.push_back(static_cast<uint8_t>(dice_()));
    return bytes;
  }

  // Numbers of very different magnitudes, so that a wrong accumulation order changes the sum. A quarter of them are
  // zeros, mostly negative.
  std::vector<double> random_doubles(int64_t count) {
    std::vector<double> numbers;
    const bool zeros = dice_() % 4 == 0;
    for (int64_t i = 0; i < count; ++i) numbers.push_back(zeros ? (dice_() % 64 ? -0.0 : 0.0) : any_number(-20, 20));
    return numbers;
  }

  // Two arrays of equal size, the second of any type, and their elements as pairs.
  template <class In>
  std::vector<std::pair<double, double>> pairs(Case& c) {
    constexpr int kExponents[] = {-1024, -5, 0, 7, 1000, 1073};
    for (double* factor : {c.factor, c.second_factor}) {
      const int exponent = kExponents[dice_() % 6];
      factor[0] = std::ldexp(1.0, std::min(exponent, 1000));
      factor[1] = std::ldexp(1.0, exponent - std::min(exponent, 1000));
    }
    c.blocks = ceil_div(c.layout.size, kLeaf);
    c.second_dtype = dice_.one_of<Dtype>(4);
    const std::vector<double> x = numbers<In>(kX, c.layout.size, c.x);
    std::vector<double> y;
    with_type(c.second_dtype, [&](auto other) { y = numbers<decltype(other)>(kG, c.layout.size, c.g); });
    std::vector<std::pair<double, double>> both;
    for (size_t i = 0; i < x.size(); ++i) both.emplace_back(x[i], y[i]);
    return both;
  }

  // Codes

  static int64_t code_bytes(const Case& c) {
    const int64_t size = c.layout.size;
    return c.codes == Codes::packed ? ceil_div(size * c.bits, 8) : c.codes == Codes::words ? 2 * size : size;
  }

  // Packed codes bit by bit.
  static double read_code(const Case& c, const void* array, int64_t index) {
    if (c.codes == Codes::words) {
      return c.is_signed ? double(read<int16_t>(array, index)) : double(read<uint16_t>(array, index));
    }
    if (c.codes == Codes::bytes) {
      return c.is_signed ? double(read<int8_t>(array, index)) : double(read<uint8_t>(array, index));
    }
    const int code = bits_at(array, index * c.bits, (index + 1) * c.bits);
    return c.is_signed && code >> (c.bits - 1) ? code - (1 << c.bits) : code;
  }

  // Bounds and parameters

  struct Extremes {
    std::vector<double> low, high;
    int64_t nonfinite = 0;
  };

  // Empty bounds for the kernel, and the expected bounds.
  template <class In>
  Extremes place_bounds(Case& c, int64_t sets, const std::vector<In>& x) {
    using T = model::Compute<In>;
    const size_t count = static_cast<size_t>(sets);
    const double infinity = model::kInfinity;
    Extremes expected{std::vector<double>(count, infinity), std::vector<double>(count, -infinity)};
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t set = static_cast<size_t>(model::set_of(c.layout, static_cast<int64_t>(i)));
      const double value = static_cast<double>(model::value_of(x[i]));
      expected.nonfinite += !std::isfinite(value);
      if (!std::isfinite(value)) continue;
      expected.low[set] = std::min(expected.low[set], value);
      expected.high[set] = std::max(expected.high[set], value);
    }
    c.low = array<T>(kLow, std::vector<T>(count, static_cast<T>(infinity)));
    c.high = array<T>(kHigh, std::vector<T>(count, static_cast<T>(-infinity)));
    c.shared = c.layout.cols == 0 || c.layout.size / c.layout.cols * ceil_div(c.layout.cols, c.layout.block) != sets;
    c.nonfinite = &nonfinite_;
    nonfinite_.store(0);
    c.merging = &merging_;
    return expected;
  }

  // Zeros of either sign are equal here, because the caller makes them positive.
  template <class In>
  void expect_bounds(const Case& c, const Extremes& expected) {
    using T = model::Compute<In>;
    for (size_t i = 0; i < expected.low.size(); ++i) {
      const int64_t set = static_cast<int64_t>(i);
      expect(static_cast<double>(read<T>(c.low, set)) == expected.low[i], c, set, "another minimum");
      expect(static_cast<double>(read<T>(c.high, set)) == expected.high[i], c, set, "another maximum");
    }
    expect(nonfinite_.load() == expected.nonfinite, c, 0, "another count of elements not finite");
  }

  // A bound of any magnitude: a number of type T, or any double.
  template <class T>
  double any_bound(bool wide) {
    const bool small = std::is_same_v<T, float>;
    const double bound = any_number(wide && small ? -200 : small ? -149 : -1074, wide && small ? 140 : small ? 127 : 1023);
    return dice_() % 8 == 0 ? 0.0 : wide ? bound : static_cast<double>(static_cast<T>(bound));
  }

  template <class T>
  void place_parameters(Case& c, int64_t sets) {
    c.scale_out = array<T>(kScale, sets);
    c.zero_out = array<T>(kZero, sets);
    c.refused = &refused_;
    refused_.store(false);
  }

  // Returns for which sets there are parameters.
  template <class T>
  std::vector<bool> expect_parameters(const Case& c, const std::vector<double>& low, const std::vector<double>& high) {
    std::vector<bool> good;
    for (size_t i = 0; i < low.size(); ++i) {
      const int64_t set = static_cast<int64_t>(i);
      const model::Derived<T> expected = model::derived<T>(c, low[i], high[i]);
      good.push_back(expected.good);
      if (!expected.good) continue;
      expect(model::same(read<T>(c.scale_out, set), expected.scale), c, set, "another scale");
      expect(model::same(read<T>(c.zero_out, set), expected.zero), c, set, "another zero point");
    }
    expect(refused_.load() == (std::find(good.begin(), good.end(), false) != good.end()), c, 0, "another refusal");
    return good;
  }

  // Sums

  // Number of blocks of the largest set.
  static int64_t blocks_of(const std::vector<std::vector<double>>& terms) {
    size_t most = 0;
    for (const auto& each : terms) most = std::max(most, each.size());
    return ceil_div(static_cast<int64_t>(most), kLeaf);
  }

  void expect_block_sums(const Case& c, const double* sums, const std::vector<std::vector<double>>& terms) {
    for (size_t set = 0; set < terms.size(); ++set) {
      const std::vector<double> expected = model::block_sums(terms[set]);
      for (size_t block = 0; block < expected.size(); ++block) {
        const int64_t place = static_cast<int64_t>(set) * c.blocks + static_cast<int64_t>(block);
        expect(model::same(sums[place], expected[block]), c, place, "another sum");
      }
    }
  }

  std::atomic<bool> saw_nan_{false}, refused_{false};
  std::atomic<int64_t> nonfinite_{0};
  Lock merging_;

 private:
  template <class T>
  void place_rules_of(Case& c, int64_t sets) {
    constexpr double kScales[] = {0.0123, 0.3, 0.017, 1.0 / 3, 0.5, 1e-3, 40.0};
    // Sometimes the limits of the range of corrected quotients, and the adjacent numbers outside.
    const int end = std::is_same_v<T, double> ? 400 : 60;
    const bool at_ends = dice_() % 8 == 0;
    std::vector<T> scale, zero;
    for (int64_t i = 0; i < sets; ++i) {
      T any_scale = static_cast<T>(kScales[dice_() % 7]);
      if (at_ends && dice_() % 4 == 0) {
        any_scale = std::nextafter(std::ldexp(T(1), dice_.heads() ? end : -end), dice_.heads() ? T(1) : any_scale * T(0));
      }
      scale.push_back(any_scale);
      const double any = c.qmin + static_cast<double>(dice_.below(static_cast<int64_t>(c.qmax - c.qmin) + 1));
      zero.push_back(c.no_zero ? T(0) : static_cast<T>(any));
    }
    c.scale = array<T>(kScale, scale);
    c.zero = array<T>(kZero, zero);
    if (!c.format) return;
    std::vector<T> levels(c.format->levels.begin(), c.format->levels.end()), bounds;
    levels.resize(256);
    c.levels = array<T>(kLevels, levels);
    for (size_t i = 0; c.kind == Kind::codebook && i + 1 < c.format->values.size(); ++i) {
      const double middle = (c.format->values[i] + c.format->values[i + 1]) / 2;
      const T bound = static_cast<T>(middle);  // may be rounded up; a rounding boundary is not above the midpoint
      bounds.push_back(static_cast<double>(bound) > middle ? std::nextafter(bound, T(-2)) : bound);
    }
    c.bounds = array<T>(kBounds, bounds);
  }

  // A number for scale 1: a representable value, a tie, or a value out of range.
  double any_ratio(const Case& c) {
    if (!c.format) {
      const int64_t reach = 2 * static_cast<int64_t>(c.qmax - c.qmin) + 9;
      return static_cast<double>(dice_.below(2 * reach) - reach) / 2;
    }
    const std::vector<double>& values = c.format->values;
    const size_t i = static_cast<size_t>(dice_.below(static_cast<int64_t>(values.size())));
    const double above = i + 1 < values.size() ? values[i + 1] : 3 * values[i];
    const double size = dice_.heads() ? values[i] : (values[i] + above) / 2;
    return dice_.heads() ? size : -size;
  }

  double any_number(int first, int last) {
    const double size = std::ldexp(1 + static_cast<double>(dice_() % 4096) / 4096, first + dice_.one_of<int>(last - first));
    return dice_.heads() ? size : -size;
  }

  // Numbers rounded to a type; one array in four has some infinities and NaN.
  template <class In>
  std::vector<double> numbers(Place place, int64_t count, const void*& pointer) {
    const bool special = dice_() % 4 == 0;
    std::vector<In> array;
    std::vector<double> values;
    for (const double number : random_doubles(count)) {
      const double odd = dice_.heads() ? model::kInfinity : model::kNaN;
      array.push_back(model::nearest<In>(static_cast<model::Compute<In>>(special && dice_() % 64 == 0 ? odd : number)));
      values.push_back(static_cast<double>(model::value_of(array.back())));
    }
    pointer = this->array<In>(place, array);
    return values;
  }
};

}  // namespace testing

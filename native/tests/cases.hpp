// Cases: shapes of arrays, and random rules. Over the whole test, all pairs of rules occur.
#pragma once

#include <random>
#include <vector>

#include "model.hpp"

namespace testing {

using namespace detent;
using model::Case;

struct Shape {
  const char* name;
  std::vector<int64_t> sizes, blocks;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The layout of an array whose axes are divided into blocks, as the Python side computes it, and its number of sets.
inline Layout layout_of(const Shape& shape, int64_t& sets) {
  Layout layout;
  const size_t last = shape.sizes.size() - 1;
  layout.cols = layout.size = shape.sizes[last];
  layout.block = std::min(shape.blocks[last], std::max<int64_t>(layout.cols, 1));
  sets = ceil_div(layout.cols, layout.block);
  layout.lead = static_cast<int>(last);
  for (size_t i = last; i-- > 0;) {
    layout.axis[i] = {shape.sizes[i], shape.blocks[i], sets};
    layout.size *= shape.sizes[i];
    sets *= ceil_div(shape.sizes[i], shape.blocks[i]);
  }
  return layout;
}

// Shapes of arrays whose last axis (or only axis) has this length, or whose rows are short.
inline std::vector<Shape> shapes(int64_t n) {
  const int64_t whole = std::max<int64_t>(n, 1);
  return {
      {"tensor", {n}, {whole}},
      {"first axis", {3, n}, {1, whole}},
      {"middle axis", {2, 3, n}, {2, 1, whole}},
      {"last axis", {9, n}, {9, 1}},
      {"last axis of tall arrays", {n / 2, 7}, {std::max<int64_t>(n / 2, 1), 1}},
      {"group 3", {2, n}, {1, 3}},
      {"group 32", {2, n}, {1, 32}},
      {"group 128", {2, n}, {1, 128}},
      {"group 3000", {2, n}, {1, 3000}},
      {"group 5 of the first axis", {7, n}, {5, 1}},
      {"block 2x5", {3, n}, {2, 5}},
      {"block 2x200", {3, n}, {2, 200}},
      {"rows of 5", {n / 4, 5}, {1, 5}},
      {"rows of 16", {n / 8, 16}, {1, 16}},
  };
}

class Dice {
 public:
  unsigned operator()() { return random_(); }
  int64_t below(int64_t count) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(count)); }
  bool heads() { return random_() % 2; }

  template <class Choice>
  Choice one_of(int count) {
    return static_cast<Choice>(random_() % static_cast<unsigned>(count));
  }

  // Random rules for integers of 1 to 16 bits or another format.
  void set_rules(Case& c) {
    c.dtype = one_of<Dtype>(4);
    c.fill = one_of<Fill>(3);
    c.mask = one_of<Mask>(4);
    c.grad = one_of<Grad>(2);
    c.find_nan = heads();
    c.exclusive = heads();
    if (random_() % 3) {
      set_integers(c);
    } else {
      set_format(c, model::kFormats[random_() % std::size(model::kFormats)]);
    }
    set_scale_rule(c);
  }

 private:
  void set_integers(Case& c) {
    c.kind = Kind::integers;
    c.division = one_of<Division>(2);
    c.zero_point = one_of<ZeroPoint>(2);
    c.rounding = one_of<Rounding>(3);
    c.is_signed = heads();
    c.no_zero = heads();
    c.codes = one_of<Codes>(3);
    c.bits = c.codes == Codes::words ? 9 + one_of<int>(8) : 1 + one_of<int>(8);
    c.qmin = c.is_signed ? -std::ldexp(1.0, c.bits - 1) : 0.0;
    c.qmax = c.qmin + std::ldexp(1.0, c.bits) - 1;
  }

  // Other formats have a single way to divide and to round, no zero point, and no mask by value.
  void set_format(Case& c, const model::Format& format) {
    c.format = &format;
    c.kind = format.kind;
    c.bits = format.bits;
    c.mantissa = format.mantissa;
    c.min_exponent = format.min_exponent;
    c.largest = c.qmax = format.values.back();
    c.qmin = -c.qmax;
    c.is_signed = false;
    c.no_zero = true;
    c.codes = heads() ? Codes::bytes : Codes::packed;
    if (c.mask == Mask::value) c.mask = Mask::code;
  }

  // Symmetric rules need a code above the zero point.
  void set_scale_rule(Case& c) {
    ScaleRule& rule = c.rule;
    rule.zero_point = c.format || c.is_signed ? 0.0 : std::floor((c.qmin + c.qmax + 1) / 2);
    rule.symmetric = one_of<Symmetric>(4);
    if (c.format && rule.symmetric == Symmetric::affine) rule.symmetric = Symmetric::qmax;
    if (c.qmax - rule.zero_point < 1 && !c.format) rule.symmetric = Symmetric::affine;
    rule.zero_range = one_of<ZeroRange>(5);
    rule.floor = heads() ? 1e-3 : 1e-10;
    rule.include_zero = heads();
    rule.half_away = heads();
  }

  std::mt19937 random_{20240229};
};

}  // namespace testing

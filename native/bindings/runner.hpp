// Runner: the kernels of one plan, with its layout and rules. Calls check only that the arrays are as large as the plan says,
// so that no caller can make a kernel read or write beyond them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "detent/levels.hpp"

namespace detent {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Lead = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

int64_t item_size(Dtype dtype);
const Kernels& kernels_of(int level);
void require_bytes(const char* name, size_t given, int64_t expected);

class Runner {
 public:
  // `rules` are those of a Call by name; `lead` holds size, block and stride in sets of every axis but the last.
  Runner(int level, int64_t cols, int64_t block, const Lead& lead, int64_t sets, const nb::dict& rules);

  // These return whether NaN was met, where it is looked for.
  bool quantize(const Input& x, const Input& scale, const Input& zero, const Output& codes) const;
  bool dequantize(const Input& codes, const Input& scale, const Input& zero, const Output& out) const;
  bool fake_quantize(const Input& x, const Input& scale, const Input& zero, const Output& out) const;
  bool fake_quantize_masked(const Input& x, const Input& scale, const Input& zero, const Output& out,
                            const Output& mask) const;
  bool backward(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& out) const;
  bool dequantize_backward(const Input& g, const Input& scale, const Input& zero, const Output& out) const;
  void masked_backward(const Input& g, const Input& mask, const Output& out) const;

  // The float64 sums of every set for the gradients of scale and zero point.
  void learned(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& of_scale,
               const Output& of_zero) const;

  // The bounds of each set, which must be (inf, -inf) before; returns how many elements are not finite.
  int64_t minmax(const Input& x, const Output& low, const Output& high) const;

  // Scales and zero points of bounds in double; returns whether all ranges gave some.
  bool derive(const Input& low, const Input& high, const Output& scale, const Output& zero) const;

  // minmax, derive and fake_quantize in one; returns how many elements are not finite, and whether all is well. Where not,
  // what is in out is undefined.
  std::tuple<int64_t, bool> observe(const Input& x, const Output& low, const Output& high, const Output& scale,
                                    const Output& zero, const Output& out) const;

  // Adds to counts[row][set][bin] what falls into the rows that `rows` gives each sign and exponent; `missed` is set for
  // those of other elements. Weights are one per element, or none. Bounds as for minmax. Returns how many elements are not
  // finite, and whether all others are in the range of a float.
  std::tuple<int64_t, bool> histogram(const Input& x, const Input& weights, const Input& rows, int64_t row_count,
                                      const Output& counts, const Output& missed, const Output& low,
                                      const Output& high) const;

 private:
  int64_t boxes(bool columns) const;
  int64_t data_bytes() const { return call_.layout.size * item_size(call_.dtype); }
  int64_t set_bytes() const { return sets_ * (call_.dtype == Dtype::f64 ? 8 : 4); }
  int64_t code_bytes() const;
  bool run(Call& call, Kernel kernel, const Input& scale, const Input& zero) const;

  const Kernels& kernels_;
  int64_t sets_;
  bool shared_;  // whether a set may have elements in several rows
  Call call_;
  std::vector<float> levels_, bounds_;
  std::vector<double> wide_levels_, wide_bounds_;
};

}  // namespace detent

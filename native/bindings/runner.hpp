// Runner: the kernels of one plan, with its layout and rules. Calls check only the sizes of arrays, so that no caller
// can make a kernel read or write outside of them.
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
  // `rules` are the fields of a Call by name. `lead` has the size, the block and the stride (in sets) of every axis
  // except the last.
  Runner(int level, int64_t cols, int64_t block, const Lead& lead, int64_t sets, const nb::dict& rules);

  // These return whether x contains NaN; false if they do not check.
  bool quantize(const Input& x, const Input& scale, const Input& zero, const Output& codes) const;
  bool quantize_masked(const Input& x, const Input& scale, const Input& zero, const Output& codes,
                       const Output& mask) const;
  bool dequantize(const Input& codes, const Input& scale, const Input& zero, const Output& out) const;
  bool fake_quantize(const Input& x, const Input& scale, const Input& zero, const Output& out) const;
  bool fake_quantize_masked(const Input& x, const Input& scale, const Input& zero, const Output& out,
                            const Output& mask) const;
  bool backward(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& out) const;
  bool dequantize_backward(const Input& g, const Input& scale, const Input& zero, const Output& out) const;
  void masked_backward(const Input& g, const Input& mask, const Output& out) const;

  // Computes the float64 sums of every set for the gradients of scale and zero point. If `points` is not 0, g and x are
  // channels-last images of `points` times `channels` elements; the sums are those of C order.
  void learned(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& of_scale,
               const Output& of_zero, int64_t points, int64_t channels) const;

  // Computes the bounds of each set, which must be (inf, -inf) before; returns the number of non-finite elements.
  int64_t minmax(const Input& x, const Output& low, const Output& high) const;

  // Derives scales and zero points from bounds in double; returns whether all ranges are valid.
  bool derive(const Input& low, const Input& high, const Output& scale, const Output& zero) const;

  // Runs minmax, derive and fake_quantize (or quantize, if to_codes) in one call; returns the number of non-finite elements, and whether all
  // ranges are valid. If not, the contents of out are undefined.
  std::tuple<int64_t, bool> observe(const Input& x, const Output& low, const Output& high, const Output& scale,
                                    const Output& zero, const Output& out, bool to_codes) const;

  // Counts elements in counts[row][set][bin], where `rows` maps each sign and exponent to a row or -1; `missed` is set
  // for signs and exponents that occur without a row. Weights are one per element, or empty. Bounds must be (inf, -inf)
  // before, as for minmax. Returns the number of non-finite elements, and whether all finite elements are in the range
  // of a float.
  std::tuple<int64_t, bool> histogram(const Input& x, const Input& weights, const Input& rows, int64_t row_count,
                                      const Output& counts, const Output& missed, const Output& low,
                                      const Output& high) const;

  // Searches the scale and zero point with the least squared error of every set, from the given ones downward; `low` and
  // `high` are the bounds of the sets. `factors` has the scale of each position relative to the first.
  void best_scales(const Input& x, const Input& low, const Input& high, const Input& scale, const Input& zero,
                   const Input& factors, int64_t coarse, bool refine, double least, const Output& best_scale,
                   const Output& best_zero, const Output& errors) const;

  // The same operations on memory that the caller has checked, without the GIL: for LayerStep. `call` is a copy of
  // `rules()` with x, g, out, mask and codes set.
  const Call& rules() const { return call_; }
  const Kernels& kernels() const { return kernels_; }
  int64_t sets() const { return sets_; }
  bool run_at(Call& call, Kernel kernel, const void* scale, const void* zero, bool backwards = false) const;
  int64_t minmax_at(const void* x, void* low, void* high) const;
  bool derive_at(const void* low, const void* high, void* scale, void* zero) const;
  std::tuple<int64_t, bool> observe_at(const void* x, void* low, void* high, void* scale, void* zero, void* out,
                                       bool to_codes) const;
  // of_zero may be null
  void learned_at(const void* g, const void* x, const void* scale, const void* zero, double* of_scale,
                  double* of_zero, int64_t points, int64_t channels) const;
  void require_images(int64_t points, int64_t channels) const;

 private:
  int64_t boxes(bool columns) const;
  int64_t largest_set() const;
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

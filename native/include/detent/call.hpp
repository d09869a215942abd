// Call: the arguments of one kernel run, set by the plan. Plain data, without Python objects and ownership.
#pragma once

#include <atomic>
#include <cstdint>

#include "detent/layout.hpp"
#include "detent/pool.hpp"

namespace detent {

enum class Dtype : int { f16, bf16, f32, f64 };
enum class Division : int { divide, reciprocal };
enum class ZeroPoint : int { after_round, before_round };
enum class Rounding : int { half_even, half_away, floor };
enum class Fill : int { none, zero_point, qmin };          // the code that replaces NaN
enum class Mask : int { identity, code, value, hard_tanh };  // where the gradient passes
enum class Grad : int { fake, quantize };                  // quantize: the gradient is divided by the scale
enum class Kind : int { integers, small_floats, codebook };  // kind of the format

// The terms of error_sums; in squares and products, values are multiplied by their factor first.
enum class Term : int { value, square, squared_error, absolute_error, product };

// Rule that derives scale and zero point from a range; the names are those of detent.convention.
enum class Symmetric : int { affine, qmax, half_span, tight };
enum class ZeroRange : int { unit, unit_at_qmin, eps, width, error };

struct ScaleRule {
  Symmetric symmetric = Symmetric::affine;
  ZeroRange zero_range = ZeroRange::unit;
  double floor = 0;        // lower limit of the scale (eps) or of the width of a range (width)
  double zero_point = 0;   // used if the rule is symmetric
  bool include_zero = true;
  bool half_away = false;  // whether zero points are rounded half away from zero
};

// Storage of codes: one per byte, one per two bytes, or packed at `bits` each.
enum class Codes : int { bytes, words, packed };

struct Call {
  Layout layout;
  Dtype dtype = Dtype::f32;  // type of x, g and y
  Division division = Division::divide;
  ZeroPoint zero_point = ZeroPoint::after_round;
  Rounding rounding = Rounding::half_even;
  Fill fill = Fill::none;
  Mask mask = Mask::code;
  Grad grad = Grad::fake;
  bool find_nan = false;   // whether fake_quantize checks for NaN; quantize always does
  bool exclusive = false;  // whether the bounds of the mask are exclusive
  bool is_signed = true;   // whether codes are signed
  bool no_zero = false;    // every zero point is 0
  int bits = 8;
  Codes codes = Codes::bytes;
  double qmin = 0, qmax = 0;

  Kind kind = Kind::integers;
  int mantissa = 0, min_exponent = 0;  // float formats: bits of the mantissa, exponent of the smallest normal number
  double largest = 0;                  // float formats: the largest finite value
  const void* levels = nullptr;        // not for integers: the value of each of 256 codes, in the compute type
  const void* bounds = nullptr;        // codebooks: rounding boundaries between codes, in the compute type

  const void* x = nullptr;
  const void* g = nullptr;
  const void* scale = nullptr;  // one scale per set, in the compute type (double for f64, else float)
  const void* zero = nullptr;   // one zero point per set, in the compute type
  const void* codes_in = nullptr;
  void* out = nullptr;

  void* low = nullptr;   // minmax, observe, derive: the bounds of each set, in the compute type unless wide_bounds
  void* high = nullptr;
  bool shared = false;   // minmax: a set may have elements in several rows
  Lock* merging = nullptr;  // minmax and histogram: lock that is held while the results of parts are merged

  uint8_t* mask_bits = nullptr;          // fake_quantize: output for the mask, one bit per element, or null
  const uint8_t* mask_in = nullptr;      // masked_backward: the mask

  // Sums: each set has `blocks` sums, one per kLeaf elements. high_sums are those for zero points, or null.
  double* sums = nullptr;
  double* high_sums = nullptr;
  int64_t blocks = 1, tile = 1;

  // Scratch memory. A part of `step` pieces of work needs 2 * kLeaf * tile numbers (learned) or `room` (best_scales);
  // for grid_errors, see kGridArrays.
  double* scratch = nullptr;
  int64_t step = 1;

  // learned: if `points` is not 0, x and g (f32) are channels-last: `points` times `channels` elements per image, while
  // sums add elements in C order, channel by channel. Each set has whole images. `planes` has 2 * planes_of * pitch_of
  // numbers per part.
  int64_t points = 0, channels = 0;
  float* planes = nullptr;

  // scale_sums: one offset and one bias per column; the sums are floats or int32. requantize: `bias` has multipliers.
  const int32_t* offset = nullptr;
  const float* bias = nullptr;
  bool float_sums = false, biased = false;

  bool divides = false;  // factor_rows: whether rows are divided by their factors

  Term term = Term::value;
  Dtype second_dtype = Dtype::f32;          // error_sums: type of g
  double factor[2] = {1, 1}, second_factor[2] = {1, 1};  // error_sums: factor of x (or of the error), factor of g

  // histogram: `rows` has the row of each sign and exponent, or -1. `counts` has the counts of each row, set and bin;
  // a bin is the leading `bits` bits of the mantissa.
  const int16_t* rows = nullptr;
  const int64_t* weights = nullptr;  // weight of each element; null means that all weights are 1
  int64_t* counts = nullptr;
  uint8_t* missed = nullptr;  // set for signs and exponents that occur but have no row
  int64_t sets = 1;

  // grid_errors: lower and upper edges of bins, their mass in each set, and `candidates` scales and zero points per
  // set.
  const double *lower = nullptr, *upper = nullptr, *mass = nullptr, *scales = nullptr, *zeros = nullptr;
  // Only for uneven levels: midpoints between levels, and the integral of the error up to each level.
  const double *middles = nullptr, *whole = nullptr;
  double* errors = nullptr;
  int64_t bins = 0, candidates = 0, level_count = 0;
  double norm = 2;

  // best_scales: the scale of each position relative to the first, the distance between positions in the descent,
  // whether positions between them are tried, the smallest scale, and the scratch memory of a part in doubles, which is
  // 0 if sets are searched in place.
  const double* factors = nullptr;
  int64_t positions = 0, coarse = 1, room = 0;
  bool refine = true;
  double least = 0;

  ScaleRule rule;             // observe, derive: how scales and zero points are derived from bounds
  bool to_codes = false;      // observe: whether to write codes instead of fake-quantized values
  bool wide_bounds = false;   // derive: low and high are double for every compute type
  void* scale_out = nullptr;  // observe, derive: output
  void* zero_out = nullptr;
  std::atomic<bool>* refused = nullptr;  // set if a range is invalid; encode_blocks: if an element is not finite
  std::atomic<bool>* extreme = nullptr;  // encode_blocks: set if scales of a block may be infinite or 0

  std::atomic<bool>* saw_nan = nullptr;       // set if a kernel checks for NaN and finds it
  std::atomic<int64_t>* nonfinite = nullptr;  // minmax: number of non-finite elements

  // encode_blocks, decode_blocks: number of the block format's type; encode_blocks: the weight of each column or null,
  // and the mean square of each row or null; a row has `blocks` blocks.
  int block_type = 0;
  const float* importance = nullptr;
  const float* row_means = nullptr;
};

constexpr int64_t kGrain = 4096;
constexpr int64_t kLeaf = 1024;  // elements per block of a sum
constexpr int64_t kTile = 16;    // sets of single columns per box

// Channels-last images: the channels that are copied to C order at once, and the distance between two of them in `planes`.
// All copied channels fit the cache if `points` is not too large. The distance is an odd number of cache lines, so that
// channels do not share cache sets.
constexpr int64_t kPlaneElements = 65536, kLine = 16;
constexpr int64_t planes_of(int64_t points, int64_t channels) {
  const int64_t lines = kPlaneElements / (points * kLine), most = (lines < 1 ? 1 : lines) * kLine;
  return channels < most ? channels : most;
}
constexpr int64_t pitch_of(int64_t points) { return ((points + kLine - 1) / kLine | 1) * kLine; }
constexpr int64_t kChecked = 65536;  // bytes per block of a checksum
constexpr int kExponents = 512;  // exponents of float32, times two signs

// Scratch memory of each part of grid_errors: kGridArrays arrays, each with bins + kGridPadding numbers.
constexpr int64_t kGridArrays = 5, kGridPadding = 8;

// One table per instruction set. A kernel processes elements [begin, end) of the flat array, where begin is a multiple
// of kGrain. Kernels that sum process pieces, blocks or sets; their source files say which.
#define DETENT_FOR_EACH_ARRAY_KERNEL(ROW)                                                                        \
  ROW(quantize) ROW(dequantize) ROW(fake_quantize) ROW(backward) ROW(dequantize_backward) ROW(masked_backward)   \
  ROW(minmax) ROW(derive) ROW(observe) ROW(learned) ROW(fold_sums) ROW(error_sums) ROW(largest_error)            \
  ROW(pack) ROW(unpack) ROW(histogram) ROW(grid_errors) ROW(best_scales) ROW(checksum)                           \
  ROW(scale_sums) ROW(requantize) ROW(factor_rows) ROW(sum_rows)
#define DETENT_FOR_EACH_BLOCK_KERNEL(ROW) ROW(encode_blocks) ROW(row_means) ROW(decode_blocks)
#define DETENT_FOR_EACH_KERNEL(ROW) DETENT_FOR_EACH_ARRAY_KERNEL(ROW) DETENT_FOR_EACH_BLOCK_KERNEL(ROW)

using Kernel = void (*)(const Call&, int64_t begin, int64_t end);

struct Kernels {
#define DETENT_FIELD(NAME) Kernel NAME;
  DETENT_FOR_EACH_KERNEL(DETENT_FIELD)
#undef DETENT_FIELD
};

}  // namespace detent

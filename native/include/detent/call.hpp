// Call: everything one run of a kernel needs, decided by the plan. Plain data; no Python, no ownership.
#pragma once

#include <atomic>
#include <cstdint>

#include "detent/layout.hpp"

namespace detent {

enum class Dtype : int { f16, bf16, f32, f64 };
enum class Division : int { divide, reciprocal };
enum class ZeroPoint : int { after_round, before_round };
enum class Rounding : int { half_even, half_away, floor };
enum class Fill : int { none, zero_point, qmin };          // the code NaN gets
enum class Mask : int { identity, code, value, hard_tanh };  // where the gradient passes
enum class Grad : int { fake, quantize };                  // quantize: divided by the scale

// How codes lie in memory: one per byte, one per two bytes, or packed at `bits` each.
enum class Codes : int { bytes, words, packed };

struct Call {
  Layout layout;
  Dtype dtype = Dtype::f32;  // of x, g and y
  Division division = Division::divide;
  ZeroPoint zero_point = ZeroPoint::after_round;
  Rounding rounding = Rounding::half_even;
  Fill fill = Fill::none;
  Mask mask = Mask::code;
  Grad grad = Grad::fake;
  bool find_nan = false;   // whether fake_quantize looks for NaN; quantize always does
  bool exclusive = false;  // bounds of the mask
  bool is_signed = true;   // of the codes
  bool no_zero = false;    // every zero point is 0
  int bits = 8;
  Codes codes = Codes::bytes;
  double qmin = 0, qmax = 0;

  const void* x = nullptr;
  const void* g = nullptr;
  const void* scale = nullptr;  // compute type (double for f64, else float), one per set
  const void* zero = nullptr;   // the zero points as the compute type, one per set
  const void* codes_in = nullptr;
  void* out = nullptr;
  void* high = nullptr;  // minmax: the upper bounds, beside the lower ones in out
  bool shared = false;   // minmax: a set may have elements in several rows

  std::atomic<bool>* saw_nan = nullptr;       // set where NaN was met and looked for
  std::atomic<int64_t>* nonfinite = nullptr;  // minmax: how many elements are not finite
};

// One table per CPU level. A kernel works on elements [begin, end) of the flat array; begin is a multiple of kGrain.
constexpr int64_t kGrain = 4096;

struct Kernels {
  void (*quantize)(const Call&, int64_t begin, int64_t end);
  void (*dequantize)(const Call&, int64_t begin, int64_t end);
  void (*fake_quantize)(const Call&, int64_t begin, int64_t end);
  void (*backward)(const Call&, int64_t begin, int64_t end);            // of fake_quantize and quantize
  void (*dequantize_backward)(const Call&, int64_t begin, int64_t end);
  void (*minmax)(const Call&, int64_t begin, int64_t end);
};

}  // namespace detent

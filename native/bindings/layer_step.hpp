// LayerStep: what a prepared layer does around its matmul or convolution in a training step, in one call before the
// product and one after it, in each direction. It has the plans of both operands, pointers to the buffers of their
// quantizers, and the settings that do not change from step to step.
//
// Addresses come from Python as integers. The caller guarantees that they belong to float32 tensors (codes: one byte)
// of the shapes for which the record was made; it makes a new record if a shape, an order of axes or a buffer changes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runner.hpp"

namespace detent {

enum class Mode : int { stored, ema, batch, learned };

// The quantizer of one operand.
struct Side {
  const Runner* runner = nullptr;
  Mode mode = Mode::stored;
  float *low = nullptr, *high = nullptr;  // EMA range
  float* scale = nullptr;
  int32_t* zero_point = nullptr;
  uint8_t* initialized = nullptr;
  float* written = nullptr;  // low, high, scale and zero point of the last step, one row each
  // learned: scale = initial_scale * max(1 + rate * scale_shift, growth), zero point = initial + span * shift
  const float *initial_scale = nullptr, *initial_zero = nullptr, *scale_shift = nullptr, *zero_shift = nullptr;
  float decay = 0, rest = 0;  // EMA: weights of the old and the new range
  float rate = 1, span = 0, growth = 0;
  bool held = false;      // learned: a zero point that starts at qmin is not trained
  bool after_relu = false;
  double factor = 0;      // learned: factor of the gradients of scales and zero points
  int64_t points = 0, channels = 0;  // if points is not 0: elements and channels of channels-last images
};

// What one forward pass used; its backward pass needs it.
struct StepValues {
  std::vector<float> x_scale, x_zero, w_scale, w_zero, factor, unit, bias;
  std::vector<int32_t> offset;
  int zero_point = 0;
  bool clips = true;           // whether an element of x may be clipped
  bool has_bias_codes = false;  // whether the offsets contain the bias
};

class LayerStep {
 public:
  LayerStep(nb::object x_runner, nb::object w_runner, const nb::dict& settings);

  // Quantizes x and the weight, and updates the quantizers. Returns null, without a change of state, if the general
  // path must decide: NaN, infinities, an invalid range, parameters that are not set. A mask is written if its address
  // is not 0. `unit_out` (or 0) receives the scale of each output channel.
  std::unique_ptr<StepValues> forward(uintptr_t x, uintptr_t x_out, uintptr_t mask, uintptr_t w, uintptr_t w_out,
                                      uintptr_t bias, uintptr_t unit_out);

  // Scales sums of products of codes in place; returns whether they are exact.
  bool finish(const StepValues& values, uintptr_t sums, int64_t size, bool float_sums) const;

  // Fake-quantizes x (or dequantizes its codes) and the weight again for the backward product; 0 leaves one out. A mask
  // is written if its address is not 0.
  void operands(const StepValues& values, uintptr_t x, bool from_codes, uintptr_t x_out, uintptr_t mask, uintptr_t w,
                uintptr_t w_out) const;

  // Sets the elements of g (the layout of x) to 0 whose bit in the mask is 0.
  void clear(uintptr_t g, uintptr_t mask) const;

  // Makes the gradient of x or of the weight from g in place, and the gradients of its learned shifts.
  void learned(const StepValues& values, bool of_weight, uintptr_t g, uintptr_t x, uintptr_t of_scale,
               uintptr_t of_zero) const;

 private:
  bool input_parameters(const Side& side, const void* x, std::vector<float>& bounds, StepValues& values) const;
  bool weight_parameters(const void* w, void* out, std::vector<float>& bounds, StepValues& values) const;
  bool learned_parameters(const Side& side, std::vector<float>& scale, std::vector<float>& zero) const;
  bool may_clip(const StepValues& values, const std::vector<float>& bounds) const;
  void units(const StepValues& values, const void* codes, const float* bias, StepValues& into) const;
  void find_factor(StepValues& values) const;
  void apply_factor(const void* w, const std::vector<float>& factor, void* out, bool divides) const;
  static void store(const Side& side, const std::vector<float>& bounds, const std::vector<float>& scale,
                    const std::vector<float>& zero);

  nb::object x_owner_, w_owner_;
  Side x_, w_;
  bool to_codes_, is_linear_, float_bias_, adds_codes_;
  const float *variance_ = nullptr, *gamma_ = nullptr;  // of a folded batch norm
  float eps_ = 0;
  int64_t channels_;
  mutable std::mutex mutex_;
};

}  // namespace detent

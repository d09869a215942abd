#include "layer_step.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "launch.hpp"

namespace detent {
namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
T* pointer(const nb::dict& settings, const char* name) {
  return at<T>(nb::cast<uintptr_t>(settings[name]));
}

Side side_of(const nb::object& runner, const nb::dict& settings) {
  Side side;
  side.runner = nb::cast<const Runner*>(runner);
  side.mode = static_cast<Mode>(nb::cast<int>(settings["mode"]));
  side.low = pointer<float>(settings, "lo");
  side.high = pointer<float>(settings, "hi");
  side.scale = pointer<float>(settings, "scale");
  side.zero_point = pointer<int32_t>(settings, "zero_point");
  side.initialized = pointer<uint8_t>(settings, "initialized");
  side.written = pointer<float>(settings, "written");
  side.initial_scale = pointer<const float>(settings, "initial_scale");
  side.initial_zero = pointer<const float>(settings, "initial_zero_point");
  side.scale_shift = pointer<const float>(settings, "scale_shift");
  side.zero_shift = pointer<const float>(settings, "zero_point_shift");
  const double decay = nb::cast<double>(settings["decay"]);
  side.decay = static_cast<float>(decay);
  side.rest = static_cast<float>(1.0 - decay);
  side.rate = static_cast<float>(nb::cast<double>(settings["rate"]));
  side.span = static_cast<float>(nb::cast<double>(settings["span"]));
  side.growth = static_cast<float>(nb::cast<double>(settings["min_growth"]));
  side.held = nb::cast<bool>(settings["held"]);
  side.after_relu = nb::cast<bool>(settings["after_relu"]);
  side.factor = nb::cast<double>(settings["factor"]);
  side.points = nb::cast<int64_t>(settings["points"]);
  side.channels = nb::cast<int64_t>(settings["channels"]);
  side.runner->require_images(side.points, side.channels);
  return side;
}

size_t count_of(int64_t number) { return static_cast<size_t>(number); }

// Memory for one scaled weight, kept by each thread for the next layer.
float* scratch_of(int64_t size) {
  thread_local std::vector<float> memory;
  if (memory.size() < count_of(size)) memory.resize(count_of(size));
  return memory.data();
}

// If at most one word of a mask in so many has a zero, the others are skipped.
constexpr int64_t kFewClipping = 16;

uint64_t word_at(const uint8_t* bits, int64_t word) {
  uint64_t all;
  std::memcpy(&all, bits + 8 * word, sizeof all);
  return all;
}

bool is_valid_scale(float scale) { return scale >= std::numeric_limits<float>::min() && std::isfinite(scale); }

}  // namespace

LayerStep::LayerStep(nb::object x_runner, nb::object w_runner, const nb::dict& settings)
    : x_owner_(std::move(x_runner)), w_owner_(std::move(w_runner)) {
  x_ = side_of(x_owner_, nb::cast<nb::dict>(settings["x"]));
  w_ = side_of(w_owner_, nb::cast<nb::dict>(settings["w"]));
  to_codes_ = nb::cast<bool>(settings["to_codes"]);
  is_linear_ = nb::cast<bool>(settings["is_linear"]);
  float_bias_ = nb::cast<bool>(settings["float_bias"]);
  channels_ = nb::cast<int64_t>(settings["channels"]);
  variance_ = pointer<const float>(settings, "running_var");
  gamma_ = pointer<const float>(settings, "gamma");
  eps_ = static_cast<float>(nb::cast<double>(settings["eps"]));
  adds_codes_ = to_codes_ && !float_bias_;
  for (const Side* side : {&x_, &w_}) {
    if (side->runner->rules().dtype != Dtype::f32) throw std::invalid_argument("a step has float32 operands");
    if (side->runner->rules().codes != Codes::bytes) throw std::invalid_argument("a step has codes of one byte");
  }
  if (channels_ < 1 || w_.runner->rules().layout.size % channels_) throw std::invalid_argument("ragged channels");
  if (w_.runner->sets() != 1 && w_.runner->sets() != channels_) throw std::invalid_argument("a scale per channel");
  if (to_codes_ && x_.runner->sets() != 1) throw std::invalid_argument("one scale for the input's codes");
}

// Parameters

bool LayerStep::learned_parameters(const Side& side, std::vector<float>& scale, std::vector<float>& zero) const {
  if (!*side.initialized) return false;
  const Call& rules = side.runner->rules();
  const float qmin = static_cast<float>(rules.qmin), qmax = static_cast<float>(rules.qmax);
  for (size_t i = 0; i < scale.size(); ++i) {
    const float move = side.rate * side.scale_shift[i];
    const float grown = 1.0f + move;
    scale[i] = side.initial_scale[i] * (grown < side.growth ? side.growth : grown);
    float whole = side.initial_zero[i];
    if (side.zero_shift && !(side.held && side.initial_zero[i] == qmin)) {
      const float shift = side.span * side.zero_shift[i];
      whole = side.initial_zero[i] + shift;
    }
    if (!is_valid_scale(scale[i]) || !std::isfinite(whole)) return false;
    zero[i] = side.zero_shift ? std::min(std::max(std::nearbyint(whole), qmin), qmax) : static_cast<float>(side.zero_point[i]);
  }
  return true;
}

bool LayerStep::input_parameters(const Side& side, const void* x, std::vector<float>& bounds, StepValues& values) const {
  const size_t sets = count_of(side.runner->sets());
  values.x_scale.resize(sets);
  values.x_zero.resize(sets);
  if (side.mode == Mode::learned) return learned_parameters(side, values.x_scale, values.x_zero);
  if (side.mode == Mode::stored) {
    for (size_t i = 0; i < sets; ++i) {
      if (!*side.initialized || !is_valid_scale(side.scale[i])) return false;
      values.x_scale[i] = side.scale[i];
      values.x_zero[i] = static_cast<float>(side.zero_point[i]);
    }
    return true;
  }
  bounds.assign(4 * sets, std::numeric_limits<float>::infinity());
  float *low = bounds.data(), *high = low + sets, *seen_low = high + sets, *seen_high = seen_low + sets;
  std::fill_n(high, sets, -std::numeric_limits<float>::infinity());
  if (side.runner->minmax_at(x, low, high)) return false;
  std::vector<double> wide(2 * sets);
  for (size_t i = 0; i < sets; ++i) {
    low[i] += 0.0f;  // turns -0.0 into +0.0
    high[i] += 0.0f;
    seen_low[i] = low[i];
    seen_high[i] = high[i];
    if (side.after_relu) {
      low[i] = low[i] > 0 ? low[i] : 0.0f;
      high[i] = high[i] > 0 ? high[i] : 0.0f;
    }
    if (!(low[i] <= high[i])) return false;
    if (side.mode == Mode::ema) {
      if (!*side.initialized || !(side.low[i] <= side.high[i])) return false;
      const float old_low = side.decay * side.low[i], new_low = side.rest * low[i];
      const float old_high = side.decay * side.high[i], new_high = side.rest * high[i];
      low[i] = old_low + new_low;
      high[i] = old_high + new_high;
      if (!(low[i] <= high[i])) return false;
    }
    wide[i] = static_cast<double>(low[i]);
    wide[sets + i] = static_cast<double>(high[i]);
  }
  return side.runner->derive_at(wide.data(), wide.data() + sets, values.x_scale.data(), values.x_zero.data());
}

void LayerStep::find_factor(StepValues& values) const {
  if (!variance_) return;
  values.factor.resize(count_of(channels_));
  for (size_t i = 0; i < values.factor.size(); ++i) {
    const float variance = variance_[i] + eps_;
    const float gain = 1.0f / std::sqrt(variance);
    const float scaled = gamma_ ? gain * gamma_[i] : gain;
    values.factor[i] = scaled == 0 ? 1.0f : scaled;
  }
}

void LayerStep::apply_factor(const void* w, const std::vector<float>& factor, void* out, bool divides) const {
  Call call = w_.runner->rules();
  const int64_t size = call.layout.size;
  call.layout.cols = size / channels_;
  call.x = w;
  call.out = out;
  call.scale = factor.data();
  call.divides = divides;
  launch(call, w_.runner->kernels().factor_rows, channels_, 1, size);
}

bool LayerStep::weight_parameters(const void* w, void* out, std::vector<float>& bounds, StepValues& values) const {
  const size_t sets = count_of(w_.runner->sets());
  values.w_scale.resize(sets);
  values.w_zero.resize(sets);
  const void* scaled = w;
  if (variance_) {
    float* memory = scratch_of(w_.runner->rules().layout.size);
    apply_factor(w, values.factor, memory, false);
    scaled = memory;
  }
  if (w_.mode == Mode::batch) {
    bounds.resize(2 * sets);
    const auto [nonfinite, good] = w_.runner->observe_at(scaled, bounds.data(), bounds.data() + sets,
                                                         values.w_scale.data(), values.w_zero.data(), out, to_codes_);
    if (nonfinite || !good) return false;
    for (float& each : bounds) each += 0.0f;
  } else {
    if (!learned_parameters(w_, values.w_scale, values.w_zero)) return false;
    Call call = w_.runner->rules();
    call.x = scaled;
    call.out = out;
    const Kernels& kernels = w_.runner->kernels();
    const bool saw_nan = w_.runner->run_at(call, to_codes_ ? kernels.quantize : kernels.fake_quantize,
                                           values.w_scale.data(), values.w_zero.data());
    if (to_codes_ && saw_nan) return false;
  }
  if (variance_ && !to_codes_) apply_factor(out, values.factor, out, true);
  return true;
}

// The mask is monotone: if neither the smallest nor the largest element is clipped, none is.
bool LayerStep::may_clip(const StepValues& values, const std::vector<float>& bounds) const {
  const Call& rules = x_.runner->rules();
  if (rules.mask == Mask::identity) return false;
  if (bounds.empty() || x_.runner->sets() != 1) return true;
  const float ends[2] = {bounds[2], bounds[3]}, ones[2] = {1, 1};
  float pass[2] = {0, 0};
  Call call = rules;
  call.layout = Layout{};
  call.layout.size = call.layout.cols = call.layout.block = 2;
  call.x = ends;
  call.g = ones;
  call.out = pass;
  call.scale = values.x_scale.data();
  call.zero = values.x_zero.data();
  x_.runner->kernels().backward(call, 0, 2);
  return pass[0] != 1 || pass[1] != 1;
}

// The scale of each output channel, and what is added to its sums; see detent.torch.integer_product.
void LayerStep::units(const StepValues& values, const void* codes, const float* bias, StepValues& into) const {
  const size_t channels = count_of(channels_), sets = values.w_scale.size();
  into.unit.resize(channels);
  into.offset.assign(channels, 0);
  bool fits = bias != nullptr && adds_codes_;
  for (size_t i = 0; i < channels; ++i) {
    float scale = values.w_scale[sets == 1 ? 0 : i];
    if (!values.factor.empty()) scale = scale / values.factor[i];
    into.unit[i] = scale * values.x_scale[0];
    fits = fits && std::fabs(into.unit[i]) >= std::numeric_limits<float>::min();
  }
  std::vector<double> whole(fits ? channels : 0);
  for (size_t i = 0; i < whole.size(); ++i) {
    whole[i] = std::nearbyint(static_cast<double>(bias[i]) / static_cast<double>(into.unit[i]));
    fits = fits && std::fabs(whole[i]) <= 2147483647.0;
  }
  into.has_bias_codes = fits;
  if (fits) std::transform(whole.begin(), whole.end(), into.offset.begin(), [](double each) { return static_cast<int32_t>(each); });
  if (!fits && bias) into.bias.assign(bias, bias + channels);
  into.zero_point = static_cast<int>(values.x_zero[0]);
  if (!is_linear_ || !into.zero_point) return;
  std::vector<int32_t> sums(channels);
  Call call = w_.runner->rules();
  const int64_t size = call.layout.size;
  call.layout.cols = size / channels_;
  call.codes_in = codes;
  call.out = sums.data();
  launch(call, w_.runner->kernels().sum_rows, channels_, 1, size);
  for (size_t i = 0; i < channels; ++i) {  // modulo 2^32, as integer kernels add
    into.offset[i] = static_cast<int32_t>(static_cast<uint32_t>(into.offset[i]) -
                                          static_cast<uint32_t>(into.zero_point) * static_cast<uint32_t>(sums[i]));
  }
}

void LayerStep::store(const Side& side, const std::vector<float>& bounds, const std::vector<float>& scale,
                      const std::vector<float>& zero) {
  if (side.mode == Mode::stored) return;
  const size_t sets = scale.size();
  for (size_t i = 0; i < sets; ++i) {
    side.scale[i] = scale[i];
    side.zero_point[i] = static_cast<int32_t>(zero[i]);
    if (side.mode == Mode::ema) {
      side.low[i] = bounds[i];
      side.high[i] = bounds[sets + i];
    }
    if (side.mode != Mode::learned) {
      side.written[i] = bounds[i];
      side.written[sets + i] = bounds[sets + i];
      side.written[2 * sets + i] = scale[i];
      side.written[3 * sets + i] = zero[i];
    }
  }
  *side.initialized = 1;
}

// Calls from Python

std::unique_ptr<StepValues> LayerStep::forward(uintptr_t x, uintptr_t x_out, uintptr_t mask, uintptr_t w, uintptr_t w_out,
                                               uintptr_t bias, uintptr_t unit_out) {
  auto values = std::make_unique<StepValues>();
  nb::gil_scoped_release unlocked;
  const std::lock_guard<std::mutex> alone(mutex_);
  std::vector<float> x_bounds, w_bounds;
  if (!input_parameters(x_, at<const void>(x), x_bounds, *values)) return nullptr;
  find_factor(*values);
  if (!weight_parameters(at<const void>(w), at<void>(w_out), w_bounds, *values)) return nullptr;
  values->clips = may_clip(*values, x_bounds);
  const Runner& runner = *x_.runner;
  Call call = runner.rules();
  std::atomic<bool> saw_nan{false};
  call.x = at<const void>(x);
  call.out = at<void>(x_out);
  call.scale = values->x_scale.data();
  call.zero = values->x_zero.data();
  call.saw_nan = &saw_nan;
  if (values->clips) call.mask_bits = at<uint8_t>(mask);
  const int64_t size = call.layout.size;
  launch(call, to_codes_ ? runner.kernels().quantize : runner.kernels().fake_quantize, size, kGrain, size, Cut::many,
         !x_bounds.empty() && size > kGrain);  // the end of x is still in the cache
  if (to_codes_) {
    if (saw_nan.load()) return nullptr;
    units(*values, at<const void>(w_out), at<const float>(bias), *values);
    if (unit_out) std::copy(values->unit.begin(), values->unit.end(), at<float>(unit_out));
  }
  store(x_, x_bounds, values->x_scale, values->x_zero);
  store(w_, w_bounds, values->w_scale, values->w_zero);
  return values;
}

bool LayerStep::finish(const StepValues& values, uintptr_t sums, int64_t size, bool float_sums) const {
  if (size % channels_) throw std::invalid_argument("the sums must fill whole rows");
  nb::gil_scoped_release unlocked;
  std::atomic<bool> inexact{false};
  Call call;
  call.biased = !values.bias.empty();
  call.float_sums = float_sums;
  call.layout.size = size;
  call.layout.cols = channels_;
  call.x = at<const void>(sums);
  call.offset = values.offset.data();
  call.scale = values.unit.data();
  call.bias = values.bias.data();
  call.out = at<void>(sums);
  call.refused = &inexact;
  launch(call, w_.runner->kernels().scale_sums, size, kGrain, size);
  return !inexact.load();
}

void LayerStep::operands(const StepValues& values, uintptr_t x, bool from_codes, uintptr_t x_out, uintptr_t mask,
                         uintptr_t w, uintptr_t w_out) const {
  nb::gil_scoped_release unlocked;
  if (x_out || mask) {
    const Runner& runner = *x_.runner;
    Call call = runner.rules();
    call.out = at<void>(x_out);
    call.mask_bits = at<uint8_t>(mask);
    (from_codes ? call.codes_in : call.x) = at<const void>(x);
    const Kernels& kernels = runner.kernels();
    runner.run_at(call, from_codes ? kernels.dequantize : kernels.fake_quantize, values.x_scale.data(), values.x_zero.data());
  }
  if (!w_out) return;
  const void* scaled = at<const void>(w);
  if (variance_) {
    float* memory = scratch_of(w_.runner->rules().layout.size);
    apply_factor(scaled, values.factor, memory, false);
    scaled = memory;
  }
  Call call = w_.runner->rules();
  call.x = scaled;
  call.out = at<void>(w_out);
  w_.runner->run_at(call, w_.runner->kernels().fake_quantize, values.w_scale.data(), values.w_zero.data());
  if (variance_) apply_factor(at<const void>(w_out), values.factor, at<void>(w_out), true);
}

void LayerStep::clear(uintptr_t g, uintptr_t mask) const {
  nb::gil_scoped_release unlocked;
  float* gradient = at<float>(g);
  const uint8_t* bits = at<const uint8_t>(mask);
  Call call = x_.runner->rules();
  const int64_t size = call.layout.size, words = size / 64;
  int64_t clipping = 0;
  for (int64_t word = 0; word < words; ++word) clipping += word_at(bits, word) != ~uint64_t{0};
  if (clipping > words / kFewClipping) {
    call.g = call.out = gradient;
    call.mask_in = bits;
    launch(call, x_.runner->kernels().masked_backward, size, kGrain, size);
    return;
  }
  const auto clear_range = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!(bits[i / 8] >> (i % 8) & 1)) gradient[i] = 0.0f;
    }
  };
  for (int64_t word = 0; clipping && word < words; ++word) {
    if (word_at(bits, word) != ~uint64_t{0}) clear_range(64 * word, 64 * word + 64);
  }
  clear_range(64 * words, size);
}

void LayerStep::learned(const StepValues& values, bool of_weight, uintptr_t g, uintptr_t x, uintptr_t of_scale,
                        uintptr_t of_zero) const {
  nb::gil_scoped_release unlocked;
  const Side& side = of_weight ? w_ : x_;
  const std::vector<float>&scale = of_weight ? values.w_scale : values.x_scale, &zero = of_weight ? values.w_zero : values.x_zero;
  const size_t sets = scale.size();
  std::vector<double> scale_sums(sets), zero_sums(sets);
  const Runner& runner = *side.runner;
  runner.learned_at(at<const void>(g), at<const void>(x), scale.data(), zero.data(), scale_sums.data(),
                    of_zero ? zero_sums.data() : nullptr, side.points, side.channels);
  float *to_scale = at<float>(of_scale), *to_zero = at<float>(of_zero);
  const float qmin = static_cast<float>(runner.rules().qmin);
  for (size_t i = 0; i < sets; ++i) {
    const float gs = static_cast<float>(scale_sums[i] * side.factor), gz = static_cast<float>(zero_sums[i] * side.factor);
    const float initial = side.initial_scale[i];
    const float unit = side.rate * initial;
    if (to_scale) to_scale[i] = gs / unit;
    if (!to_zero) continue;
    const float first = side.span * initial;
    const float area = first * initial;
    to_zero[i] = side.held && side.initial_zero[i] == qmin ? 0.0f : gz / area;
  }
  Call call = runner.rules();
  call.x = at<const void>(x);
  call.g = at<const void>(g);
  call.out = at<void>(g);
  runner.run_at(call, runner.kernels().backward, scale.data(), zero.data(), true);
}

}  // namespace detent

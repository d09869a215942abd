// Fused requantization of x = fl(sum * unit), where `sum` is a whole number and each channel has its unit: the sum is
// found again from x, and its code is rounded once. Elements that are not of this form keep what `out` contains.
//
//   sum  = round(fl(x * fl(1 / unit)))
//   code = clamp(round(fl(sum * multiplier)) + zero)
//
// `cols` elements of one channel follow each other, then those of the next of `channels` channels, and so on in turn.
// `bias` has the multipliers, `g` the inverses of the units, `factor` the scale and the zero point of the codes. `out` has codes or, without to_codes,
// fake-quantized values.
#include "detent/arithmetic.hpp"
#include "detent/chunks.hpp"

namespace {

struct Target {
  float scale, zero, low, high;
};

// With `each`, every element has its own channel.
template <class Out, bool each>
DETENT_LOOP void requantize_run(const float* x, const float* unit, const float* inverse, const float* multiplier,
                                const Target& to, Out* out, int64_t count) {
  DETENT_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) {
    const float u = unit[each ? i : 0], m = multiplier[each ? i : 0];
    const float sum = std::rint(x[i] * inverse[each ? i : 0]);
    const float code = clamped(std::rint(sum * m) + to.zero, to.low, to.high);
    if constexpr (std::is_same_v<Out, float>) {
      const float value = (code - to.zero) * to.scale;
      out[i] = sum * u == x[i] ? value : out[i];
    } else {
      const Out value = static_cast<Out>(static_cast<int32_t>(code == code ? code : to.low));
      out[i] = sum * u == x[i] ? value : out[i];
    }
  }
}

template <class Out>
void requantize_channels(const Call& call, int64_t begin, int64_t end) {
  const float *x = static_cast<const float*>(call.x), *unit = static_cast<const float*>(call.scale),
              *inverse = static_cast<const float*>(call.g);
  const Target to{static_cast<float>(call.factor[0]), static_cast<float>(call.factor[1]), static_cast<float>(call.qmin),
                  static_cast<float>(call.qmax)};
  Out* out = static_cast<Out*>(call.out);
  const int64_t cols = call.layout.cols, channels = call.channels;
  for (int64_t at = begin; at < end;) {
    const int64_t channel = at / cols % channels;
    const int64_t rest = cols == 1 ? channels - channel : cols - at % cols, count = least(rest, end - at);
    const auto run = cols == 1 ? requantize_run<Out, true> : requantize_run<Out, false>;
    run(x + at, unit + channel, inverse + channel, call.bias + channel, to, out + at, count);
    at += count;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void requantize(const Call& call, int64_t begin, int64_t end) {
  if (!call.to_codes) return requantize_channels<float>(call, begin, end);
  return call.is_signed ? requantize_channels<int8_t>(call, begin, end) : requantize_channels<uint8_t>(call, begin, end);
}

}  // namespace detent::DETENT_LEVEL

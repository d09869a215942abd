// The gradient of x: g where the mask is set, else 0; multiplied by the slope for HardTanh; divided by the scale for
// quantize. Masks select bits instead of multiplying, because g may be infinite. NaN in x has gradient 0 except for
// Identity.
#include <cstring>

#include "detent/bits.hpp"
#include "detent/mask.hpp"

namespace {

using detent::Grad;

inline float select(bool pass, float g) { return pass ? g : 0.0f; }
inline double select(bool pass, double g) { return pass ? g : 0.0; }
inline f16 select(bool pass, f16 g) { return {static_cast<uint16_t>(pass ? g.bits : 0)}; }
inline bf16 select(bool pass, bf16 g) { return {static_cast<uint16_t>(pass ? g.bits : 0)}; }

template <class T>
DETENT_LOOP void weigh(const Params<T>& p, const T* x, const T* g, T* y, int64_t count, double qmin, double qmax) {
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) {
    const double step = unit.scale, middle = (qmin + qmax) / 2 - static_cast<double>(zero);
    const T center = static_cast<T>(middle * step), half = static_cast<T>((qmax - qmin) / 2 * step);
    const T slope = T(1) - std::fabs((x[i] - center) / half);
    y[i] = slope > T(0) ? g[i] * slope : T(0);  // a slope of 0 or NaN gives a gradient of 0
  });
}

// Applies the mask to gradients of type G: the data's type if gradients are only selected, else the compute type.
template <class Codec, class T, class G>
DETENT_LOOP void apply(const Codec& codec, const Call& call, const Params<T>& p, const T* x, const G* g, G* y, int64_t count) {
  switch (call.mask) {
    case Mask::identity: std::memcpy(y, g, static_cast<size_t>(count) * sizeof(G)); return;
    case Mask::code:
    case Mask::value:
      return with_mask(codec, call, p, x, count, [=](int64_t i, bool pass) { y[i] = select(pass, g[i]); });
    case Mask::hard_tanh:
      if constexpr (std::is_same_v<T, G>) return weigh(p, x, g, y, count, call.qmin, call.qmax);
      return;
  }
}

template <class T>
DETENT_LOOP void over_scale(const Params<T>& p, T* y, int64_t count) {
  each(p, count, [=](int64_t i, Unit<T> unit, T) { y[i] = y[i] / unit.scale; });
}

template <class In, class Codec>
void run(const Codec& codec, const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  constexpr bool direct = std::is_same_v<In, T>;
  const bool selects = call.grad == Grad::fake && call.mask != Mask::hard_tanh;
  const In *in = static_cast<const In*>(call.x), *gradient = static_cast<const In*>(call.g);
  In* out = static_cast<In*>(call.out);
  Chunks<T> chunks(call, begin, direct ? kLongChunk : kChunk);
  alignas(64) T wide_x[kChunk], wide_g[kChunk], result[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const T* x = load(in + at, count, wide_x);
    if (selects) {
      apply(codec, call, params, x, gradient + at, out + at, count);
    } else {
      const T* g = load(gradient + at, count, wide_g);
      T* y = result;
      if constexpr (direct) y = out + at;
      apply(codec, call, params, x, g, y, count);
      if (call.grad == Grad::quantize) over_scale(params, y, count);
      if constexpr (!direct) narrow_all(y, out + at, count);
    }
    at += count;
  }
}

// The gradient of x from the mask of the forward pass.
template <class In>
void run_masked(const Call& call, int64_t begin, int64_t end) {
  const In* g = static_cast<const In*>(call.g);
  In* out = static_cast<In*>(call.out);
  uint8_t pass[kChunk];
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t count = least(kChunk, end - at);
    unpack_bits(call.mask_in + at / 8, pass, count, 1, false);
    for (int64_t i = 0; i < count; ++i) out[at + i] = select(pass[i] != 0, g[at + i]);
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void backward(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) { run<In>(codec, call, begin, end); });
  });
}

void masked_backward(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) { run_masked<decltype(in)>(call, begin, end); });
}

}  // namespace detent::DETENT_LEVEL

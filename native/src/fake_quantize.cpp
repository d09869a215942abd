// y = (clamp(round(x / s) + z) - z) * s, or the nearest level times s, rounded to x's type. NaN stays NaN unless there
// is a fill.
#include "detent/mask.hpp"

namespace {

using detent::Fill;

template <class Codec, class T>
DETENT_LOOP void values(const Codec codec, const Params<T>& p, const T* x, T* y, int64_t count) {
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) { y[i] = codec.value(x[i], unit, zero) * unit.scale; });
}

template <class T>
DETENT_LOOP void fill(const Call& call, const Params<T>& p, const T* x, T* y, int64_t count) {
  const bool lowest = call.fill == Fill::qmin;
  const T qmin = T(call.qmin);
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) {
    y[i] = x[i] != x[i] ? (lowest ? (qmin - zero) * unit.scale : T(0)) : y[i];
  });
}

template <class In, class Codec>
void run(const Codec& codec, const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  constexpr bool direct = std::is_same_v<In, T>;
  const In* in = static_cast<const In*>(call.x);
  In* out = static_cast<In*>(call.out);
  Chunks<T> chunks(call, begin, direct && !call.mask_bits ? kLongChunk : kChunk);
  alignas(64) T wide[kChunk], result[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const T* x = load(in + at, count, wide);
    T* y = result;
    if constexpr (direct) y = out + at;
    with_quickest(codec, params.invertible, [&](const auto& quickest) { values(quickest, params, x, y, count); });
    if (call.mask_bits) write_mask(codec, call, params, x, call.mask_bits + at / 8, count);
    if (call.find_nan && has_nan(x, count)) call.saw_nan->store(true, std::memory_order_relaxed);
    if (call.fill != Fill::none) fill(call, params, x, y, count);
    if constexpr (!direct) store(y, out + at, count, Codec::signed_zeros);
    at += count;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void fake_quantize(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) { run<In>(codec, call, begin, end); });
  });
}

}  // namespace detent::DETENT_LEVEL

// The code of every element, as bytes, words or packed bits: q = clamp(round(x / s) + z), or the nearest level. NaN is
// reported, and replaced by the code of the fill.
#include "detent/mask.hpp"

namespace {

using detent::Codes;
using detent::Fill;

// Signed and unsigned codes of one bit width have equal bits: Code is int8_t or int16_t for both. The code of NaN is
// undefined until it is filled.
template <class Codec, class Code, class T>
DETENT_LOOP void codes(const Codec codec, const Params<T>& p, const T* x, Code* q, int64_t count) {
  if (p.spread != Spread::grouped) {
    return each(p, count, [=](int64_t i, Unit<T> unit, T zero) { q[i] = static_cast<Code>(codec.code(x[i], unit, zero)); });
  }
  // In the short loops of groups, narrow results would make the compiler use narrow vectors.
  alignas(64) int32_t wide[kChunk];
  int32_t* to = wide;
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) { to[i] = codec.code(x[i], unit, zero); });
  DETENT_INDEPENDENT
  for (int64_t i = 0; i < count; ++i) q[i] = static_cast<Code>(to[i]);
}

template <class Codec, class Code, class T>
DETENT_LOOP void fill(const Codec& codec, bool lowest, const Params<T>& p, const T* x, Code* q, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] != x[i]) q[i] = static_cast<Code>(codec.fill_code(lowest, zero_at(p, i)));
  }
}

template <class In, class Code, class Codec>
void run(const Codec& codec, const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  const bool packed = call.codes == Codes::packed;
  uint8_t* bytes = static_cast<uint8_t*>(call.out);
  Code* out = static_cast<Code*>(call.out);
  Chunks<T> chunks(call, begin);
  alignas(64) T wide[kChunk];
  alignas(64) Code buffer[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const T* x = load(in + at, count, wide);
    Code* q = packed ? buffer : out + at;
    with_quickest(codec, params.invertible, [&](const auto& quickest) { codes(quickest, params, x, q, count); });
    if (call.mask_bits) write_mask(codec, call, params, x, call.mask_bits + at / 8, count);
    if (has_nan(x, count)) {
      call.saw_nan->store(true, std::memory_order_relaxed);
      fill(codec, call.fill == Fill::qmin, params, x, q, count);
    }
    if constexpr (sizeof(Code) == 1) {
      if (packed) pack_bits(reinterpret_cast<const uint8_t*>(q), bytes + at / 8 * call.bits, count, call.bits);
    }
    at += count;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void quantize(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) {
      if (call.codes == Codes::words) return run<In, int16_t>(codec, call, begin, end);
      return run<In, int8_t>(codec, call, begin, end);
    });
  });
}

}  // namespace detent::DETENT_LEVEL

// y = (q - z) * s, or the code's level times s, in the compute type, rounded to y's type; and its gradient, g * s.
#include "detent/arithmetic.hpp"
#include "detent/bits.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::Codes;
using detent::Kind;

template <class Code, class T>
void values(const Params<T>& p, const Code* __restrict q, T* __restrict y, int64_t count) {
  if (p.uniform) {
    const T scale = p.scale, zero = p.zero;
    for (int64_t i = 0; i < count; ++i) y[i] = (static_cast<T>(q[i]) - zero) * scale;
  } else {
    const T *__restrict scales = p.scales, *__restrict zeros = p.zeros;
    for (int64_t i = 0; i < count; ++i) y[i] = (static_cast<T>(q[i]) - zeros[i]) * scales[i];
  }
}

// Formats other than integers: the level of each code.
template <class T>
void values(const T* __restrict levels, const Params<T>& p, const uint8_t* __restrict q, T* __restrict y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = levels[q[i]] * (p.uniform ? p.scale : p.scales[i]);
}

template <class Out, class Code>
void run(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<Out>;
  constexpr bool direct = std::is_same_v<Out, T>;
  const bool packed = call.codes == Codes::packed;
  const uint8_t* bytes = static_cast<const uint8_t*>(call.codes_in);
  const Code* in = static_cast<const Code*>(call.codes_in);
  Out* out = static_cast<Out*>(call.out);
  Chunks<T> chunks(call, begin);
  alignas(64) Code codes[kChunk];
  alignas(64) T result[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const Code* q = codes;
    if constexpr (sizeof(Code) == 1) {
      if (packed) {
        unpack_bits(bytes + at / 8 * call.bits, reinterpret_cast<uint8_t*>(codes), count, call.bits, call.is_signed);
      }
    }
    if (!packed) q = in + at;
    T* y = result;
    if constexpr (direct) y = out + at;
    if constexpr (std::is_same_v<Code, uint8_t>) {
      if (call.kind != Kind::integers) {
        values(static_cast<const T*>(call.levels), params, q, y, count);
      } else {
        values(params, q, y, count);
      }
    } else {
      values(params, q, y, count);
    }
    if constexpr (!direct) store(y, out + at, count, call.kind == Kind::small_floats);
    at += count;
  }
}

template <class In>
void run_backward(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  constexpr bool direct = std::is_same_v<In, T>;
  const In* in = static_cast<const In*>(call.g);
  In* out = static_cast<In*>(call.out);
  Chunks<T> chunks(call, begin);
  alignas(64) T wide[kChunk], result[kChunk];
  Params<T> p;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, p);
    const T* __restrict g = load(in + at, count, wide);
    T* __restrict y = result;
    if constexpr (direct) y = out + at;
    for (int64_t i = 0; i < count; ++i) y[i] = g[i] * (p.uniform ? p.scale : p.scales[i]);
    if constexpr (!direct) narrow_all(y, out + at, count);
    at += count;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void dequantize(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto out) {
    using Out = decltype(out);
    if (call.codes == Codes::words) {
      return call.is_signed ? run<Out, int16_t>(call, begin, end) : run<Out, uint16_t>(call, begin, end);
    }
    return call.is_signed ? run<Out, int8_t>(call, begin, end) : run<Out, uint8_t>(call, begin, end);
  });
}

void dequantize_backward(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) { run_backward<decltype(in)>(call, begin, end); });
}

}  // namespace detent::DETENT_LEVEL

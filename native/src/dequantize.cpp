// y = (q - z) * s, or the code's level times s, in the compute type, rounded to y's type; and its gradient, g * s.
#include "detent/arithmetic.hpp"
#include "detent/bits.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::Codes;
using detent::Kind;

template <class Code, class T>
DETENT_LOOP void values(const Params<T>& p, const Code* q, T* y, int64_t count) {
  each(p, count, [=](int64_t i, Unit<T> unit, T zero) { y[i] = (static_cast<T>(q[i]) - zero) * unit.scale; });
}

// Formats other than integers: the level of each code.
template <class T>
DETENT_LOOP void values(const T* levels, const Params<T>& p, const uint8_t* q, T* y, int64_t count) {
  each(p, count, [=](int64_t i, Unit<T> unit, T) { y[i] = levels[q[i]] * unit.scale; });
}

template <class Out, class Code>
void run(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<Out>;
  constexpr bool direct = std::is_same_v<Out, T>;
  const bool packed = call.codes == Codes::packed;
  const uint8_t* bytes = static_cast<const uint8_t*>(call.codes_in);
  const Code* in = static_cast<const Code*>(call.codes_in);
  Out* out = static_cast<Out*>(call.out);
  Chunks<T> chunks(call, begin, direct && !packed ? kLongChunk : kChunk, false);
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
  Chunks<T> chunks(call, begin, direct ? kLongChunk : kChunk, false);
  alignas(64) T wide[kChunk], result[kChunk];
  Params<T> p;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, p);
    const T* g = load(in + at, count, wide);
    T* y = result;
    if constexpr (direct) y = out + at;
    each(p, count, [=](int64_t i, Unit<T> unit, T) { y[i] = g[i] * unit.scale; });
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

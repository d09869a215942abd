// q = clamp(round(x / s) + z), as bytes, words or packed bits. NaN is reported, and gets the code of the fill.
#include "detent/arithmetic.hpp"
#include "detent/bits.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::Codes;
using detent::Fill;

// Signed and unsigned codes of one width have the same bits: Code is int8_t or int16_t for both. Returns whether x holds NaN,
// whose code is the lowest until it is filled.
template <class Rule, class Code, class T>
bool codes(const Params<T>& p, const T* __restrict x, Code* __restrict q, int64_t count, T low, T high) {
  int missing = 0;
  if (p.uniform) {
    const T divisor = p.divisor, zero = p.zero;
    for (int64_t i = 0; i < count; ++i) {
      missing |= x[i] != x[i];
      const T code = clamped(unclamped<Rule>(x[i], divisor, zero), low, high);
      q[i] = static_cast<Code>(static_cast<int32_t>(x[i] == x[i] ? code : low));
    }
  } else {
    const T *__restrict divisors = p.divisors, *__restrict zeros = p.zeros;
    for (int64_t i = 0; i < count; ++i) {
      missing |= x[i] != x[i];
      const T code = clamped(unclamped<Rule>(x[i], divisors[i], zeros[i]), low, high);
      q[i] = static_cast<Code>(static_cast<int32_t>(x[i] == x[i] ? code : low));
    }
  }
  return missing != 0;
}

template <class Code, class T>
void fill(const Call& call, const Params<T>& p, const T* x, Code* q, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] == x[i]) continue;
    const T zero = p.uniform ? p.zero : p.zeros[i];
    q[i] = static_cast<Code>(static_cast<int32_t>(call.fill == Fill::qmin ? T(call.qmin) : zero));
  }
}

template <class Rule, class In, class Code>
void run(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  const bool packed = call.codes == Codes::packed;
  uint8_t* bytes = static_cast<uint8_t*>(call.out);
  Code* out = static_cast<Code*>(call.out);
  const T low = T(call.qmin), high = T(call.qmax);
  Chunks<T> chunks(call, begin);
  alignas(64) T wide[kChunk];
  alignas(64) Code buffer[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const T* x = load(in + at, count, wide);
    Code* q = packed ? buffer : out + at;
    if (codes<Rule>(params, x, q, count, low, high)) {
      call.saw_nan->store(true, std::memory_order_relaxed);
      fill(call, params, x, q, count);
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
    with_rules(call, [&](auto rule) {
      if (call.codes == Codes::words) return run<decltype(rule), decltype(in), int16_t>(call, begin, end);
      return run<decltype(rule), decltype(in), int8_t>(call, begin, end);
    });
  });
}

}  // namespace detent::DETENT_LEVEL

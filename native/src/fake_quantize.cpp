// y = (clamp(round(x / s) + z) - z) * s, rounded to x's type. NaN stays NaN unless a fill is asked for.
#include "detent/arithmetic.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::Fill;

template <class Rule, class T>
void values(const Params<T>& p, const T* __restrict x, T* __restrict y, int64_t count, T low, T high) {
  if (p.uniform) {
    const T scale = p.scale, divisor = p.divisor, zero = p.zero;
    for (int64_t i = 0; i < count; ++i) {
      // + 0: a negative zero becomes a positive one
      y[i] = (clamped(unclamped<Rule>(x[i], divisor, zero), low, high) - zero + T(0)) * scale;
    }
  } else {
    const T *__restrict scales = p.scales, *__restrict divisors = p.divisors, *__restrict zeros = p.zeros;
    for (int64_t i = 0; i < count; ++i) {
      y[i] = (clamped(unclamped<Rule>(x[i], divisors[i], zeros[i]), low, high) - zeros[i] + T(0)) * scales[i];
    }
  }
}

template <class T>
void fill(const Call& call, const Params<T>& p, const T* x, T* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const T scale = p.uniform ? p.scale : p.scales[i], zero = p.uniform ? p.zero : p.zeros[i];
    const T value = call.fill == Fill::qmin ? (T(call.qmin) - zero) * scale : T(0);
    y[i] = x[i] != x[i] ? value : y[i];
  }
}

template <class T>
bool has_nan(const T* x, int64_t count) {
  int missing = 0;
  for (int64_t i = 0; i < count; ++i) missing |= x[i] != x[i];
  return missing != 0;
}

template <class Rule, class In>
void run(const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  constexpr bool direct = std::is_same_v<In, T>;
  const In* in = static_cast<const In*>(call.x);
  In* out = static_cast<In*>(call.out);
  const T low = T(call.qmin), high = T(call.qmax);
  Chunks<T> chunks(call, begin);
  alignas(64) T wide[kChunk], result[kChunk];
  Params<T> params;
  for (int64_t at = begin; at < end;) {
    const int64_t count = chunks.next(end - at, params);
    const T* x = load(in + at, count, wide);
    T* y = result;
    if constexpr (direct) y = out + at;
    values<Rule>(params, x, y, count, low, high);
    if (call.find_nan && has_nan(x, count)) call.saw_nan->store(true, std::memory_order_relaxed);
    if (call.fill != Fill::none) fill(call, params, x, y, count);
    if constexpr (!direct) store(y, out + at, count);
    at += count;
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void fake_quantize(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    with_rules(call, [&](auto rule) { run<decltype(rule), decltype(in)>(call, begin, end); });
  });
}

}  // namespace detent::DETENT_LEVEL

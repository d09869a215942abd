// From data to parameters to fake quantized data. `derive` makes scales and zero points of bounds, for the sets [begin, end).
// `observe` does all three steps for the sets [begin, end), a few at a time while they are in the cache, where every set is
// one run of memory (call.shared is false); elsewhere minmax, derive and fake_quantize run one after the other.
#include "detent/arithmetic.hpp"
#include "detent/bounds.hpp"
#include "detent/scale_rule.hpp"

namespace {

template <class T, Symmetric kind>
bool derive_sets(const Call& call, int64_t begin, int64_t end) {
  const Deriver<kind> derive(call);
  const T *__restrict low = static_cast<const T*>(call.low), *__restrict high = static_cast<const T*>(call.high);
  T *__restrict scale = static_cast<T*>(call.scale_out), *__restrict zero = static_cast<T*>(call.zero_out);
  int good = 1;
  for (int64_t i = begin; i < end; ++i) good &= derive(low[i], high[i], scale[i], zero[i]);
  return good != 0;
}

template <class T>
void derive_all(const Call& call, int64_t begin, int64_t end) {
  bool good = false;
  switch (call.rule.symmetric) {
    case Symmetric::affine: good = derive_sets<T, Symmetric::affine>(call, begin, end); break;
    case Symmetric::qmax: good = derive_sets<T, Symmetric::qmax>(call, begin, end); break;
    case Symmetric::half_span: good = derive_sets<T, Symmetric::half_span>(call, begin, end); break;
    case Symmetric::tight: good = derive_sets<T, Symmetric::tight>(call, begin, end); break;
  }
  if (!good) call.refused->store(true, std::memory_order_relaxed);
}

constexpr int64_t kStage = 8192;  // elements at a time

template <class In>
void observe_sets(const Call& call, detent::Kernel fake_quantize, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const Layout& layout = call.layout;
  const In* in = static_cast<const In*>(call.x);
  T *low = static_cast<T*>(call.low), *high = static_cast<T*>(call.high);
  const int64_t across = (layout.cols + layout.block - 1) / layout.block;
  int64_t column = begin % across, at = begin / across * layout.cols + column * layout.block, nonfinite = 0;
  alignas(64) T wide[kChunk];
  for (int64_t set = begin; set < end;) {
    const int64_t first = set, start = at;
    do {
      const int64_t run = least(layout.block, layout.cols - column * layout.block);
      const Bounds<T> bounds = bounds_of_run(in + at, run, wide, nonfinite);
      low[set] = bounds.low + T(0);
      high[set] = bounds.high + T(0);
      at += run;
      column = column + 1 == across ? 0 : column + 1;
    } while (++set < end && at - start + layout.block <= kStage);
    derive_all<T>(call, first, set);
    fake_quantize(call, start, at);
  }
  if (nonfinite) call.nonfinite->fetch_add(nonfinite, std::memory_order_relaxed);
}

}  // namespace

namespace detent::DETENT_LEVEL {

void fake_quantize(const Call&, int64_t, int64_t);

void derive(const Call& call, int64_t begin, int64_t end) {
  if (call.dtype == Dtype::f64) return derive_all<double>(call, begin, end);
  return derive_all<float>(call, begin, end);
}

void observe(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) { observe_sets<decltype(in)>(call, fake_quantize, begin, end); });
}

}  // namespace detent::DETENT_LEVEL

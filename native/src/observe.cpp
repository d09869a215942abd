// Fake quantization with parameters from the data's own range. `derive` computes scales and zero points from bounds,
// for the sets [begin, end). `observe` runs minmax, derive and fake_quantize (or quantize) for the sets [begin, end), a few sets at a
// time while they are in the cache. Each set must be contiguous in memory (call.shared is false). Otherwise the three
// kernels run one after the other on the whole array.
#include "detent/arithmetic.hpp"
#include "detent/bounds.hpp"
#include "detent/scale_rule.hpp"

namespace {

// T is the type of scales and zero points, B that of the bounds.
template <class T, class B, Symmetric kind, bool half_away = false>
bool derive_sets(const Call& call, int64_t begin, int64_t end) {
  constexpr int64_t kBatch = 128;
  const Deriver<B, kind, half_away> deriver(call);
  const B *low = static_cast<const B*>(call.low), *high = static_cast<const B*>(call.high);
  T *scale = static_cast<T*>(call.scale_out), *zero = static_cast<T*>(call.zero_out);
  double scales[kBatch], zeros[kBatch], faults[kBatch];
  bool good = true;
  for (int64_t at = begin; at < end; at += kBatch) {
    const int64_t count = least(kBatch, end - at);
    DETENT_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      const double lowest = static_cast<double>(low[at + i]), highest = static_cast<double>(high[at + i]);
      faults[i] = deriver.template derive<T>(lowest, highest, scales[i], zeros[i]);
    }
    for (int64_t i = 0; i < count; ++i) good &= faults[i] == 0;
    narrow_all(scales, scale + at, count);
    narrow_all(zeros, zero + at, count);
  }
  return good;
}

template <class T, class B>
void derive_all(const Call& call, int64_t begin, int64_t end) {
  bool good = false;
  switch (call.rule.symmetric) {
    case Symmetric::affine:
      good = call.rule.half_away ? derive_sets<T, B, Symmetric::affine, true>(call, begin, end)
                                 : derive_sets<T, B, Symmetric::affine>(call, begin, end);
      break;
    case Symmetric::qmax: good = derive_sets<T, B, Symmetric::qmax>(call, begin, end); break;
    case Symmetric::half_span: good = derive_sets<T, B, Symmetric::half_span>(call, begin, end); break;
    case Symmetric::tight: good = derive_sets<T, B, Symmetric::tight>(call, begin, end); break;
  }
  if (!good) call.refused->store(true, std::memory_order_relaxed);
}

constexpr int64_t kStage = 8192;  // elements per stage, which fit the cache

template <class In>
void observe_sets(const Call& call, detent::Kernel quantizing, int64_t begin, int64_t end) {
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
      const int64_t whole = least(least(layout.cols / layout.block - column, end - set), kGroups<In> / layout.block);
      int64_t groups = 1;
      if (whole > 1) {
        groups = whole;
        bounds_of_groups(load(in + at, groups * run, wide), groups, run, low + set, high + set, nonfinite);
      } else {
        const Bounds<T> bounds = bounds_of_run(in + at, run, wide, nonfinite);
        low[set] = bounds.low;
        high[set] = bounds.high;
      }
      at += groups * run;
      set += groups;
      column = column + groups == across ? 0 : column + groups;
    } while (set < end && at - start + layout.block <= kStage);
    derive_all<T, T>(call, first, set);
    quantizing(call, start, at);
  }
  if (nonfinite) call.nonfinite->fetch_add(nonfinite, std::memory_order_relaxed);
}

}  // namespace

namespace detent::DETENT_LEVEL {

void fake_quantize(const Call&, int64_t, int64_t);
void quantize(const Call&, int64_t, int64_t);

void derive(const Call& call, int64_t begin, int64_t end) {
  if (call.dtype == Dtype::f64) return derive_all<double, double>(call, begin, end);
  if (call.wide_bounds) return derive_all<float, double>(call, begin, end);
  return derive_all<float, float>(call, begin, end);
}

void observe(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) { observe_sets<decltype(in)>(call, call.to_codes ? quantize : fake_quantize, begin, end); });
}

}  // namespace detent::DETENT_LEVEL

// Gradients of scale and zero point (LSQ, LSQ+), as block sums of each set:
//   scale       g * ((q - z) - t) in range, g * (q - z) where clamped
//   zero point  -s * g where clamped, 0 in range; integers only
// NaN in x adds nothing. The kernel processes pieces [begin, end); piece i is block i % blocks of box i / blocks.
#include "detent/chunks.hpp"
#include "detent/codec.hpp"
#include "detent/sums.hpp"

namespace {

// Consecutive elements that share the parameters of one set, or each have the parameters of their own set.
template <bool uniform, class Codec, class T>
DETENT_LOOP void terms(const Codec codec, const T* __restrict scales, const T* __restrict zeros, const T* __restrict x,
           const T* __restrict g, double* __restrict of_scale, double* __restrict of_zero, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const T scale = scales[uniform ? 0 : i], zero = zeros[uniform ? 0 : i];
    const Unit<T> unit{scale, T(1) / scale};
    const bool inside = codec.inside(x[i], unit, zero), missing = x[i] != x[i];
    const double gradient = static_cast<double>(g[i]);
    const double value = static_cast<double>(codec.value(x[i], unit, zero));
    const double distance = inside ? value - static_cast<double>(codec.ratio(x[i], unit)) : value;
    of_scale[i] = missing ? 0.0 : gradient * distance;
    if (of_zero) of_zero[i] = missing | inside ? 0.0 : -static_cast<double>(scale) * gradient;
  }
}

template <class In, class Codec>
void run(Codec codec, const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const In *in = static_cast<const In*>(call.x), *gradient = static_cast<const In*>(call.g);
  const T *scale = static_cast<const T*>(call.scale), *zero = static_cast<const T*>(call.zero);
  const bool columns = call.tile > 1;
  double* of_scale = call.scratch + begin / call.step * (2 * kLeaf * call.tile);
  double* of_zero = call.high_sums ? of_scale + kLeaf * call.tile : nullptr;
  alignas(64) T wide_x[kLeaf], wide_g[kLeaf];
  Boxes boxes(call.layout, columns ? call.tile : call.layout.block, begin / call.blocks);
  int64_t block = begin % call.blocks;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t width = columns ? boxes.width() : 1, set = boxes.set();
    const int64_t first = block * kLeaf * width, last = least(boxes.count(), first + kLeaf * width);
    boxes.runs(first, last, [&](int64_t at, int64_t count, int64_t done) {
      const T* x = load(in + at, count, wide_x);
      const T* g = load(gradient + at, count, wide_g);
      double* to_zero = of_zero ? of_zero + done : nullptr;
      if (columns) {
        terms<false>(codec, scale + set, zero + set, x, g, of_scale + done, to_zero, count);
      } else {
        terms<true>(codec, scale + set, zero + set, x, g, of_scale + done, to_zero, count);
      }
    });
    if (first < last) {
      const int64_t rows = (last - first) / width;
      fold(of_scale, rows, width, rows < kLeaf);
      if (of_zero) fold(of_zero, rows, width, rows < kLeaf);
      for (int64_t j = 0; j < width; ++j) {
        call.sums[(set + j) * call.blocks + block] = of_scale[j];
        if (of_zero) call.high_sums[(set + j) * call.blocks + block] = of_zero[j];
      }
    }
    if (++block == call.blocks) {
      block = 0;
      boxes.next();
    }
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void learned(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) { run<In>(codec, call, begin, end); });
  });
}

// Adds up the block sums of the sets [begin, end), each into its first block sum.
void fold_sums(const Call& call, int64_t begin, int64_t end) {
  Boxes boxes(call.layout, call.layout.block, begin);
  for (int64_t set = begin; set < end; ++set) {
    const int64_t blocks = (boxes.count() + kLeaf - 1) / kLeaf;
    for (double* sums : {call.sums, call.high_sums}) {
      if (sums) fold(sums + set * call.blocks, blocks, 1, false);
    }
    boxes.next();
  }
}

}  // namespace detent::DETENT_LEVEL

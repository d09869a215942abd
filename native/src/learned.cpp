// Gradients of scale and zero point (LSQ, LSQ+), as block sums of each set:
//   scale       g * ((q - z) - t) in range, g * (q - z) where clamped
//   zero point  -s * g where clamped, 0 in range; integers only
// NaN in x adds nothing. The kernel processes pieces [begin, end); piece i is block i % blocks of box i / blocks. With
// channels-last arrays, blocks still contain elements in C order: groups of channels are copied to that order first.
#include <cstring>
#include <type_traits>

#include "detent/chunks.hpp"
#include "detent/codec.hpp"
#include "detent/sums.hpp"

namespace {

using detent::pitch_of;
using detent::planes_of;

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

constexpr int64_t kSquare = 8;  // points and channels that are transposed in registers
constexpr int64_t kTilePoints = 64;  // points that are copied before the next channels, which are on other pages

#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
typedef float Eight __attribute__((vector_size(32)));

// Transposes kSquare rows of kSquare numbers.
inline void transpose(const float* from, int64_t from_pitch, float* to, int64_t to_pitch) {
  Eight row[kSquare], pair[kSquare], four[kSquare];
  for (int i = 0; i < kSquare; ++i) std::memcpy(&row[i], from + i * from_pitch, sizeof row[i]);
  for (int i = 0; i < kSquare; i += 2) {
    pair[i] = __builtin_shufflevector(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pair[i + 1] = __builtin_shufflevector(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < kSquare; i += 4) {
    for (int j = 0; j < 2; ++j) {
      four[i + 2 * j] = __builtin_shufflevector(pair[i + j], pair[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      four[i + 2 * j + 1] = __builtin_shufflevector(pair[i + j], pair[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const Eight low = __builtin_shufflevector(four[i], four[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Eight high = __builtin_shufflevector(four[i], four[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + i * to_pitch, &low, sizeof low);
    std::memcpy(to + (i + 4) * to_pitch, &high, sizeof high);
  }
}
#else
inline void transpose(const float* from, int64_t from_pitch, float* to, int64_t to_pitch) {
  for (int64_t i = 0; i < kSquare; ++i) {
    for (int64_t j = 0; j < kSquare; ++j) to[j * to_pitch + i] = from[i * from_pitch + j];
  }
}
#endif

// Some channels of one image of a channels-last array, in C order.
class Planes {
 public:
  Planes(const Call& call, const void* in, float* memory)
      : in_(static_cast<const float*>(in)),
        memory_(memory),
        points_(call.points),
        channels_(call.channels),
        group_(planes_of(call.points, call.channels)),
        pitch_(pitch_of(call.points)) {}

  // The elements of a channel; they are valid until a channel of another group is read.
  const float* channel(int64_t image, int64_t channel) {
    const int64_t first = channel - channel % group_;
    if (image != image_ || first != first_) copy(image_ = image, first_ = first);
    return memory_ + (channel - first) * pitch_;
  }

 private:
  void copy(int64_t image, int64_t first) {
    const float* from = in_ + image * points_ * channels_ + first;
    const int64_t count = least(group_, channels_ - first);
    const int64_t whole_points = points_ - points_ % kSquare, whole_channels = count - count % kSquare;
    for (int64_t tile = 0; tile < whole_points; tile += kTilePoints) {
      for (int64_t i = 0; i < whole_channels; i += kSquare) {
        for (int64_t point = tile; point < least(whole_points, tile + kTilePoints); point += kSquare) {
          transpose(from + point * channels_ + i, channels_, memory_ + i * pitch_ + point, pitch_);
        }
      }
    }
    for (int64_t point = 0; point < points_; ++point) {
      for (int64_t i = point < whole_points ? whole_channels : 0; i < count; ++i) {
        memory_[i * pitch_ + point] = from[point * channels_ + i];
      }
    }
  }

  const float* in_;
  float* memory_;
  int64_t points_, channels_, group_, pitch_, image_ = -1, first_ = -1;
};

template <class Codec>
void run_channels_last(Codec codec, const Call& call, int64_t begin, int64_t end) {
  const float *scale = static_cast<const float*>(call.scale), *zero = static_cast<const float*>(call.zero);
  const int64_t part = begin / call.step, room = planes_of(call.points, call.channels) * pitch_of(call.points);
  double* of_scale = call.scratch + part * (2 * kLeaf);
  double* of_zero = call.high_sums ? of_scale + kLeaf : nullptr;
  Planes x(call, call.x, call.planes + 2 * part * room), g(call, call.g, call.planes + (2 * part + 1) * room);
  alignas(64) float block_x[kLeaf], block_g[kLeaf];
  const int64_t size = call.layout.size / call.sets, image_size = call.points * call.channels;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t set = piece / call.blocks, block = piece % call.blocks;
    const int64_t first = block * kLeaf, last = least(size, first + kLeaf);
    if (first >= last) continue;
    const float *at_x = block_x, *at_g = block_g;
    for (int64_t at = first; at < last;) {
      const int64_t index = set * size + at, rest = index % image_size, point = rest % call.points;
      const int64_t count = least(call.points - point, last - at);
      const float* one_x = x.channel(index / image_size, rest / call.points) + point;
      const float* one_g = g.channel(index / image_size, rest / call.points) + point;
      if (count == last - first) {
        at_x = one_x;
        at_g = one_g;
      } else {
        std::memcpy(block_x + (at - first), one_x, static_cast<size_t>(count) * sizeof(float));
        std::memcpy(block_g + (at - first), one_g, static_cast<size_t>(count) * sizeof(float));
      }
      at += count;
    }
    const int64_t count = last - first;
    terms<true>(codec, scale + set, zero + set, at_x, at_g, of_scale, of_zero, count);
    fold(of_scale, count, 1, count < kLeaf);
    call.sums[piece] = of_scale[0];
    if (!of_zero) continue;
    fold(of_zero, count, 1, count < kLeaf);
    call.high_sums[piece] = of_zero[0];
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void learned(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) {
      if constexpr (std::is_same_v<In, float>) {
        if (call.points) return run_channels_last(codec, call, begin, end);
      }
      run<In>(codec, call, begin, end);
    });
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

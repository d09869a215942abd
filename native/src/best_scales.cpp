// The scale and zero point with the least squared error of the quantizer, searched per set on its values.
//
// A candidate is measured as it would be stored. A position p is the scale start * factors[p], and 0 is the min-max
// scale. With the codes of a candidate, the error is a parabola of the scale: its lowest point is the fitted scale, and
// the error there is the candidate's estimate. The search:
//   1. every `coarse` positions, down to where clipping alone costs more than the least error; affine formats with up to
//      kZeroPoints zero points per scale
//   2. if `refine`: near the kCenters lowest estimates, in rounds that come nearer; affine formats then try other zero
//      points
//   3. if `refine`: the fitted scale, kFits times
// Of equal errors, the first wins. Equals detent.kernels.reference.scale_search bit for bit. Works on boxes [begin, end).
#include <algorithm>
#include <limits>

#include "detent/chunks.hpp"
#include "detent/codec.hpp"
#include "detent/sums.hpp"

namespace {

constexpr int kLanes = 8;  // partial sums, added up by halves: the order of every level
constexpr int kCenters = 4, kZeroPoints = 9, kFits = 3;
constexpr int kOffsets = 4, kRounds = 3;
constexpr int64_t kNear[kRounds][kOffsets] = {{-32, -16, 16, 32}, {-8, -4, 4, 8}, {-2, -1, 1, 2}};
constexpr int64_t kFewValues = 128;  // with so few, the last round rarely changes a code
constexpr double kNone = std::numeric_limits<double>::infinity();

// Inlines everything that a loop calls; otherwise the many uses of a codec would exceed the compiler's limits.
#if defined(__GNUC__)
#define DETENT_FLAT_LOOP __attribute__((noinline, flatten))
#else
#define DETENT_FLAT_LOOP
#endif

// Sums over a set: the squared errors, and for values v of codes at scale 1, x * v and v * v.
struct Sums {
  double error, product, power;
};

inline double total(double* lanes) {
  for (int half = kLanes / 2; half; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

template <class Codec, class T>
DETENT_FLAT_LOOP Sums measure(const Codec codec, const T* __restrict x, int64_t count, Unit<T> unit, T zero) {
  double error[kLanes] = {}, product[kLanes] = {}, power[kLanes] = {};
  const auto add = [&](int64_t i, int j) {
    const T value = codec.value(x[i + j], unit, zero), y = value * unit.scale;
    const double wide = static_cast<double>(x[i + j]), v = static_cast<double>(value);
    const double distance = wide - static_cast<double>(y);
    error[j] += distance * distance;
    product[j] += wide * v;
    power[j] += v * v;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) add(i, j);
  }
  for (int j = 0; i + j < count; ++j) add(i, j);
  return {total(error), total(product), total(power)};
}

// The squared error of clipping at -reach and reach.
template <class T>
DETENT_FLAT_LOOP double clipping(const T* __restrict x, int64_t count, double reach) {
  double sums[kLanes] = {};
  const auto add = [&](int64_t i, int j) {
    const double beyond = std::fabs(static_cast<double>(x[i + j])) - reach, clipped = beyond > 0 ? beyond : 0.0;
    sums[j] += clipped * clipped;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) add(i, j);
  }
  for (int j = 0; i + j < count; ++j) add(i, j);
  return total(sums);
}

template <class T, class Codec>
class Search {
 public:
  struct Best {
    double error, scale, zero;
  };

  Search(const Call& call, const Codec& codec)
      : call_(call), codec_(codec), affine_(call.rule.symmetric == detent::Symmetric::affine), steps_(call.qmax - call.qmin) {
    while (zero_step_ * 32 <= steps_) zero_step_ *= 2;
  }

  Best run(const T* x, int64_t count, T scale, T zero, T low, T high) {
    x_ = x;
    count_ = count;
    start_ = static_cast<double>(scale);
    start_zero_ = static_cast<double>(zero);
    low_ = static_cast<double>(low);
    high_ = static_cast<double>(high);
    best_ = {kNone, start_, start_zero_};
    guide_ = {kNone, start_, start_zero_, 0};
    for (Guide& center : centers_) center.estimate = kNone;
    descend();
    if (call_.refine && best_.error > 0) refine();
    return best_;
  }

 private:
  struct Guide {
    double estimate, scale, zero;
    int64_t position;
  };

  void descend() {
    for (int64_t position = 0; position < call_.positions; position += call_.coarse) {
      const double scale = scale_at(position);
      if (position == 0 || !affine_) consider(scale, start_zero_, position);
      if (affine_) try_zeros(scale, position);
      if (best_.error == 0 || scale <= call_.least || bound(scale) > best_.error) break;
    }
  }

  // Zero points from the one that keeps the highest value in range to the one that keeps the lowest, and min-max's.
  void try_zeros(double scale, int64_t position) {
    const double at_high = clamped(std::rint(call_.qmax - high_ / scale), call_.qmin, call_.qmax);
    const double at_low = clamped(std::rint(call_.qmin - low_ / scale), call_.qmin, call_.qmax);
    const double first = lesser(lesser(at_high, at_low), start_zero_), last = greater(greater(at_high, at_low), start_zero_);
    if (last - first < kZeroPoints) {
      for (double zero = first; zero <= last; ++zero) consider(scale, zero, position);
    } else {
      for (int i = 0; i < kZeroPoints; ++i) consider(scale, std::rint(first + (last - first) * i / (kZeroPoints - 1)), position);
    }
  }

  // The error of clipping alone, which no smaller scale can avoid. The range of codes includes zero, so it lies between
  // -steps * scale and steps * scale, if affine.
  double bound(double scale) const {
    const double below = std::fabs(call_.qmin - start_zero_), above = std::fabs(call_.qmax - start_zero_);
    const double clipped = clipping(x_, count_, (affine_ ? steps_ : greater(below, above)) * scale);
    const double excess = high_ - low_ - steps_ * scale;
    return affine_ && excess > 0 ? greater(clipped, excess * excess * 0.5) : clipped;
  }

  void refine() {
    const int rounds = count_ > kFewValues ? kRounds : kRounds - 1;
    for (int round = 0; round < rounds; ++round) {
      Guide centers[kCenters];
      std::copy(centers_, centers_ + kCenters, centers);
      for (const Guide& center : centers) {
        if (center.estimate == kNone) break;
        consider_near(center, kNear[round]);
      }
    }
    for (double step = affine_ ? zero_step_ : 0; step >= 1; step = std::floor(step / 2)) {
      const Guide middle = guide_;
      for (const double zero : {middle.zero - step, middle.zero + step}) {
        take(stored(middle.scale), clamped(zero, call_.qmin, call_.qmax), middle.position);
      }
    }
    for (int i = 0; i < kFits; ++i) take(stored(guide_.scale), guide_.zero, guide_.position);
  }

  // All are measured before any is compared, so that the processor can work on several at a time.
  void consider_near(const Guide& center, const int64_t* offsets) {
    Sums sums[kOffsets];
    for (int i = 0; i < kOffsets; ++i) {
      const int64_t position = center.position + offsets[i];
      if (is_valid(position)) sums[i] = measured(scale_at(position), center.zero);
    }
    for (int i = 0; i < kOffsets; ++i) {
      const int64_t position = center.position + offsets[i];
      if (is_valid(position)) keep(sums[i], scale_at(position), center.zero, position);
    }
  }

  void consider(double scale, double zero, int64_t position) { keep(measured(scale, zero), scale, zero, position); }

  double take(double scale, double zero, int64_t position) { return update(measured(scale, zero), scale, zero, position); }

  // Updates the best candidate, and the centers if the candidate is new and its estimate among the lowest.
  void keep(const Sums& sums, double scale, double zero, int64_t position) {
    const Guide candidate{update(sums, scale, zero, position), scale, zero, position};
    if (!(candidate.estimate < centers_[kCenters - 1].estimate)) return;
    for (const Guide& center : centers_) {
      if (center.estimate < kNone && center.position == position && center.zero == zero) return;
    }
    int place = kCenters - 1;
    for (; place && candidate.estimate < centers_[place - 1].estimate; --place) centers_[place] = centers_[place - 1];
    centers_[place] = candidate;
  }

  // Updates the best candidate; returns the estimate.
  double update(const Sums& sums, double scale, double zero, int64_t position) {
    const double fitted = sums.product / sums.power, slope = scale * sums.power - sums.product;
    const bool usable = fitted >= call_.least && fitted <= start_;
    const double estimate = usable ? sums.error - slope * slope / sums.power : sums.error;
    if (sums.error < best_.error) best_ = {sums.error, scale, zero};
    if (estimate < guide_.estimate) guide_ = {estimate, usable ? fitted : scale, zero, position};
    return estimate;
  }

  Sums measured(double scale, double zero) const {
    const T s = static_cast<T>(scale), z = static_cast<T>(zero);
    const Unit<T> unit{s, T(1) / s};
    Sums sums;
    with_quickest(codec_, s >= kLeastInvertible<T> && s <= kMostInvertible<T>,
                  [&](const auto& codec) { sums = measure(codec, x_, count_, unit, z); });
    return sums;
  }

  bool is_valid(int64_t position) const { return position >= 0 && position < call_.positions; }
  double scale_at(int64_t position) const { return greater(stored(start_ * call_.factors[position]), call_.least); }
  static double stored(double scale) { return static_cast<double>(static_cast<T>(scale)); }
  static double lesser(double a, double b) { return a < b ? a : b; }
  static double greater(double a, double b) { return a > b ? a : b; }

  const Call& call_;
  const Codec codec_;
  const bool affine_;
  const double steps_;
  double zero_step_ = 1;
  const T* x_ = nullptr;
  int64_t count_ = 0;
  double start_ = 0, start_zero_ = 0, low_ = 0, high_ = 0;
  Best best_{};
  Guide guide_{};  // the lowest estimate
  Guide centers_[kCenters] = {};
};

// Copies a box: each of its sets becomes `rows` consecutive numbers.
template <class In>
void gather(const Boxes& boxes, const In* in, int64_t width, int64_t rows, compute_t<In>* out) {
  using T = compute_t<In>;
  alignas(64) T wide[kChunk];
  boxes.runs(0, boxes.count(), [&](int64_t start, int64_t length, int64_t before) {
    for (int64_t done = 0; done < length; done += kChunk) {
      const int64_t count = least(length - done, kChunk), from = before + done;
      const T* x = load(in + start + done, count, wide);
      if (width == 1) {
        for (int64_t i = 0; i < count; ++i) out[from + i] = x[i];
      } else {
        for (int64_t i = 0; i < count; ++i) out[i * rows + from / width] = x[i];
      }
    }
  });
}

template <class In, class Codec>
void run(const Codec& codec, const Call& call, int64_t begin, int64_t end) {
  using T = compute_t<In>;
  const In* in = static_cast<const In*>(call.x);
  const T *scale = static_cast<const T*>(call.scale), *zero = static_cast<const T*>(call.zero);
  const T *low = static_cast<const T*>(call.low), *high = static_cast<const T*>(call.high);
  T *scale_out = static_cast<T*>(call.scale_out), *zero_out = static_cast<T*>(call.zero_out);
  const bool columns = call.tile > 1;
  T* copied = reinterpret_cast<T*>(call.scratch + begin / call.step * call.room);
  Search<T, Codec> search(call, codec);
  Boxes boxes(call.layout, columns ? call.tile : call.layout.block, begin);
  for (int64_t box = begin; box < end; ++box, boxes.next()) {
    const int64_t width = columns ? boxes.width() : 1, rows = boxes.count() / width;
    const T* x = copied;
    if constexpr (std::is_same_v<In, T>) {
      if (!call.room) boxes.runs(0, 1, [&](int64_t start, int64_t, int64_t) { x = in + start; });
    }
    if (x == copied) gather(boxes, in, width, rows, copied);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t set = boxes.set() + i;
      const auto best = search.run(x + i * rows, rows, scale[set], zero[set], low[set], high[set]);
      scale_out[set] = static_cast<T>(best.scale);
      zero_out[set] = static_cast<T>(best.zero);
      call.errors[set] = best.error;
    }
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void best_scales(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call, [&](auto in) {
    using In = decltype(in);
    with_codec<compute_t<In>>(call, [&](auto codec) { run<In>(codec, call, begin, end); });
  });
}

}  // namespace detent::DETENT_LEVEL

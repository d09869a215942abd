// The quantization error of a candidate scale and zero point on a histogram: the sum over bins of the integral of |x -
// nearest level|^norm, with the mass of a bin spread evenly. The norm is 1 or 2. Bins are cut at the bounds of the
// set; a bin of width zero is treated as a point.
//
// Let n be the level nearest to t, and f the distance from n to t. In units of the scale, the integral from 0 to t is n
// times the integral over one level, plus f^(norm+1) / (norm + 1). Beyond the last level, n is constant and f grows.
#include "detent/arithmetic.hpp"
#include "detent/chunks.hpp"

namespace {

using detent::Kind;

constexpr double kNarrow = 0x1p-900;  // a bin of at most this width is treated as a point: its density could overflow
constexpr int kLanes = detent::kGridPadding;  // partial sums, added up by halves; equal for all instruction sets

// The part of the integral beyond a level, an odd function of the distance; and the power of the distance.
template <int norm>
inline double beyond(double f) {
  if constexpr (norm == 2) return f * f * f * (1.0 / 3.0);
  return std::copysign(f * f * 0.5, f);
}
template <int norm>
inline double power(double f) {
  return norm == 2 ? f * f : std::fabs(f);
}
template <int norm>
inline double cube(double scale) {
  return norm == 2 ? scale * scale * scale : scale * scale;
}

// Levels at distance 1, from first to last.
template <int norm>
struct Even {
  double nearest(double t) const { return clamped(std::rint(t), first, last); }
  double integral(double t) const {
    const double n = nearest(t);
    return n * (norm == 2 ? 1.0 / 12.0 : 0.25) + beyond<norm>(t - n);
  }
  double first, last;
};

// Arbitrary levels: `middles` are the midpoints between levels, and whole[i] is the integral up to level i.
template <int norm>
struct Uneven {
  int64_t index(double t) const {
    int64_t low = 0, high = count - 1;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (t > middles[middle]) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  double nearest(double t) const { return levels[index(t)]; }
  double integral(double t) const {
    const int64_t i = index(t);
    return whole[i] + beyond<norm>(t - levels[i]);
  }
  const double *levels, *middles, *whole;
  int64_t count;
};

// The bins of one set that are not empty, cut at its bounds.
struct Bins {
  Bins(double* scratch, int64_t most)
      : low(scratch), high(low + most), density(high + most), point(density + most), weight(point + most) {}

  void gather(const Call& call, int64_t set) {
    const double least_x = static_cast<const double*>(call.low)[set], most_x = static_cast<const double*>(call.high)[set];
    const double* mass = call.mass + set * call.bins;
    count = points = 0;
    for (int64_t i = 0; i < call.bins; ++i) {
      if (mass[i] == 0) continue;
      const double a = call.lower[i] > least_x ? call.lower[i] : least_x, b = call.upper[i] < most_x ? call.upper[i] : most_x;
      if (b - a > kNarrow) {
        low[count] = a;
        high[count] = b;
        density[count++] = mass[i] / (b - a);
      } else {
        point[points] = a;
        weight[points++] = mass[i];
      }
    }
    for (; count % kLanes; ++count) low[count] = high[count] = density[count] = 0;
  }

  double *low, *high, *density, *point, *weight;
  int64_t count = 0, points = 0;
};

template <int norm, class Grid>
DETENT_LOOP double error_of(const Grid grid, const Bins& bins, double scale) {
  const double inverse = 1.0 / scale;
  const double *__restrict low = bins.low, *__restrict high = bins.high, *__restrict density = bins.density;
  double sums[kLanes] = {};
  for (int64_t i = 0; i < bins.count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const double whole = grid.integral(high[i + j] * inverse) - grid.integral(low[i + j] * inverse);
      sums[j] += density[i + j] * whole;
    }
  }
  for (int half = kLanes / 2; half; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  double error = sums[0] * cube<norm>(scale);
  for (int64_t i = 0; i < bins.points; ++i) {
    const double t = bins.point[i] * inverse;
    error += bins.weight[i] * power<norm>((t - grid.nearest(t)) * scale);
  }
  return error;
}

template <int norm>
void run(const Call& call, int64_t begin, int64_t end) {
  const Uneven<norm> uneven{static_cast<const double*>(call.levels), call.middles, call.whole, call.level_count};
  const int64_t most = call.bins + detent::kGridPadding;
  Bins bins(call.scratch + begin / call.step * detent::kGridArrays * most, most);
  for (int64_t set = begin; set < end; ++set) {
    bins.gather(call, set);
    for (int64_t i = set * call.candidates; i < (set + 1) * call.candidates; ++i) {
      const Even<norm> even{call.qmin - call.zeros[i], call.qmax - call.zeros[i]};
      call.errors[i] = call.kind == Kind::integers ? error_of<norm>(even, bins, call.scales[i])
                                                   : error_of<norm>(uneven, bins, call.scales[i]);
    }
  }
}

}  // namespace

namespace detent::DETENT_LEVEL {

void grid_errors(const Call& call, int64_t begin, int64_t end) {
  if (call.norm == 2) return run<2>(call, begin, end);
  run<1>(call, begin, end);
}

}  // namespace detent::DETENT_LEVEL

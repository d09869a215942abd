#include "runner.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>

#include "launch.hpp"

namespace detent {

int64_t item_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

const Kernels& kernels_of(int level) {
  if (level < 0 || level >= kLevelCount || !kLevels[level].supported()) throw std::invalid_argument("unsupported level");
  return kLevels[level].kernels;
}

void require_bytes(const char* name, size_t given, int64_t expected) {
  if (static_cast<int64_t>(given) != expected) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(given) + " bytes, expected " +
                                std::to_string(expected));
  }
}

Runner::Runner(int level, int64_t cols, int64_t block, const Lead& lead, int64_t sets, const nb::dict& rules)
    : kernels_(kernels_of(level)), sets_(sets) {
  if (lead.size() > static_cast<size_t>(kMaxLead)) throw std::invalid_argument("too many axes");
  if (cols < 0 || block < 1) throw std::invalid_argument("a layout has blocks of at least one element");
  Layout& layout = call_.layout;
  layout.cols = cols;
  layout.block = block;
  layout.size = cols;
  int64_t rows = 1, grid = ceil_div(cols, block);
  for (const auto& [size, width, stride] : lead) {
    if (size < 0 || width < 1) throw std::invalid_argument("a layout has blocks of at least one element");
    layout.axis[layout.lead++] = {size, width, stride};
    if (layout.size && size > std::numeric_limits<int64_t>::max() / layout.size) throw std::invalid_argument("too large");
    layout.size *= size;
    rows *= size;
    grid *= ceil_div(size, width);
  }
  // The number of bytes and the number of bits must fit int64, too.
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() / 64;
  if (layout.size > kLargest || sets > kLargest) throw std::invalid_argument("a layout of more elements than memory has");
  if (layout.size && grid != sets) throw std::invalid_argument("a layout has as many sets as its blocks make");
  shared_ = rows * ceil_div(cols, block) != sets;
  const auto whole = [&](const char* name) { return nb::cast<int>(rules[name]); };
  const auto real = [&](const char* name) { return nb::cast<double>(rules[name]); };
  call_.dtype = static_cast<Dtype>(whole("dtype"));
  call_.division = static_cast<Division>(whole("division"));
  call_.zero_point = static_cast<ZeroPoint>(whole("zero_point"));
  call_.rounding = static_cast<Rounding>(whole("rounding"));
  call_.fill = static_cast<Fill>(whole("fill"));
  call_.mask = static_cast<Mask>(whole("mask"));
  call_.grad = static_cast<Grad>(whole("grad"));
  call_.find_nan = whole("find_nan") != 0;
  call_.exclusive = whole("exclusive") != 0;
  call_.is_signed = whole("is_signed") != 0;
  call_.no_zero = whole("no_zero") != 0;
  call_.bits = whole("bits");
  call_.codes = static_cast<Codes>(whole("codes"));
  call_.qmin = real("qmin");
  call_.qmax = real("qmax");
  call_.kind = static_cast<Kind>(whole("kind"));
  call_.mantissa = whole("mantissa");
  call_.min_exponent = whole("min_exponent");
  call_.largest = real("largest");
  call_.rule.symmetric = static_cast<Symmetric>(whole("symmetric"));
  call_.rule.zero_range = static_cast<ZeroRange>(whole("zero_range"));
  call_.rule.floor = real("floor");
  call_.rule.zero_point = real("symmetric_zero_point");
  call_.rule.include_zero = whole("include_zero") != 0;
  call_.rule.half_away = whole("half_away") != 0;
  if (call_.kind == Kind::integers) return;
  wide_levels_ = nb::cast<std::vector<double>>(rules["levels"]);
  wide_bounds_ = nb::cast<std::vector<double>>(rules["bounds"]);
  wide_levels_.resize(256);  // an entry for every byte
  wide_bounds_.resize(15, std::numeric_limits<double>::infinity());
  levels_.assign(wide_levels_.begin(), wide_levels_.end());
  bounds_.assign(wide_bounds_.begin(), wide_bounds_.end());
  const bool wide = call_.dtype == Dtype::f64;
  call_.levels = wide ? static_cast<const void*>(wide_levels_.data()) : levels_.data();
  call_.bounds = wide ? static_cast<const void*>(wide_bounds_.data()) : bounds_.data();
}

// Number of boxes: one per set, or one per kTile sets of single columns.
int64_t Runner::boxes(bool columns) const {
  const Layout& layout = call_.layout;
  int64_t count = ceil_div(layout.cols, columns ? kTile : layout.block);
  for (int i = 0; i < layout.lead; ++i) count *= ceil_div(layout.axis[i].size, layout.axis[i].block);
  return count;
}

// Number of elements of the largest set.
int64_t Runner::largest_set() const {
  const Layout& layout = call_.layout;
  int64_t count = std::min(layout.block, layout.cols);
  for (int i = 0; i < layout.lead; ++i) count *= std::min(layout.axis[i].block, layout.axis[i].size);
  return count;
}

int64_t Runner::code_bytes() const {
  const int64_t size = call_.layout.size;
  return call_.codes == Codes::packed ? (size * call_.bits + 7) / 8 : call_.codes == Codes::words ? 2 * size : size;
}

bool Runner::run(Call& call, Kernel kernel, const Input& scale, const Input& zero) const {
  require_bytes("scale", scale.nbytes(), set_bytes());
  require_bytes("zero point", zero.nbytes(), set_bytes());
  nb::gil_scoped_release unlocked;
  return run_at(call, kernel, scale.data(), zero.data());
}

bool Runner::run_at(Call& call, Kernel kernel, const void* scale, const void* zero, bool backwards) const {
  std::atomic<bool> saw_nan{false};
  call.scale = scale;
  call.zero = zero;
  call.saw_nan = &saw_nan;
  launch(call, kernel, call.layout.size, kGrain, call.layout.size, Cut::many, backwards);
  return saw_nan.load();
}

bool Runner::quantize(const Input& x, const Input& scale, const Input& zero, const Output& codes) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("out", codes.nbytes(), code_bytes());
  Call call = call_;
  call.x = x.data();
  call.out = codes.data();
  return run(call, kernels_.quantize, scale, zero);
}

bool Runner::quantize_masked(const Input& x, const Input& scale, const Input& zero, const Output& codes,
                             const Output& mask) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("out", codes.nbytes(), code_bytes());
  require_bytes("mask", mask.nbytes(), ceil_div(call_.layout.size, 8));
  Call call = call_;
  call.x = x.data();
  call.out = codes.data();
  call.mask_bits = static_cast<uint8_t*>(mask.data());
  return run(call, kernels_.quantize, scale, zero);
}

bool Runner::dequantize(const Input& codes, const Input& scale, const Input& zero, const Output& out) const {
  require_bytes("codes", codes.nbytes(), code_bytes());
  require_bytes("out", out.nbytes(), data_bytes());
  Call call = call_;
  call.codes_in = codes.data();
  call.out = out.data();
  return run(call, kernels_.dequantize, scale, zero);
}

bool Runner::fake_quantize(const Input& x, const Input& scale, const Input& zero, const Output& out) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("out", out.nbytes(), data_bytes());
  Call call = call_;
  call.x = x.data();
  call.out = out.data();
  return run(call, kernels_.fake_quantize, scale, zero);
}

bool Runner::fake_quantize_masked(const Input& x, const Input& scale, const Input& zero, const Output& out,
                                  const Output& mask) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("out", out.nbytes(), data_bytes());
  require_bytes("mask", mask.nbytes(), ceil_div(call_.layout.size, 8));
  Call call = call_;
  call.x = x.data();
  call.out = out.data();
  call.mask_bits = static_cast<uint8_t*>(mask.data());
  return run(call, kernels_.fake_quantize, scale, zero);
}

bool Runner::backward(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& out) const {
  require_bytes("g", g.nbytes(), data_bytes());
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("out", out.nbytes(), data_bytes());
  Call call = call_;
  call.g = g.data();
  call.x = x.data();
  call.out = out.data();
  return run(call, kernels_.backward, scale, zero);
}

bool Runner::dequantize_backward(const Input& g, const Input& scale, const Input& zero, const Output& out) const {
  require_bytes("g", g.nbytes(), data_bytes());
  require_bytes("out", out.nbytes(), data_bytes());
  Call call = call_;
  call.g = g.data();
  call.out = out.data();
  return run(call, kernels_.dequantize_backward, scale, zero);
}

void Runner::masked_backward(const Input& g, const Input& mask, const Output& out) const {
  require_bytes("g", g.nbytes(), data_bytes());
  require_bytes("mask", mask.nbytes(), ceil_div(call_.layout.size, 8));
  require_bytes("out", out.nbytes(), data_bytes());
  Call call = call_;
  call.g = g.data();
  call.mask_in = static_cast<const uint8_t*>(mask.data());
  call.out = out.data();
  nb::gil_scoped_release unlocked;
  launch(call, kernels_.masked_backward, call.layout.size, kGrain, call.layout.size);
}

void Runner::learned(const Input& g, const Input& x, const Input& scale, const Input& zero, const Output& of_scale,
                     const Output& of_zero, int64_t points, int64_t channels) const {
  require_images(points, channels);
  require_bytes("g", g.nbytes(), data_bytes());
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("scale", scale.nbytes(), set_bytes());
  require_bytes("zero point", zero.nbytes(), set_bytes());
  require_bytes("the scale's gradient", of_scale.nbytes(), 8 * sets_);
  require_bytes("the zero point's gradient", of_zero.nbytes(), 8 * sets_);
  nb::gil_scoped_release unlocked;
  learned_at(g.data(), x.data(), scale.data(), zero.data(), static_cast<double*>(of_scale.data()),
             static_cast<double*>(of_zero.data()), points, channels);
}

// Checks that channels-last images fit the plan: float32, and each set has whole images.
void Runner::require_images(int64_t points, int64_t channels) const {
  if (!points) return;
  const Layout& layout = call_.layout;
  const bool whole = layout.block == layout.cols && (!layout.lead || (layout.lead == 1 && layout.axis[0].block == 1));
  const bool fits = points > 0 && channels > 0 && points <= layout.size && channels <= layout.size / points;
  if (call_.dtype != Dtype::f32 || !whole || !fits || layout.cols % (points * channels)) {
    throw std::invalid_argument("channels-last images that do not fit the plan");
  }
}

void Runner::learned_at(const void* g, const void* x, const void* scale, const void* zero, double* of_scale,
                        double* of_zero, int64_t points, int64_t channels) const {
  Call call = call_;
  const Layout& layout = call.layout;
  if (!layout.size) return;
  call.x = x;
  call.g = g;
  call.scale = scale;
  call.zero = zero;
  call.exclusive = false;  // learned parameters always use inclusive bounds
  // Every set has room for as many block sums as the largest set needs; single columns are summed together.
  const bool columns = layout.block == 1 && layout.cols > 1 && !points;
  call.sets = sets_;
  call.points = points;
  call.channels = channels;
  call.blocks = ceil_div(largest_set(), kLeaf);
  call.tile = columns ? kTile : 1;
  const bool integers = call.kind == Kind::integers && of_zero, direct = call.blocks == 1;
  std::vector<double> sums(direct ? 0 : static_cast<size_t>(sets_ * call.blocks));
  std::vector<double> high_sums(direct || !integers ? 0 : static_cast<size_t>(sets_ * call.blocks));
  call.sums = direct ? of_scale : sums.data();
  call.high_sums = !integers ? nullptr : direct ? of_zero : high_sums.data();
  const int threads = threads_for(layout.size);
  const int64_t pieces = boxes(columns) * call.blocks;
  call.step = ceil_div(pieces, threads);  // one part per thread, each with its own scratch memory
  const auto scratch = std::make_unique_for_overwrite<double[]>(
      static_cast<size_t>(ceil_div(pieces, call.step) * 2 * kLeaf * call.tile));
  call.scratch = scratch.get();
  const auto planes = std::make_unique_for_overwrite<float[]>(
      static_cast<size_t>(points ? ceil_div(pieces, call.step) * 2 * planes_of(points, channels) * pitch_of(points) : 0));
  call.planes = planes.get();
  launch_parts(call, kernels_.learned, pieces, call.step, threads);
  if (direct) return;
  launch(call, kernels_.fold_sums, sets_, 1, sets_ * call.blocks);
  for (int64_t set = 0; set < sets_; ++set) {
    of_scale[set] = sums[static_cast<size_t>(set * call.blocks)];
    if (integers) of_zero[set] = high_sums[static_cast<size_t>(set * call.blocks)];
  }
}

std::tuple<int64_t, bool> Runner::histogram(const Input& x, const Input& weights, const Input& rows, int64_t row_count,
                                            const Output& counts, const Output& missed, const Output& low,
                                            const Output& high) const {
  constexpr int kMostBits = 10;
  const int64_t size = call_.layout.size;
  Call call = call_;
  if (call.bits < 1 || call.bits > kMostBits) throw std::invalid_argument("a histogram has 1 to 10 bits of mantissa");
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("rows", rows.nbytes(), kExponents * 2);
  require_bytes("missed", missed.nbytes(), kExponents);
  require_bytes("low", low.nbytes(), set_bytes());
  require_bytes("high", high.nbytes(), set_bytes());
  if (row_count < 0 || row_count > kExponents) throw std::invalid_argument("there are at most 512 rows");
  require_bytes("counts", counts.nbytes(), row_count * sets_ * (int64_t{8} << call.bits));
  if (weights.nbytes()) require_bytes("weights", weights.nbytes(), 8 * size);
  call.rows = static_cast<const int16_t*>(rows.data());
  for (int i = 0; i < kExponents; ++i) {
    if (call.rows[i] >= row_count) throw std::invalid_argument("a row beyond the counts");
  }
  std::atomic<int64_t> nonfinite{0};
  std::atomic<bool> beyond{false};
  Lock merging;
  call.merging = &merging;
  call.nonfinite = &nonfinite;
  call.refused = &beyond;
  call.x = x.data();
  call.weights = weights.nbytes() ? static_cast<const int64_t*>(weights.data()) : nullptr;
  call.counts = static_cast<int64_t*>(counts.data());
  call.missed = static_cast<uint8_t*>(missed.data());
  call.low = low.data();
  call.high = high.data();
  call.sets = sets_;
  call.shared = shared_;
  const bool columns = call.layout.block == 1 && call.layout.cols > 1;
  call.tile = columns ? kTile : 1;
  nb::gil_scoped_release unlocked;
  if (sets_ == 1) {
    launch(call, kernels_.histogram, size, kGrain, size, Cut::few);
  } else {
    launch(call, kernels_.minmax, size, kGrain, size, shared_ ? Cut::few : Cut::many);
    launch(call, kernels_.histogram, boxes(columns), 1, size);
  }
  return {nonfinite.load(), !beyond.load()};
}

int64_t Runner::minmax(const Input& x, const Output& low, const Output& high) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("low", low.nbytes(), set_bytes());
  require_bytes("high", high.nbytes(), set_bytes());
  nb::gil_scoped_release unlocked;
  return minmax_at(x.data(), low.data(), high.data());
}

int64_t Runner::minmax_at(const void* x, void* low, void* high) const {
  Call call = call_;
  std::atomic<int64_t> nonfinite{0};
  Lock merging;
  call.merging = &merging;
  call.x = x;
  call.low = low;
  call.high = high;
  call.nonfinite = &nonfinite;
  call.shared = shared_;
  launch(call, kernels_.minmax, call.layout.size, kGrain, call.layout.size, shared_ ? Cut::few : Cut::many);
  return nonfinite.load();
}

bool Runner::derive(const Input& low, const Input& high, const Output& scale, const Output& zero) const {
  require_bytes("low", low.nbytes(), 8 * sets_);
  require_bytes("high", high.nbytes(), 8 * sets_);
  require_bytes("scale", scale.nbytes(), set_bytes());
  require_bytes("zero point", zero.nbytes(), set_bytes());
  nb::gil_scoped_release unlocked;
  return derive_at(low.data(), high.data(), scale.data(), zero.data());
}

bool Runner::derive_at(const void* low, const void* high, void* scale, void* zero) const {
  Call call = call_;
  std::atomic<bool> refused{false};
  call.low = const_cast<void*>(low);  // only read by this kernel
  call.high = const_cast<void*>(high);
  call.wide_bounds = true;
  call.scale_out = scale;
  call.zero_out = zero;
  call.refused = &refused;
  launch(call, kernels_.derive, sets_, 1, sets_);
  return !refused.load();
}

std::tuple<int64_t, bool> Runner::observe(const Input& x, const Output& low, const Output& high, const Output& scale,
                                          const Output& zero, const Output& out, bool to_codes) const {
  require_bytes("x", x.nbytes(), data_bytes());
  for (const auto& [name, bytes] : {std::pair{"low", low.nbytes()}, std::pair{"high", high.nbytes()},
                                    std::pair{"scale", scale.nbytes()}, std::pair{"zero point", zero.nbytes()}}) {
    require_bytes(name, bytes, set_bytes());
  }
  require_bytes("out", out.nbytes(), to_codes ? code_bytes() : data_bytes());
  nb::gil_scoped_release unlocked;
  return observe_at(x.data(), low.data(), high.data(), scale.data(), zero.data(), out.data(), to_codes);
}

std::tuple<int64_t, bool> Runner::observe_at(const void* x, void* low, void* high, void* scale, void* zero, void* out,
                                             bool to_codes) const {
  Call call = call_;
  std::atomic<int64_t> nonfinite{0};
  std::atomic<bool> refused{false}, saw_nan{false};
  Lock merging;
  call.merging = &merging;
  call.to_codes = to_codes;
  call.x = x;
  call.out = out;
  call.low = low;
  call.high = high;
  call.scale = call.scale_out = scale;
  call.zero = call.zero_out = zero;
  call.nonfinite = &nonfinite;
  call.refused = &refused;
  call.saw_nan = &saw_nan;
  call.shared = shared_;
  const int64_t size = call.layout.size;
  const Kernel quantizing = to_codes ? kernels_.quantize : kernels_.fake_quantize;
  constexpr int64_t kResident = 1 << 15;  // elements of a set that stay in the cache for a second pass
  if (!shared_ && call.layout.block <= kResident && sets_ >= int64_t{4} * threads_for(size)) {
    launch(call, kernels_.observe, sets_, 1, size);
  } else {
    for (auto [array, value] : {std::pair{low, std::numeric_limits<double>::infinity()},
                                std::pair{high, -std::numeric_limits<double>::infinity()}}) {
      if (call.dtype == Dtype::f64) {
        std::fill_n(static_cast<double*>(array), sets_, value);
      } else {
        std::fill_n(static_cast<float*>(array), sets_, static_cast<float>(value));
      }
    }
    launch(call, kernels_.minmax, size, kGrain, size, shared_ ? Cut::few : Cut::many);
    launch(call, kernels_.derive, sets_, 1, sets_);
    if (!refused.load()) launch(call, quantizing, size, kGrain, size, Cut::many, true);
  }
  return {nonfinite.load(), !refused.load()};
}

void Runner::best_scales(const Input& x, const Input& low, const Input& high, const Input& scale, const Input& zero,
                         const Input& factors, int64_t coarse, bool refine, double least, const Output& best_scale,
                         const Output& best_zero, const Output& errors) const {
  require_bytes("x", x.nbytes(), data_bytes());
  require_bytes("errors", errors.nbytes(), 8 * sets_);
  for (const auto& [name, bytes] :
       {std::pair{"low", low.nbytes()}, std::pair{"high", high.nbytes()}, std::pair{"scale", scale.nbytes()},
        std::pair{"zero point", zero.nbytes()}, std::pair{"the best scale", best_scale.nbytes()},
        std::pair{"the best zero point", best_zero.nbytes()}}) {
    require_bytes(name, bytes, set_bytes());
  }
  Call call = call_;
  call.positions = static_cast<int64_t>(factors.nbytes()) / 8;
  if (coarse < 1 || call.positions < 1) throw std::invalid_argument("a search has at least one position");
  if (!call.layout.size) return;
  call.x = x.data();
  call.low = const_cast<void*>(low.data());  // only read by this kernel
  call.high = const_cast<void*>(high.data());
  call.scale = scale.data();
  call.zero = zero.data();
  call.factors = static_cast<const double*>(factors.data());
  call.coarse = coarse;
  call.refine = refine;
  call.least = least;
  call.scale_out = best_scale.data();
  call.zero_out = best_zero.data();
  call.errors = static_cast<double*>(errors.data());
  const bool columns = call.layout.block == 1 && call.layout.cols > 1;
  call.tile = columns ? kTile : 1;
  constexpr int64_t kMeasured = 32;  // times that an element is measured, about
  nb::gil_scoped_release unlocked;
  const int threads = threads_for(call.layout.size * kMeasured);
  // Sets that are contiguous and of the compute type are searched in place; copies of large sets are one per thread.
  const bool in_place = !shared_ && !columns && (call.dtype == Dtype::f32 || call.dtype == Dtype::f64);
  const int64_t numbers = in_place ? 0 : largest_set() * call.tile;
  call.room = call.dtype == Dtype::f64 ? numbers : ceil_div(numbers, 2);
  constexpr int64_t kFewCopies = 1 << 16;
  const int64_t pieces = boxes(columns), parts = int64_t{threads} * (threads == 1 || numbers > kFewCopies ? 1 : 16);
  call.step = ceil_div(pieces, parts);
  const auto scratch = std::make_unique_for_overwrite<double[]>(static_cast<size_t>(ceil_div(pieces, call.step) * call.room));
  call.scratch = scratch.get();
  launch_parts(call, kernels_.best_scales, pieces, call.step, threads);
}

}  // namespace detent

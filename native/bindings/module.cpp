// detent._native: the Python bindings of the kernels.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>

#include "detent/blocks.hpp"
#include "launch.hpp"
#include "layer_step.hpp"
#include "runner.hpp"

namespace {

using namespace detent;

// Sums and largest magnitudes over two arrays of `count` elements, for metrics. A factor is a power of two, given as
// two factors.
Call pair_call(int term, int64_t count, const Input& x, int dtype, const Input& y, int second_dtype) {
  Call call;
  call.term = static_cast<Term>(term);
  call.dtype = static_cast<Dtype>(dtype);
  call.second_dtype = static_cast<Dtype>(second_dtype);
  require_bytes("x", x.nbytes(), count * item_size(call.dtype));
  require_bytes("y", y.nbytes(), count * item_size(call.second_dtype));
  call.x = x.data();
  call.g = y.data();
  call.layout.size = call.layout.cols = call.layout.block = count;
  call.blocks = ceil_div(count, kLeaf);
  return call;
}

double error_sum(int level, int term, int64_t count, const Input& x, int dtype, const Input& y, int second_dtype,
                 std::tuple<double, double> factor, std::tuple<double, double> second_factor) {
  const Kernels& kernels = kernels_of(level);
  Call call = pair_call(term, count, x, dtype, y, second_dtype);
  std::tie(call.factor[0], call.factor[1]) = factor;
  std::tie(call.second_factor[0], call.second_factor[1]) = second_factor;
  if (!count) return 0.0;
  nb::gil_scoped_release unlocked;
  std::vector<double> sums(static_cast<size_t>(call.blocks));
  call.sums = sums.data();
  launch(call, kernels.error_sums, call.blocks, 1, count);
  kernels.fold_sums(call, 0, 1);
  return sums[0];
}

double largest_error(int level, int term, int64_t count, const Input& x, int dtype, const Input& y, int second_dtype) {
  const Kernels& kernels = kernels_of(level);
  Call call = pair_call(term, count, x, dtype, y, second_dtype);
  if (!count) return 0.0;
  nb::gil_scoped_release unlocked;
  std::vector<double> found(static_cast<size_t>(call.blocks));
  call.sums = found.data();
  launch(call, kernels.largest_error, call.blocks, 1, count);
  double largest = 0.0;
  for (const double each : found) {
    if (std::isnan(each)) return each;
    largest = each > largest ? each : largest;
  }
  return largest;
}

// Checksum of an array, which can be compared only within this process.
uint64_t checksum(int level, const Input& x) {
  const Kernels& kernels = kernels_of(level);
  Call call;
  call.x = x.data();
  call.layout.size = static_cast<int64_t>(x.nbytes());
  call.blocks = ceil_div(call.layout.size, kChecked);
  nb::gil_scoped_release unlocked;
  std::vector<uint64_t> found(static_cast<size_t>(call.blocks));
  call.out = found.data();
  launch(call, kernels.checksum, call.blocks, 1, call.layout.size / 4);
  uint64_t sum = 0;
  for (const uint64_t each : found) sum = (sum ^ each) * 0x9E3779B97F4A7C15ull + 1;
  return sum;
}

// Scales a matrix of `cols` columns of sums of products to floats, see scale_sums.cpp; returns whether all sums are
// exact. The bias may be empty.
bool scale_sums(int level, int64_t cols, const Input& sums, bool float_sums, const Input& offset, const Input& scale,
                const Input& bias, const Output& out) {
  const Kernels& kernels = kernels_of(level);
  constexpr int64_t kWord = 4;
  const int64_t size = static_cast<int64_t>(sums.nbytes()) / kWord;
  if (cols < 1 || size % cols) throw std::invalid_argument("the sums must fill whole rows");
  require_bytes("out", out.nbytes(), size * kWord);
  require_bytes("offset", offset.nbytes(), cols * kWord);
  require_bytes("scale", scale.nbytes(), cols * kWord);
  Call call;
  call.biased = bias.nbytes() != 0;
  if (call.biased) require_bytes("bias", bias.nbytes(), cols * kWord);
  std::atomic<bool> inexact{false};
  call.float_sums = float_sums;
  call.layout.size = size;
  call.layout.cols = cols;
  call.x = sums.data();
  call.offset = static_cast<const int32_t*>(offset.data());
  call.scale = scale.data();
  call.bias = static_cast<const float*>(bias.data());
  call.out = out.data();
  call.refused = &inexact;
  nb::gil_scoped_release unlocked;
  launch(call, kernels.scale_sums, size, kGrain, size);
  return !inexact.load();
}

// Writes the codes or values of fused requantization, see requantize.cpp; `codes` is 0 for values, 1 for unsigned and -1
// for signed codes.
void requantize(int level, const Input& x, const Input& unit, const Input& inverse, const Input& multiplier, int64_t cols,
                double scale, double zero, double qmin, double qmax, int codes, const Output& out) {
  constexpr int64_t kFloat = sizeof(float);
  Call call;
  call.layout.size = static_cast<int64_t>(x.nbytes()) / kFloat;
  call.layout.cols = cols;
  call.channels = static_cast<int64_t>(unit.nbytes()) / kFloat;
  if (cols < 1 || call.channels < 1) throw std::invalid_argument("at least one element per channel, and one channel");
  require_bytes("inverse", inverse.nbytes(), call.channels * kFloat);
  require_bytes("multiplier", multiplier.nbytes(), call.channels * kFloat);
  require_bytes("out", out.nbytes(), codes ? call.layout.size : call.layout.size * kFloat);
  call.x = x.data();
  call.scale = unit.data();
  call.g = inverse.data();
  call.bias = static_cast<const float*>(multiplier.data());
  call.factor[0] = scale;
  call.factor[1] = zero;
  call.qmin = qmin;
  call.qmax = qmax;
  call.to_codes = codes != 0;
  call.is_signed = codes < 0;
  call.out = out.data();
  nb::gil_scoped_release unlocked;
  launch(call, kernels_of(level).requantize, call.layout.size, kGrain, call.layout.size);
}

BlockShape shape_of(int type) {
  const BlockShape shape = block_shape(static_cast<BlockType>(type));
  if (!shape.size) throw std::invalid_argument("unknown block format");
  return shape;
}

// Encodes rows of `cols` float32 to a block format. The importance may be empty. Returns whether all elements are finite,
// and whether scales of a block may be infinite or 0.
nb::tuple encode_blocks(int level, int type, int64_t cols, const Input& x, const Input& importance, const Output& out) {
  const Kernels& kernels = kernels_of(level);
  const BlockShape shape = shape_of(type);
  constexpr int64_t kFloat = sizeof(float);
  const int64_t size = static_cast<int64_t>(x.nbytes()) / kFloat;
  if (cols < 1 || cols % shape.size || size % cols) throw std::invalid_argument("x must be rows of whole blocks");
  const int64_t count = size / shape.size, rows = size / cols;
  require_bytes("out", out.nbytes(), count * shape.bytes);
  Call call;
  std::atomic<bool> refused{false}, extreme{false};
  call.block_type = type;
  call.layout.size = size;
  call.layout.cols = cols;
  call.blocks = cols / shape.size;
  call.x = x.data();
  call.refused = &refused;
  call.extreme = &extreme;
  {
    nb::gil_scoped_release unlocked;
    std::vector<float> means;
    if (importance.nbytes()) {
      require_bytes("importance", importance.nbytes(), cols * kFloat);
      call.importance = static_cast<const float*>(importance.data());
      if (shape.size == 32 && static_cast<BlockType>(type) != BlockType::iq4_nl) {
        means.resize(static_cast<size_t>(rows));
        call.out = means.data();
        launch(call, kernels.row_means, rows, 16, size);
        call.row_means = means.data();
      }
    }
    call.out = out.data();
    launch(call, kernels.encode_blocks, count, 16, size);
  }
  return nb::make_tuple(!refused.load(), extreme.load());
}

void decode_blocks(int level, int type, const Input& blocks, const Output& out) {
  const Kernels& kernels = kernels_of(level);
  const BlockShape shape = shape_of(type);
  constexpr int64_t kFloat = sizeof(float);
  const int64_t count = static_cast<int64_t>(blocks.nbytes()) / shape.bytes;
  require_bytes("blocks", blocks.nbytes(), count * shape.bytes);
  require_bytes("out", out.nbytes(), count * shape.size * kFloat);
  Call call;
  call.block_type = type;
  call.codes_in = blocks.data();
  call.out = out.data();
  nb::gil_scoped_release unlocked;
  launch(call, kernels.decode_blocks, count, 16, count * shape.size);
}

// Converts between one code per byte and packed codes of `bits` bits; count is the number of codes.
void repack(bool packing, int level, int64_t count, int bits, bool is_signed, const Input& in, const Output& out) {
  if (bits < 1 || bits > 8) throw std::invalid_argument("1 to 8 bits are packed");
  const Kernels& kernels = kernels_of(level);
  const int64_t packed = (count * bits + 7) / 8;
  require_bytes("the input", in.nbytes(), packing ? count : packed);
  require_bytes("out", out.nbytes(), packing ? packed : count);
  Call call;
  call.layout.size = count;
  call.bits = bits;
  call.is_signed = is_signed;
  call.codes_in = in.data();
  call.out = out.data();
  nb::gil_scoped_release unlocked;
  launch(call, packing ? kernels.pack : kernels.unpack, count, kGrain, count);
}

// Computes, for each set, the quantization error of each candidate on the set's histogram. Levels are empty for integer
// formats.
void grid_errors(int level, int norm, double qmin, double qmax, const Input& lower, const Input& upper, const Input& mass,
                 const Input& low, const Input& high, const Input& scales, const Input& zeros, const Input& levels,
                 const Input& middles, const Input& whole, const Output& errors) {
  const Kernels& kernels = kernels_of(level);
  if (norm != 1 && norm != 2) throw std::invalid_argument("norms are 1 and 2");
  constexpr int64_t kDouble = sizeof(double);
  Call call;
  call.norm = norm;
  call.qmin = qmin;
  call.qmax = qmax;
  call.bins = static_cast<int64_t>(lower.nbytes()) / kDouble;
  call.sets = static_cast<int64_t>(low.nbytes()) / kDouble;
  call.level_count = static_cast<int64_t>(levels.nbytes()) / kDouble;
  call.kind = call.level_count ? Kind::codebook : Kind::integers;
  if (!call.sets) return;
  call.candidates = static_cast<int64_t>(scales.nbytes()) / kDouble / call.sets;
  require_bytes("upper", upper.nbytes(), call.bins * kDouble);
  require_bytes("mass", mass.nbytes(), call.bins * call.sets * kDouble);
  require_bytes("high", high.nbytes(), call.sets * kDouble);
  require_bytes("scales", scales.nbytes(), call.sets * call.candidates * kDouble);
  require_bytes("zeros", zeros.nbytes(), call.sets * call.candidates * kDouble);
  require_bytes("errors", errors.nbytes(), call.sets * call.candidates * kDouble);
  require_bytes("middles", middles.nbytes(), call.level_count ? (call.level_count - 1) * kDouble : 0);
  require_bytes("whole", whole.nbytes(), call.level_count * kDouble);
  call.lower = static_cast<const double*>(lower.data());
  call.upper = static_cast<const double*>(upper.data());
  call.mass = static_cast<const double*>(mass.data());
  call.low = const_cast<void*>(low.data());  // only read by this kernel
  call.high = const_cast<void*>(high.data());
  call.scales = static_cast<const double*>(scales.data());
  call.zeros = static_cast<const double*>(zeros.data());
  call.levels = levels.data();
  call.middles = static_cast<const double*>(middles.data());
  call.whole = static_cast<const double*>(whole.data());
  call.errors = static_cast<double*>(errors.data());
  nb::gil_scoped_release unlocked;
  const int threads = threads_for(call.sets * call.candidates * call.bins);
  call.step = ceil_div(call.sets, int64_t{4} * threads);
  const int64_t parts = ceil_div(call.sets, call.step);
  std::vector<double> scratch(static_cast<size_t>(parts * kGridArrays * (call.bins + kGridPadding)));
  call.scratch = scratch.data();
  launch_parts(call, kernels.grid_errors, call.sets, call.step, threads);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // cached plans keep their runners until the process ends
  m.doc() = "The native kernels of detent; use the functions of detent, which check their arguments.";
  m.def("levels", [] {
    std::vector<std::tuple<std::string, bool>> rows;
    for (int i = 0; i < kLevelCount; ++i) rows.emplace_back(kLevels[i].name, kLevels[i].supported());
    return rows;
  });
  m.def("best_level", &best_level);
  m.def("set_num_threads", [](int count) { thread_count.store(count); });
  m.def("join_team", [](uintptr_t team, uintptr_t size) {
    join_team(reinterpret_cast<Team>(team), reinterpret_cast<TeamSize>(size));
  });
  m.def("error_sum", &error_sum);
  m.def("largest_error", &largest_error);
  m.def("checksum", &checksum);
  m.def("repack", &repack);
  m.def("scale_sums", &scale_sums);
  m.def("requantize", &requantize);
  m.def("encode_blocks", &encode_blocks);
  m.def("decode_blocks", &decode_blocks);
  m.def("grid_errors", &grid_errors);
  nb::class_<Runner>(m, "Runner")
      .def(nb::init<int, int64_t, int64_t, const Lead&, int64_t, const nb::dict&>())
      .def("quantize", &Runner::quantize)
      .def("quantize_masked", &Runner::quantize_masked)
      .def("dequantize", &Runner::dequantize)
      .def("fake_quantize", &Runner::fake_quantize)
      .def("fake_quantize_masked", &Runner::fake_quantize_masked)
      .def("backward", &Runner::backward)
      .def("dequantize_backward", &Runner::dequantize_backward)
      .def("masked_backward", &Runner::masked_backward)
      .def("learned", &Runner::learned)
      .def("minmax", &Runner::minmax)
      .def("derive", &Runner::derive)
      .def("observe", &Runner::observe)
      .def("histogram", &Runner::histogram)
      .def("best_scales", &Runner::best_scales);
  nb::class_<StepValues>(m, "StepValues")
      .def_ro("clips", &StepValues::clips)
      .def_ro("has_bias_codes", &StepValues::has_bias_codes)
      .def_ro("zero_point", &StepValues::zero_point)
      .def_ro("x_scale", &StepValues::x_scale)
      .def_ro("x_zero", &StepValues::x_zero)
      .def_ro("w_scale", &StepValues::w_scale)
      .def_ro("w_zero", &StepValues::w_zero)
      .def_ro("factor", &StepValues::factor);
  nb::class_<LayerStep>(m, "LayerStep")
      .def(nb::init<nb::object, nb::object, const nb::dict&>())
      .def("forward", &LayerStep::forward)
      .def("finish", &LayerStep::finish)
      .def("operands", &LayerStep::operands)
      .def("clear", &LayerStep::clear)
      .def("learned", &LayerStep::learned);
}

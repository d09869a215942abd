// detent._native: the kernels as seen from Python. A Runner is one plan's kernel; calling it checks only that the arrays are
// as large as the plan says, so that no caller can make it read or write beyond them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "detent/levels.hpp"
#include "detent/pool.hpp"

namespace nb = nanobind;

namespace {

using namespace detent;

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;

enum class Operation : int { quantize, dequantize, fake_quantize, backward, dequantize_backward, minmax };

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kSmall = 1 << 15;

std::atomic<int> thread_count{1};

struct Job {
  const Call* call;
  void (*kernel)(const Call&, int64_t, int64_t);
  int64_t step;
};

void run_part(const void* context, int64_t index) {
  const Job& job = *static_cast<const Job*>(context);
  const int64_t begin = index * job.step, end = begin + job.step, size = job.call->layout.size;
  job.kernel(*job.call, begin, end < size ? end : size);
}

void run_all(const Job& job, int threads) {
  const int64_t size = job.call->layout.size;
  Job part = job;
  const int64_t wanted = size < kSmall ? 1 : 4 * threads;  // several parts a thread, for machines with uneven cores
  const int64_t each = (size + wanted - 1) / wanted;
  part.step = (each + kGrain - 1) / kGrain * kGrain;
  if (size) run_tasks(run_part, &part, (size + part.step - 1) / part.step, size < kSmall ? 1 : threads);
}

void (*pick(const Kernels& kernels, Operation operation))(const Call&, int64_t, int64_t) {
  switch (operation) {
    case Operation::quantize: return kernels.quantize;
    case Operation::dequantize: return kernels.dequantize;
    case Operation::fake_quantize: return kernels.fake_quantize;
    case Operation::backward: return kernels.backward;
    case Operation::dequantize_backward: return kernels.dequantize_backward;
    case Operation::minmax: return kernels.minmax;
  }
  throw std::invalid_argument("unknown operation");
}

class Runner {
 public:
  Runner(int operation, int level, int64_t cols, int64_t block, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& lead,
         int64_t sets, nb::dict rules)
      : operation_(static_cast<Operation>(operation)), sets_(sets) {
    if (level < 0 || level >= kLevelCount || !kLevels[level].supported()) throw std::invalid_argument("unsupported level");
    if (lead.size() > static_cast<size_t>(kMaxLead)) throw std::invalid_argument("too many axes");
    kernel_ = pick(kLevels[level].kernels, operation_);
    if (cols < 0 || block < 1) throw std::invalid_argument("a layout has blocks of at least one element");
    Layout& layout = call_.layout;
    layout.cols = cols;
    layout.block = block;
    layout.size = cols;
    for (const auto& [size, width, stride] : lead) {
      if (size < 0 || width < 1) throw std::invalid_argument("a layout has blocks of at least one element");
      layout.axis[layout.lead++] = {size, width, stride};
      layout.size *= size;
    }
    const auto rule = [&](const char* name) { return nb::cast<int>(rules[name]); };
    call_.dtype = static_cast<Dtype>(rule("dtype"));
    call_.division = static_cast<Division>(rule("division"));
    call_.zero_point = static_cast<ZeroPoint>(rule("zero_point"));
    call_.rounding = static_cast<Rounding>(rule("rounding"));
    call_.fill = static_cast<Fill>(rule("fill"));
    call_.mask = static_cast<Mask>(rule("mask"));
    call_.grad = static_cast<Grad>(rule("grad"));
    call_.exclusive = rule("exclusive") != 0;
    call_.find_nan = rule("find_nan") != 0;
    call_.is_signed = rule("is_signed") != 0;
    call_.no_zero = rule("no_zero") != 0;
    call_.bits = rule("bits");
    call_.codes = static_cast<Codes>(rule("codes"));
    call_.qmin = nb::cast<double>(rules["qmin"]);
    call_.qmax = nb::cast<double>(rules["qmax"]);
  }

  // Runs on arrays; returns whether NaN was met, where it is looked for. `second` is x where `first` is g.
  bool run(const Input& first, const Input& second, const Input& scale, const Input& zero, const Output& out) const {
    const int64_t wide = call_.dtype == Dtype::f64 ? 8 : 4;
    const int64_t data = call_.layout.size * (call_.dtype == Dtype::f64 ? 8 : call_.dtype == Dtype::f32 ? 4 : 2);
    const bool to_codes = operation_ == Operation::quantize, from_codes = operation_ == Operation::dequantize;
    require("first input", first, from_codes ? code_bytes() : data);
    if (operation_ == Operation::backward) require("second input", second, data);
    require("scale", scale, sets_ * wide);
    require("zero point", zero, sets_ * wide);
    require("out", out, to_codes ? code_bytes() : data);
    Call call = call_;
    std::atomic<bool> saw_nan{false};
    (from_codes ? call.codes_in : operation_ == Operation::fake_quantize || to_codes ? call.x : call.g) = first.data();
    if (operation_ == Operation::backward) call.x = second.data();
    call.scale = scale.data();
    call.zero = zero.data();
    call.out = out.data();
    call.saw_nan = &saw_nan;
    {
      nb::gil_scoped_release unlocked;
      run_all({&call, kernel_, 0}, thread_count.load(std::memory_order_relaxed));
    }
    return saw_nan.load();
  }

  // Takes the elements into the bounds of their sets; returns how many are not finite.
  int64_t reduce(const Input& data, const Output& low, const Output& high) const {
    const int64_t wide = call_.dtype == Dtype::f64 ? 8 : 4;
    require("data", data, call_.layout.size * (call_.dtype == Dtype::f64 ? 8 : call_.dtype == Dtype::f32 ? 4 : 2));
    require("low", low, sets_ * wide);
    require("high", high, sets_ * wide);
    Call call = call_;
    std::atomic<int64_t> nonfinite{0};
    call.x = data.data();
    call.out = low.data();
    call.high = high.data();
    call.nonfinite = &nonfinite;
    const int64_t rows = call.layout.size / (call.layout.cols ? call.layout.cols : 1);
    call.shared = rows * ((call.layout.cols + call.layout.block - 1) / call.layout.block) != sets_;
    {
      nb::gil_scoped_release unlocked;
      run_all({&call, kernel_, 0}, thread_count.load(std::memory_order_relaxed));
    }
    return nonfinite.load();
  }

 private:
  int64_t code_bytes() const {
    const int64_t size = call_.layout.size;
    return call_.codes == Codes::packed ? (size * call_.bits + 7) / 8 : call_.codes == Codes::words ? 2 * size : size;
  }

  template <class Array>
  static void require(const char* name, const Array& array, int64_t bytes) {
    if (static_cast<int64_t>(array.nbytes()) != bytes) {
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.nbytes()) + " bytes, expected " +
                                  std::to_string(bytes));
    }
  }

  Operation operation_;
  int64_t sets_;
  void (*kernel_)(const Call&, int64_t, int64_t);
  Call call_;
};

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // plans are cached for the life of the process, and their runners with them
  m.doc() = "The native kernels of detent; use the functions of detent, which check their arguments.";
  m.def("levels", [] {
    std::vector<std::tuple<std::string, bool>> rows;
    for (int i = 0; i < kLevelCount; ++i) rows.emplace_back(kLevels[i].name, kLevels[i].supported());
    return rows;
  });
  m.def("best_level", &best_level);
  m.def("set_num_threads", [](int count) { thread_count.store(count); });
  nb::class_<Runner>(m, "Runner")
      .def(nb::init<int, int, int64_t, int64_t, const std::vector<std::tuple<int64_t, int64_t, int64_t>>&, int64_t, nb::dict>())
      .def("run", &Runner::run)
      .def("reduce", &Runner::reduce);
}

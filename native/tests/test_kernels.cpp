// Every kernel of every CPU level this machine can run, against the model, on arrays that end (or begin) at a guard page:
// all lengths from 0 to 300 in many layouts, and long arrays cut into parts for several threads.
// Prints what differs and exits with 1; `native/tests/Makefile` builds it as shipped and under the sanitizers.
#include <algorithm>
#include <cinttypes>
#include <random>
#include <vector>

#include "detent/levels.hpp"
#include "detent/pool.hpp"
#include "guarded.hpp"
#include "model.hpp"

namespace {

using namespace detent;
using testing::Guarded;
using testing::Side;

constexpr int64_t kLargest = 40000;

struct Operation {
  const char* name;
  void (*Kernels::*kernel)(const Call&, int64_t, int64_t);
};
constexpr Operation kOperations[] = {
    {"quantize", &Kernels::quantize},
    {"dequantize", &Kernels::dequantize},
    {"fake_quantize", &Kernels::fake_quantize},
    {"backward", &Kernels::backward},
    {"dequantize_backward", &Kernels::dequantize_backward},
    {"minmax", &Kernels::minmax},
};

struct Shape {
  const char* name;
  std::vector<int64_t> sizes, blocks;
};

// The layout of an array whose axes are cut into blocks, as the Python side makes it, and its number of sets.
Layout layout_of(const Shape& shape, int64_t& sets) {
  Layout layout;
  const size_t last = shape.sizes.size() - 1;
  layout.cols = layout.size = shape.sizes[last];
  layout.block = shape.blocks[last];
  sets = (layout.cols + layout.block - 1) / layout.block;
  layout.lead = static_cast<int>(last);
  for (size_t i = last; i-- > 0;) {
    layout.axis[i] = {shape.sizes[i], shape.blocks[i], sets};
    layout.size *= shape.sizes[i];
    sets *= (shape.sizes[i] + shape.blocks[i] - 1) / shape.blocks[i];
  }
  return layout;
}

// Arrays whose last axis (or only axis) has that length.
std::vector<Shape> shapes(int64_t n) {
  return {
      {"tensor", {n}, {n}},
      {"first axis", {3, n}, {1, n}},
      {"middle axis", {2, 3, n}, {2, 1, n}},
      {"last axis", {3, n}, {3, 1}},
      {"group 3", {2, n}, {1, 3}},
      {"group 32", {2, n}, {1, std::min<int64_t>(32, n)}},
      {"group 128", {2, n}, {1, std::min<int64_t>(128, n)}},
      {"group 2 of the first axis", {5, n}, {2, 1}},
      {"block 2x5", {3, n}, {2, std::min<int64_t>(5, n)}},
      {"block 2x200", {3, n}, {2, std::min<int64_t>(200, n)}},
      {"short rows", {n, 5}, {1, 5}},
  };
}

class Tester {
 public:
  // Runs an operation with rules that differ from run to run; over the whole test all of them meet all of the others.
  void check(const Level& level, const Operation& operation, const Shape& shape, int threads) {
    Call call;
    int64_t sets = 0;
    call.layout = layout_of(shape, sets);
    call.dtype = static_cast<Dtype>(random_() % 4);
    call.division = static_cast<Division>(random_() % 2);
    call.zero_point = static_cast<ZeroPoint>(random_() % 2);
    call.rounding = static_cast<Rounding>(random_() % 3);
    call.fill = static_cast<Fill>(random_() % 3);
    call.mask = static_cast<Mask>(random_() % 4);
    call.grad = static_cast<Grad>(random_() % 2);
    call.find_nan = random_() % 2;
    call.exclusive = random_() % 2;
    call.is_signed = random_() % 2;
    call.no_zero = random_() % 2;
    call.codes = static_cast<Codes>(random_() % 3);
    call.bits = call.codes == Codes::words ? 9 + random_() % 8 : 1 + random_() % 8;
    call.qmin = call.is_signed ? -std::ldexp(1.0, call.bits - 1) : 0.0;
    call.qmax = call.qmin + std::ldexp(1.0, call.bits) - 1;
    side_ = random_() % 4 ? Side::last : Side::first;
    level_ = &level;
    operation_ = &operation;
    shape_ = &shape;
    threads_ = threads;
    switch (call.dtype) {
      case Dtype::f16: return run<model::Half>(call, sets);
      case Dtype::bf16: return run<model::Brain>(call, sets);
      case Dtype::f32: return run<float>(call, sets);
      case Dtype::f64: return run<double>(call, sets);
    }
  }

  int64_t runs = 0, elements = 0, failures = 0;

 private:
  template <class In>
  void run(Call call, int64_t sets) {
    using T = model::Compute<In>;
    ++runs;
    elements += call.layout.size;
    scale_.clear();
    zero_.clear();
    T* scale = array<T>(scales_memory_, sets);
    T* zero = array<T>(zeros_memory_, sets);
    for (int64_t i = 0; i < sets; ++i) {
      constexpr double kScales[] = {0.0123, 0.3, 0.017, 1.0 / 3, 0.5, 1e-3, 40.0};
      scale_.push_back(scale[i] = static_cast<T>(kScales[random_() % 7]));
      const T any = static_cast<T>(call.qmin + random_() % static_cast<unsigned>(call.qmax - call.qmin + 1));
      zero_.push_back(zero[i] = call.no_zero ? T(0) : any);
    }
    call.scale = scale;
    call.zero = zero;
    call.saw_nan = &saw_nan_;
    saw_nan_.store(false);
    if (operation_->kernel == &Kernels::quantize) return quantize<In>(call);
    if (operation_->kernel == &Kernels::dequantize) return dequantize<In>(call);
    if (operation_->kernel == &Kernels::fake_quantize) return fake_quantize<In>(call);
    if (operation_->kernel == &Kernels::minmax) return minmax<In>(call, sets);
    return gradients<In>(call);
  }

  template <class In>
  void quantize(Call& call) {
    const std::vector<In> x = data<In>(call, x_memory_, call.x);
    call.out = out_memory_.place(code_bytes(call), side_);
    launch(call);
    bool has_nan = false;
    for (int64_t i = 0; i < call.layout.size; ++i) {
      const int64_t set = model::set_of(call.layout, i);
      const double expected = model::code<model::Compute<In>>(call, model::value_of(x[i]), scale<In>(set), zero<In>(set));
      has_nan |= std::isnan(model::value_of(x[i]));
      if (!std::isnan(expected)) expect(read_code(call, call.out, i) == expected, call, i, "another code");
    }
    if (call.codes == Codes::packed) expect(padding(call) == 0, call, call.layout.size, "padding that is not zero");
    expect(saw_nan_.load() == has_nan, call, 0, "NaN overlooked or imagined");
  }

  template <class In>
  void dequantize(Call& call) {
    const int64_t bytes = code_bytes(call);
    uint8_t* codes = x_memory_.place(bytes, side_);
    for (int64_t i = 0; i < bytes; ++i) codes[i] = static_cast<uint8_t>(random_());
    call.codes_in = codes;
    call.out = array<In>(out_memory_, call.layout.size);
    launch(call);
    for (int64_t i = 0; i < call.layout.size; ++i) {
      using T = model::Compute<In>;
      const int64_t set = model::set_of(call.layout, i);
      const T code = static_cast<T>(read_code(call, codes, i));
      expect(model::same(read<In>(call.out, i), model::dequantized<In>(code, scale<In>(set), zero<In>(set))), call, i,
             "another value");
    }
  }

  template <class In>
  void fake_quantize(Call& call) {
    const std::vector<In> x = data<In>(call, x_memory_, call.x);
    call.out = array<In>(out_memory_, call.layout.size);
    launch(call);
    bool has_nan = false;
    for (int64_t i = 0; i < call.layout.size; ++i) {
      using T = model::Compute<In>;
      const int64_t set = model::set_of(call.layout, i);
      const T code = model::code<T>(call, model::value_of(x[i]), scale<In>(set), zero<In>(set));
      has_nan |= std::isnan(model::value_of(x[i]));
      expect(model::same(read<In>(call.out, i), model::dequantized<In>(code, scale<In>(set), zero<In>(set))), call, i,
             "another value");
    }
    if (call.find_nan) expect(saw_nan_.load() == has_nan, call, 0, "NaN overlooked or imagined");
  }

  template <class In>
  void gradients(Call& call) {
    using T = model::Compute<In>;
    const bool of_codes = operation_->kernel == &Kernels::dequantize_backward;
    const std::vector<In> g = data<In>(call, g_memory_, call.g);
    const std::vector<In> x = of_codes ? g : data<In>(call, x_memory_, call.x);
    call.out = array<In>(out_memory_, call.layout.size);
    launch(call);
    for (int64_t i = 0; i < call.layout.size; ++i) {
      const int64_t set = model::set_of(call.layout, i);
      const T s = scale<In>(set);
      const In expected = of_codes ? model::nearest<In>(model::value_of(g[i]) * s)
                                   : model::gradient<In>(call, g[i], x[i], s, zero<In>(set));
      expect(model::same(read<In>(call.out, i), expected), call, i, "another gradient");
    }
  }

  template <class In>
  void minmax(Call& call, int64_t sets) {
    using T = model::Compute<In>;
    constexpr T kInfinity = std::numeric_limits<T>::infinity();
    const std::vector<In> x = data<In>(call, x_memory_, call.x);
    std::vector<T> low(static_cast<size_t>(sets), kInfinity), high(static_cast<size_t>(sets), -kInfinity);
    std::atomic<int64_t> nonfinite{0};
    call.out = std::copy_n(low.data(), sets, array<T>(out_memory_, sets)) - sets;
    call.high = std::copy_n(high.data(), sets, array<T>(g_memory_, sets)) - sets;
    call.nonfinite = &nonfinite;
    call.shared = call.layout.cols == 0 || call.layout.size / call.layout.cols * blocks_of_a_row(call.layout) != sets;
    launch(call);
    int64_t expected = 0;
    for (int64_t i = 0; i < call.layout.size; ++i) {
      const size_t set = static_cast<size_t>(model::set_of(call.layout, i));
      const T value = model::value_of(x[static_cast<size_t>(i)]);
      expected += !std::isfinite(value);
      if (std::isfinite(value)) low[set] = std::min(low[set], value);
      if (std::isfinite(value)) high[set] = std::max(high[set], value);
    }
    for (int64_t i = 0; i < sets; ++i) {  // zeros of either sign are equal here: the caller makes them positive
      expect(read<T>(call.out, i) == low[static_cast<size_t>(i)], call, i, "another minimum");
      expect(read<T>(call.high, i) == high[static_cast<size_t>(i)], call, i, "another maximum");
    }
    expect(nonfinite.load() == expected, call, 0, "another count of elements not finite");
  }

  static int64_t blocks_of_a_row(const Layout& layout) { return (layout.cols + layout.block - 1) / layout.block; }

  // The kernel as the pool runs it: on the calling thread, or in parts.
  void launch(const Call& call) {
    struct Job {
      const Call* call;
      void (*kernel)(const Call&, int64_t, int64_t);
    } job{&call, level_->kernels.*operation_->kernel};
    const auto part = [](const void* context, int64_t index) {
      const Job& job = *static_cast<const Job*>(context);
      job.kernel(*job.call, index * kGrain, std::min(job.call->layout.size, (index + 1) * kGrain));
    };
    if (threads_ == 0) {
      if (call.layout.size) job.kernel(call, 0, call.layout.size);
    } else {
      run_tasks(part, &job, (call.layout.size + kGrain - 1) / kGrain, threads_);
    }
    for (Guarded* memory : {&x_memory_, &g_memory_, &scales_memory_, &zeros_memory_, &out_memory_}) {
      expect(memory->intact(), call, 0, "a write beside an array");
    }
  }

  // Codes, ties and their neighbours, and now and then something special; in guarded memory, and a copy.
  template <class In>
  std::vector<In> data(const Call& call, Guarded& memory, const void*& pointer) {
    using T = model::Compute<In>;
    constexpr T kSpecial[] = {T(0), -T(0), std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity(),
                              std::numeric_limits<T>::denorm_min(), -std::numeric_limits<T>::min() / 4,
                              std::numeric_limits<T>::max(), T(6e-8), T(-65519), std::numeric_limits<T>::quiet_NaN()};
    const unsigned special = 9 + random_() % 2;  // every other array holds NaN
    std::vector<In> x;
    const int64_t reach = 2 * static_cast<int64_t>(call.qmax - call.qmin) + 9;
    for (int64_t i = 0; i < call.layout.size; ++i) {
      const int64_t half_steps = static_cast<int64_t>(random_() % static_cast<uint64_t>(2 * reach)) - reach;
      T y = static_cast<T>(half_steps) / 2 * scale<In>(model::set_of(call.layout, i));
      const unsigned nudge = random_() % 4;
      if (nudge < 2) y = std::nextafter(y, nudge ? T(1e30) : T(-1e30));
      x.push_back(model::nearest<In>(random_() % 16 ? y : kSpecial[random_() % special]));
    }
    In* array = this->array<In>(memory, call.layout.size);
    if (!x.empty()) std::memcpy(array, x.data(), x.size() * sizeof(In));
    pointer = array;
    return x;
  }

  template <class T>
  T* array(Guarded& memory, int64_t count) {
    return reinterpret_cast<T*>(memory.place(static_cast<size_t>(count) * sizeof(T), side_));
  }

  template <class In>
  static In read(const void* array, int64_t index) {
    In value;
    std::memcpy(&value, static_cast<const uint8_t*>(array) + index * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  }

  template <class In>
  model::Compute<In> scale(int64_t set) const {
    return static_cast<model::Compute<In>>(scale_[static_cast<size_t>(set)]);
  }
  template <class In>
  model::Compute<In> zero(int64_t set) const {
    return static_cast<model::Compute<In>>(zero_[static_cast<size_t>(set)]);
  }

  static int64_t code_bytes(const Call& call) {
    const int64_t size = call.layout.size;
    return call.codes == Codes::packed ? (size * call.bits + 7) / 8 : call.codes == Codes::words ? 2 * size : size;
  }

  // Packed codes bit by bit.
  static double read_code(const Call& call, const void* array, int64_t index) {
    if (call.codes == Codes::words) {
      return call.is_signed ? double(read<int16_t>(array, index)) : double(read<uint16_t>(array, index));
    }
    if (call.codes == Codes::bytes) {
      return call.is_signed ? double(read<int8_t>(array, index)) : double(read<uint8_t>(array, index));
    }
    int code = 0;
    for (int bit = 0; bit < call.bits; ++bit) code |= bit_at(array, index * call.bits + bit) << bit;
    return call.is_signed && code >> (call.bits - 1) ? code - (1 << call.bits) : code;
  }

  static int bit_at(const void* array, int64_t bit) { return read<uint8_t>(array, bit / 8) >> bit % 8 & 1; }

  static int padding(const Call& call) {
    int set = 0;
    for (int64_t bit = call.layout.size * call.bits; bit < 8 * code_bytes(call); ++bit) set |= bit_at(call.out, bit);
    return set;
  }

  void expect(bool holds, const Call& call, int64_t index, const char* what) {
    if (holds || ++failures > 20) return;
    std::printf("%s, %s, %s of %" PRId64 ", element %" PRId64 ": %s (dtype %d, division %d, zero point %d, rounding %d, ",
                level_->name, operation_->name, shape_->name, call.layout.size, index, what, int(call.dtype),
                int(call.division), int(call.zero_point), int(call.rounding));
    std::printf("fill %d, mask %d, grad %d, exclusive %d, signed %d, codes %d of %d bits, %d threads)\n", int(call.fill),
                int(call.mask), int(call.grad), call.exclusive, call.is_signed, int(call.codes), call.bits, threads_);
  }

  std::mt19937 random_{20240229};
  Guarded x_memory_{8 * 6 * kLargest}, g_memory_{8 * 6 * kLargest}, out_memory_{8 * 6 * kLargest};
  Guarded scales_memory_{8 * 6 * kLargest}, zeros_memory_{8 * 6 * kLargest};
  std::vector<double> scale_, zero_;
  std::atomic<bool> saw_nan_{false};
  Side side_ = Side::last;
  const Level* level_ = nullptr;
  const Operation* operation_ = nullptr;
  const Shape* shape_ = nullptr;
  int threads_ = 0;  // 0: one call for the whole array
};

}  // namespace

int main() {
  static Tester tester;
  for (int i = 0; i < kLevelCount; ++i) {
    const Level& level = kLevels[i];
    if (!level.supported()) {
      std::printf("%s: not run, this machine cannot\n", level.name);
      continue;
    }
    const int64_t before = tester.runs;
    for (const Operation& operation : kOperations) {
      for (int64_t n = 0; n <= 300; ++n) {
        for (const Shape& shape : shapes(n)) {
          if (n > 0 || shape.blocks.back() > 0) tester.check(level, operation, shape, 0);
        }
      }
      for (const int64_t n : {1023, 1025, 4095, 4096, 4097, 8200}) {
        for (const Shape& shape : shapes(n)) tester.check(level, operation, shape, 0);
      }
      for (int threads = 1; threads <= 3; ++threads) {
        for (const Shape& shape : shapes(32773 / 3)) tester.check(level, operation, shape, threads);
        tester.check(level, operation, {"tensor", {kLargest}, {kLargest}}, threads);
        tester.check(level, operation, {"group 32", {kLargest}, {32}}, threads);
      }
    }
    std::printf("%s: %" PRId64 " runs\n", level.name, tester.runs - before);
  }
  std::printf("%" PRId64 " elements compared, %" PRId64 " differences\n", tester.elements, tester.failures);
  return tester.failures ? 1 : 0;
}

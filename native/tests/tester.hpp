// Tester: makes guarded arrays, runs kernels as the pool does, and counts and prints differences.
#pragma once

#include <cinttypes>

#include "cases.hpp"
#include "detent/levels.hpp"
#include "detent/pool.hpp"
#include "guarded.hpp"

namespace testing {

constexpr int64_t kLargest = 40000;
constexpr int64_t kParts = 8;  // largest number of parts, for work that is not divided by the grain

template <class T>
T read(const void* array, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const uint8_t*>(array) + index * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

inline int bit_at(const void* array, int64_t bit) { return read<uint8_t>(array, bit / 8) >> bit % 8 & 1; }

// The bits from first to last as a number.
inline int bits_at(const void* array, int64_t first, int64_t last) {
  int number = 0;
  for (int64_t bit = first; bit < last; ++bit) number |= bit_at(array, bit) << (bit - first);
  return number;
}

// Calls body with a value of the C++ type of this dtype.
template <class Body>
void with_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f16: return body(model::Half{});
    case Dtype::bf16: return body(model::Brain{});
    case Dtype::f32: return body(float{});
    case Dtype::f64: return body(double{});
  }
}

class Tester {
 public:
  int64_t runs = 0, elements = 0, failures = 0;

 protected:
  // Memory of the arrays; each run places its arrays again.
  enum Place { kX, kG, kScale, kZero, kOut, kLow, kHigh, kMask, kSums, kHighSums, kScratch, kCopies, kLevels, kBounds, kPlaces };

  template <class T>
  T* array(Place place, int64_t count) {
    return reinterpret_cast<T*>(memory_[place].place(static_cast<size_t>(count) * sizeof(T), side_));
  }

  template <class T>
  T* array(Place place, const std::vector<T>& values) {
    T* copy = array<T>(place, static_cast<int64_t>(values.size()));
    if (!values.empty()) std::memcpy(copy, values.data(), values.size() * sizeof(T));
    return copy;
  }

  // Runs the kernel on [0, count): in one call, or in parts that begin at multiples of the step.
  void launch(const Call& call, Kernel kernel, int64_t count, int64_t step) {
    struct Job {
      const Call* call;
      Kernel kernel;
      int64_t count, step;
    } job{&call, kernel, count, step};
    const auto part = [](const void* context, int64_t index) {
      const Job& job = *static_cast<const Job*>(context);
      job.kernel(*job.call, index * job.step, std::min(job.count, (index + 1) * job.step));
    };
    if (count) run_tasks(part, &job, ceil_div(count, step), threads_);
    for (const Guarded& memory : memory_) expect(memory.intact(), call, 0, "a write beside an array");
  }

  void launch(const Call& call, int64_t count, int64_t step) { launch(call, level_->kernels.*kernel_, count, step); }

  // Runs the kernel on elements, in parts that begin at multiples of the grain.
  void launch(const Call& call) {
    const int64_t size = call.layout.size;
    launch(call, size, threads_ > 0 ? kGrain : std::max(size, kGrain));
  }

  // A random step for work on sets, blocks or pieces, which may be divided anywhere.
  int64_t any_step(int64_t count) {
    const int64_t least = std::max<int64_t>(1, ceil_div(count, kParts));
    return threads_ > 0 || dice_.heads() ? least : std::max<int64_t>(1, count);
  }

  void expect(bool holds, const Call& call, int64_t index, const char* what) {
    if (holds || ++failures > 20) return;
    std::printf("%s, %s, %s of %" PRId64 ", at %" PRId64 ": %s (dtype %d, kind %d, division %d, zero point %d, ",
                level_->name, name_, shape_->name, call.layout.size, index, what, int(call.dtype), int(call.kind),
                int(call.division), int(call.zero_point));
    std::printf("rounding %d, fill %d, mask %d, grad %d, exclusive %d, signed %d, codes %d of %d bits, term %d, ",
                int(call.rounding), int(call.fill), int(call.mask), int(call.grad), call.exclusive, call.is_signed,
                int(call.codes), call.bits, int(call.term));
    std::printf("scale rule %d, zero range %d, %d threads)\n", int(call.rule.symmetric), int(call.rule.zero_range),
                threads_);
  }

  Dice dice_;
  Side side_ = Side::last;
  const Level* level_ = nullptr;
  Kernel Kernels::*kernel_ = nullptr;
  const char* name_ = nullptr;
  const Shape* shape_ = nullptr;
  int threads_ = 0;  // 0: elements in one call for the whole array

 private:
  Guarded memory_[kPlaces];
};

}  // namespace testing

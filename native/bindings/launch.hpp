// Launch: runs a kernel on the pool, in parts. The number of threads never changes a result.
#pragma once

#include <atomic>
#include <cstdint>

#include "detent/call.hpp"
#include "detent/pool.hpp"

namespace detent {

inline std::atomic<int> thread_count{1};

// Below this many elements a second thread costs more than it saves.
constexpr int64_t kSmall = 1 << 15;

struct Launch {
  const Call* call;
  Kernel kernel;
  int64_t count, step;
  bool backwards;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void run_part(const void* context, int64_t index) {
  const Launch& launch = *static_cast<const Launch*>(context);
  if (launch.backwards) index = ceil_div(launch.count, launch.step) - 1 - index;
  const int64_t begin = index * launch.step, end = begin + launch.step;
  launch.kernel(*launch.call, begin, end < launch.count ? end : launch.count);
}

inline int threads_for(int64_t elements) { return elements < kSmall ? 1 : thread_count.load(std::memory_order_relaxed); }

// The number of parts per thread. Many parts balance threads that start late or are slow. Few parts are better if each
// part must merge its result.
enum class Cut : int64_t { few = 3, many = 16 };

// Runs the kernel on [0, count) in parts of `step`.
inline void launch_parts(const Call& call, Kernel kernel, int64_t count, int64_t step, int threads, bool backwards = false) {
  const Launch part{&call, kernel, count, step, backwards};
  if (count) run_tasks(run_part, &part, ceil_div(count, step), threads);
}

// Runs the kernel in parts that begin at multiples of the grain. With `backwards`, the last
// part runs first, because the end of the array is still in the cache after another kernel.
inline void launch(const Call& call, Kernel kernel, int64_t count, int64_t grain, int64_t elements, Cut cut = Cut::many,
                   bool backwards = false) {
  const int threads = threads_for(elements);
  const int64_t parts = threads == 1 && !backwards ? 1 : static_cast<int64_t>(cut) * threads;
  const int64_t step = ceil_div(ceil_div(count, parts), grain) * grain;
  launch_parts(call, kernel, count, step ? step : grain, threads, backwards);
}

}  // namespace detent

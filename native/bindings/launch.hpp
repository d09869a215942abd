// Launch: a kernel on the pool, in parts. How many threads there are never changes a result.
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
};

inline void run_part(const void* context, int64_t index) {
  const Launch& launch = *static_cast<const Launch*>(context);
  const int64_t begin = index * launch.step, end = begin + launch.step;
  launch.kernel(*launch.call, begin, end < launch.count ? end : launch.count);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The threads for an array of that many elements, and how many of `count` pieces of work each part has, a multiple of
// `grain`: several parts a thread, for machines with uneven cores.
inline int threads_for(int64_t elements) { return elements < kSmall ? 1 : thread_count.load(std::memory_order_relaxed); }
inline int64_t step_for(int64_t count, int64_t grain, int threads) {
  const int64_t parts = threads == 1 ? 1 : int64_t{4} * threads;
  const int64_t step = ceil_div(ceil_div(count, parts), grain) * grain;
  return step ? step : grain;
}

// Runs the kernel on [0, count) in parts of `step`.
inline void launch_parts(const Call& call, Kernel kernel, int64_t count, int64_t step, int threads) {
  const Launch part{&call, kernel, count, step};
  if (count) run_tasks(run_part, &part, ceil_div(count, step), threads);
}

// The same in parts that begin at multiples of the grain.
inline void launch(const Call& call, Kernel kernel, int64_t count, int64_t grain, int64_t elements) {
  const int threads = threads_for(elements);
  launch_parts(call, kernel, count, step_for(count, grain, threads), threads);
}

}  // namespace detent

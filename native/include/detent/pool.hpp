// Pool: the threads that kernels share. Which thread runs which part never changes a result.
//
// The calling thread works too. A second caller finds the pool busy and works alone. A child process made by fork starts
// with a pool of its own, because threads do not survive a fork.
#pragma once

#include <cstdint>
#include <mutex>

namespace detent {

using Task = void (*)(const void* context, int64_t index);

// A mutex whose code is compiled once, and not per CPU level.
class Lock {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;
};

// That many zeros, which belong to the calling thread for as long as it lives. They are to be left as they were found.
double* borrowed_zeros(int64_t count);

// Runs task(context, 0 .. count-1), each index once, on at most `threads` threads; returns when all are done.
void run_tasks(Task task, const void* context, int64_t count, int threads);

}  // namespace detent

// Pool: the threads that all kernels share. The assignment of parts to threads never changes a result.
//
// The calling thread works too. If the pool is busy, a second caller works alone. A forked child process starts with a
// new pool, because threads do not survive a fork.
//
// If another library uses OpenMP threads between our kernels, two pools compete for the same cores, because OpenMP
// threads spin after their work. In that case our tasks can run on the OpenMP team of that library.
#pragma once

#include <cstdint>
#include <mutex>

namespace detent {

using Task = void (*)(const void* context, int64_t index);

// A mutex whose code is compiled once, not per instruction set.
class Lock {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;
};

// Returns `count` zeros in thread-local memory. The caller must set them to zero again after use.
double* borrowed_zeros(int64_t count);

// Runs task(context, 0 .. count-1), each index once, on at most `threads` threads; returns when all are done.
void run_tasks(Task task, const void* context, int64_t count, int threads);

// Entry point of a parallel region in the OpenMP runtime of GCC, and in compatible runtimes.
using Team = void (*)(void (*body)(void*), void* context, unsigned threads, unsigned flags);

// The runtime's omp_get_max_threads, which returns its number of threads.
using TeamSize = int (*)();

// Runs later tasks on the threads of that runtime, with at most its number of threads. If `size` is null, there is no
// limit. If the entry point is null, later tasks run on our own threads again; a child process starts in this state.
void join_team(Team team, TeamSize size);

}  // namespace detent

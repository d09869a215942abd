// Pool: the threads that kernels share. Which thread runs which part never changes a result.
//
// The calling thread works too. A second caller finds the pool busy and works alone. A child process made by fork starts
// with a pool of its own, because threads do not survive a fork.
//
// Where another library's OpenMP threads work in turn with ours, two pools on the same processors get in each other's way:
// those of OpenMP stay awake after their work. Then that library's team can do the work of both.
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

// OpenMP's entry to a parallel region, as GCC's runtime and those compatible with it have it.
using Team = void (*)(void (*body)(void*), void* context, unsigned threads, unsigned flags);

// How many threads the caller wants of that runtime: its omp_get_max_threads.
using TeamSize = int (*)();

// Lets tasks run on the team of that runtime and on no more threads than it has, or, with null, on threads of our own; a
// child process starts with the latter. Without a size the team is as large as a task asks for.
void join_team(Team team, TeamSize size);

}  // namespace detent

// Pool: the threads that kernels share. Which thread runs which part never changes a result.
//
// The calling thread works too. A second caller finds the pool busy and works alone. A child process made by fork starts with
// a pool of its own, because threads do not survive a fork.
#pragma once

#include <cstdint>

namespace detent {

using Task = void (*)(const void* context, int64_t index);

// Runs task(context, 0 .. count-1), each index once, on at most `threads` threads; returns when all are done.
void run_tasks(Task task, const void* context, int64_t count, int threads);

}  // namespace detent

#include "detent/pool.hpp"

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define DETENT_FORKS 1
#endif

namespace detent {
namespace {

class Pool {
 public:
  // False where the pool is busy with another caller's work.
  bool run(Task task, const void* context, int64_t count, int helpers) {
    std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    grow(helpers);
    task_ = task;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    invited_ = helpers < workers_ ? helpers : workers_;
    running_.store(workers_, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    work();
    for (int left = running_.load(std::memory_order_acquire); left; left = running_.load(std::memory_order_acquire)) {
      running_.wait(left, std::memory_order_acquire);
    }
    return true;
  }

 private:
  void grow(int helpers) {
    while (workers_ < helpers) {
      try {
        std::thread(&Pool::serve, this, workers_, epoch_.load(std::memory_order_relaxed)).detach();
      } catch (const std::system_error&) {
        return;  // no more threads to be had: those there are do the work
      }
      ++workers_;
    }
  }

  void serve(int index, uint32_t seen) {
    for (;;) {
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      if (index < invited_) work();
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
    }
  }

  void work() {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      task_(context_, i);
    }
  }

  std::mutex busy_;
  int workers_ = 0;
  int invited_ = 0;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> running_{0};
  std::atomic<uint32_t> epoch_{0};
};

// Never destroyed: its threads may outlive static destruction.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool.store(new Pool);
#if defined(DETENT_FORKS)
    pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
#endif
  });
  return *pool.load();
}

}  // namespace

void run_tasks(Task task, const void* context, int64_t count, int threads) {
  const int64_t most = threads < count ? threads : count;
  if (most > 1 && the_pool().run(task, context, count, static_cast<int>(most) - 1)) return;
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace detent

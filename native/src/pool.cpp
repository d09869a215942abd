#include "detent/pool.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define DETENT_FORKS 1
#endif

namespace detent {
namespace {

// Tells the CPU that this is a spin loop.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
  __asm__ __volatile__("yield");
#endif
}

// The open part of a job, in one word: the number of tasks that nobody has taken, the number of seats for threads, and
// the number of the job. A thread needs a seat to take tasks. A worker that wakes up late finds no open tasks, and
// nobody waits for it. A caller without a seat only waits. A thread with a task may read the rest of the job, because
// the caller waits for every task that was taken.
struct Open {
  static constexpr uint64_t kSeat = uint64_t{1} << 32, kJob = uint64_t{1} << 48;

  uint64_t tasks() const { return word % kSeat; }
  uint64_t seats() const { return word % kJob / kSeat; }
  uint64_t job() const { return word / kJob; }

  uint64_t word;
};

class Pool {
 public:
  // Returns false if the pool is busy with the job of another caller.
  bool run(Task task, const void* context, int64_t count, int helpers) {
    std::unique_lock<std::mutex> turn(busy_, std::try_to_lock);
    if (!turn.owns_lock()) return false;
    grow(helpers);
    task_ = task;
    context_ = context;
    count_ = count;
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t job = epoch_.load(std::memory_order_relaxed) + 1;
    open_.store(job * Open::kJob + (static_cast<uint64_t>(helpers) + 1) * Open::kSeat + static_cast<uint64_t>(count),
                std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    for (int i = 0; i < helpers; ++i) epoch_.notify_one();
    work();
    finish();
    return true;
  }

 private:
  static constexpr std::chrono::microseconds kLinger{300};

  void grow(int helpers) {
    for (; workers_ < helpers; ++workers_) {
      try {
        std::thread(&Pool::serve, this, epoch_.load(std::memory_order_relaxed)).detach();
      } catch (const std::system_error&) {
        return;  // the system has no more threads; the existing threads do the work
      }
    }
  }

  void serve(uint32_t seen) {
    for (;;) {
      linger(seen);
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
      work();
    }
  }

  // Spins for a moment, because the next job often follows soon, and waking a thread takes as long as a small job.
  // While it spins, it yields the core to other threads.
  void linger(uint32_t seen) const {
    const auto until = std::chrono::steady_clock::now() + kLinger;
    while (epoch_.load(std::memory_order_relaxed) == seen && std::chrono::steady_clock::now() < until) {
      for (int i = 0; i < 32; ++i) relax();
      std::this_thread::yield();
    }
  }

  // Takes a task, and also a seat if `seated` is not a seat of this job. Returns the word as it was before; if no task
  // was taken, a word without tasks.
  Open take(Open seated) {
    Open seen{open_.load(std::memory_order_relaxed)};
    for (;;) {
      const bool needs_seat = !seated.tasks() || seated.job() != seen.job();
      if (!seen.tasks() || (needs_seat && !seen.seats())) return {0};
      const uint64_t rest = seen.word - 1 - (needs_seat ? Open::kSeat : 0);
      if (open_.compare_exchange_weak(seen.word, rest, std::memory_order_acquire, std::memory_order_relaxed)) {
        return seen;
      }
    }
  }

  void work() {
    for (Open open = take({0}); open.tasks(); open = take(open)) {
      task_(context_, count_ - static_cast<int64_t>(open.tasks()));
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    }
  }

  // The last tasks take less time than falling asleep and being woken.
  void finish() {
    constexpr int kPatience = 2000;
    for (int i = 0; i < kPatience && unfinished_.load(std::memory_order_acquire); ++i) relax();
    while (const int64_t left = unfinished_.load(std::memory_order_acquire)) {
      unfinished_.wait(left, std::memory_order_acquire);
    }
  }

  std::mutex busy_;
  int workers_ = 0;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<uint64_t> open_{0};  // the word of an Open
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
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

std::atomic<Team> team{nullptr};
std::atomic<TeamSize> team_size{nullptr};

struct TeamJob {
  Task task;
  const void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
};

void work_in_team(void* context) {
  TeamJob& job = *static_cast<TeamJob*>(context);
  for (int64_t i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) job.task(job.context, i);
}

}  // namespace

void join_team(Team given, TeamSize size) {
#if defined(DETENT_FORKS)
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { team.store(nullptr); }); });
#endif
  team_size.store(size);
  team.store(given);
}

double* borrowed_zeros(int64_t count) {
  thread_local std::vector<double> zeros;
  if (zeros.size() < static_cast<size_t>(count)) zeros.resize(static_cast<size_t>(count));
  return zeros.data();
}

void Lock::lock() { mutex_.lock(); }
void Lock::unlock() { mutex_.unlock(); }

void run_tasks(Task task, const void* context, int64_t count, int threads) {
  constexpr int64_t kMostThreads = 1 << 15, kMostTasks = int64_t{1} << 31;  // the largest numbers that fit an Open
  int64_t most = threads < count ? threads : count;
  most = count > kMostTasks ? 1 : most < kMostThreads ? most : kMostThreads;
  if (const Team joined = most > 1 ? team.load(std::memory_order_relaxed) : nullptr) {
    const TeamSize size = team_size.load(std::memory_order_relaxed);
    const int64_t wanted = size ? size() : most;
    TeamJob job{task, context, count};
    if (wanted > 1) return joined(work_in_team, &job, static_cast<unsigned>(wanted < most ? wanted : most), 0);
    return work_in_team(&job);
  }
  if (most > 1 && the_pool().run(task, context, count, static_cast<int>(most) - 1)) return;
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace detent

#include "base/team.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <system_error>

#include "base/check.h"
#include "base/cpu.h"
#include "base/wait.h"

namespace weft {
namespace {

// Sets the team's floating-point mode, restores the thread's own at the end.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) {
    _mm_setcsr(kMode);
  }
  ~FloatMode() {
    _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kMode = 0x1F80 | 0x8000 | 0x0040;  // all exceptions masked, to nearest, FTZ, DAZ
  unsigned saved_;
#endif
};

// Signals belong to the threads of the application, so workers start with all of them blocked.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

void pin_this_thread(int cpu) {
  size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  if (set == nullptr) return;
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(cpu, bytes, set);
  sched_setaffinity(0, bytes, set);  // a refusal costs speed only
  CPU_FREE(set);
}

std::atomic<uint64_t> next_team{1};
thread_local uint64_t initialised_for = 0;  // the team whose thread_init this thread ran last

}  // namespace

Team::Team(int threads, bool pin, void (*thread_init)())
    : threads_(threads),
      wake_limit_(std::max(1, std::min(threads, static_cast<int>(allowed_cpus().size())) - 1)),
      thread_init_(thread_init),
      id_(next_team.fetch_add(1)) {
  WEFT_CHECK(threads >= 1, "a team of {} threads", threads);
  try {
    start_workers(pin);
  } catch (const std::system_error& error) {
    int started = static_cast<int>(workers_.size()) + 1;
    stop_workers();
    fail("the system refused thread {} of {} ({}); use fewer threads", started + 1, threads, error.what());
  }
}

Team::~Team() {
  stop_workers();
}

void Team::start_workers(bool pin) {
  BlockSignals block;
  std::vector<int> cpus = allowed_cpus();
  bool pinned = pin && threads_ <= static_cast<int>(cpus.size());
  workers_.reserve(threads_ - 1);
  for (int i = 1; i < threads_; ++i) {
    workers_.emplace_back(&Team::work, this, i, pinned ? cpus[i] : -1);
    pthread_setname_np(workers_.back().native_handle(), fmt::format("weft-{}", i).c_str());
  }
}

void Team::stop_workers() {
  stop_ = true;
  epoch_.fetch_add(1);
  futex_wake(epoch_, threads_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Team::init_this_thread() const {
  if (initialised_for == id_) return;
  initialised_for = id_;
  if (thread_init_ != nullptr) thread_init_();
}

void Team::work(int thread, int cpu) {
  if (cpu >= 0) pin_this_thread(cpu);
  FloatMode mode;
  init_this_thread();
  uint32_t seen = 0;
  for (;;) {
    seen = wait_for_work(seen);
    if (stop_) return;
    claim_and_run(thread);
  }
}

void Team::claim_and_run(int thread) noexcept {
  int did = 0, tasks = 0;
  for (int left; (left = unclaimed_.fetch_sub(1, std::memory_order_acq_rel)) > 0; ++did) {
    tasks = tasks_;
    task_(context_, tasks - left, thread);
  }
  // Once per thread, not per task. All of them belong to one run: it could not end before this line.
  if (did > 0 && done_.fetch_add(did) + did == static_cast<uint32_t>(tasks) && caller_sleeps_)
    futex_wake(done_, 1);
}

uint32_t Team::wait_for_work(uint32_t seen) {
  if (!spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) {
    // The caller bumps epoch_, then looks at sleepers_; here it is the other way round, so one of both sees
    // the other.
    sleepers_.fetch_add(1);
    while (epoch_.load() == seen) futex_wait(epoch_, seen);
    sleepers_.fetch_sub(1);
  }
  return epoch_.load(std::memory_order_acquire);
}

void Team::wake_workers(int tasks) {
  int asleep = sleepers_.load();
  int awake = threads_ - 1 - asleep;
  int wanted = std::min(tasks - 1, wake_limit_) - awake;
  if (asleep > 0 && wanted > 0) futex_wake(epoch_, wanted);
}

void Team::wait_until_done(uint32_t tasks) {
  if (spin_until([&] { return done_.load(std::memory_order_acquire) == tasks; })) return;
  caller_sleeps_ = true;
  for (uint32_t done; (done = done_.load()) != tasks;) futex_wait(done_, done);
  caller_sleeps_ = false;
}

void Team::run(int tasks, Task task, const void* context) {
  if (tasks <= 0) return;
  bool busy = busy_.exchange(true, std::memory_order_acquire);
  WEFT_CHECK(!busy, "Team::run called inside one of its tasks, or by two threads at once");
  init_this_thread();
  FloatMode mode;
  if (threads_ == 1 || tasks == 1) {
    [&]() noexcept {
      for (int i = 0; i < tasks; ++i) task(context, i, 0);
    }();
  } else {
    task_ = task;
    context_ = context;
    tasks_ = tasks;
    done_.store(0, std::memory_order_relaxed);
    unclaimed_.store(tasks, std::memory_order_release);
    epoch_.fetch_add(1);
    wake_workers(tasks);
    claim_and_run(0);
    wait_until_done(static_cast<uint32_t>(tasks));
  }
  busy_.store(false, std::memory_order_release);
}

}  // namespace weft

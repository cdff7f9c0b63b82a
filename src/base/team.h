// A persistent team of threads that runs numbered tasks: the only source of parallelism inside a step.
//
//  * The caller is worker 0 and works too. Tasks are claimed one by one from a counter, so a worker the system has
//  taken away holds up at most the task it already has; the caller takes the rest.
//  * Between runs workers spin for kSpin, then sleep (base/wait.h).
//  * With more threads than CPUs, only as many workers are woken as there are CPUs for.
//  * During run() every thread, the caller included, has MXCSR at round-to-nearest with FTZ and DAZ: decayed
//  states
//    reach subnormals, which cost a factor of 4 on some machines, and all threads must round alike.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace weft {

class Team {
 public:
  // A task. Must not throw (it ends the program), must not call run() of the same team, and must not wait for
  // another task of the same run, which may not have been claimed by anybody.
  using Task = void (*)(const void* context, int task, int thread);

  // threads >= 1, the caller counted. pin: bind worker i to the i-th allowed CPU (ignored with more threads
  // than CPUs; the caller itself is left free, its later threads would inherit the mask). thread_init runs
  // once in every worker and in each thread that calls run(), before its first task: tile configuration
  // belongs there. Error: the system refuses a thread.
  explicit Team(int threads, bool pin = false, void (*thread_init)() = nullptr);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // task(context, i, thread) for every i in 0..tasks-1; returns when all are done and their writes visible.
  // thread is in 0..threads()-1, and no two tasks run at once under one number. One run at a time: a nested
  // or concurrent call aborts. No allocation. One thread or one task runs inline.
  void run(int tasks, Task task, const void* context);

  // The same with a callable f(task, thread).
  template <class F>
  void run(int tasks, const F& f) {
    run(
        tasks,
        [](const void* context, int task, int thread) { (*static_cast<const F*>(context))(task, thread); },
        &f);
  }

  int threads() const { return threads_; }

 private:
  void start_workers(bool pin);
  void stop_workers();
  void work(int thread, int cpu);  // a worker's life
  void claim_and_run(int thread) noexcept;
  uint32_t wait_for_work(uint32_t seen);  // spins, then sleeps
  void wait_until_done(uint32_t tasks);
  void wake_workers(int tasks);
  void init_this_thread() const;

  const int threads_;
  const int wake_limit_;  // workers that can run beside the caller
  void (*const thread_init_)();
  const uint64_t id_;
  std::vector<std::thread> workers_;

  // The job. Written by the caller before unclaimed_, read only by a thread that has claimed one of its
  // tasks: it stays valid, because the run cannot end before that task is counted.
  Task task_ = nullptr;
  const void* context_ = nullptr;
  int tasks_ = 0;
  std::atomic<bool> busy_{false};
  std::atomic<bool> stop_{false};

  // Each on its own cache line: all threads hammer them at different moments.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // bumped by every run
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> unclaimed_{0};  // at or below zero: nothing left (latecomers drive it below)
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> caller_sleeps_{false};
};

}  // namespace weft

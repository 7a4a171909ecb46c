#pragma once

#include <cstdint>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// Threads that a call runs on: Runtime::threads, or all that the process may use; at least one and
/// no more than there are tasks.
int thread_count(const Runtime& runtime, std::int64_t tasks);

/// What a parallel loop runs: a reference to a callable. Unlike std::function it takes no memory,
/// so that a loop in the middle of a call cannot fail.
class TaskBody {
 public:
  template <typename Callable>
  TaskBody(const Callable& callable)
      : callable_(&callable), call_([](const void* body, std::int64_t task, int worker) {
          (*static_cast<const Callable*>(body))(task, worker);
        }) {}

  void operator()(std::int64_t task, int worker) const { call_(callable_, task, worker); }

 private:
  const void* callable_;
  void (*call_)(const void*, std::int64_t, int);
};

/// Runs body(task, worker) for every task in [0, tasks) on at most `threads` threads, tasks handed
/// out one by one in ascending order; worker is in [0, threads). Returns when all are done.
/// `body` must not throw. `threads` of 1 runs on the calling thread.
void parallel_for(int threads, std::int64_t tasks, TaskBody body);

}  // namespace flashdsa::core

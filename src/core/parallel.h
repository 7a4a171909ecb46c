#pragma once

#include <cstdint>
#include <functional>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// Threads that a call runs on: Runtime::threads, or all that the process may use; at least one and
/// no more than there are tasks.
int thread_count(const Runtime& runtime, std::int64_t tasks);

/// Runs body(task, worker) for every task in [0, tasks) on at most `threads` threads, tasks handed
/// out one by one in ascending order; worker is in [0, threads). Returns when all are done.
/// `body` must not throw. `threads` of 1 runs on the calling thread.
void parallel_for(int threads, std::int64_t tasks,
                  const std::function<void(std::int64_t task, int worker)>& body);

}  // namespace flashdsa::core

#include "core/parallel.h"

#include <omp.h>

#include <algorithm>

namespace flashdsa::core {

int thread_count(const Runtime& runtime, std::int64_t tasks) {
  const std::int64_t threads = runtime.threads > 0 ? runtime.threads : hardware_threads();
  return static_cast<int>(std::max<std::int64_t>(std::min(threads, tasks), 1));
}

void parallel_for(int threads, std::int64_t tasks, TaskBody body) {
  const int team = static_cast<int>(std::min<std::int64_t>(threads, tasks));
  if (team <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (std::int64_t task = 0; task < tasks; ++task) body(task, omp_get_thread_num());
}

}  // namespace flashdsa::core

// Threads: every task once, no more threads than wished for, no less than one.

#include "core/parallel.h"

#include <sched.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/progress.h"
#include "gtest/gtest.h"

namespace flashdsa::test {
namespace {

constexpr int kThreads[] = {1, 2, 3, 8};
constexpr std::int64_t kTasks[] = {0, 1, 2, 7, 8, 9, 1000};

TEST(ParallelFor, RunsEveryTaskExactlyOnce) {
  for (const int threads : kThreads) {
    for (const std::int64_t tasks : kTasks) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      core::parallel_for(threads, tasks, [&](std::int64_t task, int) {
        runs.at(static_cast<std::size_t>(task)).fetch_add(1);
      });
      for (const auto& count : runs) ASSERT_EQ(count, 1) << threads << " threads, " << tasks;
    }
  }
}

TEST(ParallelFor, WorkersAreNumberedBelowTheThreads) {
  for (const int threads : kThreads) {
    std::atomic<int> lowest{std::numeric_limits<int>::max()}, highest{-1};
    core::parallel_for(threads, 1000, [&](std::int64_t, int worker) {
      int seen = lowest;
      while (worker < seen && !lowest.compare_exchange_weak(seen, worker)) {
      }
      seen = highest;
      while (worker > seen && !highest.compare_exchange_weak(seen, worker)) {
      }
    });
    EXPECT_GE(lowest, 0);
    EXPECT_LT(highest, threads);
  }
}

TEST(ParallelFor, NoTwoThreadsShareAWorkerNumber) {
  constexpr int kCount = 4;
  std::mutex mutex;
  std::vector<std::set<std::thread::id>> threads_of(kCount);
  core::parallel_for(kCount, 400, [&](std::int64_t, int worker) {
    const std::lock_guard lock(mutex);
    threads_of.at(static_cast<std::size_t>(worker)).insert(std::this_thread::get_id());
  });
  for (const auto& ids : threads_of) EXPECT_LE(ids.size(), 1u);
}

TEST(ParallelFor, EveryWorkerGetsAscendingTasks) {
  constexpr int kCount = 3;
  std::vector<std::vector<std::int64_t>> tasks_of(kCount);
  core::parallel_for(kCount, 500, [&](std::int64_t task, int worker) {
    tasks_of.at(static_cast<std::size_t>(worker)).push_back(task);
  });
  for (const auto& tasks : tasks_of) {
    for (std::size_t i = 1; i < tasks.size(); ++i) ASSERT_LT(tasks[i - 1], tasks[i]);
  }
}

TEST(ParallelFor, RunsTasksAtTheSameTime) {
  // Each of the two tasks waits for the other one to begin.
  std::atomic<int> begun{0};
  core::parallel_for(2, 2, [&](std::int64_t, int) {
    begun.fetch_add(1);
    while (begun.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 2);
}

TEST(ParallelFor, OneThreadIsTheCallingThreadInOrder) {
  std::vector<std::int64_t> order;
  const auto caller = std::this_thread::get_id();
  core::parallel_for(1, 5, [&](std::int64_t task, int worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(ParallelFor, MayBeCalledFromSeveralThreads) {
  std::vector<std::int64_t> sums(4);
  std::vector<std::thread> callers;
  for (std::int64_t& sum : sums) {
    callers.emplace_back([&sum] {
      std::atomic<std::int64_t> total{0};
      core::parallel_for(2, 100, [&](std::int64_t task, int) { total += task; });
      sum = total;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sums, std::vector<std::int64_t>(4, 4950));
}

int count_for(int threads, std::int64_t tasks) {
  Runtime runtime;
  runtime.threads = threads;
  return core::thread_count(runtime, tasks);
}

TEST(ThreadCount, IsAtLeastOneAndAtMostTheTasks) {
  EXPECT_EQ(count_for(4, 100), 4);
  EXPECT_EQ(count_for(4, 4), 4);
  EXPECT_EQ(count_for(4, 3), 3);
  EXPECT_EQ(count_for(4, 1), 1);
  EXPECT_EQ(count_for(4, 0), 1);
  EXPECT_EQ(count_for(1, std::numeric_limits<std::int64_t>::max()), 1);
}

TEST(ThreadCount, ZeroAndBelowMeanAllThatTheProcessMayUse) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  EXPECT_EQ(count_for(0, kMany), hardware_threads());
  EXPECT_EQ(count_for(-3, kMany), hardware_threads());
  EXPECT_EQ(count_for(0, 1), 1);
}

TEST(HardwareThreads, FollowTheAffinityOfTheProcess) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  EXPECT_EQ(hardware_threads(), CPU_COUNT(&all));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (std::size_t cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(hardware_threads(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
}

TEST(Progress, StartsAtZeroAndCountsUpToItsTotal) {
  Progress progress;
  progress.done = 77;  // of an earlier call
  Runtime runtime;
  runtime.progress = &progress;
  core::ProgressReporter reporter(runtime, 50);
  EXPECT_EQ(progress.done, 0);
  EXPECT_EQ(progress.total, 50);
  reporter.advance();
  EXPECT_EQ(progress.done, 1);
  reporter.advance(9);
  EXPECT_EQ(progress.done, 10);
  core::parallel_for(3, 40, [&](std::int64_t, int) { reporter.advance(); });
  EXPECT_EQ(progress.done, progress.total);
}

TEST(Progress, MayBeAbsent) {
  core::ProgressReporter reporter(Runtime{}, 50);
  reporter.advance();
}

}  // namespace
}  // namespace flashdsa::test

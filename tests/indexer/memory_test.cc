// Whichever memory a call lacks, it ends with Error(kMemory), gives back what it has, and has
// written nothing.

#include <memory>

#include "tests/indexer/fixture.h"
#include "tests/support/failing_memory.h"

namespace flashdsa::test {
namespace {

FallibleCall topk_call(const TopkProblem& problem) {
  const auto to = std::make_shared<TopkResult>();
  to->topk_indices = HostTensor(DType::kInt32, {problem.t_q(), 1, problem.topk});
  to->topk_length = HostTensor(DType::kInt32, {problem.t_q()});
  to->topk_scores = HostTensor(DType::kFloat32, {problem.t_q(), problem.topk});
  return {[=, &problem](const Runtime& runtime) {
            IndexerTopkArgs args = problem.inputs();
            args.topk_indices = to->topk_indices;
            args.topk_length = to->topk_length;
            args.topk_scores = *to->topk_scores;
            indexer_topk(args, runtime);
          },
          [=] {
            return to->topk_indices.untouched() && to->topk_length.untouched() &&
                   to->topk_scores->untouched();
          }};
}

FallibleCall backward_call(const ScoreGradientProblem& problem, DType keys) {
  const auto to = std::make_shared<ScoreGradients>(empty_gradients(problem, keys));
  return {[=, &problem](const Runtime& runtime) {
            indexer_backward(backward_args(problem, *to), runtime);
          },
          [=] {
            return to->grad_index_q.untouched() && to->grad_index_k.untouched() &&
                   to->grad_head_weights.untouched();
          }};
}

TEST_P(TopKOnHost, WithoutMemoryIsAnErrorThatWritesNothing) {
  const TopkProblem problem = random_topk(5, 70, 3, 8, 812);
  const auto make = [&] { return topk_call(problem); };
  const Runtime on = runtime_with_threads(2);
  EXPECT_GT(fail_every_new(on, make), 0);
  EXPECT_EQ(fail_every_allocation(on, make), is_reference() ? 0 : 1);
}

TEST_P(IndexerBackwardOnHost, WithoutMemoryIsAnErrorThatWritesNothing) {
  ScoreGradientProblem problem = random_score_gradients({3, 200, 2, 160}, 813);
  problem.set_lengths({160, 7, 0});
  const Runtime on = runtime_with_threads(2);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const auto make = [&] { return backward_call(problem, keys); };
    EXPECT_GT(fail_every_new(on, make), 0);
    // Rows, threads and, unless grad_index_k is its own accumulator, FP32 sums.
    const int scratch = keys == DType::kFloat32 ? 2 : 3;
    EXPECT_EQ(fail_every_allocation(on, make), is_reference() ? 0 : scratch);
  }
}

}  // namespace
}  // namespace flashdsa::test

// Whichever memory a call lacks, it ends with Error(kMemory), gives back what it has, and has
// written nothing.

#include <memory>

#include "tests/attention/fixture.h"
#include "tests/support/failing_memory.h"

namespace flashdsa::test {
namespace {

// Two blocks of keys, a sink, lengths: everything that asks for memory.
AttentionProblem small_problem() {
  AttentionProblem problem = random_attention({3, 200, 2, 160, 576}, 811);
  problem.set_sink({0.5, -1});
  problem.set_lengths({160, 7, 0});
  return problem;
}

FallibleCall forward_call(const AttentionProblem& problem) {
  struct Outputs {
    HostTensor out{DType::kBFloat16, {3, 2, 512}};
    HostTensor lse{DType::kFloat32, {3, 2}};
    HostTensor max_logits{DType::kFloat32, {3, 2}};
  };
  const auto to = std::make_shared<Outputs>();
  return {[=, &problem](const Runtime& runtime) {
            attention_forward({problem.inputs(), to->out, to->lse, to->max_logits}, runtime);
          },
          [=] { return to->out.untouched() && to->lse.untouched() && to->max_logits.untouched(); }};
}

FallibleCall backward_call(const AttentionProblem& problem, const AttentionResult& forward,
                           DType grad_kv_dtype) {
  struct Outputs {
    HostTensor grad_q{DType::kBFloat16, {3, 2, 576}};
    HostTensor grad_kv;
    HostTensor grad_attn_sink{DType::kFloat32, {2}};
  };
  const auto to = std::make_shared<Outputs>();
  to->grad_kv = HostTensor(grad_kv_dtype, {200, 1, 576});
  return {[=, &problem, &forward](const Runtime& runtime) {
            attention_backward({problem.inputs(), forward.out, forward.lse, problem.grad_out,
                                to->grad_q, to->grad_kv, to->grad_attn_sink},
                               runtime);
          },
          [=] {
            return to->grad_q.untouched() && to->grad_kv.untouched() &&
                   to->grad_attn_sink.untouched();
          }};
}

TEST_P(AttentionOnHost, ForwardWithoutMemoryIsAnErrorThatWritesNothing) {
  const AttentionProblem problem = small_problem();
  const auto make = [&] { return forward_call(problem); };
  const Runtime on = runtime_with_threads(2);
  EXPECT_GT(fail_every_new(on, make), 0);
  EXPECT_EQ(fail_every_allocation(on, make), is_reference() ? 0 : 1);
}

TEST_P(AttentionOnHost, BackwardWithoutMemoryIsAnErrorThatWritesNothing) {
  const AttentionProblem problem = small_problem();
  const AttentionResult forward = run_forward(problem, runtime());
  const Runtime on = runtime_with_threads(2);
  for (const DType grad_kv_dtype : {DType::kBFloat16, DType::kFloat32}) {
    const auto make = [&] { return backward_call(problem, forward, grad_kv_dtype); };
    EXPECT_GT(fail_every_new(on, make), 0);
    // Rows, threads and, unless grad_kv is its own accumulator, FP32 sums.
    const int scratch = grad_kv_dtype == DType::kFloat32 ? 2 : 3;
    EXPECT_EQ(fail_every_allocation(on, make), is_reference() ? 0 : scratch);
  }
}

}  // namespace
}  // namespace flashdsa::test

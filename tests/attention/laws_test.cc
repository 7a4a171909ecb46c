// Determinism, invariance, and what must not change a result: threads, strides, alignment, calls
// before and beside. All bit for bit.

#include <thread>

#include "tests/attention/fixture.h"
#include "tests/support/property.h"

namespace flashdsa::test {
namespace {

// Of kernels for few heads and for many, the latter with heads in one block of 64 and in two.
struct Form {
  std::int64_t heads, head_dim;
};
constexpr Form kForms[] = {{5, 512}, {5, 576}, {33, 512}, {72, 576}};

// Something of everything: a hole, a duplicate, an empty row, lengths and a sink.
AttentionProblem mixed_problem(std::uint64_t seed, const Form& form = {5, 576}) {
  AttentionProblem problem = random_attention({7, 60, form.heads, 40, form.head_dim}, seed);
  problem.set_row(1, {5, -1, 7, 7, 60, 2});
  problem.set_row(3, {});
  problem.set_lengths({40, 40, 17, 40, 33, 0, 40});
  constexpr double kSinks[] = {0.5, -1, 2, 0, 1};
  std::vector<double> sinks;
  for (std::int64_t h = 0; h < form.heads; ++h) sinks.push_back(kSinks[h % std::ssize(kSinks)]);
  problem.set_sink(sinks);
  return problem;
}

Runtime in_mode(Runtime runtime, Mode mode) {
  runtime.mode = mode;
  return runtime;
}

constexpr Mode kModes[] = {Mode::kDefault, Mode::kDeterministic, Mode::kInvariant};

TEST_P(Attention, EveryRunGivesTheSameBits) {
  for (const std::int64_t topk : {64, 128, 192}) {
    const AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 200, .heads = 2, .topk = topk}, 81);
    for (const Mode mode : {Mode::kDefault, Mode::kDeterministic}) {
      const AttentionResult first = run_attention(problem, runtime(mode));
      for (int repeat = 1; repeat < 20; ++repeat) {
        const AttentionResult again = run_attention(problem, runtime(mode));
        ASSERT_TRUE(same_forward_bits(again, first)) << repeat;
        if (!gradients_repeat(mode)) continue;
        ASSERT_TRUE(same_result_bits(again, first)) << repeat;
      }
    }
  }
}

TEST_P(AttentionOnHost, AnyThreadCountGivesTheSameBits) {
  const AttentionProblem problem = mixed_problem(82);
  for (const Mode mode : kModes) {
    const AttentionResult one = run_attention(problem, in_mode(runtime_with_threads(1), mode));
    for (const int threads : {2, 3, 5, 64}) {
      EXPECT_TRUE(same_result_bits(
          run_attention(problem, in_mode(runtime_with_threads(threads), mode)), one))
          << threads << " threads";
    }
  }
}

// Many rows, so that the backward works in several chunks whose size depends on the threads.
TEST_P(AttentionOnHost, ThreadsDoNotChangeSumsOverManyRows) {
  const AttentionProblem problem =
      random_attention({.t_q = 70, .t_k = 30, .heads = 1, .topk = 5}, 83);
  const AttentionResult one = run_attention(problem, runtime_with_threads(1));
  for (const int threads : {2, 3, 5}) {
    EXPECT_TRUE(same_result_bits(run_attention(problem, runtime_with_threads(threads)), one));
  }
}

TEST_P(AttentionOnHost, ModesGiveTheSameBits) {
  const AttentionProblem problem = mixed_problem(84);
  const AttentionResult first = run_attention(problem, runtime());
  for (const Mode mode : kModes) {
    EXPECT_TRUE(same_result_bits(run_attention(problem, in_mode(runtime(), mode)), first));
  }
}

void expect_row_of(const AttentionResult& alone, const AttentionResult& batch, std::int64_t t) {
  EXPECT_TRUE(same_bits(alone.out, batch.out.rows(t, 1))) << "row " << t;
  EXPECT_TRUE(same_bits(alone.lse, batch.lse.rows(t, 1))) << "row " << t;
  EXPECT_TRUE(same_bits(alone.max_logits, batch.max_logits.rows(t, 1))) << "row " << t;
  EXPECT_TRUE(same_bits(alone.grad_q, batch.grad_q.rows(t, 1))) << "row " << t;
}

TEST_P(Attention, RowAloneGivesTheBitsOfTheBatch) {
  const Runtime invariant = in_mode(runtime(), Mode::kInvariant);
  for (const Form& form : kForms) {
    const AttentionProblem problem = mixed_problem(85, form);
    const AttentionResult batch = run_attention(problem, invariant);
    for (std::int64_t t = 0; t < problem.t_q(); ++t) {
      expect_row_of(run_attention(rows_of(problem, t, 1), invariant), batch, t);
    }
  }
}

// In the default mode, too, where no plan is walked.
TEST_P(Attention, RowAmongHundredsGivesTheBitsOfTheRowAlone) {
  const auto expect_rows = [&](std::int64_t rows, std::int64_t heads) {
    const AttentionProblem problem = rows_of_many_lengths(rows, heads, 91);
    const AttentionResult batch = run_attention(problem, runtime());
    for (const std::int64_t t :
         {std::int64_t{6}, rows / 2 - 1, rows / 2 + 2, rows - 8, rows - 6, rows - 1}) {
      expect_row_of(run_attention(rows_of(problem, t, 1), runtime()), batch, t);
    }
  };
  for (const std::int64_t heads : {3, 10, 18}) expect_rows(280, heads);
  for (const std::int64_t heads : {33, 72}) {  // fewer where no multiprocessor walks them
    expect_rows((is_on_device() ? 6600 : 660) / heads, heads);
  }
}

TEST_P(Attention, PropertyRowAloneGivesTheBitsOfTheBatch) {
  const Runtime invariant = in_mode(runtime(), Mode::kInvariant);
  check_property(10, 1002, [&invariant] {
    const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1 << 20);
    const AttentionShape shape{
        *rc::gen::inRange<std::int64_t>(2, 6), *rc::gen::inRange<std::int64_t>(1, 50),
        *rc::gen::inRange<std::int64_t>(1, 20), *rc::gen::inRange<std::int64_t>(1, 80), 576};
    const AttentionProblem problem = random_attention(shape, seed);
    const AttentionResult batch = run_attention(problem, invariant);
    const std::int64_t t = *rc::gen::inRange<std::int64_t>(0, shape.t_q);
    const AttentionResult alone = run_attention(rows_of(problem, t, 1), invariant);
    RC_ASSERT(bool{same_bits(alone.out, batch.out.rows(t, 1))});
    RC_ASSERT(bool{same_bits(alone.lse, batch.lse.rows(t, 1))});
    RC_ASSERT(bool{same_bits(alone.grad_q, batch.grad_q.rows(t, 1))});
  });
}

// Gaps of 3 elements, whose rows an engine may have to copy, and of 8, which keep them aligned to
// 16 bytes. They hold NaN.
constexpr std::int64_t kGaps[] = {3, 8};

TEST_P(Attention, StridedInputsGiveTheBitsOfContiguousOnes) {
  const auto expect_bits = [&](const AttentionProblem& contiguous, Mode mode) {
    const std::int64_t heads = contiguous.heads(), dim = contiguous.head_dim();
    const AttentionResult want = run_attention(contiguous, runtime(mode));
    for (const std::int64_t gap : kGaps) {
      AttentionProblem strided = contiguous;
      strided.q = contiguous.q.with_strides({heads * (dim + gap) + gap, dim + gap, 1});
      strided.kv = contiguous.kv.with_strides({dim + gap, 7, 1});
      strided.topk_indices = contiguous.topk_indices.with_strides({47, 3, 1});
      strided.grad_out = contiguous.grad_out.with_strides({heads * (512 + gap), 512 + gap, 1});
      expect_result(strided, run_attention(strided, runtime(mode)), want, mode);

      // Heads outside, rows inside.
      strided.q = contiguous.q.with_strides({dim + gap, 7 * (dim + gap), 1});
      strided.grad_out = contiguous.grad_out.with_strides({512 + gap, 7 * (512 + gap), 1});
      expect_result(strided, run_attention(strided, runtime(mode)), want, mode);
    }
  };
  for (const Form& form : kForms) {
    for (const Mode mode : modes()) expect_bits(mixed_problem(86, form), mode);
  }
}

TEST_P(Attention, StridedForwardResultsGiveTheSameGradients) {
  for (const Form& form : kForms) {
    const AttentionProblem problem = mixed_problem(87, form);
    for (const Mode mode : modes()) {
      const AttentionResult want = run_attention(problem, runtime(mode));
      for (const std::int64_t gap : kGaps) {
        AttentionResult got = empty_result(problem, want.backend);
        got.out = want.out.with_strides({form.heads * (512 + gap), 512 + gap, 1});
        got.lse = want.lse.with_strides({form.heads + 4, 1});
        got.max_logits = want.max_logits;
        run_placed(backward_args(problem, got), runtime(mode));
        expect_result(problem, got, want, mode);
      }
    }
  }
}

// A stride of zero repeats a row: one query for all rows, one selection for all rows.
TEST_P(Attention, RepeatedRowsByZeroStrideAreRight) {
  AttentionProblem problem = random_attention({.t_q = 4, .t_k = 20, .heads = 3, .topk = 9}, 88);
  for (std::int64_t t = 1; t < 4; ++t) {
    for (std::int64_t i = 0; i < 3 * 576; ++i) problem.q.set(t * 3 * 576 + i, problem.q.get(i));
    for (std::int64_t j = 0; j < 9; ++j) {
      problem.topk_indices.set(t * 9 + j, problem.topk_indices.get(j));
    }
  }
  const AttentionResult want = run_attention(problem, repeatable());
  AttentionProblem repeated = problem;
  repeated.q = problem.q.with_strides({0, 576, 1});
  repeated.topk_indices = problem.topk_indices.with_strides({0, 9, 1});
  EXPECT_TRUE(same_result_bits(run_attention(repeated, repeatable()), want));
}

TEST_P(Attention, UnalignedPointersGiveTheSameBits) {
  const auto expect_bits = [&](const AttentionProblem& aligned, Mode mode) {
    const AttentionResult want = run_attention(aligned, runtime(mode), DType::kFloat32);
    AttentionProblem problem = aligned;
    problem.q = aligned.q.with_unaligned_memory();
    problem.kv = aligned.kv.with_unaligned_memory();
    problem.topk_indices = aligned.topk_indices.with_unaligned_memory();
    problem.grad_out = aligned.grad_out.with_unaligned_memory();
    problem.topk_length = aligned.topk_length->with_unaligned_memory();
    problem.attn_sink = aligned.attn_sink->with_unaligned_memory();
    expect_result(problem, run_attention(problem, runtime(mode), DType::kFloat32), want, mode);
  };
  for (const Form& form : kForms) {
    for (const Mode mode : modes()) expect_bits(mixed_problem(89, form), mode);
  }
}

TEST_P(Attention, UnalignedOutputsGiveTheSameBits) {
  const auto expect_bits = [&](const AttentionProblem& problem, Mode mode, DType grad_kv_dtype) {
    const AttentionResult want = run_attention(problem, runtime(mode), grad_kv_dtype);
    AttentionResult got = empty_result(problem, want.backend, grad_kv_dtype);
    HostTensor* const outputs[] = {&got.out,    &got.lse,     &got.max_logits,
                                   &got.grad_q, &got.grad_kv, &*got.grad_attn_sink};
    for (HostTensor* output : outputs) {
      *output = HostTensor::unaligned(output->dtype(), output->shape());
    }
    run_placed(forward_args(problem, got), runtime(mode));
    run_placed(backward_args(problem, got), runtime(mode));
    expect_result(problem, got, want, mode);
    for (const HostTensor* output : outputs) EXPECT_TRUE(output->bands_intact());
  };
  for (const Form& form : kForms) {
    for (const Mode mode : modes()) {
      for (const DType grad_kv_dtype : {DType::kBFloat16, DType::kFloat32}) {
        expect_bits(mixed_problem(90, form), mode, grad_kv_dtype);
      }
    }
  }
}

// FAULTS: hidden state between calls.
TEST_P(Attention, CallsDoNotRememberEachOther) {
  const AttentionProblem first = mixed_problem(91);
  AttentionProblem second = mixed_problem(92);
  const AttentionResult want_first = run_attention(first, repeatable());
  const AttentionResult want_second = run_attention(second, repeatable());
  // forward 1, forward 2, backward 1, backward 2
  const AttentionResult f1 = run_forward(first, repeatable());
  const AttentionResult f2 = run_forward(second, repeatable());
  EXPECT_TRUE(same_bits(f1.out, want_first.out));
  EXPECT_TRUE(same_bits(f2.out, want_second.out));
  const auto gradients = [&](const AttentionProblem& problem, const AttentionResult& forward,
                             const AttentionResult& want) {
    const HostTensor grad_q(DType::kBFloat16, want.grad_q.shape());
    const HostTensor grad_kv(DType::kBFloat16, want.grad_kv.shape());
    AttentionBackwardArgs args;
    static_cast<SparseAttentionInputs&>(args) = problem.inputs();
    args.out = forward.out;
    args.lse = forward.lse;
    args.grad_out = problem.grad_out;
    args.grad_q = grad_q;
    args.grad_kv = grad_kv;
    run_placed(args, repeatable());
    EXPECT_TRUE(same_bits(grad_q, want.grad_q));
    EXPECT_TRUE(same_bits(grad_kv, want.grad_kv));
  };
  gradients(first, f1, want_first);
  gradients(second, f2, want_second);
}

TEST_P(Attention, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  const AttentionProblem problems[] = {mixed_problem(93), mixed_problem(94, {5, 512})};
  const AttentionResult want[] = {run_attention(problems[0], repeatable()),
                                  run_attention(problems[1], repeatable())};
  std::vector<std::string> failures(2);
  const auto work = [&](std::size_t i) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto same = same_result_bits(run_attention(problems[i], repeatable()), want[i]);
      if (!same) failures[i] = same.message();
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(failures, std::vector<std::string>(2));
}

// An input in the caller's hands is read only.
TEST_P(Attention, InputsAreNotWritten) {
  const AttentionProblem problem = mixed_problem(95);
  const AttentionProblem before = problem;
  run_attention(problem, repeatable());
  EXPECT_TRUE(same_bits(problem.q, before.q));
  EXPECT_TRUE(same_bits(problem.kv, before.kv));
  EXPECT_TRUE(same_bits(problem.topk_indices, before.topk_indices));
  EXPECT_TRUE(same_bits(problem.grad_out, before.grad_out));
  EXPECT_TRUE(same_bits(*problem.topk_length, *before.topk_length));
  EXPECT_TRUE(same_bits(*problem.attn_sink, *before.attn_sink));
}

}  // namespace
}  // namespace flashdsa::test

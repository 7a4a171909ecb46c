// Answers that a formula gives, on every engine.

#include <cmath>

#include "tests/attention/fixture.h"

namespace flashdsa::test {
namespace {

constexpr double kRounding = 4e-3;  // two BF16 roundings of every element, as relative RMSE

// [rows, 1, D] with sum over h of grad_out[t] * factor(t, s) on the first 512 channels.
template <typename Factor>
Values expected_grad_kv(const AttentionProblem& problem, const Factor& factor) {
  HostTensor want(DType::kFloat64, problem.kv.shape());
  want.fill(0);
  for (std::int64_t s = 0; s < problem.t_k(); ++s) {
    for (std::int64_t c = 0; c < 512; ++c) {
      double sum = 0;
      for (std::int64_t t = 0; t < problem.t_q(); ++t) {
        if (factor(t, s) == 0) continue;
        for (std::int64_t h = 0; h < problem.heads(); ++h) {
          sum += factor(t, s) * problem.grad_out.get({t, h, c});
        }
      }
      want.set({s, 0, c}, sum);
    }
  }
  return values_of("grad_kv", want, problem.describe());
}

// FAULTS R3. Row t selects key `key(t)` alone.
template <typename Key>
void expect_one_key_formula(AttentionProblem problem, const Key& key, const Runtime& runtime) {
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    problem.set_row(t, {static_cast<std::int32_t>(key(t))});
  }
  const AttentionResult result = run_attention(problem, runtime);
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    for (std::int64_t h = 0; h < problem.heads(); ++h) {
      double logit = 0;
      for (std::int64_t c = 0; c < problem.head_dim(); ++c) {
        logit += problem.softmax_scale * problem.q.get({t, h, c}) * problem.kv.get({key(t), 0, c});
      }
      EXPECT_NEAR(result.lse.get({t, h}), logit,
                  log_absolute(result.backend) + kLogRelative * std::abs(logit));
      // Equal up to the roundings between base 2, in which sm90 works, and base e.
      EXPECT_NEAR(result.lse.get({t, h}), result.max_logits.get({t, h}),
                  result.backend == Backend::kSm90 ? kLogRelative * std::abs(logit) : 0);
      for (std::int64_t c = 0; c < 512; ++c) {
        ASSERT_EQ(result.out.get({t, h, c}), problem.kv.get({key(t), 0, c}))
            << place_text(result.out.shape(), result.out.at({t, h, c})) << problem.describe();
      }
    }
  }
  const Values want = expected_grad_kv(
      problem, [&](std::int64_t t, std::int64_t s) { return key(t) == s ? 1.0 : 0.0; });
  EXPECT_TRUE(relative_rmse_within(values_of("grad_kv", result.grad_kv, problem.describe()), want,
                                   kRounding));
  EXPECT_TRUE(within_spec(problem, result));  // grad_q is zero but for what its terms allow
}

TEST_P(Attention, OneKeyGivesItsValue) {
  for (const std::int64_t dim : {512, 576}) {
    const AttentionProblem problem =
        random_attention({.t_q = 4, .t_k = 9, .heads = 5, .topk = 7, .head_dim = dim}, 11);
    expect_one_key_formula(problem, [](std::int64_t t) { return 2 * t; }, runtime());
  }
}

TEST_P(Attention, RowsOfOneTileUseTheirOwnKeys) {
  for (const std::int64_t heads : {8, 16, 32, 33, 72}) {
    const AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 2, .heads = heads, .topk = 4}, 12);
    expect_one_key_formula(problem, [](std::int64_t t) { return t; }, runtime());
  }
}

TEST_P(Attention, ZeroQueryAveragesItsKeys) {
  for (const std::int64_t count : {1, 3, 64, 65}) {
    AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 65, .heads = 3, .topk = count, .head_dim = 576}, 13);
    problem.q.fill(0);
    const AttentionResult result = run_attention(problem, runtime());
    HostTensor mean(DType::kFloat64, result.out.shape());
    for (std::int64_t t = 0; t < problem.t_q(); ++t) {
      const auto keys = problem.keys_of_row(t);
      for (std::int64_t h = 0; h < problem.heads(); ++h) {
        EXPECT_NEAR(result.lse.get({t, h}), std::log(static_cast<double>(count)),
                    log_absolute(result.backend));
        EXPECT_EQ(result.max_logits.get({t, h}), 0);
        for (std::int64_t c = 0; c < 512; ++c) {
          double sum = 0;
          for (const std::int64_t key : keys) sum += problem.kv.get({key, 0, c});
          mean.set({t, h, c}, sum / static_cast<double>(count));
        }
      }
    }
    const std::string text = problem.describe();
    EXPECT_TRUE(relative_rmse_within(values_of("out", result.out, text),
                                     values_of("out", mean, text), kOutRmse));
    const Values want = expected_grad_kv(problem, [&](std::int64_t t, std::int64_t s) {
      for (const std::int64_t key : problem.keys_of_row(t)) {
        if (key == s) return 1.0 / static_cast<double>(count);
      }
      return 0.0;
    });
    EXPECT_TRUE(relative_rmse_within(values_of("grad_kv", result.grad_kv, text), want, kRounding));
  }
}

TEST_P(Attention, HotKeysGatherEveryRow) {
  AttentionProblem problem = random_attention({.t_q = 40, .t_k = 64, .heads = 8, .topk = 64}, 14);
  problem.q.fill(0);
  problem.grad_out.fill(1);
  const AttentionResult result = run_attention(problem, runtime());
  const double want = 40.0 * 8 / 64;
  for (std::int64_t s = 0; s < 64; ++s) {
    for (std::int64_t c = 0; c < 576; ++c) {
      ASSERT_NEAR(result.grad_kv.get({s, 0, c}), c < 512 ? want : 0, c < 512 ? want * 0x1p-8 : 0)
          << place_text(result.grad_kv.shape(), result.grad_kv.at({s, 0, c}));
    }
  }
}

TEST_P(Attention, LseIsTheNaturalLogarithm) {
  AttentionProblem problem = random_attention({.t_q = 1, .t_k = 1, .heads = 1, .topk = 1}, 15);
  problem.q.fill(0);
  problem.kv.fill(0);
  problem.q.set({0, 0, 0}, 2);
  problem.kv.set({0, 0, 0}, 2);
  problem.softmax_scale = 0.5;
  const AttentionResult result = run_forward(problem, runtime());
  EXPECT_NEAR(result.lse.get({0, 0}), 2.0, log_absolute(result.backend));
  EXPECT_NEAR(result.max_logits.get({0, 0}), 2.0, log_absolute(result.backend));
}

// Three keys of logits 0, and a sink of logit ln 5: P_sink = 5/8.
TEST_P(Attention, SinkTakesItsShare) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 3, .heads = 2, .topk = 3}, 16);
  problem.q.fill(0);
  problem.kv.fill(8);
  problem.grad_out.fill(0.5);
  problem.set_sink({std::log(5.0), std::log(5.0)});
  const AttentionResult result = run_attention(problem, runtime());
  // out = 3/8 * 8; D = 512 * 3 * 0.5; grad_attn_sink = - 2 rows * 5/8 * D.
  EXPECT_EQ(result.out.get({1, 1, 511}), 3);
  EXPECT_NEAR(result.lse.get({1, 1}), std::log(3.0), log_absolute(result.backend));
  EXPECT_NEAR(result.grad_attn_sink->get({0}), -960, 960 * 1e-5);
  EXPECT_NEAR(result.grad_attn_sink->get({1}), -960, 960 * 1e-5);
  EXPECT_NEAR(result.grad_kv.get({2, 0, 0}), 2 * 2 * 0.5 / 8, 0x1p-8 * 0.25);
}

}  // namespace
}  // namespace flashdsa::test

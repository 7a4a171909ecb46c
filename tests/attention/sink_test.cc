// The attention sink at its extremes. SPEC section 5.

#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "tests/attention/fixture.h"

namespace flashdsa::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A sink for every head, one kind beside the other: nothing of it may reach a neighbour.
std::vector<double> sinks_of_every_kind(std::int64_t heads) {
  constexpr double kKinds[] = {kInf, 0.5, -kInf, 3.4028234663852886e38, -3.4028234663852886e38, 3};
  std::vector<double> sinks;
  for (std::int64_t h = 0; h < heads; ++h) sinks.push_back(kKinds[h % std::ssize(kKinds)]);
  return sinks;
}

AttentionProblem problem_with_sink(double sink, std::int64_t head_dim, std::uint64_t seed) {
  AttentionProblem problem = random_attention({3, 30, 3, 12, head_dim}, seed);
  problem.set_sink({sink, 0.25, sink});
  return problem;
}

TEST_P(Attention, OrdinarySinksAreRight) {
  for (const double sink : {-20.0, -1.0, 0.0, 3.0, 20.0, 60.0}) {
    expect_within_spec(problem_with_sink(sink, 576, 71));
  }
}

TEST_P(Attention, SinkOfMinusInfinityIsNoSink) {
  AttentionProblem problem = random_attention({3, 30, 3, 12, 576}, 72);
  const AttentionResult without = run_attention(problem, runtime());
  problem.set_sink({-kInf, -kInf, -kInf});
  const AttentionResult with = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, with));
  EXPECT_TRUE(all_zero(values_of("grad_attn_sink", *with.grad_attn_sink)));
  EXPECT_TRUE(same_bits(with.out, without.out));
  EXPECT_TRUE(same_bits(with.lse, without.lse));
}

TEST_P(Attention, SinkOfPlusInfinityTakesEverything) {
  const AttentionProblem problem = problem_with_sink(kInf, 576, 73);
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, result));
  for (const std::int64_t h : {0, 2}) {
    EXPECT_EQ(result.grad_attn_sink->get({h}), 0);
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t c = 0; c < 512; ++c) ASSERT_EQ(result.out.get({t, h, c}), 0);
      for (std::int64_t c = 0; c < 576; ++c) ASSERT_EQ(result.grad_q.get({t, h, c}), 0);
    }
  }
}

TEST_P(Attention, SinksOfEveryKindStandSideBySide) {
  for (const std::int64_t heads : {6, 33, 64, 128}) {
    AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 90, .heads = heads, .topk = heads > 64 ? 9 : 66}, 79);
    const AttentionResult without = run_attention(problem, runtime());
    const std::vector<double> sinks = sinks_of_every_kind(heads);
    problem.set_sink(sinks);
    const AttentionResult with = run_attention(problem, runtime());
    EXPECT_TRUE(within_spec(problem, with));
    for (std::int64_t h = 0; h < heads; ++h) {
      const double sink = sinks[static_cast<std::size_t>(h)];
      if (std::abs(sink) < 10) continue;
      EXPECT_EQ(with.grad_attn_sink->get({h}), 0) << "head " << h;
      // Beside a logit that high a key has no weight, and one that low takes none.
      for (std::int64_t t = 0; t < 2; ++t) {
        for (std::int64_t c = 0; c < 512; ++c) {
          const double want = sink > 0 ? 0 : without.out.get({t, h, c});
          ASSERT_EQ(with.out.get({t, h, c}), want) << problem.describe() << ", head " << h;
        }
        for (std::int64_t c = 0; c < 576; ++c) {
          const double want = sink > 0 ? 0 : without.grad_q.get({t, h, c});
          ASSERT_EQ(with.grad_q.get({t, h, c}), want) << problem.describe() << ", head " << h;
        }
      }
    }
  }
}

TEST_P(Attention, HugeFiniteSinkDoesNotOverflow) {
  for (const double sink : {100.0, 1e4, 2.4e38, 3.4028234663852886e38}) {
    expect_within_spec(problem_with_sink(sink, 576, 74));
  }
}

TEST_P(Attention, HugeNegativeSinkIsNoSink) {
  for (const double sink : {-1e4, -2.4e38, -3.4028234663852886e38}) {
    expect_within_spec(problem_with_sink(sink, 576, 75));
  }
}

TEST_P(Attention, SinkChangesNeitherLseNorMaxLogits) {
  AttentionProblem problem = random_attention({2, 20, 3, 12, 576}, 76);
  const AttentionResult without = run_forward(problem, runtime());
  problem.set_sink({5, kInf, 2.4e38});
  const AttentionResult with = run_forward(problem, runtime());
  EXPECT_TRUE(same_bits(with.lse, without.lse));
  EXPECT_TRUE(same_bits(with.max_logits, without.max_logits));
}

// FAULTS: the sink's gradient lost for one head dim.
TEST_P(Attention, SinkGradientIsEqualAtBothHeadDims) {
  for (const double sink : {0.5, -2.0, 2.4e38, kInf, -kInf}) {
    AttentionProblem latent = problem_with_sink(sink, 512, 77);
    AttentionProblem with_rope = problem_with_sink(sink, 576, 77);
    for (std::int64_t c = 0; c < 576; ++c) {  // the same latent, a rope part of zero
      const bool rope = c >= 512;
      for (std::int64_t s = 0; s < 30; ++s) {
        with_rope.kv.set({s, 0, c}, rope ? 0 : latent.kv.get({s, 0, c}));
      }
      for (std::int64_t t = 0; t < 3; ++t) {
        for (std::int64_t h = 0; h < 3; ++h) {
          with_rope.q.set({t, h, c}, rope ? 0 : latent.q.get({t, h, c}));
          if (!rope) with_rope.grad_out.set({t, h, c}, latent.grad_out.get({t, h, c}));
        }
      }
    }
    with_rope.topk_indices = latent.topk_indices;
    const AttentionResult a = run_attention(latent, runtime());
    const AttentionResult b = run_attention(with_rope, runtime());
    EXPECT_TRUE(relative_rmse_within(values_of("grad_attn_sink", *b.grad_attn_sink),
                                     values_of("grad_attn_sink", *a.grad_attn_sink), 1e-5));
    EXPECT_TRUE(within_spec(latent, a));
    EXPECT_TRUE(within_spec(with_rope, b));
  }
}

TEST_P(Attention, SinkBesideEmptyRowsGathersNothingFromThem) {
  for (const std::int64_t heads : {3, 33, 72}) {
    AttentionProblem problem =
        random_attention({.t_q = 3, .t_k = 30, .heads = heads, .topk = 12}, 78);
    problem.set_sink(std::vector<double>(static_cast<std::size_t>(heads), 1.5));
    problem.set_lengths({12, 0, 12});
    expect_within_spec(problem);
  }
}

}  // namespace
}  // namespace flashdsa::test

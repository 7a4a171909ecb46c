// Which slots count: holes, hostile indices, lengths, duplicates, empty rows. SPEC section 5.

#include <limits>
#include <set>

#include "tests/attention/fixture.h"
#include "tests/support/mapped_memory.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();

// Values of the two results agree as two roundings of the same numbers do.
void expect_close(const AttentionResult& got, const AttentionResult& want, double bound) {
  EXPECT_TRUE(relative_rmse_within(values_of("out", got.out), values_of("out", want.out), bound));
  EXPECT_TRUE(elements_within(values_of("lse", got.lse), values_of("lse", want.lse),
                              2 * log_absolute(got.backend), kLogRelative));
  EXPECT_TRUE(relative_rmse_within(values_of("grad_q", got.grad_q),
                                   values_of("grad_q", want.grad_q), bound));
  EXPECT_TRUE(relative_rmse_within(values_of("grad_kv", got.grad_kv),
                                   values_of("grad_kv", want.grad_kv), bound));
}

void expect_empty_row(const AttentionResult& result, std::int64_t t) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  for (std::int64_t h = 0; h < result.out.size(1); ++h) {
    EXPECT_EQ(result.lse.get({t, h}), kNone);
    EXPECT_EQ(result.max_logits.get({t, h}), kNone);
    for (std::int64_t c = 0; c < 512; ++c) ASSERT_EQ(result.out.get({t, h, c}), 0);
    for (std::int64_t c = 0; c < result.grad_q.size(2); ++c) {
      ASSERT_EQ(result.grad_q.get({t, h, c}), 0);
    }
  }
}

// Keys 0 and T_k-1, where a clamped or wrapped index would land, are NaN and selected by nobody.
AttentionProblem problem_with_nan_keys_at_both_ends(std::int64_t t_q, std::uint64_t seed) {
  AttentionProblem problem = random_attention({.t_q = t_q, .t_k = 16, .heads = 3, .topk = 9}, seed);
  problem.set_key(0, kNan);
  problem.set_key(15, kNan);
  return problem;
}

TEST_P(Attention, HoleIsNeverRead) {
  AttentionProblem problem = problem_with_nan_keys_at_both_ends(4, 51);
  problem.set_row(0, {-1, -1, 3, 4, 5, 6, 7, 8, 9});  // at the start
  problem.set_row(1, {3, 4, 5, -1, 6, -1, 7, 8, 9});  // in the middle
  problem.set_row(2, {3, 4, 5, 6, 7, 8, 9, -1, -1});  // at the end
  problem.set_row(3, {-1, 3, -1, 4, -1, 5, -1, 6, -1});
  expect_within_spec(problem);
}

TEST_P(Attention, IndexOutOfRangeIsNeverRead) {
  AttentionProblem problem = problem_with_nan_keys_at_both_ends(3, 52);
  problem.set_row(0, {kLowest, 3, kHighest, 4, 16, 5, -2, 6, 7});
  problem.set_row(1, {kLowest, kHighest, kLowest, kHighest, 8, 16, 17, -17, -16});
  problem.set_row(2,
                  {kLowest, kHighest, 16, -2, 1 << 30, -(1 << 30), kLowest + 1, kHighest - 1, -1});
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, result));
  expect_empty_row(result, 2);
}

TEST_P(Attention, HolesAreAsTheCompactedRow) {
  for (const std::int64_t heads : {4, 33, 72}) {
    AttentionProblem compact =
        random_attention({.t_q = 1, .t_k = 90, .heads = heads, .topk = 140}, 53);
    compact.set_row(0, {2, 3, 5, 8, 13, 21, 34, 55, 89});
    AttentionProblem scattered = compact;
    scattered.topk_indices.fill(-1);
    std::int64_t slot = 64;  // the first tile is all holes
    for (const std::int64_t key : compact.keys_of_row(0)) {
      scattered.topk_indices.set({0, 0, slot}, static_cast<double>(key));
      slot += 7;
    }
    const AttentionResult got = run_attention(scattered, runtime());
    EXPECT_TRUE(within_spec(scattered, got));
    expect_close(got, run_attention(compact, runtime()), kOutRmse);
  }
}

// Of tiles of 64 slots: holes on both sides of a border, keys only there, and a tile of holes
// between two of keys, in rows that follow one another.
TEST_P(Attention, HolesAtTheEdgesOfTilesAreRight) {
  const std::set<std::int64_t> edges = {0, 63, 64, 65, 127, 128, 129, 191, 192};
  for (const std::int64_t heads : {3, 33, 72}) {
    AttentionProblem problem =
        random_attention({.t_q = 4, .t_k = 260, .heads = heads, .topk = 194}, 64);
    for (std::int64_t j = 0; j < 194; ++j) {
      const bool at_edge = edges.count(j) > 0;
      if (at_edge) problem.topk_indices.set({0, 0, j}, -1);
      if (!at_edge) problem.topk_indices.set({1, 0, j}, -1);
      problem.topk_indices.set({2, 0, j}, -1);
      if (j >= 64 && j < 128) problem.topk_indices.set({3, 0, j}, -1);
    }
    expect_within_spec(problem);
  }
}

TEST_P(Attention, FirstTileOfHolesIsRight) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 80, .heads = 2, .topk = 140}, 54);
  for (std::int64_t t = 0; t < 2; ++t) {
    for (std::int64_t j = 0; j < 140; ++j) {
      problem.topk_indices.set({t, 0, j}, j < 64 ? -1 : static_cast<double>(j - 64));
    }
  }
  expect_within_spec(problem);
}

TEST_P(Attention, DuplicateSlotCountsAsOftenAsItStands) {
  AttentionProblem problem = random_attention({.t_q = 3, .t_k = 10, .heads = 3, .topk = 8}, 55);
  problem.set_row(0, {4, 4, 4, 4, 4, 4, 4, 4});
  problem.set_row(1, {1, 1, 2, 3, 3, 3, 9, 9});
  problem.set_row(2, {9, 1, 9, 1, 9, 1, 9, 1});
  expect_within_spec(problem);
}

TEST_P(Attention, OrderOfSlotsDoesNotMatter) {
  AttentionProblem ascending = random_attention({.t_q = 1, .t_k = 90, .heads = 4, .topk = 80}, 56);
  AttentionProblem descending = ascending;
  for (std::int64_t j = 0; j < 80; ++j) {
    descending.topk_indices.set({0, 0, j}, ascending.topk_indices.get({0, 0, 79 - j}));
  }
  const AttentionResult got = run_attention(descending, runtime());
  EXPECT_TRUE(within_spec(descending, got));
  expect_close(got, run_attention(ascending, runtime()), kOutRmse);
}

TEST_P(Attention, LengthIsClampedToTheRow) {
  for (const std::int64_t heads : {2, 33}) {
    AttentionProblem problem =
        random_attention({.t_q = 12, .t_k = 140, .heads = heads, .topk = 128}, 57);
    problem.set_lengths({-1, 0, 1, 63, 64, 65, 127, 128, 129, kHighest, kLowest, 2});
    const AttentionResult result = run_attention(problem, runtime());
    EXPECT_TRUE(within_spec(problem, result));
    for (const std::int64_t t : {0, 1, 10}) expect_empty_row(result, t);
    AttentionProblem whole = problem;  // a length above K is K
    whole.topk_length.reset();
    const AttentionResult all = run_attention(whole, runtime());
    for (const std::int64_t t : {7, 8, 9}) {
      EXPECT_TRUE(same_bits(result.out.rows(t, 1), all.out.rows(t, 1)));
      EXPECT_TRUE(same_bits(result.lse.rows(t, 1), all.lse.rows(t, 1)));
    }
  }
}

TEST_P(Attention, LengthBeyondTheValidSlotsIsRight) {
  AttentionProblem problem = problem_with_nan_keys_at_both_ends(3, 58);
  problem.set_row(0, {2, 3, -1, -1, -1, -1, -1, -1, -1});
  problem.set_row(1, {-1, 2, -1, 3, -1, 4, -1, -1, -1});
  problem.set_row(2, {-1, -1, -1, -1, -1, -1, -1, -1, -1});
  problem.set_lengths({9, 5, 4});
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, result));
  expect_empty_row(result, 2);
}

TEST_P(Attention, SlotPastTheLengthIsNeverRead) {
  AttentionProblem problem = random_attention({.t_q = 1, .t_k = 2, .heads = 3, .topk = 2}, 59);
  problem.set_row(0, {0, 1});
  problem.set_lengths({1});
  problem.set_key(1, kNan);
  const AttentionResult result = run_attention(problem, runtime());
  for (std::int64_t c = 0; c < 512; ++c) {
    ASSERT_EQ(result.out.get({0, 2, c}), problem.kv.get({0, 0, c}));
  }
  for (std::int64_t c = 0; c < 576; ++c) ASSERT_EQ(result.grad_kv.get({1, 0, c}), 0);
  EXPECT_TRUE(within_spec(problem, result));
}

TEST_P(Attention, ForwardAndBackwardSeeTheSameSlots) {
  AttentionProblem problem = problem_with_nan_keys_at_both_ends(1, 60);
  problem.set_row(0, {5, -1, 6, 16, 0, 0, 15, 15, 0});  // a hole inside, NaN keys behind the length
  problem.set_lengths({4});
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, result));
  for (std::int64_t s = 0; s < problem.t_k(); ++s) {
    bool any = false;
    for (std::int64_t c = 0; c < 576; ++c) any = any || result.grad_kv.get({s, 0, c}) != 0;
    EXPECT_EQ(any, s == 5 || s == 6) << "key " << s;
  }
}

TEST_P(Attention, EmptyRowsGiveZeroAndTouchNoKey) {
  AttentionProblem problem = random_attention({.t_q = 4, .t_k = 70, .heads = 3, .topk = 64}, 61);
  problem.set_lengths({0, 1, 0, 64});
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(within_spec(problem, result));
  expect_empty_row(result, 0);
  expect_empty_row(result, 2);
}

TEST_P(Attention, AllRowsEmptyIsAValidProblem) {
  for (const bool by_length : {true, false}) {
    AttentionProblem problem = random_attention({.t_q = 3, .t_k = 5, .heads = 2, .topk = 4}, 62);
    if (by_length) {
      problem.set_lengths({0, 0, -5});
    } else {
      problem.topk_indices.fill(-1);
    }
    problem.set_sink({1, std::numeric_limits<double>::infinity()});
    const AttentionResult result = run_attention(problem, runtime());
    for (std::int64_t t = 0; t < 3; ++t) expect_empty_row(result, t);
    EXPECT_TRUE(all_zero(values_of("grad_kv", result.grad_kv)));
    EXPECT_TRUE(all_zero(values_of("grad_attn_sink", *result.grad_attn_sink)));
  }
}

// The tensors end at a page that faults, and begin behind one.
TEST_P(Attention, NothingOutsideTheTensorsIsRead) {
  for (const std::int64_t heads : {1, 3, 8}) {
    AttentionProblem problem =
        random_attention({.t_q = 3, .t_k = 7, .heads = heads, .topk = 5}, 63);
    problem.set_row(1, {-1, kLowest, 6, kHighest, 0});
    problem.set_row(2, {});
    problem.set_sink(std::vector<double>(static_cast<std::size_t>(heads), 0.5));
    const AttentionResult want = run_attention(problem, repeatable());

    const PageGuardedTensor q(problem.q), kv(problem.kv), grad_out(problem.grad_out);
    const PageGuardedTensor topk_indices(problem.topk_indices), sink(*problem.attn_sink);
    const PageGuardedTensor out(want.out), lse(want.lse);
    SparseAttentionInputs inputs = problem.inputs();
    inputs.q = q;
    inputs.kv = kv;
    inputs.topk_indices = topk_indices;
    inputs.attn_sink = sink;
    AttentionForwardArgs forward;
    static_cast<SparseAttentionInputs&>(forward) = inputs;
    const HostTensor again(DType::kBFloat16, want.out.shape());
    const HostTensor lse_again(DType::kFloat32, want.lse.shape());
    forward.out = again;
    forward.lse = lse_again;
    run_placed(forward, repeatable());
    EXPECT_TRUE(same_bits(again, want.out));

    AttentionBackwardArgs backward;
    static_cast<SparseAttentionInputs&>(backward) = inputs;
    const HostTensor grad_q(DType::kBFloat16, want.grad_q.shape());
    const HostTensor grad_kv(DType::kBFloat16, want.grad_kv.shape());
    backward.out = out;
    backward.lse = lse;
    backward.grad_out = grad_out;
    backward.grad_q = grad_q;
    backward.grad_kv = grad_kv;
    run_placed(backward, repeatable());
    EXPECT_TRUE(same_bits(grad_q, want.grad_q));
    EXPECT_TRUE(same_bits(grad_kv, want.grad_kv));
  }
}

}  // namespace
}  // namespace flashdsa::test

// Which keys a row sees and how many it selects: documents, widths, trivial rows, hostile metadata.

#include <limits>
#include <numeric>

#include "tests/indexer/fixture.h"
#include "tests/support/mapped_memory.h"
#include "tests/support/property.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();

TEST_P(TopK, ExactIntegersAgreeWithBruteForce) {
  for (const std::int64_t heads : {1, 2, 3, 7, 8, 9, 16, 33, 64}) {
    expect_exactly_best(integer_topk(4, 300, heads, 20, 141));
  }
}

TEST_P(TopK, AnyWidthIsRight) {
  for (const std::int64_t topk : {1, 2, 15, 16, 17, 31, 33, 100, 299, 300, 301, 2048}) {
    expect_exactly_best(integer_topk(3, 300, 2, topk, 142));
  }
}

TEST_P(TopK, AnyNumberOfKeysIsRight) {
  for (const std::int64_t keys :
       {1, 2, 3, 7, 8, 9, 15, 16, 17, 47, 48, 49, 95, 959, 960, 961, 1921}) {
    expect_exactly_best(integer_topk(1, keys, 2, 6, 143));
  }
}

// FAULTS: exactly K, K-1 and K+1 visible keys at K = 2048.
TEST_P(TopK, AsManyKeysAsSlotsAreAllSelected) {
  const TopkProblem problem = integer_topk(3, 2049, 2, 2048, 144);  // rows of 2047, 2048, 2049
  expect_exactly_best(problem);
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(result.topk_indices.get({0, 0, 2046}), 2046);
  EXPECT_EQ(result.topk_indices.get({0, 0, 2047}), -1);
  EXPECT_EQ(result.topk_indices.get({1, 0, 2047}), 2047);
  EXPECT_EQ(result.topk_length.get({2}), 2048);
}

// FAULTS: lengths around every size where a dispatch may change, mixed in one call.
TEST_P(TopK, LengthsAroundEverySizeInOneCallAreRight) {
  const std::vector<std::int32_t> lengths = {0,   1,   2,   15,  16,  17,  31,   32,   33,   47,
                                             48,  49,  63,  64,  65,  127, 128,  129,  191,  192,
                                             193, 255, 256, 257, 959, 960, 961,  1023, 1024, 1025,
                                             48,  0,   1,   65,  64,  63,  1919, 1920, 1921, 2000};
  for (const std::int64_t topk : {32, 64, 960}) {
    TopkProblem problem =
        integer_topk(static_cast<std::int64_t>(lengths.size()), 2011, 2, topk, 145);
    std::vector<std::int32_t> starts;
    for (std::size_t t = 0; t < lengths.size(); ++t)
      starts.push_back(static_cast<std::int32_t>(t % 12));
    problem.set_rows(starts, lengths);
    EXPECT_TRUE(exactly_best(problem, run_topk(problem, runtime())));
  }
}

// FAULTS: state left from the previous row of a persistent loop.
TEST_P(TopK, ShortRowAfterALongOneStandsAlone) {
  TopkProblem problem = integer_topk(4, 3000, 1, 64, 146);
  problem.set_rows({0, 5, 0, 2900}, {3000, 64, 2999, 65});
  expect_exactly_best(problem);
}

// FAULTS: row-relative against absolute coordinates. cu = [0, 64, 128], query 100.
TEST_P(TopK, IndicesAreStoragePositions) {
  for (const std::int64_t topk : {16, 64}) {
    TopkProblem problem = integer_topk(1, 128, 2, topk, 147);
    problem.set_rows({64}, {37});
    expect_exactly_best(problem);
    const TopkResult result = run_topk(problem, runtime());
    const std::int64_t count = std::min<std::int64_t>(topk, 37);
    for (std::int64_t j = 0; j < topk; ++j) {
      const double key = result.topk_indices.get({0, 0, j});
      EXPECT_TRUE(j < count ? key >= 64 && key <= 100 : key == -1) << j << ": " << key;
    }
  }
}

// FAULTS: causal mask restarted per chunk. Queries 80..159 of documents [0,100) and [100,160).
TEST_P(TopK, RowsOfTwoDocumentsSeeTheirOwnKeys) {
  TopkProblem problem = integer_topk(80, 160, 2, 12, 148);
  for (std::int32_t t = 0; t < 80; ++t) {
    const std::int32_t position = 80 + t, start = position < 100 ? 0 : 100;
    problem.starts.set({t}, start);
    problem.causal_lengths.set({t}, position + 1 - start);
  }
  ASSERT_EQ(problem.causal_lengths.get({10}), 91);
  ASSERT_EQ(problem.causal_lengths.get({20}), 1);
  expect_exactly_best(problem);
  EXPECT_EQ(run_topk(problem, runtime()).topk_indices.get({20, 0, 0}), 100);
}

TEST_P(TopK, KeysOutsideTheRowAreNeverSeen) {
  TopkProblem problem = integer_topk(3, 200, 2, 10, 149);
  problem.set_rows({50, 51, 120}, {30, 29, 0});
  const TopkResult clean = run_topk(problem, runtime());
  for (std::int64_t s = 0; s < 200; ++s) {
    if (s < 50 || s >= 80) problem.fill_key(s, kNan);
  }
  EXPECT_TRUE(same_topk_bits(run_topk(problem, runtime()), clean));
}

TEST_P(TopK, EmptyRowsSelectNothing) {
  TopkProblem problem = integer_topk(3, 50, 2, 5, 150);
  problem.set_rows({0, 20, 50}, {0, 0, 0});
  for (const WantScores want : {WantScores::kNo, WantScores::kYes}) {
    const TopkResult result = run_topk(problem, runtime(), want);
    EXPECT_TRUE(exactly_best(problem, result));
    EXPECT_EQ(result.topk_length.get({1}), 0);
    EXPECT_EQ(result.topk_indices.get({1, 0, 0}), -1);
  }
}

TEST_P(TopK, TrivialRowSelectsAllWhateverItsScores) {
  TopkProblem problem =
      topk_of_scores({kNan, -std::numeric_limits<double>::infinity(), 3, kNan}, 6);
  expect_exactly_best(problem);
  EXPECT_EQ(run_topk(problem, runtime()).topk_length.get({0}), 4);
}

TEST_P(TopK, TrivialRowsHaveTheirScoresWhenAskedFor) {
  expect_exactly_best(integer_topk(5, 40, 3, 64, 151));
  const TopkProblem problem = random_topk(5, 40, 3, 64, 152);
  EXPECT_TRUE(best_within_spec(problem, run_topk(problem, runtime())));
}

// "No score is computed unless scores are requested": the keys and queries cannot even be read.
TEST_P(TopK, TrivialRowsReadNeitherKeyNorQuery) {
  const TopkProblem problem = integer_topk(6, 60, 3, 64, 153);
  MappedMemory forbidden(1 << 20);
  ASSERT_NE(forbidden.data(), nullptr);
  forbidden.forbid_access();
  const HostTensor topk_indices(DType::kInt32, {6, 1, 64}), topk_length(DType::kInt32, {6});
  IndexerTopkArgs args = problem.inputs();
  args.index_q.data = forbidden.data();
  args.index_k.data = forbidden.data();
  args.head_weights.data = forbidden.data();
  args.topk_indices = topk_indices;
  args.topk_length = topk_length;
  run_placed(args, runtime());
  const TopkResult want = run_topk(problem, runtime());
  EXPECT_TRUE(same_bits(topk_indices, want.topk_indices));
  EXPECT_TRUE(same_bits(topk_length, want.topk_length));
}

TEST_P(TopK, NoQueriesIsAValidProblem) {
  const TopkResult result = run_topk(causal_topk(0, 10, 2, 4), runtime());
  EXPECT_EQ(result.topk_indices.elements(), 0);
}

TEST_P(TopK, NoKeysIsAValidProblem) {
  TopkProblem problem = causal_topk(2, 0, 2, 4);
  problem.set_rows({0, 0}, {0, 5});
  expect_exactly_best(problem);
}

TEST_P(TopK, LengthAndScoresAreOptional) {
  const TopkProblem problem = integer_topk(3, 50, 2, 5, 154);
  const HostTensor topk_indices(DType::kInt32, {3, 1, 5});
  IndexerTopkArgs args = problem.inputs();
  args.topk_indices = topk_indices;
  args.total_key_tokens = 50;
  run_placed(args, runtime());
  EXPECT_TRUE(same_bits(topk_indices, run_topk(problem, runtime()).topk_indices));
}

// The storage ends at a page that faults, and begins behind one.
TEST_P(TopK, MetadataBeyondTheStorageIsNeverFollowed) {
  TopkProblem problem = integer_topk(11, 40, 2, 7, 155);
  problem.set_rows({-5, -1, kLowest, 30, 40, 41, kHighest, 0, 39, 3, kLowest},
                   {20, 41, kHighest, 50, 1, 3, kHighest, kHighest, kHighest, -4, kLowest});
  const PageGuardedTensor index_k(problem.index_k);
  for (const bool scores : {false, true}) {
    const HostTensor topk_indices(DType::kInt32, {11, 1, 7}), topk_length(DType::kInt32, {11});
    const HostTensor topk_scores(DType::kFloat32, {11, 7});
    IndexerTopkArgs args = problem.inputs();
    args.index_k = index_k;
    args.topk_indices = topk_indices;
    args.topk_length = topk_length;
    if (scores) args.topk_scores = topk_scores;
    run_placed(args, runtime());
    TopkResult result{topk_indices, topk_length, std::nullopt};
    if (scores) result.topk_scores = topk_scores;
    EXPECT_TRUE(exactly_best(problem, result));  // the visible keys that lie in the storage
    EXPECT_TRUE(topk_indices.bands_intact() && topk_length.bands_intact());
  }
}

TEST_P(TopK, NothingOutsideTheTensorsIsRead) {
  for (const std::int64_t heads : {1, 3, 8}) {
    const TopkProblem problem = integer_topk(3, 53, heads, 9, 156);
    const PageGuardedTensor q(problem.index_q), k(problem.index_k), weights(problem.head_weights);
    const PageGuardedTensor starts(problem.starts), lengths(problem.causal_lengths);
    const HostTensor topk_indices(DType::kInt32, {3, 1, 9});
    IndexerTopkArgs args = problem.inputs();
    args.index_q = q;
    args.index_k = k;
    args.head_weights = weights;
    args.starts = starts;
    args.causal_lengths = lengths;
    args.topk_indices = topk_indices;
    run_placed(args, runtime());
    EXPECT_TRUE(same_bits(topk_indices, run_topk(problem, runtime()).topk_indices));
  }
}

TEST_P(TopK, OffsetsBeyond32BitsAreRight) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 30) + 128;
  const TopkProblem problem = integer_topk(3, 6, 2, 4, 157);
  const MappedMemory q(3 * kStride * 2), k(6 * kStride * 2), weights(3 * kStride * 4);
  for (const MappedMemory* memory : {&q, &k, &weights}) {
    if (memory->data() == nullptr) GTEST_SKIP() << "the system maps no 12 GB of empty memory";
  }
  const auto spread = [&](const HostTensor& tensor, const MappedMemory& memory) {
    TensorView view = tensor.view();
    const std::size_t row_bytes = view.bytes() / static_cast<std::size_t>(view.shape[0]);
    for (std::int64_t t = 0; t < view.shape[0]; ++t) {
      const std::size_t to = static_cast<std::size_t>(t * kStride) * dtype_size(view.dtype);
      std::copy_n(view.as<std::byte>() + static_cast<std::size_t>(t) * row_bytes, row_bytes,
                  memory.data() + to);
    }
    view.data = memory.data();
    view.strides[0] = kStride;
    return view;
  };
  const HostTensor topk_indices(DType::kInt32, {3, 1, 4});
  IndexerTopkArgs args = problem.inputs();
  args.index_q = spread(problem.index_q, q);
  args.index_k = spread(problem.index_k, k);
  args.head_weights = spread(problem.head_weights, weights);
  args.topk_indices = topk_indices;
  run_placed(args, runtime());
  EXPECT_TRUE(same_bits(topk_indices, run_topk(problem, runtime()).topk_indices));
}

TopkProblem arbitrary_problem() {
  const auto between = [](std::int64_t low, std::int64_t high) {
    return *rc::gen::inRange(low, high + 1);
  };
  const std::int64_t t_q = between(1, 12), t_k = between(0, 400);
  TopkProblem problem = integer_topk(t_q, t_k, between(1, 10), between(1, 90),
                                     static_cast<std::uint64_t>(between(0, 1 << 20)));
  for (std::int64_t t = 0; t < t_q; ++t) {
    const std::int64_t start = between(-3, t_k + 2);
    problem.starts.set(t, static_cast<double>(start));
    problem.causal_lengths.set(t, static_cast<double>(between(-2, t_k + 3)));
  }
  if (between(0, 1) == 0) problem.head_weights = problem.head_weights.as(DType::kBFloat16);
  return problem;
}

TEST_P(TopK, PropertyAnyProblemIsTheBruteForces) {
  const Runtime on = runtime();
  check_property(100, 1003, [&on] {
    const TopkProblem problem = arbitrary_problem();
    const auto want = *rc::gen::arbitrary<bool>() ? WantScores::kYes : WantScores::kNo;
    const auto verdict = exactly_best(problem, run_topk(problem, on, want));
    if (!verdict) RC_FAIL(std::string(verdict.message()));
  });
}

}  // namespace
}  // namespace flashdsa::test

// Rows that mislead a selection which samples scores: whatever the sample sees, the selection is
// exact. The places are those of src/indexer/sm90/select; on other engines they are just rows.

#include <algorithm>
#include <limits>

#include "tests/indexer/fixture.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kShort = 8192;  // keys that stay in shared memory
constexpr std::int64_t kLong = 16384;  // keys that are streamed, in one piece

// Which keys of a document of kShort or kLong are sampled.
std::vector<bool> sampled_keys(std::int64_t keys) {
  std::vector<bool> sampled(static_cast<std::size_t>(keys));
  if (keys == kShort) {  // every fourth, from another place in every eight pieces and every run
    for (std::size_t s = 0; s < sampled.size(); ++s) {
      const std::size_t run = s / 128, lane = s % 128 / 4;
      sampled[s] = s % 4 == (lane / 8 + run) % 4;
    }
    return sampled;
  }
  for (std::uint32_t piece = 0; piece < 128; ++piece) {  // of eight keys, scattered
    const std::uint32_t place = (piece << 25) + (piece * 0x9E3779B9u >> 7);
    const std::uint64_t at = std::uint64_t{place} * static_cast<std::uint64_t>(keys / 8) >> 32;
    for (std::size_t i = 0; i < 8; ++i) sampled[8 * at + i] = true;
  }
  return sampled;
}

// Scores of [0, 1000) for the sampled keys and of [shift, shift + 1000) for the others, or the
// other way round.
std::vector<std::int64_t> misleading(std::int64_t keys, bool sampled_high) {
  constexpr std::int64_t kShift = 1 << 20;
  Random random(161);
  std::vector<std::int64_t> scores;
  for (const bool sampled : sampled_keys(keys)) {
    scores.push_back(random.integer(0, 999) + (sampled == sampled_high ? kShift : 0));
  }
  return scores;
}

TEST_P(TopK, SampleOfLowScoresMisleadsNobody) {
  for (const std::int64_t keys : {kShort, kLong}) {
    for (const std::int64_t topk : {1, 100, 2047, 2048}) {
      expect_exactly_best(topk_of_integers(misleading(keys, false), topk));
    }
  }
}

TEST_P(TopK, SampleOfHighScoresMisleadsNobody) {
  for (const std::int64_t keys : {kShort, kLong}) {
    for (const std::int64_t topk : {1, 100, 2047, 2048}) {
      expect_exactly_best(topk_of_integers(misleading(keys, true), topk));
    }
  }
}

// From two values, which thousands share, to a few equals at the threshold.
TEST_P(TopK, AnyNumberOfEqualsAtTheThresholdIsRight) {
  for (const std::int64_t keys : {kShort, kLong}) {
    for (const std::int64_t values : {2, 3, 7, 64, 1000}) {
      Random random(162);
      std::vector<std::int64_t> scores(static_cast<std::size_t>(keys));
      for (auto& score : scores) score = random.integer(0, values - 1);
      for (const std::int64_t topk : {100, 2047, 2048}) {
        expect_exactly_best(topk_of_integers(scores, topk));
      }
    }
  }
}

TEST_P(TopK, SortedLongRowsAreRight) {
  std::vector<std::int64_t> scores(static_cast<std::size_t>(kLong));
  for (std::size_t s = 0; s < scores.size(); ++s) scores[s] = static_cast<std::int64_t>(3 * s);
  for (const std::int64_t topk : {1, 100, 2048}) {
    expect_exactly_best(topk_of_integers(scores, topk));
    std::vector<std::int64_t> descending = scores;
    std::reverse(descending.begin(), descending.end());
    expect_exactly_best(topk_of_integers(descending, topk));
  }
}

// A NaN or an infinity in the sample leaves no bound, or no width, to divide into bins.
TEST_P(TopK, SampleOfNonFiniteScoresMisleadsNobody) {
  for (const std::int64_t keys : {kShort, kLong}) {
    for (const double value :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
          -std::numeric_limits<double>::infinity()}) {
      Random random(163);
      std::vector<double> scores;
      for (const bool sampled : sampled_keys(keys)) {
        scores.push_back(sampled ? value : static_cast<double>(random.integer(-128, 127)));
      }
      for (const std::int64_t topk : {100, 2048}) {
        expect_exactly_best(topk_of_scores(scores, topk));
      }
    }
  }
}

}  // namespace
}  // namespace flashdsa::test

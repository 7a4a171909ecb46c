// FP32 to BF16: nearest, ties to even, judged by the numbers' distances, not by their bits.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "flashdsa/tensor_view.h"
#include "tests/support/property.h"

namespace flashdsa::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr std::uint16_t kInfBits = 0x7F80;
constexpr std::uint16_t kSign = 0x8000;

float float_of(std::uint32_t word) { return std::bit_cast<float>(word); }

std::uint16_t rounded(float value) { return BFloat16(value).bits; }

// The number that a pattern without sign stands for, decoded by the definition of the format: one
// sign, eight exponent, seven mantissa bits. The pattern of infinity stands for 2^128 here, which
// is what rounding measures distances to.
double magnitude(int pattern) {
  const int exponent = pattern >> 7;
  const int mantissa = pattern & 0x7F;
  if (exponent == 0) return std::ldexp(mantissa, -133);
  return std::ldexp(128 + mantissa, exponent - 134);
}

// Searches all magnitudes for the nearest one; the even pattern among two.
std::uint16_t nearest(float value) {
  static const std::vector<double> magnitudes = [] {
    std::vector<double> result;
    for (int pattern = 0; pattern <= kInfBits; ++pattern) result.push_back(magnitude(pattern));
    return result;
  }();
  const double size = std::min(std::fabs(static_cast<double>(value)), magnitudes.back());
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), size);
  auto best = above;
  if (above != magnitudes.begin()) {
    const auto below = above - 1;
    const double down = size - *below, up = *above - size;  // both exact
    const bool below_is_even = (below - magnitudes.begin()) % 2 == 0;
    if (down < up || (down == up && below_is_even)) best = below;
  }
  const auto pattern = static_cast<std::uint16_t>(best - magnitudes.begin());
  return std::signbit(value) ? static_cast<std::uint16_t>(pattern | kSign) : pattern;
}

TEST(BFloat16, RoundsKnownNumbers) {
  EXPECT_EQ(rounded(0.0f), 0x0000);
  EXPECT_EQ(rounded(-0.0f), 0x8000);
  EXPECT_EQ(rounded(1.0f), 0x3F80);
  EXPECT_EQ(rounded(-2.0f), 0xC000);
  EXPECT_EQ(rounded(0.1f), 0x3DCD);  // 0.10009765625
  EXPECT_EQ(static_cast<float>(BFloat16(0.1f)), 0.10009765625f);
  EXPECT_EQ(static_cast<float>(BFloat16::from_bits(0x4049)), 3.140625f);
  EXPECT_EQ(BFloat16().bits, 0);
}

TEST(BFloat16, TiesGoToTheEvenPattern) {
  // Neighbours of 1 are 2^-7 apart.
  EXPECT_EQ(rounded(1.0f + 0x1p-8f), 0x3F80);  // down to 1
  EXPECT_EQ(rounded(1.0f + 0x3p-8f), 0x3F82);  // up to 1 + 2^-6
  EXPECT_EQ(rounded(-1.0f - 0x1p-8f), 0xBF80);
  EXPECT_EQ(rounded(-1.0f - 0x3p-8f), 0xBF82);
  EXPECT_EQ(rounded(1.0f + 0x1p-8f + 0x1p-23f), 0x3F81);  // above the tie
  EXPECT_EQ(rounded(1.0f + 0x3p-8f - 0x1p-23f), 0x3F81);  // below the tie
}

TEST(BFloat16, SubnormalsAreKept) {
  EXPECT_EQ(rounded(0x1p-133f), 0x0001);  // the smallest one
  EXPECT_EQ(rounded(0x1p-134f), 0x0000);  // half of it: a tie
  EXPECT_EQ(rounded(0x1.0002p-134f), 0x0001);
  EXPECT_EQ(rounded(0x1p-149f), 0x0000);
  EXPECT_EQ(rounded(-0x1p-149f), 0x8000);
  EXPECT_EQ(rounded(0x1p-126f), 0x0080);  // the smallest normal one
  EXPECT_EQ(static_cast<float>(BFloat16::from_bits(0x0001)), 0x1p-133f);
  EXPECT_EQ(static_cast<float>(BFloat16::from_bits(0x807F)), -0x7Fp-133f);
}

TEST(BFloat16, InfinityStaysAndLargeNumbersOverflowToIt) {
  EXPECT_EQ(rounded(kInf), kInfBits);
  EXPECT_EQ(rounded(-kInf), kInfBits | kSign);
  EXPECT_EQ(rounded(std::numeric_limits<float>::max()), kInfBits);
  EXPECT_EQ(rounded(std::numeric_limits<float>::lowest()), kInfBits | kSign);
  EXPECT_EQ(rounded(float_of(0x7F7F8000)), kInfBits);  // the tie between the largest and 2^128
  EXPECT_EQ(rounded(float_of(0x7F7F7FFF)), 0x7F7F);
}

TEST(BFloat16, NanKeepsSignAndUpperPayloadAndBecomesQuiet) {
  EXPECT_EQ(rounded(float_of(0x7FC00000)), 0x7FC0);
  EXPECT_EQ(rounded(float_of(0xFFC00000)), 0xFFC0);
  EXPECT_EQ(rounded(float_of(0x7FD50000)), 0x7FD5);
  EXPECT_EQ(rounded(float_of(0x7F950000)), 0x7FD5);  // signalling
  EXPECT_EQ(rounded(float_of(0x7F800001)), 0x7FC0);  // the payload's upper half is empty
  EXPECT_EQ(rounded(float_of(0xFF800001)), 0xFFC0);
  EXPECT_EQ(rounded(float_of(0x7FFFFFFF)), 0x7FFF);  // rounding must not carry into the sign
  EXPECT_EQ(rounded(float_of(0xFFFFFFFF)), 0xFFFF);
}

TEST(BFloat16, EveryPatternSurvivesTheWayThroughFloat) {
  for (int bits = 0; bits <= 0xFFFF; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const auto number = static_cast<float>(BFloat16::from_bits(pattern));
    if (std::isnan(number)) {
      ASSERT_EQ(rounded(number), pattern | 0x40) << bits;
    } else {
      ASSERT_EQ(rounded(number), pattern) << bits;
      const int unsigned_pattern = bits & 0x7FFF;
      const double size = unsigned_pattern == kInfBits ? kInf : magnitude(unsigned_pattern);
      ASSERT_EQ(std::fabs(number), size) << bits;
      ASSERT_EQ(std::signbit(number), bits >= 0x8000) << bits;
    }
  }
}

// Between two neighbours all numbers up to the middle go down and all behind it go up, so the
// numbers beside the neighbours and beside the middle decide.
TEST(BFloat16, EveryIntervalIsSplitInItsMiddle) {
  for (int pattern = 0; pattern < kInfBits; ++pattern) {
    const double low = magnitude(pattern), high = magnitude(pattern + 1);
    const auto middle = static_cast<float>(low + (high - low) / 2);
    const auto below = static_cast<std::uint16_t>(pattern);
    const auto above = static_cast<std::uint16_t>(pattern + 1);
    const std::uint16_t even = pattern % 2 == 0 ? below : above;
    ASSERT_EQ(rounded(middle), even) << pattern;
    ASSERT_EQ(rounded(-middle), even | kSign) << pattern;
    ASSERT_EQ(rounded(std::nextafter(middle, 0.0f)), below) << pattern;
    ASSERT_EQ(rounded(std::nextafter(middle, kInf)), above) << pattern;
    ASSERT_EQ(rounded(std::nextafter(static_cast<float>(low), kInf)), below) << pattern;
    if (above == kInfBits) continue;  // the largest FP32 number overflows
    ASSERT_EQ(rounded(std::nextafter(static_cast<float>(high), 0.0f)), above) << pattern;
  }
}

TEST(BFloat16, IsTheNearestNumber) {
  check_property(20000, 1, [] {
    const auto exponent = *rc::gen::inRange<std::uint32_t>(0, 255);
    const auto mantissa = *rc::gen::inRange<std::uint32_t>(0, 1u << 23);
    const auto sign = *rc::gen::inRange<std::uint32_t>(0, 2);
    const float value = float_of(sign << 31 | exponent << 23 | mantissa);
    RC_ASSERT(rounded(value) == nearest(value));
  });
}

}  // namespace
}  // namespace flashdsa::test

#pragma once

#include <bit>
#include <cstdint>
#include <functional>

/// Numbers that are the same on every machine, compiler and thread count: random bits are hashes of
/// a counter, normals are sums of integers, and the functions use only the operations that IEEE 754
/// rounds correctly. (The C++ library's distributions and its exp and sin promise neither.)
namespace flashdsa::tools {

/// SplitMix64's finaliser: a bijection of 64-bit words that changes half of the bits for every bit.
inline std::uint64_t mix_bits(std::uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

/// What a stream of random numbers is for; streams of one seed are independent.
enum class StreamId : std::uint64_t {
  kDocuments = 1,
  kQ,
  kKv,
  kIndexQ,
  kIndexK,
  kHeadWeights,
  kGradOut,
  kSink,
  kSelection,
  kEmbedding,
  kIndexProjection,
  kIndexGain,
  kWeightProjection,
  kKvProjection,
  kKvNoise,
  kQueryDown,
  kQueryUp,
  kSample,
  kGradScores,
};

/// Random numbers addressed by a counter: any of them is to be had without the others.
class RandomStream {
 public:
  RandomStream(std::uint64_t seed, StreamId id)
      : key_(mix_bits(mix_bits(seed) + static_cast<std::uint64_t>(id))) {}

  std::uint64_t bits(std::uint64_t counter) const {
    return mix_bits(key_ + (counter + 1) * kGoldenGamma);
  }

  /// In [0, 1), a multiple of 2^-53.
  double uniform(std::uint64_t counter) const {
    return static_cast<double>(bits(counter) >> 11) * 0x1p-53;
  }

  /// In [0, bound), for bound below 2^32; the bias is below bound / 2^32.
  std::int64_t below(std::uint64_t counter, std::int64_t bound) const {
    return static_cast<std::int64_t>(((bits(counter) >> 32) * static_cast<std::uint64_t>(bound)) >>
                                     32);
  }

  /// Mean 0, variance 1: the sum of eight 16-bit uniforms, which is normal to the eye (excess
  /// kurtosis -0.15) and bounded by 4.9.
  float normal(std::uint64_t counter) const {
    constexpr std::uint64_t kEven = 0x0000FFFF0000FFFFu;
    constexpr std::int32_t kMean = 4 * 65535;
    constexpr float kInverseDeviation = 1.0f / 53509.918f;  // sqrt(8 * (65536^2 - 1) / 12)
    const std::uint64_t first = bits(2 * counter);
    const std::uint64_t second = bits(2 * counter + 1);
    const std::uint64_t pairs =
        (first & kEven) + ((first >> 16) & kEven) + (second & kEven) + ((second >> 16) & kEven);
    const auto sum = static_cast<std::int32_t>((pairs & 0xFFFFFFFFu) + (pairs >> 32));
    return static_cast<float>(sum - kMean) * kInverseDeviation;
  }

 private:
  static constexpr std::uint64_t kGoldenGamma = 0x9E3779B97F4A7C15u;
  std::uint64_t key_;
};

/// e^x for |x| <= 700, and the sine and cosine of `turns` full turns, within a few units of the
/// last place.
double portable_exp(double x);
double portable_sin_turns(double turns);
double portable_cos_turns(double turns);

/// Calls body(begin, end) for pieces that cover [0, count), on up to `threads` threads (0: all that
/// the process may use). The result must not depend on the cut.
void parallel_ranges(int threads, std::int64_t count,
                     const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace flashdsa::tools

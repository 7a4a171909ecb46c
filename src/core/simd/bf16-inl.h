// The vector layer of the CPU kernels: FP32 and BF16-pair vectors over Highway, for the one
// instruction set this file is compiled for. Included only by kernels.cc files.
//
// BF16 matrices are walked as words of two neighbours of the contracted axis: the first in the low
// half, the second in the high half. DotPairs multiplies such words and adds both products to an
// FP32 lane, so a fixed order of words is a fixed order of additions.
#pragma once

#include <cstdint>

#include "hwy/highway.h"
// after highway.h
#include "hwy/contrib/math/math-inl.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

HWY_BEFORE_NAMESPACE();
namespace flashdsa::simd {
namespace FLASHDSA_SIMD {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that the tiles' sizes are known when compiling.
using FloatTag = hn::CappedTag<float, 16>;
using WordTag = hn::Rebind<std::uint32_t, FloatTag>;
using Floats = hn::Vec<FloatTag>;
using Words = hn::Vec<WordTag>;

inline constexpr FloatTag kFloat{};
inline constexpr WordTag kWord{};
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));

// The compiler's flags, not Highway's run-time choice, pick the set.
#if defined(__AVX512BW__)
static_assert(kLanes == 16, "Highway does not see AVX-512");
#elif defined(__AVX2__)
static_assert(kLanes == 8, "Highway does not see AVX2");
#elif defined(__SSE4_1__)
static_assert(kLanes == 4, "Highway does not see SSE4");
#endif

// The BF16 number in the low half of each word, as FP32.
HWY_INLINE Floats LowFloats(Words words) { return hn::BitCast(kFloat, hn::ShiftLeft<16>(words)); }

// The BF16 number in the high half.
HWY_INLINE Floats HighFloats(Words words) {
  return hn::BitCast(kFloat, hn::And(words, hn::Set(kWord, 0xFFFF0000u)));
}

// What DotPairs makes of subnormal numbers. The AVX-512 BF16 instruction takes them as zero, inputs
// and sums alike; to keep them costs twice its time. The other sets always keep them.
enum class Subnormals { kFlushed, kKept };

#ifdef __AVX512BF16__
inline constexpr bool kDotFlushes = true;
#else
inline constexpr bool kDotFlushes = false;
#endif

// fma(low(a), low(b), fma(high(a), high(b), sum)) in FP32: the order of the AVX-512 instruction, so
// that all sets with FMA give the same bits where no subnormal is flushed (NaN stays NaN, but which
// NaN depends on the set).
template <Subnormals kSubnormals = Subnormals::kFlushed>
HWY_INLINE Floats DotPairs(Words a, Words b, Floats sum) {
#ifdef __AVX512BF16__
  if constexpr (kSubnormals == Subnormals::kFlushed) {
    return Floats{_mm512_dpbf16_ps(sum.raw, (__m512bh)a.raw, (__m512bh)b.raw)};
  }
#endif
  return hn::MulAdd(LowFloats(a), LowFloats(b), hn::MulAdd(HighFloats(a), HighFloats(b), sum));
}

// Smallest magnitude among the BF16 numbers that are not zero, as bits; above all of them when
// there is none.
HWY_INLINE std::uint32_t LeastMagnitude(const std::uint16_t* numbers, int count) {
  std::uint16_t least = 0xFFFF;  // of magnitude - 1, where zero is the largest
  for (int i = 0; i < count; ++i) {
    const auto rank = static_cast<std::uint16_t>((numbers[i] & 0x7FFF) - 1);
    least = rank < least ? rank : least;
  }
  return least + 1u;
}

// Whether DotPairs meets no subnormal when it multiplies numbers of at least these magnitudes.
// Those of biased exponents a and b are multiples of 2^(a - 134) and 2^(b - 134), so every product,
// and every sum of products however often rounded, is a multiple of 2^(a + b - 268): zero or no
// smaller than that.
HWY_INLINE bool DotsStayNormal(std::uint32_t least_a, std::uint32_t least_b) {
  constexpr std::uint32_t kLeastNormal = 0x80;
  return least_a >= kLeastNormal && least_b >= kLeastNormal &&
         (least_a >> 7) + (least_b >> 7) >= 268 - 126;
}

// Upper halves of the FP32 numbers rounded to BF16 (nearest even), in the low half of each word.
// NaN stays NaN.
HWY_INLINE Words RoundToBf16(Floats values) {
  const Words bits = hn::BitCast(kWord, values);
  const Words odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(kWord, 1u));
  const Words rounded = hn::Add(hn::Add(bits, hn::Set(kWord, 0x7FFFu)), odd);
  const Words quiet = hn::Or(bits, hn::Set(kWord, 0x400000u));
  const auto is_nan = hn::RebindMask(kWord, hn::IsNaN(values));
  return hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
}

// Words of two BF16 numbers: `low` and `high` rounded.
HWY_INLINE Words RoundToPairs(Floats low, Floats high) {
  return hn::Or(RoundToBf16(low), hn::ShiftLeft<16>(RoundToBf16(high)));
}

// e^x with NaN kept and +inf above the range of FP32, where Highway's Exp promises nothing.
HWY_INLINE Floats ExpOfAny(Floats x) {
  const Floats limit = hn::Set(kFloat, 88.7f);
  const Floats power = hn::Exp(kFloat, hn::Min(x, limit));
  const Floats bounded = hn::IfThenElse(hn::Gt(x, limit), hn::Set(kFloat, __builtin_inff()), power);
  return hn::IfThenElse(hn::IsNaN(x), x, bounded);
}

}  // namespace FLASHDSA_SIMD
}  // namespace flashdsa::simd
HWY_AFTER_NAMESPACE();

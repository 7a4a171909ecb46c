// Gradients of the selected scores on the CPU, for the one instruction set this file is compiled
// for. Included only by kernels.cc.
//
//   phase 1, by query:  dot = q K^T, factor = g * w * 1[dot > 0],
//                       grad_weights = sum_j g * max(0, dot), grad_q = factor^T K
//   phase 2, by key:    grad_index_k[i_j] += factor^T q
//
// A row's keys are walked in blocks of kBlockKeys slots. The products and their operands are those
// of core/simd/products-inl.h:
//
//   keys      [kBlockKeys, 128] BF16        the gathered rows
//   dots      [kBlockKeys, padded H] FP32   lanes are heads; then the factors
//   factors   [K, even H] BF16              kept for phase 2
//
// A dot is the same chain of FP32 operations as in the scores that were selected, subnormal numbers
// included, so both sides of a kink agree. Rounded to BF16: the factors as operands, and the
// outputs. All else is FP32. A row's bits depend on nothing but the row.
#pragma once

#include "core/simd/products-inl.h"
#include "indexer/cpu/config.h"
#include "indexer/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace flashdsa::indexer::cpu {
namespace FLASHDSA_SIMD {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace simd::FLASHDSA_SIMD;  // the vector layer of this instruction set

constexpr int kDim = 128;

static_assert(kBlockKeys % ProductTiles::kScoreKeys == 0, "a full block has whole score tiles");
static_assert(kBlockKeys % 2 == 0, "factors are packed by two keys");
static_assert(kDim % kPairPanel == 0, "channels fill whole panels");
static_assert(kDim <= ProductTiles::kChunkChannels, "a dot is one chain, as in the scores");

struct BackwardScratch {
  std::uint32_t* q_words;
  std::uint16_t* keys;
  float* dots;  // then the factors
  std::uint32_t* pairs;
  std::uint32_t* factor_words;  // [kBlockKeys/2, padded H], of two keys
  float* acc;                   // [H, 128], grad_q
  float* weights;               // [padded H]
  float* grad_weights;
  float* ones;  // grad_q is never rescaled

  BackwardScratch(int heads, Pieces& pieces) {
    const int padded = PadHeads(heads);
    q_words = pieces.Take<std::uint32_t>(padded * kDim / 2);
    keys = pieces.Take<std::uint16_t>(kBlockKeys * kDim);
    dots = pieces.Take<float>(kBlockKeys * padded);
    pairs = pieces.Take<std::uint32_t>(kBlockKeys / 2 * kDim);
    factor_words = pieces.Take<std::uint32_t>(kBlockKeys / 2 * padded);
    acc = pieces.Take<float>(heads * kDim);
    weights = pieces.Take<float>(padded);
    grad_weights = pieces.Take<float>(padded);
    ones = pieces.Take<float>(padded);
  }
};

// dots [count, padded H] of a block of gathered keys.
void Dots(const BackwardScratch& s, int padded_heads, std::uint32_t q_least, int count) {
  if constexpr (kDotFlushes) {
    if (!DotsStayNormal(q_least, LeastMagnitude(s.keys, count * kDim))) {
      Scores<Subnormals::kKept>(s.q_words, padded_heads, s.keys, kDim, count, kDim, s.dots);
      return;
    }
  }
  Scores(s.q_words, padded_heads, s.keys, kDim, count, kDim, s.dots);
}

// dots [count, padded H] become factors, which are also stored as BF16 rows of even H: zero behind
// the last head, where the dot is zero or NaN. Adds to grad_weights.
void FactorsBlock(int heads, int padded_heads, const float* grad_scores, int count,
                  const BackwardScratch& s, std::uint16_t* factor_rows) {
  const int even = even_heads(heads);
  for (int h = 0; h < padded_heads; h += kLanes) {
    const Floats weight = hn::Load(kFloat, s.weights + h);
    Floats grad_weight = hn::Load(kFloat, s.grad_weights + h);
    for (int j = 0; j < count; ++j) {
      float* at = s.dots + j * padded_heads + h;
      const Floats dot = hn::Load(kFloat, at);
      const Floats g = hn::Set(kFloat, grad_scores[j]);
      // Not Max: a NaN dot stays NaN here, and is not above zero in the factor.
      const Floats positive = hn::IfThenZeroElse(hn::Lt(dot, hn::Zero(kFloat)), dot);
      const Floats factor = hn::IfThenElseZero(hn::Gt(dot, hn::Zero(kFloat)), hn::Mul(g, weight));
      grad_weight = hn::MulAdd(g, positive, grad_weight);
      hn::Store(factor, kFloat, at);
      StoreLowHalves(RoundToBf16(factor), even - h, factor_rows + j * even + h);
    }
    hn::Store(grad_weight, kFloat, s.grad_weights + h);
  }
}

std::uint32_t LeastMagnitudeOfHeads(const BackwardRow& row) {
  std::uint32_t least = ~0u;
  for (int h = 0; h < row.heads; ++h) {
    const std::uint32_t mine = LeastMagnitude(row.q + h * row.q_head_stride, kDim);
    if (mine < least) least = mine;
  }
  return least;
}

void BackwardRowKernel(const BackwardRow& row, void* scratch) {
  Pieces pieces(scratch);
  const BackwardScratch s(row.heads, pieces);
  const int padded = PadHeads(row.heads);
  const std::uint32_t q_least = kDotFlushes ? LeastMagnitudeOfHeads(row) : 0;
  PackHeads(row.q, row.q_head_stride, row.heads, kDim, s.q_words);
  PackRowPairs(row.q, row.q_head_stride, row.heads, kDim, row.q_pairs);
  for (int h = 0; h < padded; ++h) {
    s.weights[h] = h < row.heads ? row.weights[h] : 0;
    s.grad_weights[h] = 0;
    s.ones[h] = 1;
  }
  for (int first = 0; first < row.key_count; first += kBlockKeys) {
    const int left = row.key_count - first;
    const int count = left < kBlockKeys ? left : kBlockKeys;
    GatherKeys(row.index_k, row.index_k_row_stride, row.keys + first, count, kDim, s.keys);
    Dots(s, padded, q_least, count);
    FactorsBlock(row.heads, padded, row.grad_scores + first, count, s,
                 row.factors + first * even_heads(row.heads));
    PackBlockWeights(s.dots, count, padded, s.factor_words);
    PackRowPairs(s.keys, kDim, count, kDim, s.pairs);
    AccumulateHeads(s.factor_words, padded, row.heads, s.pairs, (count + 1) / 2, 0, kDim,
                    first == 0 ? nullptr : s.ones, s.acc);
  }
  for (int h = 0; h < row.heads; ++h) {
    row.grad_weights[h] = s.grad_weights[h];
    StoreBf16(s.acc + h * kDim, 1.0f, kDim, row.grad_q + h * kDim);
  }
}

std::size_t BackwardScratchBytes(std::int32_t heads) {
  Pieces pieces(nullptr);
  BackwardScratch layout(heads, pieces);
  return pieces.bytes();
}

std::size_t PairsWords(std::int32_t heads) {
  return static_cast<std::size_t>(even_heads(heads)) / 2 * kDim;
}

void AccumulateGradIndexK(const AccumulateRow& row, float* accumulators) {
  const SlotProduct products[] = {{row.factors, row.q_pairs, kDim}};
  AccumulateSlots(products, row.heads, {row.keys, row.slots, row.slot_count}, kDim, accumulators);
}

void StoreRowsBf16(const float* rows, std::int64_t count, std::uint16_t* grad_index_k) {
  for (std::int64_t s = 0; s < count; ++s) {
    StoreBf16(rows + s * kDim, 1.0f, kDim, grad_index_k + s * kDim);
  }
}

void StoreRowsF32(const float* rows, std::int64_t count, float* grad_index_k) {
  for (std::int64_t s = 0; s < count; ++s) StoreF32(rows + s * kDim, kDim, grad_index_k + s * kDim);
}

}  // namespace
}  // namespace FLASHDSA_SIMD
}  // namespace flashdsa::indexer::cpu
HWY_AFTER_NAMESPACE();

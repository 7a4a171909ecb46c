// Indexer scores on the CPU, compiled once per instruction set; backward-inl.h has their gradient.
//
//   score[t,s] = sum_h w[t,h] * max(0, dot(q[t,h,:], k[s,:]))
//
// Keys are packed into panels [64 words][kPanelKeys], a word being two channels: lanes are keys,
// query words are broadcast. A tile is kHeads x kKeyVectors accumulators; its heads are then
// weighted and added to the scores one after the other. So every score is one fixed chain of FP32
// operations: the words in ascending order for each dot, then the heads in ascending order,
// whatever panel, tile, row block or thread it falls into. That makes selections invariant.
//
// Where a product or sum of a panel could be subnormal, the panel is scored by the DotPairs that
// keeps them. Elsewhere both give the same bits, so a score does not show which one made it.

#include "indexer/cpu/kernels.h"

#include "core/simd/bf16-inl.h"
#include "indexer/cpu/backward-inl.h"
#include "indexer/cpu/config.h"

HWY_BEFORE_NAMESPACE();
namespace flashdsa::indexer::cpu {
namespace FLASHDSA_SIMD {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace simd::FLASHDSA_SIMD;  // the vector layer of this instruction set

using Tiles = Config<kLanes>;
constexpr int kPanelKeys = Tiles::kPanelKeys;
constexpr int kWords = kDim / 2;

// 0 in the sets that keep subnormals anyway.
std::uint32_t LeastMagnitudeIfFlushed(const std::uint16_t* numbers, std::int32_t count) {
  return kDotFlushes ? LeastMagnitude(numbers, count) : 0;
}

void PackKeys(const std::uint16_t* keys, std::int64_t key_stride, std::int32_t count,
              Panel& panel) {
  panel.least_magnitude = ~0u;
  for (int j = 0; j < kPanelKeys; ++j) {
    std::uint32_t words[kWords] = {};
    if (j < count) {
      const std::uint16_t* key = keys + j * key_stride;
      __builtin_memcpy(words, key, sizeof(words));
      const std::uint32_t least = LeastMagnitudeIfFlushed(key, kDim);
      if (least < panel.least_magnitude) panel.least_magnitude = least;
    }
    for (int c = 0; c < kWords; ++c) panel.words[c * kPanelKeys + j] = words[c];
  }
}

// Adds kHeads weighted heads to the scores of one panel.
template <int kHeads, Subnormals kSubnormals>
HWY_INLINE void HeadTile(const std::uint16_t* HWY_RESTRICT q, const float* HWY_RESTRICT weights,
                         const std::uint32_t* HWY_RESTRICT panel,
                         Floats (&scores)[Tiles::kKeyVectors]) {
  Floats dot[kHeads][Tiles::kKeyVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < Tiles::kKeyVectors; ++v) dot[h][v] = hn::Zero(kFloat);
  }
  for (int c = 0; c < kWords; ++c) {
    Words keys[Tiles::kKeyVectors];
    for (int v = 0; v < Tiles::kKeyVectors; ++v) {
      keys[v] = hn::Load(kWord, panel + c * kPanelKeys + v * kLanes);
    }
    for (int h = 0; h < kHeads; ++h) {
      std::uint32_t word;
      __builtin_memcpy(&word, q + h * kDim + 2 * c, sizeof(word));
      const Words query = hn::Set(kWord, word);
      for (int v = 0; v < Tiles::kKeyVectors; ++v) {
        dot[h][v] = DotPairs<kSubnormals>(query, keys[v], dot[h][v]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const Floats weight = hn::Set(kFloat, weights[h]);
    for (int v = 0; v < Tiles::kKeyVectors; ++v) {
      // Not Max: a NaN dot stays NaN.
      const auto negative = hn::Lt(dot[h][v], hn::Zero(kFloat));
      const Floats positive = hn::IfThenZeroElse(negative, dot[h][v]);
      scores[v] = hn::MulAdd(weight, positive, scores[v]);
    }
  }
}

template <Subnormals kSubnormals>
void ScorePanelWith(const Query& query, const std::uint32_t* panel, float* scores) {
  Floats sum[Tiles::kKeyVectors];
  for (int v = 0; v < Tiles::kKeyVectors; ++v) sum[v] = hn::Zero(kFloat);
  const auto tile = [&]<int kHeads>(int h) {
    HeadTile<kHeads, kSubnormals>(query.q + h * kDim, query.weights + h, panel, sum);
  };
  int h = 0;
  for (; h + Tiles::kHeads <= query.heads; h += Tiles::kHeads) {
    tile.template operator()<Tiles::kHeads>(h);
  }
  for (; h + 2 <= query.heads; h += 2) tile.template operator()<2>(h);
  if (h < query.heads) tile.template operator()<1>(h);
  for (int v = 0; v < Tiles::kKeyVectors; ++v) hn::Store(sum[v], kFloat, scores + v * kLanes);
}

void ScorePanel(const Query& query, const Panel& panel, float* scores) {
  if constexpr (kDotFlushes) {
    if (DotsStayNormal(query.least_magnitude, panel.least_magnitude)) {
      ScorePanelWith<Subnormals::kFlushed>(query, panel.words, scores);
      return;
    }
  }
  ScorePanelWith<Subnormals::kKept>(query, panel.words, scores);
}

std::int32_t AppendAbove(const float* scores, std::int32_t count, float threshold,
                         std::int32_t first_key, float* kept_scores, std::int32_t* kept_keys) {
  if (threshold != threshold) return 0;
  const hn::Rebind<std::int32_t, FloatTag> index_tag;
  const Floats least = hn::Set(kFloat, threshold);
  std::int32_t kept = 0;
  for (std::int32_t j = 0; j < count; j += kLanes) {
    const Floats score = hn::LoadU(kFloat, scores + j);
    // Above, or NaN; lanes behind the last score are not looked at.
    const auto inside = hn::FirstN(kFloat, static_cast<std::size_t>(count - j));
    const auto above = hn::AndNot(hn::Le(score, least), inside);
    if (hn::AllFalse(kFloat, above)) continue;
    const auto keys = hn::Iota(index_tag, first_key + j);
    hn::CompressStore(score, above, kFloat, kept_scores + kept);
    kept += static_cast<std::int32_t>(
        hn::CompressStore(keys, hn::RebindMask(index_tag, above), index_tag, kept_keys + kept));
  }
  return kept;
}

}  // namespace

const Kernels& kernels() {
  static constexpr Kernels kKernels = {
      kPanelKeys,           LeastMagnitudeIfFlushed, PackKeys,    ScorePanel,
      AppendAbove,          BackwardScratchBytes,    PairsWords,  BackwardRowKernel,
      AccumulateGradIndexK, StoreRowsBf16,           StoreRowsF32};
  return kKernels;
}

}  // namespace FLASHDSA_SIMD
}  // namespace flashdsa::indexer::cpu
HWY_AFTER_NAMESPACE();

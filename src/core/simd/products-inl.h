// Products of packed BF16 matrices, for the one instruction set this file is compiled for. Included
// only by kernels.cc files.
//
// A query row's heads meet the keys that it selected in three products. Each lays its operands out
// so that a tile issues one DotPairs after the other from registers and first-level cache:
//
//   Scores           q K^T: lanes are heads, words of two channels of a key are broadcast
//   AccumulateHeads  weights^T K: lanes are channels, weights of two keys are broadcast
//   AccumulateSlots  weights q: lanes are channels, weights of two heads are broadcast
//
// with the operands
//
//   q_words   [head panel][channels/2][panel]        words of two channels, transposed
//   pairs     [vector panel][rows/2][panel]          words of two rows (keys or heads)
//   weights   [keys/2, padded H]                     words of two keys
//
// and sums in a channel order that makes packing and unpacking pure shifts: of every 2*kLanes
// channels first the even, then the odd ones. Each result is a fixed order of FP32 sums over the
// contracted axis, whatever the tile around it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/simd/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashdsa::simd {
namespace FLASHDSA_SIMD {

// Sizes of the tiles, by the width and number of the vector registers.
struct ProductTiles {
  // 32 registers of 16 lanes, or 16 narrower ones: accumulators of one tile.
  static constexpr bool kWide = kLanes == 16;

  // Scores: vectors of heads x keys.
  static constexpr int kScoreVectors = 2;
  static constexpr int kScoreKeys = kWide ? 12 : 4;

  // Channels of a chunk of the score's contraction; a chunk of a panel takes 8 KB.
  static constexpr int kChunkChannels = 128;

  // Products over pairs of keys or heads: rows x vectors of words.
  static constexpr int kPairRows = kWide ? 6 : 4;
  static constexpr int kPairVectors = kWide ? 4 : 2;
};

inline constexpr int kScorePanel = ProductTiles::kScoreVectors * kLanes;  // heads
inline constexpr int kPairPanel = ProductTiles::kPairVectors * kLanes;    // words

constexpr int RoundUp(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Whole vectors, and an even number, as P and dS are stored by pairs of heads.
inline int PadHeads(int heads) { return RoundUp(heads, kLanes < 2 ? 2 : kLanes); }

inline std::uint32_t LoadWord(const std::uint16_t* two) {
  std::uint32_t word;
  __builtin_memcpy(&word, two, sizeof(word));
  return word;
}

// Hands out 64-byte aligned pieces of a thread's scratch; over null it counts.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* Take(std::int64_t count) {
    char* piece = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::size_t bytes_ = 0;
};

// ------------------------------------------------------------------------------ packing

// rows [heads, channels] BF16 -> words [panel][channels/2][panel heads]; missing heads are zero.
// The last panel of an odd number of head vectors is one vector wide.
inline void PackHeads(const std::uint16_t* rows, std::int64_t head_stride, int heads, int channels,
                      std::uint32_t* words) {
  const int padded = PadHeads(heads);
  for (int first = 0; first < padded; first += kScorePanel) {
    const int width = padded - first < kScorePanel ? padded - first : kScorePanel;
    for (int h = 0; h < width; ++h) {
      std::uint32_t* column = words + h;
      if (first + h >= heads) {
        for (int c = 0; c < channels / 2; ++c) column[c * width] = 0;
        continue;
      }
      const std::uint16_t* row = rows + (first + h) * head_stride;
      for (int c = 0; c < channels / 2; ++c) column[c * width] = LoadWord(row + 2 * c);
    }
    words += width * channels / 2;
  }
}

// Copies the rows of `count` keys and clears rows up to whole score tiles.
inline void GatherKeys(const std::uint16_t* rows, std::int64_t row_stride, const std::int32_t* keys,
                       int count, int channels, std::uint16_t* gathered) {
  const std::size_t row_bytes = static_cast<std::size_t>(channels) * sizeof(std::uint16_t);
  for (int j = 0; j < count; ++j) {
    __builtin_memcpy(gathered + j * channels, rows + keys[j] * row_stride, row_bytes);
  }
  const int end = RoundUp(count, 4);
  __builtin_memset(gathered + count * channels, 0,
                   static_cast<std::size_t>(end - count) * row_bytes);
}

// Two BF16 rows -> for every vector of words (2*kLanes channels) the pairs (a[c], b[c]) of the even
// channels, then of the odd ones. A null `b` counts as zeros.
HWY_INLINE void PackPair(const std::uint16_t* a, const std::uint16_t* b, int word, Words* even,
                         Words* odd) {
  const Words low = hn::LoadU(kWord, reinterpret_cast<const std::uint32_t*>(a) + word);
  const Words high = b == nullptr
                         ? hn::Zero(kWord)
                         : hn::LoadU(kWord, reinterpret_cast<const std::uint32_t*>(b) + word);
  *even = hn::Or(hn::And(low, hn::Set(kWord, 0xFFFFu)), hn::ShiftLeft<16>(high));
  *odd = hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(kWord, 0xFFFF0000u)));
}

// rows [count, channels] BF16 -> pairs [panel][even count/2][kPairPanel words].
inline void PackRowPairs(const std::uint16_t* rows, std::int64_t row_stride, int count,
                         int channels, std::uint32_t* pairs) {
  const int half = (count + 1) / 2;
  for (int k = 0; k < half; ++k) {
    const std::uint16_t* a = rows + 2 * k * row_stride;
    const std::uint16_t* b = 2 * k + 1 < count ? a + row_stride : nullptr;
    // A panel holds kPairVectors / 2 vectors of source words.
    for (int word = 0; word < channels / 2; word += kLanes) {
      Words even, odd;
      PackPair(a, b, word, &even, &odd);
      const int panel = 2 * word / kPairPanel;
      std::uint32_t* to = pairs + (panel * half + k) * kPairPanel + 2 * word % kPairPanel;
      hn::Store(even, kWord, to);
      hn::Store(odd, kWord, to + kLanes);
    }
  }
}

// Packs two rows of FP32 weights (lanes are heads) into words of two keys; null is a row of zeros.
inline void PackWeights(const float* first, const float* second, int padded_heads,
                        std::uint32_t* words) {
  for (int h = 0; h < padded_heads; h += kLanes) {
    const Floats low = hn::Load(kFloat, first + h);
    const Floats high = second == nullptr ? hn::Zero(kFloat) : hn::Load(kFloat, second + h);
    hn::Store(RoundToPairs(low, high), kWord, words + h);
  }
}

// Packs the weights [count, padded H] of a block.
inline void PackBlockWeights(const float* rows, int count, int padded_heads, std::uint32_t* words) {
  for (int k = 0; 2 * k < count; ++k) {
    const float* first = rows + 2 * k * padded_heads;
    PackWeights(first, 2 * k + 1 < count ? first + padded_heads : nullptr, padded_heads,
                words + k * padded_heads);
  }
}

// ------------------------------------------------------------------------------ tiles

// scores[j][head] += sum over `words` words of q_words[word][head] . keys[j][word], kKeys keys and
// kVectors vectors of heads. `first`: the scores are not read and count as zero.
template <int kVectors, int kKeys, Subnormals kSubnormals>
HWY_INLINE void ScoreTile(const std::uint32_t* HWY_RESTRICT q_words,
                          const std::uint16_t* HWY_RESTRICT keys, std::int64_t key_stride,
                          int words, bool first, float* HWY_RESTRICT scores, int scores_stride) {
  Floats sum[kKeys][kVectors];
  for (int j = 0; j < kKeys; ++j) {
    for (int v = 0; v < kVectors; ++v) sum[j][v] = hn::Zero(kFloat);
  }
  for (int w = 0; w < words; ++w) {
    Words q[kVectors];
    for (int v = 0; v < kVectors; ++v) q[v] = hn::Load(kWord, q_words + v * kLanes);
    q_words += kVectors * kLanes;
    for (int j = 0; j < kKeys; ++j) {
      const Words key = hn::Set(kWord, LoadWord(keys + j * key_stride + 2 * w));
      for (int v = 0; v < kVectors; ++v) sum[j][v] = DotPairs<kSubnormals>(q[v], key, sum[j][v]);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = scores + j * scores_stride + v * kLanes;
      hn::Store(first ? sum[j][v] : hn::Add(hn::Load(kFloat, to), sum[j][v]), kFloat, to);
    }
  }
}

// One panel of heads. Channels are taken in chunks whose partial sums are then added: a chunk of
// the panel stays in first-level cache for all keys, and a large first channel does not cost every
// later addition its low bits.
template <int kVectors, Subnormals kSubnormals>
void ScoreHeadPanel(const std::uint32_t* q_words, const std::uint16_t* keys,
                    std::int64_t key_stride, int count, int channels, float* scores,
                    int scores_stride) {
  for (int c = 0; c < channels; c += ProductTiles::kChunkChannels) {
    const int words = (channels - c < ProductTiles::kChunkChannels ? channels - c
                                                                   : ProductTiles::kChunkChannels) /
                      2;
    const std::uint16_t* chunk = keys + c;
    int j = 0;
    for (; j + ProductTiles::kScoreKeys <= count; j += ProductTiles::kScoreKeys) {
      ScoreTile<kVectors, ProductTiles::kScoreKeys, kSubnormals>(
          q_words, chunk + j * key_stride, key_stride, words, c == 0, scores + j * scores_stride,
          scores_stride);
    }
    for (; j < count; j += 4) {  // rows up to a multiple of four are there
      ScoreTile<kVectors, 4, kSubnormals>(q_words, chunk + j * key_stride, key_stride, words,
                                          c == 0, scores + j * scores_stride, scores_stride);
    }
    q_words += kVectors * kLanes * words;
  }
}

// scores [count, padded H]: packed heads times the first `channels` of `count` key rows. Rows up to
// a multiple of four are read.
template <Subnormals kSubnormals = Subnormals::kFlushed>
void Scores(const std::uint32_t* q_words, int padded_heads, const std::uint16_t* keys,
            std::int64_t key_stride, int count, int channels, float* scores) {
  int h = 0;
  for (; h + kScorePanel <= padded_heads; h += kScorePanel) {
    ScoreHeadPanel<ProductTiles::kScoreVectors, kSubnormals>(q_words, keys, key_stride, count,
                                                             channels, scores + h, padded_heads);
    q_words += kScorePanel * channels / 2;
  }
  if (h < padded_heads) {
    ScoreHeadPanel<1, kSubnormals>(q_words, keys, key_stride, count, channels, scores + h,
                                   padded_heads);
  }
}

// sum[m][v] += weights word (m, k) . pairs[k][v] for k in [0, depth).
template <int kRows>
HWY_INLINE void PairTile(const std::uint32_t* HWY_RESTRICT weights, std::int64_t row_step,
                         std::int64_t depth_step, const std::uint32_t* HWY_RESTRICT pairs,
                         int depth, Floats (&sum)[kRows][ProductTiles::kPairVectors]) {
  for (int k = 0; k < depth; ++k) {
    Words pair[ProductTiles::kPairVectors];
    for (int v = 0; v < ProductTiles::kPairVectors; ++v) {
      pair[v] = hn::Load(kWord, pairs + v * kLanes);
    }
    pairs += kPairPanel;
    for (int m = 0; m < kRows; ++m) {
      const Words weight = hn::Set(kWord, weights[m * row_step + k * depth_step]);
      for (int v = 0; v < ProductTiles::kPairVectors; ++v) {
        sum[m][v] = DotPairs(weight, pair[v], sum[m][v]);
      }
    }
  }
}

// acc rows [kRows] of one panel: acc = acc * rescale[row] + weights . pairs. rescale null: acc is
// not read and counts as zero.
template <int kRows>
void AccumulateTile(const std::uint32_t* weights, int weights_stride, const std::uint32_t* pairs,
                    int depth, const float* rescale, float* acc, int acc_stride) {
  Floats sum[kRows][ProductTiles::kPairVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < ProductTiles::kPairVectors; ++v) {
      sum[m][v] = rescale == nullptr ? hn::Zero(kFloat)
                                     : hn::Mul(hn::Set(kFloat, rescale[m]),
                                               hn::Load(kFloat, acc + m * acc_stride + v * kLanes));
    }
  }
  PairTile<kRows>(weights, 1, weights_stride, pairs, depth, sum);
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < ProductTiles::kPairVectors; ++v) {
      hn::Store(sum[m][v], kFloat, acc + m * acc_stride + v * kLanes);
    }
  }
}

// acc [heads, end - begin] = acc * rescale[head] + weights^T . pairs over `depth` pairs of keys,
// for the channels [begin, end) of pairs.
inline void AccumulateHeads(const std::uint32_t* weights, int padded_heads, int heads,
                            const std::uint32_t* pairs, int depth, int begin, int end,
                            const float* rescale, float* acc) {
  const int width = end - begin;
  for (int c = 0; c < width; c += kPairPanel) {
    const std::uint32_t* panel = pairs + (begin + c) * depth;
    const auto tile = [&]<int kRows>(int h) {
      AccumulateTile<kRows>(weights + h, padded_heads, panel, depth,
                            rescale == nullptr ? nullptr : rescale + h, acc + h * width + c, width);
    };
    int h = 0;
    for (; h + ProductTiles::kPairRows <= heads; h += ProductTiles::kPairRows) {
      tile.template operator()<ProductTiles::kPairRows>(h);
    }
    for (; h + 2 <= heads; h += 2) tile.template operator()<2>(h);
    if (h < heads) tile.template operator()<1>(h);
  }
}

// ------------------------------------------------------------------------------ slots

// One product that is added to key rows: weights^T times a query row.
struct SlotProduct {
  const std::uint16_t* weights;  // [slots, even H] BF16
  const std::uint32_t* pairs;    // [H, channels] from PackRowPairs
  int channels;                  // whole panels
};

// The slots that AccumulateSlots adds, and their keys.
struct Slots {
  const std::int32_t* keys;   // by slot
  const std::int32_t* slots;  // [count]
  int count;
};

inline constexpr int kSlotBlock = 8 * ProductTiles::kPairRows;  // weights gathered at once
inline constexpr int kMaxHeadPairs = 64;

using SlotWeights = std::uint32_t[kSlotBlock][kMaxHeadPairs];

// Adds one panel of the products to the accumulator rows of kRows slots, one after the other: a key
// that stands in two slots is added to twice.
template <int kRows, int kProducts>
void AccumulateSlotTile(const SlotProduct (&products)[kProducts],
                        const SlotWeights (&weights)[kProducts], int depth, int first, int panel,
                        const std::int32_t* keys, const std::int32_t* slots, int channels,
                        float* accumulators) {
  Floats sum[kRows][ProductTiles::kPairVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < ProductTiles::kPairVectors; ++v) sum[m][v] = hn::Zero(kFloat);
  }
  for (int i = 0; i < kProducts; ++i) {
    if (panel * kPairPanel >= products[i].channels) continue;
    PairTile<kRows>(weights[i][first], kMaxHeadPairs, 1,
                    products[i].pairs + panel * depth * kPairPanel, depth, sum);
  }
  for (int m = 0; m < kRows; ++m) {
    const std::int64_t key = keys[slots[first + m]];
    float* to = accumulators + key * channels + panel * kPairPanel;
    for (int v = 0; v < ProductTiles::kPairVectors; ++v) {
      hn::Store(hn::Add(hn::Load(kFloat, to + v * kLanes), sum[m][v]), kFloat, to + v * kLanes);
    }
  }
}

// accumulators [T_k, channels] += the sum of the products, slot after slot.
template <int kProducts>
void AccumulateSlots(const SlotProduct (&products)[kProducts], int heads, const Slots& row,
                     int channels, float* accumulators) {
  const int depth = (heads + 1) / 2;
  SlotWeights weights[kProducts];
  for (int block = 0; block < row.count; block += kSlotBlock) {
    const int left = row.count - block;
    const int count = left < kSlotBlock ? left : kSlotBlock;
    const std::int32_t* slots = row.slots + block;
    for (int m = 0; m < count; ++m) {
      for (int i = 0; i < kProducts; ++i) {
        const std::int64_t at = static_cast<std::int64_t>(slots[m]) * 2 * depth;
        __builtin_memcpy(weights[i][m], products[i].weights + at,
                         static_cast<std::size_t>(depth) * sizeof(std::uint32_t));
      }
    }
    for (int panel = 0; panel < channels / kPairPanel; ++panel) {
      const auto tile = [&]<int kRows>(int first) {
        AccumulateSlotTile<kRows>(products, weights, depth, first, panel, row.keys, slots, channels,
                                  accumulators);
      };
      int m = 0;
      for (; m + ProductTiles::kPairRows <= count; m += ProductTiles::kPairRows) {
        tile.template operator()<ProductTiles::kPairRows>(m);
      }
      for (; m + 2 <= count; m += 2) tile.template operator()<2>(m);
      if (m < count) tile.template operator()<1>(m);
    }
  }
}

// ------------------------------------------------------------------------------ stores

// The BF16 numbers in the low halves of the first `count` words.
inline void StoreLowHalves(Words words, int count, std::uint16_t* to) {
  const hn::Rebind<std::uint16_t, FloatTag> half_word;
  const auto halves = hn::TruncateTo(half_word, words);
  if (count >= kLanes) {
    hn::StoreU(halves, half_word, to);
    return;
  }
  std::uint16_t tail[kLanes];
  hn::StoreU(halves, half_word, tail);
  for (int lane = 0; lane < count; ++lane) to[lane] = tail[lane];
}

// One row in the kernels' channel order, times factor, to BF16 in order.
inline void StoreBf16(const float* row, float factor, int channels, std::uint16_t* to) {
  const Floats by = hn::Set(kFloat, factor);
  for (int c = 0; c < channels; c += 2 * kLanes) {
    const Floats even = hn::Mul(by, hn::Load(kFloat, row + c));
    const Floats odd = hn::Mul(by, hn::Load(kFloat, row + c + kLanes));
    hn::StoreU(RoundToPairs(even, odd), kWord, reinterpret_cast<std::uint32_t*>(to + c));
  }
}

// The same to FP32; `to` may be `row` itself.
inline void StoreF32(const float* row, int channels, float* to) {
  for (int c = 0; c < channels; c += 2 * kLanes) {
    const Floats even = hn::Load(kFloat, row + c);
    const Floats odd = hn::Load(kFloat, row + c + kLanes);
    hn::StoreInterleaved2(even, odd, kFloat, to + c);
  }
}

}  // namespace FLASHDSA_SIMD
}  // namespace flashdsa::simd
HWY_AFTER_NAMESPACE();

// Sparse MLA attention on the CPU: one query row at a time, compiled once per instruction set.
//
//   forward    S = scale * q K^T, P = softmax(S), out = P V
//   backward   phase 1, by query: P = exp(S - lse), dS = scale * P * (grad_out V^T - D),
//              grad_q = dS K;  phase 2, by key: grad_kv[i_j] += dS^T q + P^T grad_out
//
// A row's keys are walked in blocks of kBlockKeys slots. Everything a block needs is copied once
// into second-level cache and used by all heads:
//
//   q_words   [head panel][D/2][panel]      words of two channels, transposed: lanes are heads
//   keys      [kBlockKeys, D] BF16          the gathered rows
//   logits    [kBlockKeys, padded H] FP32   lanes are heads, so the softmax needs no shuffle
//   pairs     [vector panel][kBlockKeys/2][panel]   words of two keys: lanes are channels
//   weights   [kBlockKeys/2, padded H]      words of P (or dS) of two keys
//   acc       [H, D] FP32                   channel order: of every 2*kLanes channels first the
//                                           even, then the odd ones, which makes packing and
//                                           unpacking pure shifts
//
// Two tiles do all the arithmetic: ScoreTile (lanes are heads, key words are broadcast) and
// PairTile (lanes are channels, weight words are broadcast). Each result is a fixed order of FP32
// sums over the contracted axis, whatever the tile around it: a row's bits depend on nothing but
// the row.
//
// Rounded to BF16: P and dS as operands, and the outputs. All else is FP32.

#include "attention/cpu/kernels.h"

#include "attention/cpu/config.h"
#include "core/simd/bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashdsa::attention::cpu {
namespace FLASHDSA_SIMD {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace simd::FLASHDSA_SIMD;  // the vector layer of this instruction set

using Tiles = Config<kLanes>;
constexpr int kBlockKeys = Tiles::kBlockKeys;
constexpr int kScorePanel = Tiles::kScoreVectors * kLanes;  // heads
constexpr int kPairPanel = Tiles::kPairVectors * kLanes;    // words
constexpr int kValueDim = 512;
constexpr int kChunkChannels = Tiles::kChunkChannels;
constexpr float kInfinity = __builtin_inff();

static_assert(kBlockKeys % Tiles::kScoreKeys == 0, "a full block has whole score tiles");
static_assert(kBlockKeys % 2 == 0, "weights are packed by two keys");
static_assert((512 % kPairPanel) == 0 && (576 % kPairPanel) == 0, "channels fill whole panels");

constexpr int RoundUp(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Whole vectors, and an even number, as P and dS are stored by pairs of heads.
int PadHeads(int heads) { return RoundUp(heads, kLanes < 2 ? 2 : kLanes); }

int PaddedHeads(const Sizes& sizes) { return PadHeads(sizes.heads); }

std::uint32_t LoadWord(const std::uint16_t* two) {
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
void PackHeads(const std::uint16_t* rows, std::int64_t head_stride, int heads, int channels,
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
void GatherKeys(const RowInputs& row, int first, int count, int channels, std::uint16_t* keys) {
  for (int j = 0; j < count; ++j) {
    __builtin_memcpy(keys + j * channels, row.kv + row.keys[first + j] * row.kv_row_stride,
                     static_cast<std::size_t>(channels) * sizeof(std::uint16_t));
  }
  const int end = RoundUp(count, 4);
  __builtin_memset(keys + count * channels, 0,
                   static_cast<std::size_t>((end - count) * channels) * sizeof(std::uint16_t));
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
void PackRowPairs(const std::uint16_t* rows, std::int64_t row_stride, int count, int channels,
                  std::uint32_t* pairs) {
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

// ------------------------------------------------------------------------------ tiles

// scores[j][head] += sum over `words` words of q_words[word][head] . keys[j][word], kKeys keys and
// kVectors vectors of heads. `first`: the scores are not read and count as zero.
template <int kVectors, int kKeys>
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
      for (int v = 0; v < kVectors; ++v) sum[j][v] = DotPairs(q[v], key, sum[j][v]);
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
template <int kVectors>
void ScorePanel(const std::uint32_t* q_words, const std::uint16_t* keys, std::int64_t key_stride,
                int count, int channels, float* scores, int scores_stride) {
  for (int c = 0; c < channels; c += kChunkChannels) {
    const int words = (channels - c < kChunkChannels ? channels - c : kChunkChannels) / 2;
    const std::uint16_t* chunk = keys + c;
    int j = 0;
    for (; j + Tiles::kScoreKeys <= count; j += Tiles::kScoreKeys) {
      ScoreTile<kVectors, Tiles::kScoreKeys>(q_words, chunk + j * key_stride, key_stride, words,
                                             c == 0, scores + j * scores_stride, scores_stride);
    }
    for (; j < count; j += 4) {  // rows up to a multiple of four are there
      ScoreTile<kVectors, 4>(q_words, chunk + j * key_stride, key_stride, words, c == 0,
                             scores + j * scores_stride, scores_stride);
    }
    q_words += kVectors * kLanes * words;
  }
}

// scores [count, padded H]: packed heads times the first `channels` of `count` key rows. Rows up to
// a multiple of four are read.
void Scores(const std::uint32_t* q_words, int padded_heads, const std::uint16_t* keys,
            std::int64_t key_stride, int count, int channels, float* scores) {
  int h = 0;
  for (; h + kScorePanel <= padded_heads; h += kScorePanel) {
    ScorePanel<Tiles::kScoreVectors>(q_words, keys, key_stride, count, channels, scores + h,
                                     padded_heads);
    q_words += kScorePanel * channels / 2;
  }
  if (h < padded_heads) {
    ScorePanel<1>(q_words, keys, key_stride, count, channels, scores + h, padded_heads);
  }
}

// sum[m][v] += weights word (m, k) . pairs[k][v] for k in [0, depth).
template <int kRows>
HWY_INLINE void PairTile(const std::uint32_t* HWY_RESTRICT weights, std::int64_t row_step,
                         std::int64_t depth_step, const std::uint32_t* HWY_RESTRICT pairs,
                         int depth, Floats (&sum)[kRows][Tiles::kPairVectors]) {
  for (int k = 0; k < depth; ++k) {
    Words pair[Tiles::kPairVectors];
    for (int v = 0; v < Tiles::kPairVectors; ++v) {
      pair[v] = hn::Load(kWord, pairs + v * kLanes);
    }
    pairs += kPairPanel;
    for (int m = 0; m < kRows; ++m) {
      const Words weight = hn::Set(kWord, weights[m * row_step + k * depth_step]);
      for (int v = 0; v < Tiles::kPairVectors; ++v) {
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
  Floats sum[kRows][Tiles::kPairVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < Tiles::kPairVectors; ++v) {
      sum[m][v] = rescale == nullptr ? hn::Zero(kFloat)
                                     : hn::Mul(hn::Set(kFloat, rescale[m]),
                                               hn::Load(kFloat, acc + m * acc_stride + v * kLanes));
    }
  }
  PairTile<kRows>(weights, 1, weights_stride, pairs, depth, sum);
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < Tiles::kPairVectors; ++v) {
      hn::Store(sum[m][v], kFloat, acc + m * acc_stride + v * kLanes);
    }
  }
}

// acc [heads, end - begin] = acc * rescale[head] + weights^T . pairs over `depth` pairs of keys,
// for the channels [begin, end) of pairs.
void AccumulateHeads(const std::uint32_t* weights, int padded_heads, int heads,
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
    for (; h + Tiles::kPairRows <= heads; h += Tiles::kPairRows) {
      tile.template operator()<Tiles::kPairRows>(h);
    }
    for (; h + 2 <= heads; h += 2) tile.template operator()<2>(h);
    if (h < heads) tile.template operator()<1>(h);
  }
}

// ------------------------------------------------------------------------------ softmax

// Packs two rows of FP32 weights (lanes are heads) into words of two keys; null is a row of zeros.
void PackWeights(const float* first, const float* second, int padded_heads, std::uint32_t* words) {
  for (int h = 0; h < padded_heads; h += kLanes) {
    const Floats low = hn::Load(kFloat, first + h);
    const Floats high = second == nullptr ? hn::Zero(kFloat) : hn::Load(kFloat, second + h);
    hn::Store(RoundToPairs(low, high), kWord, words + h);
  }
}

// Packs the weights [count, padded H] of a block.
void PackBlockWeights(const float* rows, int count, int padded_heads, std::uint32_t* words) {
  for (int k = 0; 2 * k < count; ++k) {
    const float* first = rows + 2 * k * padded_heads;
    PackWeights(first, 2 * k + 1 < count ? first + padded_heads : nullptr, padded_heads,
                words + k * padded_heads);
  }
}

// One block of the running softmax. logits [count, padded H]: raw dots in, P relative to the new
// maximum out. Updates maximum and sum, sets rescale = exp(old maximum - new maximum).
void SoftmaxBlock(const Sizes& sizes, int padded_heads, int count, float* logits, float* maximum,
                  float* sum, float* rescale) {
  const Floats scale = hn::Set(kFloat, sizes.softmax_scale);
  for (int h = 0; h < padded_heads; h += kLanes) {
    const Floats old_top = hn::Load(kFloat, maximum + h);
    Floats top = old_top;
    for (int j = 0; j < count; ++j) {
      float* at = logits + j * padded_heads + h;
      const Floats logit = hn::Mul(scale, hn::Load(kFloat, at));
      hn::Store(logit, kFloat, at);
      // NaN wins and stays.
      top = hn::IfThenElse(hn::Or(hn::Gt(logit, top), hn::IsNaN(logit)), logit, top);
    }
    // While every logit is -inf, subtracting the maximum would make NaN of a weight of zero.
    const auto none = hn::Eq(top, hn::Set(kFloat, -kInfinity));
    const Floats base = hn::IfThenElse(none, hn::Zero(kFloat), top);
    const Floats factor = ExpOfAny(hn::Sub(old_top, base));
    Floats total = hn::Mul(factor, hn::Load(kFloat, sum + h));
    for (int j = 0; j < count; ++j) {
      float* at = logits + j * padded_heads + h;
      const Floats p = ExpOfAny(hn::Sub(hn::Load(kFloat, at), base));
      hn::Store(p, kFloat, at);
      total = hn::Add(total, p);
    }
    hn::Store(top, kFloat, maximum + h);
    hn::Store(total, kFloat, sum + h);
    hn::Store(factor, kFloat, rescale + h);
  }
}

// ------------------------------------------------------------------------------ forward

struct ForwardScratch {
  std::uint32_t* q_words;
  std::uint16_t* keys;
  float* logits;
  std::uint32_t* pairs;
  std::uint32_t* weights;
  float* acc;
  float* maximum;
  float* sum;
  float* rescale;

  ForwardScratch(const Sizes& sizes, Pieces& pieces) {
    const int padded = PaddedHeads(sizes);
    q_words = pieces.Take<std::uint32_t>(padded * sizes.head_dim / 2);
    keys = pieces.Take<std::uint16_t>(kBlockKeys * sizes.head_dim);
    logits = pieces.Take<float>(kBlockKeys * padded);
    pairs = pieces.Take<std::uint32_t>(kBlockKeys / 2 * kValueDim);
    weights = pieces.Take<std::uint32_t>(kBlockKeys / 2 * padded);
    acc = pieces.Take<float>(sizes.heads * kValueDim);
    maximum = pieces.Take<float>(padded);
    sum = pieces.Take<float>(padded);
    rescale = pieces.Take<float>(padded);
  }
};

// One row in the kernels' channel order, times factor, to BF16 in order.
void StoreBf16(const float* row, float factor, int channels, std::uint16_t* to) {
  const Floats by = hn::Set(kFloat, factor);
  for (int c = 0; c < channels; c += 2 * kLanes) {
    const Floats even = hn::Mul(by, hn::Load(kFloat, row + c));
    const Floats odd = hn::Mul(by, hn::Load(kFloat, row + c + kLanes));
    hn::StoreU(RoundToPairs(even, odd), kWord, reinterpret_cast<std::uint32_t*>(to + c));
  }
}

void FinishForward(const Sizes& sizes, const ForwardRow& row, const ForwardScratch& s) {
  const int padded = PaddedHeads(sizes);
  // 1 / (sum + exp(sink - maximum)) into rescale; lse into sum.
  for (int h = 0; h < padded; h += kLanes) {
    const Floats top = hn::Load(kFloat, s.maximum + h);
    const Floats sum = hn::Load(kFloat, s.sum + h);
    Floats whole = sum;
    if (row.attn_sink != nullptr) {
      const int lanes = sizes.heads - h < kLanes ? sizes.heads - h : kLanes;
      float sink[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        sink[lane] = lane < lanes ? row.attn_sink[h + lane] : -kInfinity;
      }
      // A sink that takes everything overflows to an infinite sum: out is zero.
      whole = hn::Add(sum, ExpOfAny(hn::Sub(hn::LoadU(kFloat, sink), top)));
    }
    hn::Store(hn::Div(hn::Set(kFloat, 1.0f), whole), kFloat, s.rescale + h);
    hn::Store(hn::Add(top, hn::Log(kFloat, sum)), kFloat, s.sum + h);
  }
  for (int h = 0; h < sizes.heads; ++h) {
    row.lse[h] = s.sum[h];
    if (row.max_logits != nullptr) row.max_logits[h] = s.maximum[h];
    StoreBf16(s.acc + h * kValueDim, s.rescale[h], kValueDim, row.out + h * kValueDim);
  }
}

void ForwardRowKernel(const Sizes& sizes, const ForwardRow& row, void* scratch) {
  Pieces pieces(scratch);
  const ForwardScratch s(sizes, pieces);
  const int padded = PaddedHeads(sizes);
  PackHeads(row.q, row.q_head_stride, sizes.heads, sizes.head_dim, s.q_words);
  for (int h = 0; h < padded; ++h) {
    s.maximum[h] = -kInfinity;
    s.sum[h] = 0;
  }
  for (int first = 0; first < row.key_count; first += kBlockKeys) {
    const int left = row.key_count - first;
    const int count = left < kBlockKeys ? left : kBlockKeys;
    GatherKeys(row, first, count, sizes.head_dim, s.keys);
    Scores(s.q_words, padded, s.keys, sizes.head_dim, count, sizes.head_dim, s.logits);
    SoftmaxBlock(sizes, padded, count, s.logits, s.maximum, s.sum, s.rescale);
    const int depth = (count + 1) / 2;
    PackBlockWeights(s.logits, count, padded, s.weights);
    PackRowPairs(s.keys, sizes.head_dim, count, kValueDim, s.pairs);
    AccumulateHeads(s.weights, padded, sizes.heads, s.pairs, depth, 0, kValueDim,
                    first == 0 ? nullptr : s.rescale, s.acc);
  }
  FinishForward(sizes, row, s);
}

std::size_t ForwardScratchBytes(const Sizes& sizes) {
  Pieces pieces(nullptr);
  ForwardScratch layout(sizes, pieces);
  return pieces.bytes();
}

// ------------------------------------------------------------------------------ backward

struct BackwardScratch {
  std::uint32_t* q_words;
  std::uint32_t* grad_out_words;
  std::uint16_t* keys;
  float* logits;  // then P
  float* dp;      // then dS
  std::uint32_t* pairs;
  std::uint32_t* weights;
  float* acc;
  float* rope_acc;  // [H, D - 512], P K on the channels that out does not have
  float* lse;
  float* grad_dot_out;  // of the BF16 out
  float* p_sum;         // sum over keys of P
  float* p_dp_sum;      // sum over keys of P dP
  float* correction;    // what dS lacks, over P
  float* ones;          // grad_q is never rescaled

  BackwardScratch(const Sizes& sizes, Pieces& pieces) {
    const int padded = PaddedHeads(sizes);
    q_words = pieces.Take<std::uint32_t>(padded * sizes.head_dim / 2);
    grad_out_words = pieces.Take<std::uint32_t>(padded * kValueDim / 2);
    keys = pieces.Take<std::uint16_t>(kBlockKeys * sizes.head_dim);
    logits = pieces.Take<float>(kBlockKeys * padded);
    dp = pieces.Take<float>(kBlockKeys * padded);
    pairs = pieces.Take<std::uint32_t>(kBlockKeys / 2 * sizes.head_dim);
    weights = pieces.Take<std::uint32_t>(kBlockKeys / 2 * padded);
    acc = pieces.Take<float>(sizes.heads * sizes.head_dim);
    rope_acc = pieces.Take<float>(sizes.heads * (sizes.head_dim - kValueDim));
    lse = pieces.Take<float>(padded);
    grad_dot_out = pieces.Take<float>(padded);
    p_sum = pieces.Take<float>(padded);
    p_dp_sum = pieces.Take<float>(padded);
    correction = pieces.Take<float>(padded);
    ones = pieces.Take<float>(padded);
  }
};

// sum_c grad_out * out of one head, FP32 lanes.
float GradDotOut(const std::uint16_t* grad_out, const std::uint16_t* out) {
  Floats low = hn::Zero(kFloat), high = hn::Zero(kFloat);
  for (int word = 0; word < kValueDim / 2; word += kLanes) {
    const Words g = hn::LoadU(kWord, reinterpret_cast<const std::uint32_t*>(grad_out) + word);
    const Words o = hn::LoadU(kWord, reinterpret_cast<const std::uint32_t*>(out) + word);
    low = hn::MulAdd(LowFloats(g), LowFloats(o), low);
    high = hn::MulAdd(HighFloats(g), HighFloats(o), high);
  }
  return hn::GetLane(hn::SumOfLanes(kFloat, hn::Add(low, high)));
}

// logits and dp [count, padded H]: raw dots in, P and dS out; also stored as BF16 rows of even H.
// Lanes behind the last head become zero. Adds to p_sum and p_dp_sum.
void WeightsBlock(const Sizes& sizes, int padded_heads, int count, const BackwardScratch& s,
                  std::uint16_t* p_rows, std::uint16_t* ds_rows) {
  const hn::Rebind<std::uint16_t, FloatTag> half_word;
  const Floats scale = hn::Set(kFloat, sizes.softmax_scale);
  const int even = even_heads(sizes.heads);
  for (int h = 0; h < padded_heads; h += kLanes) {
    const int heads = sizes.heads - h < kLanes ? sizes.heads - h : kLanes;
    const int stored = even - h < kLanes ? even - h : kLanes;
    const auto real = hn::FirstN(kFloat, static_cast<std::size_t>(heads));
    const Floats lse = hn::Load(kFloat, s.lse + h);
    const Floats d = hn::Load(kFloat, s.grad_dot_out + h);
    Floats p_sum = hn::Load(kFloat, s.p_sum + h);
    Floats p_dp_sum = hn::Load(kFloat, s.p_dp_sum + h);
    for (int j = 0; j < count; ++j) {
      float* logit_at = s.logits + j * padded_heads + h;
      float* dp_at = s.dp + j * padded_heads + h;
      const Floats logit = hn::Mul(scale, hn::Load(kFloat, logit_at));
      const Floats p = hn::IfThenElseZero(real, ExpOfAny(hn::Sub(logit, lse)));
      const Floats dp = hn::Load(kFloat, dp_at);
      const Floats ds = hn::IfThenElseZero(real, hn::Mul(hn::Mul(p, hn::Sub(dp, d)), scale));
      p_sum = hn::Add(p_sum, p);
      p_dp_sum = hn::MulAdd(p, dp, p_dp_sum);
      hn::Store(p, kFloat, logit_at);
      hn::Store(ds, kFloat, dp_at);
      const auto p_half = hn::TruncateTo(half_word, RoundToBf16(p));
      const auto ds_half = hn::TruncateTo(half_word, RoundToBf16(ds));
      if (stored == kLanes) {
        hn::StoreU(p_half, half_word, p_rows + j * even + h);
        hn::StoreU(ds_half, half_word, ds_rows + j * even + h);
        continue;
      }
      std::uint16_t p_tail[kLanes], ds_tail[kLanes];
      hn::StoreU(p_half, half_word, p_tail);
      hn::StoreU(ds_half, half_word, ds_tail);
      for (int lane = 0; lane < stored; ++lane) {
        p_rows[j * even + h + lane] = p_tail[lane];
        ds_rows[j * even + h + lane] = ds_tail[lane];
      }
    }
    hn::Store(p_sum, kFloat, s.p_sum + h);
    hn::Store(p_dp_sum, kFloat, s.p_dp_sum + h);
  }
}

// D taken from the BF16 `out` is off by its rounding, which shifts every dS of a head; where keys
// cancel, that is more than what is left. The exact D is sum_j P dP, with P rescaled to the mass
// that lse gives it. Sets correction = (D of out - exact D) * scale, so that dS + correction * P is
// right, and row.grad_dot_out to the exact D.
void FindCorrection(const Sizes& sizes, const BackwardRow& row, const BackwardScratch& s) {
  for (int h = 0; h < sizes.heads; ++h) {
    const float mass = row.key_mass[h];
    const float exact = s.p_sum[h] > 0 ? s.p_dp_sum[h] * (mass / s.p_sum[h]) : s.p_dp_sum[h];
    s.correction[h] = (s.grad_dot_out[h] - exact) * sizes.softmax_scale;
    row.grad_dot_out[h] = exact;
  }
}

// acc row of head h += correction * P K: the value channels of P K are out, the others rope_acc.
void CorrectGradQ(const Sizes& sizes, const BackwardRow& row, int h, const BackwardScratch& s) {
  const Floats by = hn::Set(kFloat, s.correction[h]);
  float* acc = s.acc + h * sizes.head_dim;
  const std::uint16_t* out = row.out + h * row.out_head_stride;
  for (int c = 0; c < kValueDim; c += 2 * kLanes) {
    const Words words = hn::LoadU(kWord, reinterpret_cast<const std::uint32_t*>(out + c));
    float* even = acc + c;
    float* odd = even + kLanes;
    hn::Store(hn::MulAdd(by, LowFloats(words), hn::Load(kFloat, even)), kFloat, even);
    hn::Store(hn::MulAdd(by, HighFloats(words), hn::Load(kFloat, odd)), kFloat, odd);
  }
  const float* rope = s.rope_acc + h * (sizes.head_dim - kValueDim);
  for (int c = kValueDim; c < sizes.head_dim; c += kLanes) {
    const Floats p_k = hn::Load(kFloat, rope + c - kValueDim);
    hn::Store(hn::MulAdd(by, p_k, hn::Load(kFloat, acc + c)), kFloat, acc + c);
  }
}

// The stored dS rows += correction * P.
void CorrectWeights(const Sizes& sizes, const BackwardRow& row, const BackwardScratch& s) {
  const hn::Rebind<std::uint16_t, FloatTag> half_word;
  const int even = even_heads(sizes.heads);
  for (int j = 0; j < row.key_count; ++j) {
    const std::uint16_t* p = row.p + j * even;
    std::uint16_t* ds = row.ds + j * even;
    int h = 0;
    for (; h + kLanes <= sizes.heads; h += kLanes) {
      const Words p_words = hn::PromoteTo(kWord, hn::LoadU(half_word, p + h));
      const Words ds_words = hn::PromoteTo(kWord, hn::LoadU(half_word, ds + h));
      const Floats sum =
          hn::MulAdd(hn::Load(kFloat, s.correction + h), LowFloats(p_words), LowFloats(ds_words));
      hn::StoreU(hn::TruncateTo(half_word, RoundToBf16(sum)), half_word, ds + h);
    }
    for (; h < sizes.heads; ++h) {
      const Floats sum =
          hn::MulAdd(hn::Set(kFloat, s.correction[h]), LowFloats(hn::Set(kWord, p[h])),
                     LowFloats(hn::Set(kWord, ds[h])));
      ds[h] = static_cast<std::uint16_t>(hn::GetLane(RoundToBf16(sum)));
    }
  }
}

void BackwardRowKernel(const Sizes& sizes, const BackwardRow& row, void* scratch) {
  Pieces pieces(scratch);
  const BackwardScratch s(sizes, pieces);
  const int padded = PaddedHeads(sizes);
  const int even = even_heads(sizes.heads);
  PackHeads(row.q, row.q_head_stride, sizes.heads, sizes.head_dim, s.q_words);
  PackHeads(row.grad_out, row.grad_out_head_stride, sizes.heads, kValueDim, s.grad_out_words);
  PackRowPairs(row.q, row.q_head_stride, sizes.heads, sizes.head_dim, row.q_pairs);
  PackRowPairs(row.grad_out, row.grad_out_head_stride, sizes.heads, kValueDim, row.grad_out_pairs);
  for (int h = 0; h < padded; ++h) {
    const bool real = h < sizes.heads;
    s.ones[h] = 1;
    s.lse[h] = real ? row.lse[h] : 0;
    s.grad_dot_out[h] = real ? GradDotOut(row.grad_out + h * row.grad_out_head_stride,
                                          row.out + h * row.out_head_stride)
                             : 0;
    s.p_sum[h] = s.p_dp_sum[h] = 0;
  }
  for (int first = 0; first < row.key_count; first += kBlockKeys) {
    const int left = row.key_count - first;
    const int count = left < kBlockKeys ? left : kBlockKeys;
    GatherKeys(row, first, count, sizes.head_dim, s.keys);
    Scores(s.q_words, padded, s.keys, sizes.head_dim, count, sizes.head_dim, s.logits);
    Scores(s.grad_out_words, padded, s.keys, sizes.head_dim, count, kValueDim, s.dp);
    WeightsBlock(sizes, padded, count, s, row.p + first * even, row.ds + first * even);
    const int depth = (count + 1) / 2;
    PackRowPairs(s.keys, sizes.head_dim, count, sizes.head_dim, s.pairs);
    const float* rescale = first == 0 ? nullptr : s.ones;
    PackBlockWeights(s.dp, count, padded, s.weights);
    AccumulateHeads(s.weights, padded, sizes.heads, s.pairs, depth, 0, sizes.head_dim, rescale,
                    s.acc);
    PackBlockWeights(s.logits, count, padded, s.weights);
    AccumulateHeads(s.weights, padded, sizes.heads, s.pairs, depth, kValueDim, sizes.head_dim,
                    rescale, s.rope_acc);
  }
  FindCorrection(sizes, row, s);
  CorrectWeights(sizes, row, s);
  for (int h = 0; h < sizes.heads; ++h) {
    CorrectGradQ(sizes, row, h, s);
    StoreBf16(s.acc + h * sizes.head_dim, 1.0f, sizes.head_dim, row.grad_q + h * sizes.head_dim);
  }
}

std::size_t BackwardScratchBytes(const Sizes& sizes) {
  Pieces pieces(nullptr);
  BackwardScratch layout(sizes, pieces);
  return pieces.bytes();
}

// ------------------------------------------------------------------------------ grad_kv

constexpr int kSlotBlock = 8 * Tiles::kPairRows;  // slots whose weights are gathered at once
constexpr int kMaxHeadPairs = 64;

std::size_t PairsWords(const Sizes& sizes, std::int32_t channels) {
  return static_cast<std::size_t>(even_heads(sizes.heads) / 2) * static_cast<std::size_t>(channels);
}

struct SlotWeights {
  std::uint32_t p[kSlotBlock][kMaxHeadPairs];
  std::uint32_t ds[kSlotBlock][kMaxHeadPairs];
};

// Adds one panel of dS^T q + P^T grad_out to the accumulator rows of kRows slots, one after the
// other: a key that stands in two slots is added to twice.
template <int kRows>
void AccumulateSlots(const Sizes& sizes, const AccumulateRow& row, const SlotWeights& weights,
                     int block, int first, int panel, float* accumulators) {
  const int depth = even_heads(sizes.heads) / 2;
  Floats sum[kRows][Tiles::kPairVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int v = 0; v < Tiles::kPairVectors; ++v) sum[m][v] = hn::Zero(kFloat);
  }
  const int offset = panel * depth * kPairPanel;
  PairTile<kRows>(weights.ds[first], kMaxHeadPairs, 1, row.q_pairs + offset, depth, sum);
  if (panel * kPairPanel < kValueDim) {
    PairTile<kRows>(weights.p[first], kMaxHeadPairs, 1, row.grad_out_pairs + offset, depth, sum);
  }
  for (int m = 0; m < kRows; ++m) {
    const std::int64_t key = row.keys[row.slots[block + first + m]];
    float* to = accumulators + key * sizes.head_dim + panel * kPairPanel;
    for (int v = 0; v < Tiles::kPairVectors; ++v) {
      hn::Store(hn::Add(hn::Load(kFloat, to + v * kLanes), sum[m][v]), kFloat, to + v * kLanes);
    }
  }
}

void AccumulateGradKv(const Sizes& sizes, const AccumulateRow& row, float* accumulators) {
  const int even = even_heads(sizes.heads);
  SlotWeights weights;
  for (int block = 0; block < row.slot_count; block += kSlotBlock) {
    const int left = row.slot_count - block;
    const int count = left < kSlotBlock ? left : kSlotBlock;
    for (int m = 0; m < count; ++m) {
      const std::int64_t at = static_cast<std::int64_t>(row.slots[block + m]) * even;
      const std::size_t bytes = static_cast<std::size_t>(even) * sizeof(std::uint16_t);
      __builtin_memcpy(weights.p[m], row.p + at, bytes);
      __builtin_memcpy(weights.ds[m], row.ds + at, bytes);
    }
    for (int panel = 0; panel < sizes.head_dim / kPairPanel; ++panel) {
      const auto slots = [&]<int kRows>(int first) {
        AccumulateSlots<kRows>(sizes, row, weights, block, first, panel, accumulators);
      };
      int m = 0;
      for (; m + Tiles::kPairRows <= count; m += Tiles::kPairRows) {
        slots.template operator()<Tiles::kPairRows>(m);
      }
      for (; m + 2 <= count; m += 2) slots.template operator()<2>(m);
      if (m < count) slots.template operator()<1>(m);
    }
  }
}

void StoreGradKvBf16(const Sizes& sizes, const float* row, std::uint16_t* grad_kv_row) {
  StoreBf16(row, 1.0f, sizes.head_dim, grad_kv_row);
}

void StoreGradKvF32(const Sizes& sizes, const float* row, float* grad_kv_row) {
  for (int c = 0; c < sizes.head_dim; c += 2 * kLanes) {
    const Floats even = hn::Load(kFloat, row + c);
    const Floats odd = hn::Load(kFloat, row + c + kLanes);
    hn::StoreInterleaved2(even, odd, kFloat, grad_kv_row + c);
  }
}

// ------------------------------------------------------------------------------ plain product

std::size_t ProductScratchBytes(const Sizes& sizes) {
  return static_cast<std::size_t>(PaddedHeads(sizes) * sizes.head_dim / 2) * sizeof(std::uint32_t);
}

void Product(const Sizes& sizes, const RowInputs& row, float* scores, void* scratch) {
  auto* q_words = static_cast<std::uint32_t*>(scratch);
  PackHeads(row.q, row.q_head_stride, sizes.heads, sizes.head_dim, q_words);
  Scores(q_words, PaddedHeads(sizes), row.kv, row.kv_row_stride, row.key_count, sizes.head_dim,
         scores);
}

}  // namespace

const Kernels& kernels() {
  static constexpr Kernels kKernels = {
      ForwardScratchBytes, ForwardRowKernel, BackwardScratchBytes, PairsWords,
      BackwardRowKernel,   AccumulateGradKv, StoreGradKvBf16,      StoreGradKvF32,
      ProductScratchBytes, Product};
  return kKernels;
}

}  // namespace FLASHDSA_SIMD
}  // namespace flashdsa::attention::cpu
HWY_AFTER_NAMESPACE();

// Sparse MLA attention on the CPU: one query row at a time, compiled once per instruction set.
//
//   forward    S = scale * q K^T, P = softmax(S), out = P V
//   backward   phase 1, by query: P = exp(S - lse), dS = scale * P * (grad_out V^T - D),
//              grad_q = dS K;  phase 2, by key: grad_kv[i_j] += dS^T q + P^T grad_out
//
// A row's keys are walked in blocks of kBlockKeys slots. Everything a block needs is copied once
// into second-level cache and used by all heads:
//
//   q_words   words of two channels, transposed: lanes are heads
//   keys      [kBlockKeys, D] BF16          the gathered rows
//   logits    [kBlockKeys, padded H] FP32   lanes are heads, so the softmax needs no shuffle
//   pairs     words of two keys: lanes are channels
//   weights   [kBlockKeys/2, padded H]      words of P (or dS) of two keys
//   acc       [H, D] FP32
//
// The products and their operands are those of core/simd/products-inl.h, whose results do not
// depend on tiles: a row's bits depend on nothing but the row.
//
// Rounded to BF16: P and dS as operands, and the outputs. All else is FP32.

#include "attention/cpu/kernels.h"

#include "attention/cpu/config.h"
#include "core/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flashdsa::attention::cpu {
namespace FLASHDSA_SIMD {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace simd::FLASHDSA_SIMD;  // the vector layer of this instruction set

constexpr int kValueDim = 512;
constexpr float kInfinity = __builtin_inff();

static_assert(kBlockKeys % ProductTiles::kScoreKeys == 0, "a full block has whole score tiles");
static_assert(kBlockKeys % 2 == 0, "weights are packed by two keys");
static_assert((512 % kPairPanel) == 0 && (576 % kPairPanel) == 0, "channels fill whole panels");

int PaddedHeads(const Sizes& sizes) { return PadHeads(sizes.heads); }

// ------------------------------------------------------------------------------ softmax

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
    GatherKeys(row.kv, row.kv_row_stride, row.keys + first, count, sizes.head_dim, s.keys);
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
  const Floats scale = hn::Set(kFloat, sizes.softmax_scale);
  const int even = even_heads(sizes.heads);
  for (int h = 0; h < padded_heads; h += kLanes) {
    const int heads = sizes.heads - h < kLanes ? sizes.heads - h : kLanes;
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
      StoreLowHalves(RoundToBf16(p), even - h, p_rows + j * even + h);
      StoreLowHalves(RoundToBf16(ds), even - h, ds_rows + j * even + h);
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
    GatherKeys(row.kv, row.kv_row_stride, row.keys + first, count, sizes.head_dim, s.keys);
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

std::size_t PairsWords(const Sizes& sizes, std::int32_t channels) {
  return static_cast<std::size_t>(even_heads(sizes.heads) / 2) * static_cast<std::size_t>(channels);
}

void AccumulateGradKv(const Sizes& sizes, const AccumulateRow& row, float* accumulators) {
  const SlotProduct products[] = {{row.ds, row.q_pairs, sizes.head_dim},
                                  {row.p, row.grad_out_pairs, kValueDim}};
  AccumulateSlots(products, sizes.heads, {row.keys, row.slots, row.slot_count}, sizes.head_dim,
                  accumulators);
}

void StoreGradKvBf16(const Sizes& sizes, const float* row, std::uint16_t* grad_kv_row) {
  StoreBf16(row, 1.0f, sizes.head_dim, grad_kv_row);
}

void StoreGradKvF32(const Sizes& sizes, const float* row, float* grad_kv_row) {
  StoreF32(row, sizes.head_dim, grad_kv_row);
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

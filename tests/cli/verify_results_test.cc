// `flashdsa verify` on whole results: what the backends compute passes, one planted fault fails.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>
#include <random>

#include "tools/verify_attention.h"
#include "tools/verify_selection.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kRows = 24;
constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kHeadDim = 576;
constexpr std::int64_t kTopk = 5;
constexpr std::int64_t kIndexHeads = 4;

Tensor random_bf16(std::initializer_list<std::int64_t> shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Tensor tensor = Tensor::host(DType::kBFloat16, shape);
  for (BFloat16& value : tensor.span<BFloat16>()) value = BFloat16(normal(random));
  return tensor;
}

Tensor random_f32(std::initializer_list<std::int64_t> shape, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Tensor tensor = Tensor::host(DType::kFloat32, shape);
  for (float& value : tensor.span<float>()) value = normal(random);
  return tensor;
}

Tensor copy_of(const Tensor& tensor) {
  const TensorView& view = tensor;
  Tensor copy =
      Tensor::host(view.dtype, std::span(view.shape.data(), static_cast<std::size_t>(view.rank)));
  std::copy_n(view.as<char>(), view.bytes(), copy.view().as<char>());
  return copy;
}

class Verify : public testing::Test {
 protected:
  void SetUp() override {
    const Tensor cu_seqlens = Tensor::host(DType::kInt32, {3});
    cu_seqlens.span<std::int32_t>()[0] = 0;
    cu_seqlens.span<std::int32_t>()[1] = 9;
    cu_seqlens.span<std::int32_t>()[2] = kRows;
    PackedMetadataArgs args;
    args.cu_seqlens = cu_seqlens;
    args.total_key_tokens = kRows;
    metadata_ = prepare_packed_metadata(args);
    indexer_ = {random_bf16({kRows, kIndexHeads, 128}, 1), random_bf16({kRows, 128}, 2),
                random_f32({kRows, kIndexHeads}, 3)};
    selection_ = select_keys(indexer_, metadata_, kTopk, /*scores=*/true, runtime_);

    attention_.q = random_bf16({kRows, kHeads, kHeadDim}, 4);
    attention_.kv = random_bf16({kRows, 1, kHeadDim}, 5);
    attention_.softmax_scale = 1.0 / 24;
    attention_.selection = selection_;
    attention_.attn_sink = random_f32({kHeads}, 6);
    attention_.grad_out = random_bf16({kRows, kHeads, 512}, 7);
    results_ = attend_forward(attention_, runtime_);
    attend_backward(attention_, std::nullopt, results_, runtime_);
  }

  bool selection_passes() {
    ErrorTable table;
    verify_selection(table, indexer_, metadata_, selection_, runtime_);
    return table.ok();
  }

  ErrorTable attention_table(const VerifyBudget& budget = {}) {
    ErrorTable table;
    verify_attention(table, attention_, results_, /*tight=*/true, runtime_, budget);
    return table;
  }

  std::span<std::int32_t> indices(std::int64_t row) {
    return selection_.topk_indices.span<std::int32_t>().subspan(
        static_cast<std::size_t>(row * kTopk), static_cast<std::size_t>(kTopk));
  }

  Runtime runtime_;
  PackedMetadata metadata_;
  IndexerTensors indexer_;
  Selection selection_;
  AttentionTensors attention_;
  AttentionResults results_;
};

TEST_F(Verify, RightSelectionPasses) { EXPECT_TRUE(selection_passes()); }

TEST_F(Verify, OneExchangedKeyFails) {
  const auto row = indices(8);  // sees keys 0..8
  std::int32_t free = 0;
  while (std::find(row.begin(), row.end(), free) != row.end()) ++free;
  *std::find_if(row.begin(), row.end(), [&](std::int32_t key) { return key > free; }) = free;
  std::sort(row.begin(), row.end());
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, TwoSwappedSlotsFail) {
  std::swap(indices(8)[0], indices(8)[1]);
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, KeyOfAnotherDocumentFails) {
  indices(9)[0] = 8;  // row 9 begins the second document
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, KeyAheadOfTheQueryFails) {
  indices(0)[0] = 1;
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, RepeatedKeyFails) {
  indices(20)[1] = indices(20)[0];
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, WrongLengthFails) {
  selection_.topk_length->span<std::int32_t>()[3] += 1;
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, IndexBehindTheLengthFails) {
  indices(0)[4] = 0;
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, WrongScoreFails) {
  selection_.topk_scores->span<float>()[8 * kTopk] *= 1.001F;
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, ScoreBehindTheLengthFails) {
  selection_.topk_scores->span<float>()[kTopk - 1] = 0;
  EXPECT_FALSE(selection_passes());
}

TEST_F(Verify, RightAttentionPasses) {
  const ErrorTable table = attention_table();
  EXPECT_TRUE(table.ok()) << table.text();
}

// The table does not depend on how the work is cut.
TEST_F(Verify, SmallMemoryGivesTheSameTable) {
  const ErrorTable small = attention_table({/*block_bytes=*/1, /*key_bytes=*/5 * 16 * kHeadDim});
  EXPECT_TRUE(small.ok()) << small.text();
  EXPECT_EQ(small.text(), attention_table().text());
}

TEST_F(Verify, ForwardAlonePasses) {
  attention_.grad_out.reset();
  results_ = attend_forward(attention_, runtime_);
  const ErrorTable table = attention_table();
  EXPECT_TRUE(table.ok()) << table.text();
  EXPECT_EQ(table.text().find("grad"), std::string::npos);
}

TEST_F(Verify, EmptyProblemPasses) {
  attention_.q = Tensor::host(DType::kBFloat16, {0, kHeads, kHeadDim});
  attention_.grad_out = Tensor::host(DType::kBFloat16, {0, kHeads, 512});
  attention_.selection = {Tensor::host(DType::kInt32, {0, 1, kTopk}), std::nullopt, std::nullopt};
  results_ = attend_forward(attention_, runtime_);
  attend_backward(attention_, std::nullopt, results_, runtime_);
  EXPECT_TRUE(attention_table().ok());
}

// Every element of a result multiplied, or one vector of it, or one element made NaN.
struct Fault {
  const char* tensor;
  std::function<Tensor&(AttentionResults&)> result;
};

const Fault kFaults[] = {
    {"out", [](AttentionResults& r) -> Tensor& { return r.out; }},
    {"lse", [](AttentionResults& r) -> Tensor& { return r.lse; }},
    {"max_logits", [](AttentionResults& r) -> Tensor& { return r.max_logits; }},
    {"grad_q", [](AttentionResults& r) -> Tensor& { return *r.grad_q; }},
    {"grad_kv", [](AttentionResults& r) -> Tensor& { return *r.grad_kv; }},
    {"grad_attn_sink", [](AttentionResults& r) -> Tensor& { return *r.grad_attn_sink; }},
};

// Multiplies the elements [begin, end) of a tensor of bfloat16 or float32.
void scale(const Tensor& tensor, double factor, std::int64_t begin, std::int64_t end) {
  for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
    if (tensor.view().dtype == DType::kBFloat16) {
      BFloat16& value = tensor.span<BFloat16>()[i];
      value = BFloat16(static_cast<float>(factor * static_cast<float>(value)));
    } else {
      float& value = tensor.span<float>()[i];
      value = static_cast<float>(factor * value);
    }
  }
}

double value_at(const Tensor& tensor, std::int64_t element) {
  const auto i = static_cast<std::size_t>(element);
  if (tensor.view().dtype == DType::kFloat32) return tensor.span<float>()[i];
  return static_cast<float>(tensor.span<BFloat16>()[i]);
}

class VerifyFault : public Verify, public testing::WithParamInterface<Fault> {
 protected:
  void expect_found() {
    const ErrorTable table = attention_table();
    EXPECT_FALSE(table.ok());
    for (const auto& line : table.json()) {
      if (line["tensor"] == GetParam().tensor) continue;
      EXPECT_TRUE(line["ok"]) << line;
    }
  }
};

TEST_P(VerifyFault, TenPercentTooLargeFails) {
  const Tensor& tensor = GetParam().result(results_);
  scale(tensor, 1.1, 0, tensor.view().elements());
  expect_found();
}

TEST_P(VerifyFault, OneVectorAloneFails) {
  const Tensor& tensor = GetParam().result(results_);
  const TensorView& view = tensor;
  const std::int64_t width = view.rank < 3 ? 1 : view.shape[2];
  std::int64_t begin =
      view.elements() - width;  // the last that is not zero, as unselected keys are
  while (value_at(tensor, begin) == 0) begin -= width;
  scale(tensor, 1.2, begin, begin + width);
  expect_found();
}

TEST_P(VerifyFault, OneNanFails) {
  const Tensor& tensor = GetParam().result(results_);
  scale(tensor, std::nan(""), tensor.view().elements() - 1, tensor.view().elements());
  expect_found();
}

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.tensor; }

INSTANTIATE_TEST_SUITE_P(Results, VerifyFault, testing::ValuesIn(kFaults),
                         [](const auto& fault) { return std::string(fault.param.tensor); });

TEST_F(Verify, ResultsOfOtherKeysFail) {
  AttentionTensors other = attention_;
  other.selection.topk_indices = copy_of(selection_.topk_indices);
  other.selection.topk_indices.span<std::int32_t>()[20 * kTopk] = 9;  // row 20 sees 9..20
  if (indices(20)[0] == 9) other.selection.topk_indices.span<std::int32_t>()[20 * kTopk] = 10;
  results_ = attend_forward(other, runtime_);
  attend_backward(other, std::nullopt, results_, runtime_);
  EXPECT_FALSE(attention_table().ok());
}

TEST_F(Verify, ValuesInEmptyRowsAndUnselectedKeysFail) {
  attention_.selection.topk_length = Tensor::host(DType::kInt32, {kRows});
  std::ranges::fill(attention_.selection.topk_length->span<std::int32_t>(), 0);
  results_ = attend_forward(attention_, runtime_);
  attend_backward(attention_, std::nullopt, results_, runtime_);
  EXPECT_TRUE(attention_table().ok());
  for (const Tensor& tensor : {results_.out, *results_.grad_q, *results_.grad_kv}) {
    tensor.span<BFloat16>()[0] = BFloat16(1e-30F);
    EXPECT_FALSE(attention_table().ok());
    tensor.span<BFloat16>()[0] = BFloat16(0.0F);
  }
}

}  // namespace
}  // namespace flashdsa::tools

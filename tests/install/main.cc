// Uses an installed FlashDSA from end to end on a problem small enough to work by hand: one
// document of three tokens, one head, K = 2. Every vector is a multiple of the unit vector on
// channel 0, so a tensor is written down as one number per row.

#include <flashdsa/flashdsa.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using flashdsa::BFloat16;
using flashdsa::DType;
using flashdsa::Tensor;

namespace {

constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kTopk = 2;
constexpr float kLn2 = 0.693147181f;

// [rows, channels] (with axes of one between them) with `values` on channel 0 and zeros elsewhere.
Tensor on_channel_0(std::vector<float> values, std::vector<std::int64_t> shape) {
  const Tensor tensor = Tensor::host(DType::kBFloat16, shape);
  const auto channels = static_cast<std::size_t>(shape.back());
  for (auto& element : tensor.span<BFloat16>()) element = BFloat16(0.0f);
  for (std::size_t row = 0; row < values.size(); ++row) {
    tensor.span<BFloat16>()[row * channels] = BFloat16(values[row]);
  }
  return tensor;
}

Tensor of_int32(std::vector<std::int32_t> values) {
  const auto size = static_cast<std::int64_t>(values.size());
  const Tensor tensor = Tensor::host(DType::kInt32, {size});
  for (std::size_t i = 0; i < values.size(); ++i) tensor.span<std::int32_t>()[i] = values[i];
  return tensor;
}

void expect(const char* what, double expected, double got, double tolerance = 0) {
  if (std::abs(got - expected) <= tolerance) return;  // false for NaN
  std::fprintf(stderr, "%s: expected %.9g, got %.9g\n", what, expected, got);
  std::exit(1);
}

template <typename T>
void expect_all(const char* what, std::vector<double> expected, const Tensor& tensor) {
  expect(what, static_cast<double>(expected.size()), static_cast<double>(tensor.span<T>().size()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expect(what, expected[i], static_cast<double>(tensor.span<T>()[i]));
  }
}

void expect_on_channel_0(const char* what, std::vector<double> expected, const Tensor& tensor) {
  const auto elements = tensor.span<BFloat16>();
  const std::size_t channels = elements.size() / expected.size();
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const double wanted = i % channels == 0 ? expected[i / channels] : 0.0;
    expect(what, wanted, static_cast<double>(static_cast<float>(elements[i])));
  }
}

}  // namespace

int main() {
  const Tensor cu_seqlens = of_int32({0, kTokens});
  flashdsa::PackedMetadataArgs batch;
  batch.cu_seqlens = cu_seqlens;
  batch.total_key_tokens = kTokens;
  const flashdsa::PackedMetadata metadata = flashdsa::prepare_packed_metadata(batch);
  expect_all<std::int32_t>("starts", {0, 0, 0}, metadata.starts);
  expect_all<std::int32_t>("causal_lengths", {1, 2, 3}, metadata.causal_lengths);

  // The last token scores its keys 3, 1 and 2, so it keeps keys 0 and 2; the others see at most
  // two.
  const Tensor index_q = on_channel_0({1, 1, 1}, {kTokens, 1, 128});
  const Tensor index_k = on_channel_0({3, 1, 2}, {kTokens, 128});
  const Tensor head_weights = on_channel_0({1, 1, 1}, {kTokens, 1});
  const Tensor topk_indices = Tensor::host(DType::kInt32, {kTokens, 1, kTopk});
  flashdsa::IndexerTopkArgs selection;
  selection.index_q = index_q;
  selection.index_k = index_k;
  selection.head_weights = head_weights;
  selection.starts = metadata.starts;
  selection.causal_lengths = metadata.causal_lengths;
  selection.topk_indices = topk_indices;
  flashdsa::indexer_topk(selection);
  expect_all<std::int32_t>("topk_indices", {0, -1, 0, 1, 0, 2}, topk_indices);

  // Token 0 has one key: out is its value and lse = 0.5 * 4 * 1. The queries of the other two are
  // zero, so out is the mean of their two values and lse = ln 2.
  const Tensor q = on_channel_0({4, 0, 0}, {kTokens, 1, 576});
  const Tensor kv = on_channel_0({1, 2, 3}, {kTokens, 1, 576});
  const Tensor out = Tensor::host(DType::kBFloat16, {kTokens, 1, 512});
  const Tensor lse = Tensor::host(DType::kFloat32, {kTokens, 1});
  flashdsa::AttentionForwardArgs forward;
  forward.q = q;
  forward.kv = kv;
  forward.topk_indices = topk_indices;
  forward.softmax_scale = 0.5;
  forward.out = out;
  forward.lse = lse;
  flashdsa::attention_forward(forward);
  expect_on_channel_0("out", {1, 1.5, 2}, out);
  expect("lse[0]", 2.0, lse.span<float>()[0], 1e-5);
  expect("lse[1]", kLn2, lse.span<float>()[1], 1e-5);
  expect("lse[2]", kLn2, lse.span<float>()[2], 1e-5);

  // Only token 2 has a gradient, 1 on channel 0. P = (1/2, 1/2), dP = (1, 3) and D = 2, so
  // dS = (-1/4, 1/4), grad_q = -1/4 * 1 + 1/4 * 3, and each of its keys receives P * grad_out.
  const Tensor grad_out = on_channel_0({0, 0, 1}, {kTokens, 1, 512});
  const Tensor grad_q = Tensor::host(DType::kBFloat16, {kTokens, 1, 576});
  const Tensor grad_kv = Tensor::host(DType::kBFloat16, {kTokens, 1, 576});
  flashdsa::AttentionBackwardArgs backward;
  static_cast<flashdsa::SparseAttentionInputs&>(backward) = forward;
  backward.out = out;
  backward.lse = lse;
  backward.grad_out = grad_out;
  backward.grad_q = grad_q;
  backward.grad_kv = grad_kv;
  flashdsa::attention_backward(backward);
  expect_on_channel_0("grad_q", {0, 0, 0.5}, grad_q);
  expect_on_channel_0("grad_kv", {0.5, 0, 0.5}, grad_kv);

  std::printf("flashdsa %s: the numbers are right\n", flashdsa::version().data());
  return 0;
}

#include <flashdsa/flashdsa.h>

#include <algorithm>
#include <cstdio>

using namespace flashdsa;

static Tensor ones(std::initializer_list<std::int64_t> shape) {
  const Tensor tensor = Tensor::host(DType::kBFloat16, shape);
  std::ranges::fill(tensor.span<BFloat16>(), BFloat16(1.0f));
  return tensor;
}

int main() {
  std::int32_t boundaries[] = {0, 100, 300};  // two documents: 100 and 200 tokens
  PackedMetadataArgs batch;
  batch.cu_seqlens = TensorView::contiguous(boundaries, DType::kInt32, {3});
  batch.total_key_tokens = 300;
  const PackedMetadata rows = prepare_packed_metadata(batch);

  const Tensor index_q = ones({300, 32, 128}), index_k = ones({300, 128}), w = ones({300, 32});
  const Tensor topk_indices = Tensor::host(DType::kInt32, {300, 1, 64});
  IndexerTopkArgs selection;
  selection.index_q = index_q, selection.index_k = index_k, selection.head_weights = w;
  selection.starts = rows.starts, selection.causal_lengths = rows.causal_lengths;
  selection.topk_indices = topk_indices;
  indexer_topk(selection);  // the 64 best visible keys of every token

  const Tensor q = ones({300, 8, 576}), kv = ones({300, 1, 576});
  const Tensor out = ones({300, 8, 512}), lse = Tensor::host(DType::kFloat32, {300, 8});
  AttentionForwardArgs attention;
  attention.q = q, attention.kv = kv, attention.topk_indices = topk_indices;
  attention.softmax_scale = 1.0 / 24;
  attention.out = out, attention.lse = lse;
  attention_forward(attention);

  const auto keys = topk_indices.span<std::int32_t>().last(64);
  std::printf("the last token attends to keys %d..%d, lse %.4f\n", keys.front(), keys.back(),
              static_cast<double>(lse.span<float>().back()));
}

#include <flashdsa/flashdsa.h>

#include <algorithm>
#include <cstdio>

using namespace flashdsa;

static Tensor filled(std::initializer_list<std::int64_t> shape, float value) {
  const Tensor tensor = Tensor::host(DType::kBFloat16, shape);
  std::ranges::fill(tensor.span<BFloat16>(), BFloat16(value));
  return tensor;
}

int main() try {
  std::int32_t boundaries[] = {0, 3, 8};  // documents of 3 and 5 tokens
  PackedMetadataArgs batch;
  batch.cu_seqlens = TensorView::contiguous(boundaries, DType::kInt32, {3});
  batch.total_key_tokens = 8;
  const PackedMetadata rows = prepare_packed_metadata(batch);

  // One index head. Every query asks for channel 0, where key s holds scores[s].
  const float scores[] = {1, 5, 2, 4, 1, 3, 2, 6};
  const Tensor index_q = filled({8, 1, 128}, 0), index_k = filled({8, 128}, 0);
  const Tensor head_weights = filled({8, 1}, 1);
  // One attention head. Logits are 0, so that a row's out is the mean of its keys' values; the
  // value of key s is s.
  const Tensor q = filled({8, 1, 576}, 0), kv = filled({8, 1, 576}, 0);
  for (std::size_t s = 0; s < 8; ++s) {
    index_q.span<BFloat16>()[s * 128] = BFloat16(1.0f);
    index_k.span<BFloat16>()[s * 128] = BFloat16(scores[s]);
    kv.span<BFloat16>()[s * 576] = BFloat16(static_cast<float>(s));
  }

  const Tensor topk_indices = Tensor::host(DType::kInt32, {8, 1, 4});
  const Tensor topk_length = Tensor::host(DType::kInt32, {8});
  IndexerTopkArgs selection;
  selection.index_q = index_q, selection.index_k = index_k;
  selection.head_weights = head_weights;
  selection.starts = rows.starts, selection.causal_lengths = rows.causal_lengths;
  selection.topk_indices = topk_indices, selection.topk_length = topk_length;
  indexer_topk(selection);

  const Tensor out = filled({8, 1, 512}, 0), lse = Tensor::host(DType::kFloat32, {8, 1});
  AttentionForwardArgs attention;
  attention.q = q, attention.kv = kv;
  attention.topk_indices = topk_indices, attention.topk_length = topk_length;
  attention.softmax_scale = 1.0 / 24;
  attention.out = out, attention.lse = lse;
  attention_forward(attention);

  for (const std::size_t t : {0u, 2u, 6u, 7u}) {
    const auto keys = topk_indices.span<std::int32_t>().subspan(4 * t, 4);
    std::printf("row %zu: keys %d %d %d %d, out %g\n", t, keys[0], keys[1], keys[2], keys[3],
                static_cast<double>(float(out.span<BFloat16>()[t * 512])));
  }

  attention.softmax_scale = 0;
  attention_forward(attention);
} catch (const Error& error) {
  std::printf("%s\n", error.what());
}

// Times one small call of every operation from C++, for bench/python_overhead.py: a line
// "operation nanoseconds nanoseconds ..." each, one figure for every batch of calls.
//
//   python_overhead BATCHES CALLS

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "flashdsa/flashdsa.h"

using namespace flashdsa;

namespace {

Tensor zeros(DType dtype, std::initializer_list<std::int64_t> shape) {
  const Tensor tensor = Tensor::host(dtype, shape);
  for (std::size_t i = 0; i < tensor.view().bytes(); ++i) tensor.view().as<char>()[i] = 0;
  return tensor;
}

void time_calls(const char* operation, int batches, int calls, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  std::printf("%s", operation);
  for (int i = 0; i < calls; ++i) call();
  for (int batch = 0; batch < batches; ++batch) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    const std::chrono::duration<double, std::nano> time = Clock::now() - begin;
    std::printf(" %.1f", time.count() / calls);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int batches = std::atoi(argv[1]), calls = std::atoi(argv[2]);
  constexpr auto kReal = DType::kBFloat16;
  constexpr auto kSingle = DType::kFloat32;
  constexpr auto kInt = DType::kInt32;
  Runtime runtime;
  runtime.threads = 1;

  const Tensor q = zeros(kReal, {1, 1, 512}), kv = zeros(kReal, {1, 1, 512});
  const Tensor indices = zeros(kInt, {1, 1, 1}), lse = zeros(kSingle, {1, 1});
  const Tensor out = zeros(kReal, {1, 1, 512});
  AttentionForwardArgs forward;
  forward.q = q, forward.kv = kv, forward.topk_indices = indices, forward.softmax_scale = 1;
  forward.out = out, forward.lse = lse;
  time_calls("attention_forward", batches, calls, [&] { attention_forward(forward, runtime); });

  const Tensor grad_q = zeros(kReal, {1, 1, 512}), grad_kv = zeros(kReal, {1, 1, 512});
  AttentionBackwardArgs backward;
  static_cast<SparseAttentionInputs&>(backward) = forward;
  backward.out = out, backward.lse = lse, backward.grad_out = q;
  backward.grad_q = grad_q, backward.grad_kv = grad_kv;
  time_calls("attention_backward", batches, calls, [&] { attention_backward(backward, runtime); });

  const Tensor index_q = zeros(kReal, {1, 1, 128}), index_k = zeros(kReal, {1, 128});
  const Tensor weights = zeros(kSingle, {1, 1}), length = zeros(kInt, {1});
  const Tensor starts = zeros(kInt, {1}), causal_lengths = zeros(kInt, {1});
  *causal_lengths.view().as<std::int32_t>() = 1;
  IndexerTopkArgs topk;
  topk.index_q = index_q, topk.index_k = index_k, topk.head_weights = weights;
  topk.starts = starts, topk.causal_lengths = causal_lengths;
  topk.topk_indices = indices, topk.topk_length = length;
  time_calls("indexer_topk", batches, calls, [&] { indexer_topk(topk, runtime); });

  const Tensor row = zeros(kInt, {1, 1}), sorted_row = zeros(kInt, {1, 1});
  CompactAndSortArgs compact;
  compact.indices = row, compact.key_count = 1;
  compact.sorted_indices = sorted_row, compact.lengths = length;
  time_calls("compact_and_sort", batches, calls, [&] { compact_and_sort(compact, runtime); });

  const Tensor boundaries = zeros(kInt, {2});
  boundaries.view().as<std::int32_t>()[1] = 1;
  PackedMetadataArgs packed;
  packed.cu_seqlens = boundaries, packed.total_key_tokens = 1;
  time_calls("prepare_packed_metadata", batches, calls,
             [&] { (void)prepare_packed_metadata(packed, runtime); });
  return 0;
}

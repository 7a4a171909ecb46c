// The smallest and largest problems, and offsets beyond 32 bits.

#include <algorithm>

#include "tests/attention/fixture.h"
#include "tests/support/mapped_memory.h"

namespace flashdsa::test {
namespace {

TEST_P(Attention, NoQueriesIsAValidProblem) {
  AttentionProblem problem = random_attention({.t_q = 0, .t_k = 4, .heads = 3, .topk = 5}, 111);
  problem.set_sink({1, 2, 3});
  problem.set_lengths({});
  const AttentionResult result = run_attention(problem, runtime());
  EXPECT_TRUE(all_zero(values_of("grad_kv", result.grad_kv)));
  EXPECT_TRUE(all_zero(values_of("grad_attn_sink", *result.grad_attn_sink)));
}

TEST_P(Attention, NoQueriesMayComeWithNullPointers) {
  AttentionForwardArgs args;
  const HostTensor kv(DType::kBFloat16, {3, 1, 576});
  args.q = TensorView::contiguous(nullptr, DType::kBFloat16, {0, 4, 576});
  args.kv = kv;
  args.topk_indices = TensorView::contiguous(nullptr, DType::kInt32, {0, 1, 8});
  args.softmax_scale = 1;
  args.out = TensorView::contiguous(nullptr, DType::kBFloat16, {0, 4, 512});
  args.lse = TensorView::contiguous(nullptr, DType::kFloat32, {0, 4});
  EXPECT_NO_THROW(run_placed(args, runtime()));
}

TEST_P(Attention, NoKeysLeavesEveryRowEmpty) {
  AttentionProblem problem = random_attention({.t_q = 3, .t_k = 0, .heads = 2, .topk = 5}, 112);
  problem.set_row(0, {0, 1, 2, 3, 4});  // no such keys
  problem.set_sink({1, -1});
  expect_within_spec(problem);
}

TEST_P(Attention, OneKeyOfStorageIsRight) {
  AttentionProblem problem = random_attention({.t_q = 3, .t_k = 1, .heads = 2, .topk = 5}, 113);
  problem.set_row(1, {-1, -1, 0, 0, 1});
  expect_within_spec(problem);
}

TEST_P(Attention, OneSlotIsRight) {
  expect_within_spec(random_attention({.t_q = 3, .t_k = 9, .heads = 2, .topk = 1}, 114));
}

TEST_P(Attention, OneQueryOneHeadOneKeyIsRight) {
  expect_within_spec(random_attention({.t_q = 1, .t_k = 1, .heads = 1, .topk = 1}, 115));
}

TEST_P(Attention, MostHeadsAndWidestRowTogether) {
  expect_within_spec(random_attention(
      {.t_q = 1, .t_k = 2048, .heads = is_reference() ? 16 : 128, .topk = 2048}, 116));
}

// Copies the rows of a contiguous tensor into memory where they lie `row_stride` elements apart.
TensorView spread(const HostTensor& tensor, std::int64_t row_stride, const MappedMemory& memory) {
  TensorView view = tensor.view();
  const std::size_t row_bytes = view.bytes() / static_cast<std::size_t>(view.shape[0]);
  const std::size_t step = static_cast<std::size_t>(row_stride) * dtype_size(view.dtype);
  for (std::size_t t = 0; t < static_cast<std::size_t>(view.shape[0]); ++t) {
    std::copy_n(view.as<std::byte>() + t * row_bytes, row_bytes, memory.data() + t * step);
  }
  view.data = memory.data();
  view.strides[0] = row_stride;
  return view;
}

std::size_t spread_bytes(const HostTensor& tensor, std::int64_t row_stride) {
  return static_cast<std::size_t>(tensor.size(0) * row_stride) * dtype_size(tensor.dtype());
}

// Row strides whose products pass 2^31 and 2^32 elements, over memory that is mostly not there.
TEST_P(Attention, OffsetsBeyond32BitsAreRight) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 30) + 2048;
  AttentionProblem problem = random_attention({.t_q = 5, .t_k = 5, .heads = 2, .topk = 4}, 117);
  problem.set_sink({0.5, -0.5});
  const AttentionResult want = run_attention(problem, repeatable());

  const MappedMemory q(spread_bytes(problem.q, kStride)), kv(spread_bytes(problem.kv, kStride));
  const MappedMemory indices(spread_bytes(problem.topk_indices, kStride));
  const MappedMemory grad_out(spread_bytes(problem.grad_out, kStride));
  const MappedMemory out(spread_bytes(want.out, kStride)), lse(spread_bytes(want.lse, kStride));
  for (const MappedMemory* memory : {&q, &kv, &indices, &grad_out, &out, &lse}) {
    if (memory->data() == nullptr) GTEST_SKIP() << "the system maps no 20 GB of empty memory";
  }
  SparseAttentionInputs inputs = problem.inputs();
  inputs.q = spread(problem.q, kStride, q);
  inputs.kv = spread(problem.kv, kStride, kv);
  inputs.topk_indices = spread(problem.topk_indices, kStride, indices);

  AttentionForwardArgs forward;
  static_cast<SparseAttentionInputs&>(forward) = inputs;
  const HostTensor out_again(DType::kBFloat16, want.out.shape());
  const HostTensor lse_again(DType::kFloat32, want.lse.shape());
  forward.out = out_again;
  forward.lse = lse_again;
  run_placed(forward, repeatable());
  EXPECT_TRUE(same_bits(out_again, want.out));
  EXPECT_TRUE(same_bits(lse_again, want.lse));

  AttentionBackwardArgs backward;
  static_cast<SparseAttentionInputs&>(backward) = inputs;
  const HostTensor grad_q(DType::kBFloat16, want.grad_q.shape());
  const HostTensor grad_kv(DType::kBFloat16, want.grad_kv.shape());
  backward.out = spread(want.out, kStride, out);
  backward.lse = spread(want.lse, kStride, lse);
  backward.grad_out = spread(problem.grad_out, kStride, grad_out);
  backward.grad_q = grad_q;
  backward.grad_kv = grad_kv;
  run_placed(backward, repeatable());
  EXPECT_TRUE(same_bits(grad_q, want.grad_q));
  EXPECT_TRUE(same_bits(grad_kv, want.grad_kv));
}

}  // namespace
}  // namespace flashdsa::test

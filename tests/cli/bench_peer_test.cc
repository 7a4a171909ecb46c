// A peer's library gets the problem that the library gets.

#include "tools/bench_peer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flashdsa/flashdsa.h"

namespace flashdsa::tools {
namespace {

// The seven keys' problem with three rows that the stub writes down; its results are FP32 here.
struct Problem {
  explicit Problem(std::int64_t heads)
      : q(Tensor::host(DType::kBFloat16, {3, heads, 576})),
        kv(Tensor::host(DType::kBFloat16, {7, 1, 576})),
        topk_indices(Tensor::host(DType::kInt32, {3, 1, 4})),
        topk_length(Tensor::host(DType::kInt32, {3})),
        result(Tensor::host(DType::kFloat32, {8})) {
    std::ranges::fill(topk_indices.span<std::int32_t>(), 6);
    std::ranges::fill(topk_length.span<std::int32_t>(), 2);
    std::ranges::fill(result.span<float>(), -1.0F);
  }

  template <typename Args>
  Args inputs() const {
    Args args;
    args.q = q;
    args.kv = kv;
    args.topk_indices = topk_indices;
    args.topk_length = topk_length;
    args.softmax_scale = 0.5;
    args.out = q;
    args.lse = result;
    return args;
  }

  std::vector<float> answer() const {
    const auto values = result.span<float>();
    return {values.begin(), values.end()};
  }

  Tensor q, kv, topk_indices, topk_length, result;
};

const std::vector<float> kAnswer = {3, 7, 2, 576, 4, 0.5, 6, 2};

TEST(PeerLibrary, TellsWhatItHas) {
  const PeerLibrary peer(FLASHDSA_PEER_STUB);
  EXPECT_EQ(peer.name(), "stub@1");
  EXPECT_TRUE(peer.has("forward"));
  EXPECT_TRUE(peer.has("backward"));
  EXPECT_FALSE(peer.has("topk"));
}

TEST(PeerLibrary, ForwardGetsTheProblem) {
  const Problem problem(2);
  const PeerLibrary peer(FLASHDSA_PEER_STUB);
  peer.calls().forward(problem.inputs<AttentionForwardArgs>(), Runtime{});
  EXPECT_EQ(problem.answer(), kAnswer);
}

TEST(PeerLibrary, BackwardGetsTheProblem) {
  const Problem problem(2);
  const PeerLibrary peer(FLASHDSA_PEER_STUB);
  auto args = problem.inputs<AttentionBackwardArgs>();
  args.grad_out = problem.q;
  args.grad_q = problem.q;
  args.grad_kv = problem.result;
  peer.calls().backward(args, Runtime{});
  EXPECT_EQ(problem.answer(), kAnswer);
}

TEST(PeerLibrary, ProblemThatItDoesNotTakeIsUnavailable) {
  const Problem problem(3);
  const PeerLibrary peer(FLASHDSA_PEER_STUB);
  try {
    peer.calls().forward(problem.inputs<AttentionForwardArgs>(), Runtime{});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_STREQ(error.what(), "bench: the peer's forward does not take this problem");
  }
}

TEST(PeerLibrary, OtherFilesAreRefused) {
  for (const char* path : {"/nowhere/peer.so", __FILE__}) {
    try {
      const PeerLibrary peer(path);
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kValue);
      EXPECT_NE(std::string(error.what()).find("--peer-library"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace flashdsa::tools

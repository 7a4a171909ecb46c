// A peer's shared library for tests: writes what it was asked into its results. It takes two heads
// alone.

#include <cstddef>
#include <cstdint>

#include "bench/peer.h"

namespace {

constexpr std::size_t kSizes = 5;

int answer(const flashdsa_peer_attention& problem, float* target) {
  if (problem.heads != 2) return 1;
  const std::int64_t sizes[kSizes] = {problem.t_q, problem.t_k, problem.heads, problem.head_dim,
                                      problem.topk};
  for (std::size_t i = 0; i < kSizes; ++i) target[i] = static_cast<float>(sizes[i]);
  target[kSizes] = static_cast<float>(problem.softmax_scale);
  target[kSizes + 1] = static_cast<float>(problem.topk_indices[0]);
  target[kSizes + 2] = static_cast<float>(problem.topk_length[0]);
  return 0;
}

}  // namespace

extern "C" {

const char* flashdsa_peer_name(void) { return "stub@1"; }

int flashdsa_peer_forward(const flashdsa_peer_attention* problem) {
  const bool is_forward = problem->out != nullptr && problem->grad_out == nullptr &&
                          problem->grad_q == nullptr && problem->grad_kv == nullptr;
  return is_forward ? answer(*problem, problem->lse) : 2;
}

int flashdsa_peer_backward(const flashdsa_peer_attention* problem) {
  const bool is_backward =
      problem->grad_out != nullptr && problem->grad_q != nullptr && problem->out != nullptr;
  return is_backward ? answer(*problem, static_cast<float*>(problem->grad_kv)) : 2;
}

}  // extern "C"

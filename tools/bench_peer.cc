#include "tools/bench_peer.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "bench/peer.h"
#include "flashdsa/error.h"

namespace flashdsa::tools {
namespace {

template <typename Function>
Function* find(const std::shared_ptr<void>& library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library.get(), name));
}

using Call = int(const flashdsa_peer_attention*);

Call* forward_of(const std::shared_ptr<void>& library) {
  return find<Call>(library, "flashdsa_peer_forward");
}

Call* backward_of(const std::shared_ptr<void>& library) {
  return find<Call>(library, "flashdsa_peer_backward");
}

flashdsa_peer_attention problem_of(const SparseAttentionInputs& inputs, const Runtime& runtime) {
  flashdsa_peer_attention problem{};
  problem.t_q = inputs.q.shape[0];
  problem.t_k = inputs.kv.shape[0];
  problem.heads = inputs.q.shape[1];
  problem.head_dim = inputs.q.shape[2];
  problem.topk = inputs.topk_indices.shape[2];
  problem.softmax_scale = inputs.softmax_scale;
  problem.q = inputs.q.data;
  problem.kv = inputs.kv.data;
  problem.topk_indices = inputs.topk_indices.as<std::int32_t>();
  problem.topk_length = inputs.topk_length->as<std::int32_t>();
  problem.stream = runtime.stream.handle;
  return problem;
}

void check(int status, const char* what) {
  if (status != 0) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("bench: the peer's {} does not take this problem", what));
  }
}

}  // namespace

PeerLibrary::PeerLibrary(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: --peer-library must be a shared library, got {}", dlerror()));
  }
  library_ = {handle, dlclose};
  auto* name = find<const char*()>(library_, "flashdsa_peer_name");
  if (name == nullptr) {
    throw Error(
        ErrorCode::kValue,
        fmt::format("bench: --peer-library must export flashdsa_peer_name, {} does not", path));
  }
  name_ = name();
}

bool PeerLibrary::has(std::string_view operation) const {
  if (operation == "forward") return forward_of(library_) != nullptr;
  return operation == "backward" && forward_of(library_) != nullptr &&
         backward_of(library_) != nullptr;
}

AttentionCalls PeerLibrary::calls() const {
  AttentionCalls calls;
  calls.forward = [library = library_](const AttentionForwardArgs& args, const Runtime& runtime) {
    flashdsa_peer_attention problem = problem_of(args, runtime);
    problem.out = args.out.data;
    problem.lse = args.lse.as<float>();
    check(forward_of(library)(&problem), "forward");
  };
  calls.backward = [library = library_](const AttentionBackwardArgs& args, const Runtime& runtime) {
    flashdsa_peer_attention problem = problem_of(args, runtime);
    problem.out = args.out.data;
    problem.lse = args.lse.as<float>();
    problem.grad_out = args.grad_out.data;
    problem.grad_q = args.grad_q.data;
    problem.grad_kv = args.grad_kv.data;
    check(backward_of(library)(&problem), "backward");
  };
  return calls;
}

}  // namespace flashdsa::tools

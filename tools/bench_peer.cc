#include "tools/bench_peer.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "bench/peer.h"
#include "flashdsa/error.h"
#include "tools/gpu.h"
#include "tools/placement.h"

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

// A forward call with heads of zeros behind the caller's, which fill up a multiple of 64; its q is
// padded and its results are cut on every call, as a caller of such a kernel has to.
class PaddedForward {
 public:
  // What the peer's function returned.
  int queue(Call* forward, flashdsa_peer_attention problem, const AttentionForwardArgs& args,
            const Runtime& runtime) {
    allocate(args, runtime);
    queue_copy_heads(args.q, q_, runtime.stream);
    problem.heads = q_.view().shape[1];
    problem.q = q_.view().data;
    problem.out = out_.view().data;
    problem.lse = lse_.view().as<float>();
    const int status = forward(&problem);
    if (status != 0) return status;
    queue_copy_heads(out_, args.out, runtime.stream);
    queue_copy_heads(lse_, args.lse, runtime.stream);
    return 0;
  }

 private:
  // A caller has such memory from an allocator that keeps it, so it is taken once.
  void allocate(const AttentionForwardArgs& args, const Runtime& runtime) {
    if (q_.view().rank != 0) return;
    const std::int64_t t_q = args.q.shape[0], heads = (args.q.shape[1] + 63) / 64 * 64;
    q_ = allocate_beside(args.q, args.q.dtype, {t_q, heads, args.q.shape[2]}, runtime);
    out_ = allocate_beside(args.q, args.out.dtype, {t_q, heads, args.out.shape[2]}, runtime);
    lse_ = allocate_beside(args.q, args.lse.dtype, {t_q, heads}, runtime);
  }

  Tensor q_, out_, lse_;
};

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
  calls.forward = [library = library_, padded = std::make_shared<PaddedForward>()](
                      const AttentionForwardArgs& args, const Runtime& runtime) {
    flashdsa_peer_attention problem = problem_of(args, runtime);
    problem.out = args.out.data;
    problem.lse = args.lse.as<float>();
    int status = forward_of(library)(&problem);
    if (status != 0 && problem.heads % 64 != 0 && args.q.device.kind == DeviceKind::kCuda) {
      status = padded->queue(forward_of(library), problem, args, runtime);
    }
    check(status, "forward");
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

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "flashdsa/api.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa {

/// What does the work of a call.
enum class Backend : std::uint8_t {
  kAuto,       ///< the best backend that takes the call's tensors
  kReference,  ///< float64, plain loops; also takes float64 tensors
  kCpu,        ///< SIMD and threads
  kSm90,       ///< NVIDIA Hopper
  kSm80,       ///< NVIDIA Ampere and later
};

/// Instruction set of the CPU backend. One set gives the same bits on every machine that has it.
enum class SimdTarget : std::uint8_t {
  kAuto,        ///< the best one this CPU has
  kBaseline,    ///< what the compiler assumes: SSE4 on x86-64, NEON on Arm
  kAvx2,        ///< AVX2 and FMA
  kAvx512,      ///< AVX-512 F, BW, CD, DQ, VL
  kAvx512Bf16,  ///< the same with BF16 dot products
};

/// How reproducible a result has to be. SPEC sections 5 and 6.
enum class Mode : std::uint8_t {
  kDefault,        ///< same forward bits on every run; the backward may use atomics
  kDeterministic,  ///< same bits on every run and stream, forward and backward
  kInvariant,      ///< deterministic, and a row's result does not depend on the call's other rows
};

/// "auto", "reference", "cpu", "sm90" or "sm80".
FLASHDSA_API std::string_view backend_name(Backend backend) noexcept;

/// "auto", "baseline", "avx2", "avx512" or "avx512bf16".
FLASHDSA_API std::string_view simd_target_name(SimdTarget target) noexcept;

/// Opaque stream of the tensors' device (a cudaStream_t). Host calls ignore it: they are
/// synchronous.
struct Stream {
  void* handle = nullptr;  ///< null: the device's default stream
};

/// Where scratch memory comes from. Calls may arrive from several threads at once.
class FLASHDSA_API Allocator {
 public:
  virtual ~Allocator() = default;

  /// At least `bytes` > 0 bytes on `device`, aligned to 64 bytes, usable by work queued on `stream`
  /// after this call; null when there is no such memory.
  virtual void* allocate(std::size_t bytes, Device device, Stream stream) noexcept = 0;

  /// Returns memory of `allocate`; work already queued on `stream` may still use it.
  virtual void deallocate(void* data, std::size_t bytes, Device device, Stream stream) noexcept = 0;
};

/// Written by a running operation, read by whoever shows it (a progress bar on another thread).
struct Progress {
  std::atomic<std::int64_t> done{0};   ///< units of work finished
  std::atomic<std::int64_t> total{0};  ///< units of work of this call; 0 until known
};

/// What one or several calls used; an operation only ever raises the numbers.
struct Usage {
  std::atomic<std::size_t> scratch_bytes{0};       ///< scratch held at this moment
  std::atomic<std::size_t> peak_scratch_bytes{0};  ///< the most scratch held at one moment
};

/// Everything a call needs beside its tensors. The library has no other state.
struct Runtime {
  Backend backend = Backend::kAuto;     ///< the only one that may take the call, or kAuto
  Mode mode = Mode::kDefault;           ///< how reproducible the results are
  SimdTarget simd = SimdTarget::kAuto;  ///< instruction set of the CPU backend
  int threads = 0;                      ///< threads of a host call; 0: hardware_threads()
  bool check = false;  ///< report bad tensor data (SPEC section 7) as Error(kData) with the row;
                       ///< waits for the device, hence Error(kValue) while the stream is captured
  std::size_t scratch_budget_bytes = std::size_t{256}
                                     << 20;  ///< upper bound of the indexer's scratch
  Allocator* allocator =
      nullptr;                   ///< null: host memory, or the stream-ordered memory of the device
  Stream stream;                 ///< where work on a device is queued
  Progress* progress = nullptr;  ///< null: not reported
  Usage* usage = nullptr;        ///< null: not reported
};

/// One line of `backends()`.
struct BackendStatus {
  Backend backend;     ///< which one
  bool available;      ///< whether this machine can run it
  std::string detail;  ///< what it runs on, or why it is not available
};

/// Every backend, best first, and whether this machine can run it.
FLASHDSA_API std::vector<BackendStatus> backends();

/// One line of `operations()`.
struct OperationSupport {
  std::string_view name;          ///< of the function: "attention_forward"
  std::string_view sizes;         ///< the sizes that it takes, in the letters of SPEC
  std::string_view dtypes;        ///< element types of its main tensors
  std::vector<Backend> backends;  ///< which do its work where they are available, best first
};

/// Every operation of this version and what does its work, in whatever build and on whatever
/// machine; `backends()` says what is available here.
FLASHDSA_API std::vector<OperationSupport> operations();

/// The instruction sets that this CPU and this build have, best first.
FLASHDSA_API std::vector<SimdTarget> simd_targets();

/// Threads this process may run at once (its CPU affinity counts).
FLASHDSA_API int hardware_threads() noexcept;

/// A contiguous copy of a contiguous tensor on `device`, in memory of its own. The copy is complete
/// when the call returns. Throws Error(kValue) for a strided tensor, Error(kMemory),
/// Error(kDevice), or Error(kUnavailable) when a side is a CUDA device and the build has no CUDA.
FLASHDSA_API Tensor copy_to(const TensorView& view, Device device, const Runtime& runtime = {});

/// The same of a tensor, which may be a temporary.
inline Tensor copy_to(const Tensor& tensor, Device device, const Runtime& runtime = {}) {
  return copy_to(tensor.view(), device, runtime);
}

/// "0.1.0"
FLASHDSA_API std::string_view version() noexcept;

/// Compiler and build type: "GNU 12.2.0, Release".
FLASHDSA_API std::string_view build_description() noexcept;

}  // namespace flashdsa

#include "tests/support/cuda/counted_calls.h"

#include <cuda_runtime_api.h>

namespace {

thread_local flashdsa::test::CountedCalls counted;

}  // namespace

namespace flashdsa::test {

CountedCalls counted_calls() { return counted; }

}  // namespace flashdsa::test

// The linker's --wrap=NAME calls __wrap_NAME for NAME and gives the name __real_NAME to NAME
// itself.
extern "C" {

cudaError_t __real_cudaStreamSynchronize(cudaStream_t stream);
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t stream) {
  ++counted.waits;
  return __real_cudaStreamSynchronize(stream);
}

cudaError_t __real_cudaDeviceSynchronize();
cudaError_t __wrap_cudaDeviceSynchronize() {
  ++counted.waits;
  return __real_cudaDeviceSynchronize();
}

cudaError_t __real_cudaEventSynchronize(cudaEvent_t event);
cudaError_t __wrap_cudaEventSynchronize(cudaEvent_t event) {
  ++counted.waits;
  return __real_cudaEventSynchronize(event);
}

cudaError_t __real_cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t __wrap_cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ++counted.waits;
  return __real_cudaMemcpy(to, from, bytes, kind);
}

cudaError_t __real_cudaMemset(void* to, int value, size_t bytes);
cudaError_t __wrap_cudaMemset(void* to, int value, size_t bytes) {
  ++counted.waits;
  return __real_cudaMemset(to, value, bytes);
}

cudaError_t __real_cudaMalloc(void** data, size_t bytes);
cudaError_t __wrap_cudaMalloc(void** data, size_t bytes) {
  ++counted.allocations;
  return __real_cudaMalloc(data, bytes);
}

cudaError_t __real_cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream);
cudaError_t __wrap_cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  ++counted.allocations;
  return __real_cudaMallocAsync(data, bytes, stream);
}

cudaError_t __real_cudaFree(void* data);
cudaError_t __wrap_cudaFree(void* data) {
  ++counted.waits;
  return __real_cudaFree(data);
}

}  // extern "C"

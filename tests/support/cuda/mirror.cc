#include "tests/support/mirror.h"

#include <gtest/gtest.h>

#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "tests/support/cuda/device_memory.h"
#include "tests/support/memory_blocks.h"

namespace flashdsa::test {
namespace {

struct Transfer {
  std::byte* host;
  std::byte* device;
  std::size_t bytes;
};

// From the view's first element to behind its last one, in bytes.
std::size_t extent_bytes(const TensorView& view) {
  if (view.elements() == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    last += (view.shape[axis] - 1) * view.strides[axis];
  }
  return static_cast<std::size_t>(last + 1) * dtype_size(view.dtype);
}

// Calls piece(element offset, elements) for the longest runs of elements without gaps.
template <typename Piece>
void for_pieces(const TensorView& view, const Piece& piece) {
  if (view.elements() == 0) return;
  std::size_t outer = static_cast<std::size_t>(view.rank);
  std::int64_t run = 1;
  while (outer > 0 && (view.shape[outer - 1] == 1 || view.strides[outer - 1] == run)) {
    run *= view.shape[--outer];
  }
  for (std::int64_t i = 0; i < view.elements() / run; ++i) {
    std::int64_t rest = i, offset = 0;
    for (std::size_t axis = outer; axis-- > 0;) {
      offset += rest % view.shape[axis] * view.strides[axis];
      rest /= view.shape[axis];
    }
    piece(offset, run);
  }
}

}  // namespace

struct Mirror::State {
  Stream stream;
  std::map<std::byte*, std::byte*> whole;                          // host block -> its device copy
  std::map<std::byte*, std::unique_ptr<SparseMemory>> with_pages;  // likewise
  std::vector<Transfer> transfers;
  GuardingAllocator allocator;

  void upload(const Transfer& transfer) const {
    check_cuda(cudaMemcpyAsync(transfer.device, transfer.host, transfer.bytes,
                               cudaMemcpyHostToDevice, native(stream)),
               "copying to the device");
  }

  void add(const Transfer& transfer) {
    if (transfer.bytes == 0) return;
    upload(transfer);
    transfers.push_back(transfer);
  }

  std::byte* copy_of(const MemoryBlock& block) {
    std::byte*& device = whole[block.begin];
    if (device == nullptr) {
      void* data = nullptr;
      check_cuda(cudaMallocAsync(&data, std::max<std::size_t>(block.bytes, 1), native(stream)),
                 "making a mirror");
      device = static_cast<std::byte*>(data);
      add({block.begin, device, block.bytes});
    }
    return device;
  }

  SparseMemory& pages_of(const MemoryBlock& block) {
    std::unique_ptr<SparseMemory>& pages = with_pages[block.begin];
    if (pages == nullptr) pages = std::make_unique<SparseMemory>(block.bytes);
    return *pages;
  }

  // Elements of `view`, which begins at `device`.
  void place_elements(const TensorView& view, const MemoryBlock& block, std::byte* device) {
    SparseMemory& pages = pages_of(block);
    const std::size_t size = dtype_size(view.dtype);
    for_pieces(view, [&](std::int64_t offset, std::int64_t elements) {
      const std::size_t begin = static_cast<std::size_t>(offset) * size;
      const std::size_t bytes = static_cast<std::size_t>(elements) * size;
      pages.back(static_cast<std::size_t>(device - pages.data()) + begin, bytes);
      add({view.as<std::byte>() + begin, device + begin, bytes});
    });
  }
};

Mirror::Mirror(Stream stream) : state_(std::make_unique<State>()) {
  state_->stream = stream;
  check_cuda(cudaSetDevice(kFirstDevice.index), "choosing the first device");
}

Mirror::~Mirror() {
  try {
    download();
    state_->allocator.check_and_free(state_->stream);
    for (const auto& [host, device] : state_->whole) {
      check_cuda(cudaFreeAsync(device, native(state_->stream)), "freeing a mirror");
    }
    check_cuda(cudaStreamSynchronize(native(state_->stream)), "freeing the mirrors");
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

TensorView Mirror::place(const TensorView& host) {
  TensorView there = host;
  there.device = kFirstDevice;
  if (host.data == nullptr) return there;
  auto* data = host.as<std::byte>();
  const MemoryBlock block =
      block_of(data).value_or(MemoryBlock{data, extent_bytes(host), MemoryKind::kWhole});
  std::byte* base =
      block.kind == MemoryKind::kWhole ? state_->copy_of(block) : state_->pages_of(block).data();
  std::byte* device = base + (data - block.begin);
  if (block.kind == MemoryKind::kPages) state_->place_elements(host, block, device);
  there.data = device;
  return there;
}

void Mirror::upload() {
  for (const Transfer& transfer : state_->transfers) state_->upload(transfer);
}

void Mirror::download() {
  for (const Transfer& transfer : state_->transfers) {
    check_cuda(cudaMemcpyAsync(transfer.host, transfer.device, transfer.bytes,
                               cudaMemcpyDeviceToHost, native(state_->stream)),
               "copying from the device");
  }
  check_cuda(cudaStreamSynchronize(native(state_->stream)), "waiting for the device");
}

Allocator& Mirror::allocator() { return state_->allocator; }

}  // namespace flashdsa::test

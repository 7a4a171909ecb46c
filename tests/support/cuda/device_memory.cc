#include "tests/support/cuda/device_memory.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

namespace flashdsa::test {
namespace {

void check_driver(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  throw std::runtime_error(
      fmt::format("cuda: {} failed: error {}", what, static_cast<int>(status)));
}

// The driver's functions are asked for at run time, so that the tests link without a driver.
template <typename Function>
Function driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found),
             name);
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(fmt::format("cuda: the driver has no {}", name));
  }
  return reinterpret_cast<Function>(function);
}

CUmemAllocationProp page_properties() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {kFirstDevice.index}};
  return properties;
}

std::size_t page_bytes() {
  const CUmemAllocationProp properties = page_properties();
  std::size_t bytes = 0;
  check_driver(
      driver_function<PFN_cuMemGetAllocationGranularity_v10020>("cuMemGetAllocationGranularity")(
          &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "asking for the size of a page");
  return bytes;
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(fmt::format("cuda: {} failed: {}", what, cudaGetErrorString(status)));
}

SparseMemory::SparseMemory(std::size_t bytes) {
  check_cuda(cudaSetDevice(kFirstDevice.index), "choosing the first device");
  check_cuda(cudaFree(nullptr), "making the device's context");
  page_bytes_ = page_bytes();
  const std::size_t inner = (bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  reserved_bytes_ = inner + 2 * page_bytes_;
  CUdeviceptr base = 0;
  check_driver(driver_function<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve")(
                   &base, reserved_bytes_, 0, 0, 0),
               "reserving addresses");
  base_ = base;
  data_ = reinterpret_cast<std::byte*>(base) + page_bytes_ + inner - bytes;
}

SparseMemory::~SparseMemory() {
  // Errors here follow from one that the test has seen.
  for (const auto& [page, handle] : handles_) {
    driver_function<PFN_cuMemUnmap_v10020>("cuMemUnmap")(base_ + page * page_bytes_, page_bytes_);
    driver_function<PFN_cuMemRelease_v10020>("cuMemRelease")(handle);
  }
  driver_function<PFN_cuMemAddressFree_v10020>("cuMemAddressFree")(base_, reserved_bytes_);
}

void SparseMemory::back(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t before = reinterpret_cast<CUdeviceptr>(data_) - base_;
  const std::size_t first = (before + offset) / page_bytes_;
  const std::size_t last = (before + offset + bytes - 1) / page_bytes_;
  for (std::size_t page = first; page <= last; ++page) {
    if (handles_.count(page) == 0) back_page(page);
  }
}

void SparseMemory::back_page(std::size_t page) {
  const CUmemAllocationProp properties = page_properties();
  CUmemGenericAllocationHandle handle = 0;
  check_driver(
      driver_function<PFN_cuMemCreate_v10020>("cuMemCreate")(&handle, page_bytes_, &properties, 0),
      "making a page");
  handles_[page] = handle;
  const CUdeviceptr place = base_ + page * page_bytes_;
  check_driver(driver_function<PFN_cuMemMap_v10020>("cuMemMap")(place, page_bytes_, 0, handle, 0),
               "mapping a page");
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(
      driver_function<PFN_cuMemSetAccess_v10020>("cuMemSetAccess")(place, page_bytes_, &access, 1),
      "opening a page");
}

void* GuardingAllocator::allocate(std::size_t bytes, Device device, Stream stream) noexcept {
  if (device != kFirstDevice) return nullptr;
  void* begin = nullptr;
  const std::size_t all = bytes + 2 * kBandBytes;
  if (cudaMallocAsync(&begin, all, native(stream)) != cudaSuccess ||
      cudaMemsetAsync(begin, 0xFF, all, native(stream)) != cudaSuccess) {
    cudaGetLastError();  // the caller learns of it by null
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  shares_.push_back({static_cast<std::byte*>(begin), bytes, false});
  return shares_.back().begin + kBandBytes;
}

void GuardingAllocator::deallocate(void* data, std::size_t bytes, Device, Stream) noexcept {
  const std::lock_guard lock(mutex_);
  const auto share = std::find_if(shares_.begin(), shares_.end(), [&](const Share& candidate) {
    return candidate.begin + kBandBytes == data && candidate.bytes == bytes;
  });
  if (share == shares_.end() || share->is_returned) {
    ADD_FAILURE() << bytes << " bytes came back that the allocator had not given";
    return;
  }
  share->is_returned = true;
}

void GuardingAllocator::check_and_free(Stream stream) {
  const std::lock_guard lock(mutex_);
  for (const Share& share : shares_) {
    EXPECT_TRUE(share.is_returned) << share.bytes << " bytes of scratch were not given back";
    std::byte bands[2][kBandBytes];
    const std::byte* behind = share.begin + kBandBytes + share.bytes;
    check_cuda(
        cudaMemcpyAsync(bands[0], share.begin, kBandBytes, cudaMemcpyDeviceToHost, native(stream)),
        "reading a guard band");
    check_cuda(
        cudaMemcpyAsync(bands[1], behind, kBandBytes, cudaMemcpyDeviceToHost, native(stream)),
        "reading a guard band");
    check_cuda(cudaFreeAsync(share.begin, native(stream)), "freeing scratch");
    check_cuda(cudaStreamSynchronize(native(stream)), "reading the guard bands");
    for (const auto& band : bands) {
      EXPECT_TRUE(std::all_of(band, band + kBandBytes,
                              [](std::byte byte) { return byte == std::byte{0xFF}; }))
          << "guard band " << (&band == bands ? "before " : "behind ") << share.bytes
          << " bytes of scratch";
    }
  }
  shares_.clear();
}

ArenaAllocator::ArenaAllocator(std::size_t bytes) : bytes_(bytes) {
  void* data = nullptr;
  check_cuda(cudaSetDevice(kFirstDevice.index), "choosing the first device");
  check_cuda(cudaMalloc(&data, bytes), "making an arena");
  data_ = static_cast<std::byte*>(data);
}

ArenaAllocator::~ArenaAllocator() { cudaFree(data_); }

void* ArenaAllocator::allocate(std::size_t bytes, Device device, Stream) noexcept {
  constexpr std::size_t kAlignment = 64;  // no more than Allocator promises
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (device != kFirstDevice || rounded > bytes_ - used_) return nullptr;
  std::byte* piece = data_ + used_;
  used_ += rounded;
  ++allocations_;
  return piece;
}

}  // namespace flashdsa::test

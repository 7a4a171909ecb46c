// The one file of the command that sees inside the library: the ceiling is that of its own kernel.

#include "tools/bench_peak.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string_view>
#include <thread>
#include <vector>

#include "attention/cpu/select_kernels.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa::tools {
namespace {

using attention::cpu::Kernels;
using attention::cpu::RowInputs;
using attention::cpu::Sizes;

constexpr std::int64_t kHeads = 64;
constexpr std::int64_t kKeys = 2048;
constexpr std::int64_t kChannels = 576;
constexpr double kProductFlop = 2.0 * kHeads * kKeys * kChannels;
constexpr int kRounds = 5;  // the best of them counts: a ceiling is not an average
constexpr std::chrono::milliseconds kRoundTime{100};

struct GpuPeak {
  std::string_view name;
  double cold, warm, sustained;  // GFLOP/s
};

constexpr std::array kGpuPeaks = {GpuPeak{"NVIDIA H200", 789e3, 680e3, 672e3}};

/// Operands, result and scratch of one thread's product.
class Product {
 public:
  explicit Product(const Kernels& kernels)
      : kernels_(kernels),
        sizes_{kHeads, kChannels, kKeys, 1.0f},
        q_(Tensor::host(DType::kBFloat16, {kHeads, kChannels})),
        keys_(Tensor::host(DType::kBFloat16, {kKeys, kChannels})),
        slots_(kKeys),
        scores_(Tensor::host(DType::kFloat32, {kKeys, kHeads})),
        scratch_(Tensor::host(DType::kUInt8,
                              {static_cast<std::int64_t>(kernels.product_scratch_bytes(sizes_))})) {
    std::iota(slots_.begin(), slots_.end(), 0);
    fill(q_);
    fill(keys_);
    row_.q = q_.view().as<std::uint16_t>();
    row_.q_head_stride = kChannels;
    row_.kv = keys_.view().as<std::uint16_t>();
    row_.kv_row_stride = kChannels;
    row_.keys = slots_.data();
    row_.key_count = kKeys;
  }

  void run() { kernels_.product(sizes_, row_, scores_.view().as<float>(), scratch_.view().data); }

 private:
  // Numbers of size 1, all different enough that no unit can idle on zeros.
  static void fill(const Tensor& tensor) {
    std::uint32_t state = 1;
    for (BFloat16& value : tensor.span<BFloat16>()) {
      state = state * 1664525u + 1013904223u;
      value = BFloat16(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
    }
  }

  const Kernels& kernels_;
  Sizes sizes_;
  Tensor q_, keys_;
  std::vector<std::int32_t> slots_;
  Tensor scores_, scratch_;
  RowInputs row_{};
};

// GFLOP/s of one thread over one round.
double run_round(Product& product) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  auto end = begin;
  double products = 0;
  for (; end - begin < kRoundTime; end = Clock::now()) {
    product.run();
    ++products;
  }
  return products * kProductFlop / std::chrono::duration<double>(end - begin).count() / 1e9;
}

}  // namespace

double measure_peak_gflops(int threads, SimdTarget simd) {
  Runtime runtime;
  runtime.simd = simd;
  const Kernels& kernels = attention::cpu::select_kernels(runtime);
  std::vector<std::unique_ptr<Product>> products;
  for (int i = 0; i < threads; ++i) products.push_back(std::make_unique<Product>(kernels));

  std::vector<std::vector<double>> rates(products.size(), std::vector<double>(kRounds));
  std::barrier start(static_cast<std::ptrdiff_t>(products.size()));
  {
    std::vector<std::jthread> workers;
    for (std::size_t i = 0; i < products.size(); ++i) {
      workers.emplace_back([&, i] {
        products[i]->run();  // warm
        for (double& rate : rates[i]) {
          start.arrive_and_wait();
          rate = run_round(*products[i]);
        }
      });
    }
  }
  double best = 0;
  for (std::size_t round = 0; round < kRounds; ++round) {
    double sum = 0;
    for (const auto& of_thread : rates) sum += of_thread[round];
    best = std::max(best, sum);
  }
  return best;
}

std::optional<double> gpu_peak_gflops(const std::string& name, Regime regime) {
  const auto found = std::find_if(kGpuPeaks.begin(), kGpuPeaks.end(),
                                  [&](const GpuPeak& peak) { return peak.name == name; });
  if (found == kGpuPeaks.end()) return std::nullopt;
  switch (regime) {
    case Regime::kCold:
      return found->cold;
    case Regime::kWarm:
      return found->warm;
    case Regime::kSustained:
      return found->sustained;
  }
  return std::nullopt;
}

}  // namespace flashdsa::tools

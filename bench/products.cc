// The plain products of the CPU backend by oneDNN and by our own kernel: which library should do
// the matrix work. One independent product per thread; items are FLOP, so items_per_second is
// FLOP/s. The figures stand in docs/benchmarks.md.

#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>

#include "attention/cpu/select_kernels.h"
#include "core/scratch.h"

namespace flashdsa {
namespace {

// C [m, n] FP32 = A [m, k] . B, B [k, n] or, transposed, [n, k].
struct Product {
  std::int64_t m, n, k;
  bool b_transposed;

  double flop() const { return 2.0 * static_cast<double>(m) * static_cast<double>(n * k); }
};

constexpr Product kScores = {64, 2048, 576, true};     // query heads times gathered keys
constexpr Product kValues = {64, 512, 2048, false};    // probabilities times values
constexpr Product kIndexer = {4096, 2048, 128, true};  // indexer heads of many rows times keys

void report(benchmark::State& state, const Product& product) {
  state.SetItemsProcessed(static_cast<std::int64_t>(product.flop()) * state.iterations());
}

#if DNNL_VERSION_MAJOR >= 3
dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const dnnl::memory::desc& a,
                                      const dnnl::memory::desc& b, const dnnl::memory::desc& c) {
  return {engine, a, b, c};
}
#else
dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const dnnl::memory::desc& a,
                                      const dnnl::memory::desc& b, const dnnl::memory::desc& c) {
  return {dnnl::matmul::desc(a, b, c), engine};
}
#endif

void one_dnn(benchmark::State& state, Product product, dnnl::memory::data_type type) {
  using dnnl::memory;
  omp_set_num_threads(1);  // of this thread's products
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc a({product.m, product.k}, type, memory::dims{product.k, 1});
  const memory::desc b(
      {product.k, product.n}, type,
      product.b_transposed ? memory::dims{1, product.k} : memory::dims{product.n, 1});
  const memory::desc c({product.m, product.n}, memory::data_type::f32, memory::dims{product.n, 1});
  memory left(a, engine), right(b, engine), result(c, engine);
  std::fill_n(static_cast<std::byte*>(left.get_data_handle()), a.get_size(), std::byte{0x3C});
  std::fill_n(static_cast<std::byte*>(right.get_data_handle()), b.get_size(), std::byte{0x3C});
  const dnnl::matmul matmul(describe(engine, a, b, c));
  for (auto _ : state) {
    matmul.execute(stream,
                   {{DNNL_ARG_SRC, left}, {DNNL_ARG_WEIGHTS, right}, {DNNL_ARG_DST, result}});
    stream.wait();
  }
  report(state, product);
}

// Our kernel has the shape of kScores; its right operand is BF16, its sums FP32.
void own_kernel(benchmark::State& state, SimdTarget target) {
  Runtime runtime;
  runtime.simd = target;
  const auto targets = simd_targets();
  if (std::find(targets.begin(), targets.end(), target) == targets.end()) {
    state.SkipWithError("this CPU does not have the instruction set");
    return;
  }
  namespace cpu = attention::cpu;
  const cpu::Kernels& kernels = cpu::select_kernels(runtime);
  const cpu::Sizes sizes = {64, 576, 2048, 1.0f};
  const Tensor q = Tensor::host(DType::kBFloat16, {kScores.m, kScores.k});
  const Tensor keys = Tensor::host(DType::kBFloat16, {kScores.n, kScores.k});
  const Tensor scores = Tensor::host(DType::kFloat32, {kScores.n, kScores.m});
  std::ranges::fill(q.span<BFloat16>(), BFloat16(0.5f));
  std::ranges::fill(keys.span<BFloat16>(), BFloat16(0.5f));
  const core::Scratch scratch(runtime, kernels.product_scratch_bytes(sizes));
  cpu::RowInputs row;
  row.q = q.view().as<std::uint16_t>();
  row.q_head_stride = kScores.k;
  row.kv = keys.view().as<std::uint16_t>();
  row.kv_row_stride = kScores.k;
  row.keys = nullptr;
  row.key_count = static_cast<std::int32_t>(kScores.n);
  for (auto _ : state) {
    kernels.product(sizes, row, scores.view().as<float>(), scratch.data());
  }
  report(state, kScores);
}

using dnnl::memory;
#define FLASHDSA_THREADS ->Threads(1)->Threads(2)->UseRealTime()
BENCHMARK_CAPTURE(one_dnn, scores_bf16, kScores, memory::data_type::bf16) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(one_dnn, values_bf16, kValues, memory::data_type::bf16) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(one_dnn, indexer_bf16, kIndexer, memory::data_type::bf16) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(one_dnn, scores_f32, kScores, memory::data_type::f32) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(own_kernel, scores_avx512bf16, SimdTarget::kAvx512Bf16) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(own_kernel, scores_avx512, SimdTarget::kAvx512) FLASHDSA_THREADS;
BENCHMARK_CAPTURE(own_kernel, scores_avx2, SimdTarget::kAvx2) FLASHDSA_THREADS;
#undef FLASHDSA_THREADS

}  // namespace
}  // namespace flashdsa

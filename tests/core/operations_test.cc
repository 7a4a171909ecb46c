// The list of operations says what the functions themselves answer.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <map>
#include <sstream>
#include <string>

#include "flashdsa/flashdsa.h"
#include "tests/support/engines.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

// Sizes of a call with one query row and one key.
struct Sizes {
  std::map<std::string, std::int64_t> by_symbol = {{"H", 1}, {"H_index", 1}, {"K", 1}, {"D", 512}};

  std::int64_t operator[](const char* symbol) const { return by_symbol.at(symbol); }
};

Tensor zeros(DType dtype, std::initializer_list<std::int64_t> shape) {
  const Tensor tensor = Tensor::host(dtype, shape);
  std::fill_n(tensor.view().as<std::byte>(), tensor.view().bytes(), std::byte{0});
  return tensor;
}

constexpr auto kReal = DType::kBFloat16;
constexpr auto kIndex = DType::kInt32;
constexpr auto kSingle = DType::kFloat32;

void build_metadata(const Sizes&, const Runtime& runtime) {
  const Tensor cu_seqlens = zeros(kIndex, {2});
  cu_seqlens.span<std::int32_t>()[1] = 1;
  PackedMetadataArgs args;
  args.cu_seqlens = cu_seqlens, args.total_key_tokens = 1;
  prepare_packed_metadata(args, runtime);
}

void select(const Sizes& sizes, const Runtime& runtime) {
  const Tensor q = zeros(kReal, {1, sizes["H_index"], 128}), k = zeros(kReal, {1, 128});
  const Tensor weights = zeros(kSingle, {1, sizes["H_index"]}), rows = zeros(kIndex, {1});
  const Tensor indices = zeros(kIndex, {1, 1, sizes["K"]});
  IndexerTopkArgs args;
  args.index_q = q, args.index_k = k, args.head_weights = weights;
  args.starts = rows, args.causal_lengths = rows, args.topk_indices = indices;
  indexer_topk(args, runtime);
}

void select_backward(const Sizes& sizes, const Runtime& runtime) {
  const Tensor q = zeros(kReal, {1, sizes["H_index"], 128}), k = zeros(kReal, {1, 128});
  const Tensor grad_q = zeros(kReal, {1, sizes["H_index"], 128}), grad_k = zeros(kReal, {1, 128});
  const Tensor weights = zeros(kSingle, {1, sizes["H_index"]});
  const Tensor grad_weights = zeros(kSingle, {1, sizes["H_index"]});
  const Tensor indices = zeros(kIndex, {1, 1, sizes["K"]}),
               scores = zeros(kSingle, {1, sizes["K"]});
  IndexerBackwardArgs args;
  args.index_q = q, args.index_k = k, args.head_weights = weights;
  args.topk_indices = indices, args.grad_scores = scores;
  args.grad_index_q = grad_q, args.grad_index_k = grad_k, args.grad_head_weights = grad_weights;
  indexer_backward(args, runtime);
}

void compact(const Sizes& sizes, const Runtime& runtime) {
  const Tensor indices = zeros(kIndex, {1, sizes["K"]}), lengths = zeros(kIndex, {1});
  compact_and_sort({indices, 1, indices, lengths}, runtime);
}

void build_plan(const Sizes& sizes, const Runtime& runtime) {
  const Tensor indices = zeros(kIndex, {1, 1, sizes["K"]});
  build_selection_plan({indices, {}, 1, sizes["H"]}, runtime);
}

struct Attention {
  Tensor q, kv, indices, out, lse;

  explicit Attention(const Sizes& sizes)
      : q(zeros(kReal, {1, sizes["H"], sizes["D"]})),
        kv(zeros(kReal, {1, 1, sizes["D"]})),
        indices(zeros(kIndex, {1, 1, sizes["K"]})),
        out(zeros(kReal, {1, sizes["H"], 512})),
        lse(zeros(kSingle, {1, sizes["H"]})) {}

  template <typename Args>
  Args args() const {
    Args result;
    result.q = q, result.kv = kv, result.topk_indices = indices, result.softmax_scale = 1;
    result.out = out, result.lse = lse;
    return result;
  }
};

void attend(const Sizes& sizes, const Runtime& runtime) {
  attention_forward(Attention(sizes).args<AttentionForwardArgs>(), runtime);
}

void attend_backward(const Sizes& sizes, const Runtime& runtime) {
  const Attention problem(sizes);
  const Tensor grad_out = zeros(kReal, {1, sizes["H"], 512});
  const Tensor grad_q = zeros(kReal, {1, sizes["H"], sizes["D"]});
  const Tensor grad_kv = zeros(kReal, {1, 1, sizes["D"]});
  auto args = problem.args<AttentionBackwardArgs>();
  args.grad_out = grad_out, args.grad_q = grad_q, args.grad_kv = grad_kv;
  attention_backward(args, runtime);
}

using Call = std::function<void(const Sizes&, const Runtime&)>;

const std::map<std::string, Call> kCalls = {
    {"prepare_packed_metadata", build_metadata}, {"indexer_topk", select},
    {"indexer_backward", select_backward},       {"compact_and_sort", compact},
    {"build_selection_plan", build_plan},        {"attention_forward", attend},
    {"attention_backward", attend_backward}};

TEST(Operations, AreTheFunctionsOfTheInterface) {
  std::map<std::string, Call> listed;
  for (const auto& operation : operations()) {
    listed.emplace(operation.name, kCalls.at(std::string(operation.name)));
  }
  EXPECT_EQ(listed.size(), kCalls.size());
}

// A backend of the host runs the call; one that is listed besides says what keeps it from host
// tensors, and one that is not listed never does the operation.
TEST(Operations, BackendsAreThoseThatDoTheWork) {
  for (const auto& operation : operations()) {
    for (const Backend backend :
         {Backend::kReference, Backend::kCpu, Backend::kSm90, Backend::kSm80}) {
      SCOPED_TRACE(std::string(operation.name) + " on " + std::string(backend_name(backend)));
      const bool listed = std::ranges::count(operation.backends, backend) == 1;
      Runtime runtime;
      runtime.backend = backend;
      std::string reason;
      try {
        kCalls.at(std::string(operation.name))({}, runtime);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
        reason = error.what();
      }
      const bool left_out = !kBuildHasCuda && backend == Backend::kSm90 &&
                            reason.ends_with("(not part of this build)");
      const bool on_device = reason.ends_with("the tensors are not on a CUDA device)");
      EXPECT_EQ(listed, reason.empty() || on_device || left_out) << reason;
    }
  }
}

void expect_takes(const Call& call, Sizes sizes, const std::string& symbol, std::int64_t size,
                  bool taken) {
  SCOPED_TRACE(symbol + " = " + std::to_string(size));
  sizes.by_symbol.at(symbol) = size;
  Runtime runtime;
  runtime.backend = Backend::kReference;
  try {
    call(sizes, runtime);
    EXPECT_TRUE(taken);
  } catch (const Error& error) {
    EXPECT_FALSE(taken) << error.what();
    EXPECT_EQ(error.code(), ErrorCode::kValue) << error.what();
  }
}

// "H in 1..128": both ends are taken, their neighbours refused. "D 576 or 512": nothing between.
TEST(Operations, SizesAreThoseThatTheFunctionsTake) {
  int ranges = 0, choices = 0;
  for (const auto& operation : operations()) {
    SCOPED_TRACE(operation.name);
    const Call& call = kCalls.at(std::string(operation.name));
    const std::string text(operation.sizes);
    std::istringstream clauses(text);
    for (std::string clause; std::getline(clauses >> std::ws, clause, ',');) {
      std::array<char, 16> symbol{};
      long long first = 0, second = 0;
      if (std::sscanf(clause.c_str(), "%15s in %lld..%lld", symbol.data(), &first, &second) == 3) {
        expect_takes(call, {}, symbol.data(), first - 1, false);
        expect_takes(call, {}, symbol.data(), first, true);
        expect_takes(call, {}, symbol.data(), second, true);
        expect_takes(call, {}, symbol.data(), second + 1, false);
        ++ranges;
      }
      if (std::sscanf(clause.c_str(), "%15s %lld or %lld", symbol.data(), &first, &second) == 3) {
        expect_takes(call, {}, symbol.data(), first, true);
        expect_takes(call, {}, symbol.data(), second, true);
        expect_takes(call, {}, symbol.data(), (first + second) / 2, false);
        ++choices;
      }
    }
  }
  EXPECT_EQ(ranges, 11);
  EXPECT_EQ(choices, 2);
}

}  // namespace
}  // namespace flashdsa::test

// Every refusal of the indexer: code, sentence word for word, outputs untouched.

#include <functional>
#include <limits>

#include "tests/indexer/fixture.h"
#include "tests/support/expect_error.h"
#include "tests/support/spoiled_view.h"

namespace flashdsa::test {
namespace {

// A good call: T_q = 3, H_index = 2, T_k = 10, K = 4. Each test spoils one thing.
class Call {
 public:
  Call() : problem_(integer_topk(3, 10, 2, 4, 191)), args(problem_.inputs()) {
    args.topk_indices = topk_indices_;
    args.topk_length = topk_length_;
    args.topk_scores = topk_scores_;
  }
  Call(const Call&) = delete;  // the arguments point into the object
  Call& operator=(const Call&) = delete;

  bool outputs_untouched() const {
    for (const HostTensor* tensor : {&topk_indices_, &topk_length_, &topk_scores_}) {
      if (!tensor->untouched() || !tensor->bands_intact()) return false;
    }
    return true;
  }

 private:
  TopkProblem problem_;
  HostTensor topk_indices_{DType::kInt32, {3, 1, 4}}, topk_length_{DType::kInt32, {3}};
  HostTensor topk_scores_{DType::kFloat32, {3, 4}};

 public:
  IndexerTopkArgs args;
};

struct Refusal {
  const char* name;
  std::function<void(IndexerTopkArgs&)> spoil;
  ErrorCode code;
  std::string sentence;
};

std::vector<Refusal> refusals() {
  using Args = IndexerTopkArgs;
  constexpr auto kType = ErrorCode::kType;
  constexpr auto kValue = ErrorCode::kValue;
  const std::string q =
      "index_q must be bfloat16 or float64 [T_q, H_index, 128] with T_q in 0..2147483646, H_index "
      "in 1..64, got ";
  const std::string k = "index_k must be bfloat16 [T_k, 128] with T_k in 0..2147483646, got ";
  const std::string weights =
      "head_weights must be float32 or bfloat16 [T_q, H_index] = [3, 2], got ";
  const std::string indices =
      "topk_indices must be int32 [T_q, 1, K] = [3, 1, K] with K in 1..2048, got ";
  const std::string layout =
      " must be contiguous in its last axis and have no negative stride, got ";
  return {
      {"QInFloat32", [](Args& a) { a.index_q = with_dtype(a.index_q, DType::kFloat32); }, kType,
       q + "float32 [3, 2, 128]"},
      {"QOfRank2", [](Args& a) { a.index_q = with_shape(a.index_q, {6, 128}); }, kValue,
       q + "bfloat16 [6, 128]"},
      {"QOf65Heads", [](Args& a) { a.index_q = with_shape(a.index_q, {3, 65, 128}); }, kValue,
       q + "bfloat16 [3, 65, 128]"},
      {"QWithoutHeads", [](Args& a) { a.index_q = with_shape(a.index_q, {3, 0, 128}); }, kValue,
       q + "bfloat16 [3, 0, 128]"},
      {"QOf64Channels", [](Args& a) { a.index_q = with_shape(a.index_q, {3, 4, 64}); }, kValue,
       q + "bfloat16 [3, 4, 64]"},
      {"QWithStridedChannels", [](Args& a) { a.index_q = with_strides(a.index_q, {512, 256, 2}); },
       kValue, "index_q" + layout + "bfloat16 [3, 2, 128] with strides [512, 256, 2]"},
      {"QWithNegativeStride", [](Args& a) { a.index_q = with_strides(a.index_q, {256, -128, 1}); },
       kValue, "index_q" + layout + "bfloat16 [3, 2, 128] with strides [256, -128, 1]"},
      {"NullQ", [](Args& a) { a.index_q = null(a.index_q); }, kValue,
       "index_q must point to 768 elements, got a null pointer"},
      {"KInFloat32", [](Args& a) { a.index_k = with_dtype(a.index_k, DType::kFloat32); }, kType,
       k + "float32 [10, 128]"},
      {"KInFloat64BesideBFloat16",
       [](Args& a) { a.index_k = with_dtype(a.index_k, DType::kFloat64); }, kType,
       k + "float64 [10, 128]"},
      {"KOfRank3", [](Args& a) { a.index_k = with_shape(a.index_k, {10, 1, 128}); }, kValue,
       k + "bfloat16 [10, 1, 128]"},
      {"KOfTooManyRows", [](Args& a) { a.index_k = with_shape(a.index_k, {2147483647, 128}); },
       kValue, k + "bfloat16 [2147483647, 128]"},
      {"NullK", [](Args& a) { a.index_k = null(a.index_k); }, kValue,
       "index_k must point to 1280 elements, got a null pointer"},
      {"KOnAnotherDevice", [](Args& a) { a.index_k.device = {DeviceKind::kCuda, 0}; }, kValue,
       "index_k must be on cpu as index_q is, got cuda:0"},
      {"WeightsInFloat64",
       [](Args& a) { a.head_weights = with_dtype(a.head_weights, DType::kFloat64); }, kType,
       weights + "float64 [3, 2]"},
      {"WeightsOfOtherHeads", [](Args& a) { a.head_weights = with_shape(a.head_weights, {3, 1}); },
       kValue, weights + "float32 [3, 1]"},
      {"WeightsTransposed", [](Args& a) { a.head_weights = with_strides(a.head_weights, {1, 3}); },
       kValue, "head_weights" + layout + "float32 [3, 2] with strides [1, 3]"},
      {"StartsInInt64", [](Args& a) { a.starts = with_dtype(a.starts, DType::kInt64); }, kType,
       "starts must be int32 [T_q] = [3], got int64 [3]"},
      // FAULTS: metadata of one batch used with tensors of another.
      {"StartsOfAnotherBatch", [](Args& a) { a.starts = with_shape(a.starts, {6}); }, kValue,
       "starts must be int32 [T_q] = [3], got int32 [6]"},
      {"StridedStarts", [](Args& a) { a.starts = with_strides(a.starts, {2}); }, kValue,
       "starts must be contiguous, got int32 [3] with strides [2]"},
      {"CausalLengthsInFloat32",
       [](Args& a) { a.causal_lengths = with_dtype(a.causal_lengths, DType::kFloat32); }, kType,
       "causal_lengths must be int32 [T_q] = [3], got float32 [3]"},
      {"CausalLengthsOfAnotherBatch",
       [](Args& a) { a.causal_lengths = with_shape(a.causal_lengths, {2}); }, kValue,
       "causal_lengths must be int32 [T_q] = [3], got int32 [2]"},
      {"TotalKeyTokensOfAnotherBatch", [](Args& a) { a.total_key_tokens = 11; }, kValue,
       "index_k must have total_key_tokens = 11 rows, got bfloat16 [10, 128]"},
      {"TopkIndicesInInt64",
       [](Args& a) { a.topk_indices = with_dtype(a.topk_indices, DType::kInt64); }, kType,
       indices + "int64 [3, 1, 4]"},
      {"TopkIndicesOfRank2", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 4}); },
       kValue, indices + "int32 [3, 4]"},
      {"WidthOf0", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 1, 0}); }, kValue,
       indices + "int32 [3, 1, 0]"},
      {"WidthOf2049", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 1, 2049}); },
       kValue, indices + "int32 [3, 1, 2049]"},
      {"StridedTopkIndices",
       [](Args& a) { a.topk_indices = with_strides(a.topk_indices, {8, 4, 1}); }, kValue,
       "topk_indices must be contiguous, got int32 [3, 1, 4] with strides [8, 4, 1]"},
      {"NullTopkIndices", [](Args& a) { a.topk_indices = null(a.topk_indices); }, kValue,
       "topk_indices must point to 12 elements, got a null pointer"},
      {"TopkLengthInInt64",
       [](Args& a) { a.topk_length = with_dtype(*a.topk_length, DType::kInt64); }, kType,
       "topk_length must be int32 [T_q] = [3], got int64 [3]"},
      {"TopkScoresInBFloat16",
       [](Args& a) { a.topk_scores = with_dtype(*a.topk_scores, DType::kBFloat16); }, kType,
       "topk_scores must be float32 [T_q, K] = [3, 4], got bfloat16 [3, 4]"},
      {"TopkScoresOfRank3", [](Args& a) { a.topk_scores = with_shape(*a.topk_scores, {3, 1, 4}); },
       kValue, "topk_scores must be float32 [T_q, K] = [3, 4], got float32 [3, 1, 4]"},
      {"TopkScoresOverTopkIndices", [](Args& a) { a.topk_scores->data = a.topk_indices.data; },
       kValue, "topk_indices must not overlap topk_scores, got memory that both use"},
      {"TopkLengthOverStarts", [](Args& a) { a.topk_length->data = a.starts.data; }, kValue,
       "topk_length must not overlap starts, got memory that both use"},
  };
}

class TopKRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(TopKRefuses, WithItsSentence) {
  Call call;
  GetParam().spoil(call.args);
  expect_error([&] { indexer_topk(call.args); }, GetParam().code,
               "indexer_topk: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

std::string refusal_name(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Of, TopKRefuses, ::testing::ValuesIn(refusals()), refusal_name);

TEST(TopKErrors, AGoodCallIsNotRefused) {
  Call call;
  EXPECT_NO_THROW(indexer_topk(call.args));
  EXPECT_FALSE(call.outputs_untouched());
}

TEST(TopKErrors, Float64IsRefusedByCpuAlone) {
  const TopkProblem problem = in_float64(integer_topk(1, 3, 1, 2, 192));
  Runtime cpu;
  cpu.backend = Backend::kCpu;
  expect_error(
      [&] { run_topk(problem, cpu); }, ErrorCode::kUnavailable,
      "indexer_topk: no backend takes this call with backend cpu (cpu: takes bfloat16 only)");
  EXPECT_TRUE(exactly_best(problem, run_topk(problem, {})));
}

class EmptyAllocator final : public Allocator {
 public:
  void* allocate(std::size_t, Device, Stream) noexcept override { return nullptr; }
  void deallocate(void*, std::size_t, Device, Stream) noexcept override {}
};

TEST(TopKErrors, AnEmptyAllocatorIsAMemoryError) {
  Call call;
  EmptyAllocator allocator;
  Runtime runtime;
  runtime.backend = Backend::kCpu;
  runtime.allocator = &allocator;
  try {
    indexer_topk(call.args, runtime);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMemory);
    EXPECT_EQ(std::string(error.what()).find("scratch: expected "), 0u) << error.what();
  }
  EXPECT_TRUE(call.outputs_untouched());
}

// ---------------------------------------------------------------- checking mode, SPEC section 7

class TopKChecking : public TopK {
 protected:
  void expect_data_error(std::int32_t start, std::int32_t length, const std::string& sentence) {
    Call call;
    call.args.starts.as<std::int32_t>()[1] = start;
    call.args.causal_lengths.as<std::int32_t>()[1] = length;
    Runtime checking = runtime();
    checking.check = true;
    expect_error([&] { run_placed(call.args, checking); }, ErrorCode::kData,
                 "indexer_topk: " + sentence);
    EXPECT_TRUE(call.outputs_untouched());
    EXPECT_NO_THROW(run_placed(call.args, runtime()));  // without the option it is tolerated
  }
};

INSTANTIATE_TEST_SUITE_P(Every, TopKChecking, ::testing::ValuesIn(engines()), engine_name);

TEST_P(TopKChecking, BadStartIsNamedWithItsRow) {
  expect_data_error(-1, 2, "starts row 1 must hold 0..10, got -1");
  expect_data_error(11, 0, "starts row 1 must hold 0..10, got 11");
  expect_data_error(std::numeric_limits<std::int32_t>::max(), 1,
                    "starts row 1 must hold 0..10, got 2147483647");
}

TEST_P(TopKChecking, BadLengthIsNamedWithItsRow) {
  expect_data_error(3, 8, "causal_lengths row 1 must hold 0..7, got 8");
  expect_data_error(3, -1, "causal_lengths row 1 must hold 0..7, got -1");
  expect_data_error(0, std::numeric_limits<std::int32_t>::max(),
                    "causal_lengths row 1 must hold 0..10, got 2147483647");
}

TEST_P(TopKChecking, GoodDataGivesTheSameBits) {
  TopkProblem problem = integer_topk(4, 30, 2, 6, 193);
  problem.set_rows({0, 30, 5, 29}, {30, 0, 25, 1});
  Runtime checking = runtime();
  checking.check = true;
  EXPECT_TRUE(same_topk_bits(run_topk(problem, checking), run_topk(problem, runtime())));
}

}  // namespace
}  // namespace flashdsa::test

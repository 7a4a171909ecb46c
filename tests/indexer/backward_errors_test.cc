// Every refusal of the indexer's gradient: code, sentence word for word, outputs untouched.

#include <functional>

#include "tests/indexer/fixture.h"
#include "tests/support/expect_error.h"
#include "tests/support/spoiled_view.h"

namespace flashdsa::test {
namespace {

// A good call: T_q = 3, H_index = 2, T_k = 10, K = 4. Each test spoils one thing.
class Call {
 public:
  Call() : problem_(make_problem()), args(backward_args(problem_, outputs_)) {}
  Call(const Call&) = delete;  // the arguments point into the object
  Call& operator=(const Call&) = delete;

  bool outputs_untouched() const {
    for (const HostTensor* tensor :
         {&outputs_.grad_index_q, &outputs_.grad_index_k, &outputs_.grad_head_weights}) {
      if (!tensor->untouched() || !tensor->bands_intact()) return false;
    }
    return true;
  }

 private:
  static ScoreGradientProblem make_problem() {
    ScoreGradientProblem problem = integer_score_gradients({3, 10, 2, 4}, 331);
    problem.set_lengths({4, 4, 4});
    return problem;
  }

  ScoreGradientProblem problem_;
  ScoreGradients outputs_ = empty_gradients(problem_);

 public:
  IndexerBackwardArgs args;
};

struct Refusal {
  const char* name;
  std::function<void(IndexerBackwardArgs&)> spoil;
  ErrorCode code;
  std::string sentence;
};

std::vector<Refusal> refusals() {
  using Args = IndexerBackwardArgs;
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
  const std::string scores = "grad_scores must be float32 [T_q, K] = [3, 4], got ";
  const std::string grad_q =
      "grad_index_q must be bfloat16 [T_q, H_index, 128] = [3, 2, 128], got ";
  const std::string grad_k =
      "grad_index_k must be bfloat16 or float32 [T_k, 128] = [10, 128], got ";
  const std::string grad_weights =
      "grad_head_weights must be float32 [T_q, H_index] = [3, 2], got ";
  const std::string layout =
      " must be contiguous in its last axis and have no negative stride, got ";
  return {
      {"QInFloat32", [](Args& a) { a.index_q = with_dtype(a.index_q, DType::kFloat32); }, kType,
       q + "float32 [3, 2, 128]"},
      {"QOf65Heads", [](Args& a) { a.index_q = with_shape(a.index_q, {3, 65, 128}); }, kValue,
       q + "bfloat16 [3, 65, 128]"},
      {"QWithoutHeads", [](Args& a) { a.index_q = with_shape(a.index_q, {3, 0, 128}); }, kValue,
       q + "bfloat16 [3, 0, 128]"},
      {"QWithStridedChannels", [](Args& a) { a.index_q = with_strides(a.index_q, {512, 256, 2}); },
       kValue, "index_q" + layout + "bfloat16 [3, 2, 128] with strides [512, 256, 2]"},
      {"NullQ", [](Args& a) { a.index_q = null(a.index_q); }, kValue,
       "index_q must point to 768 elements, got a null pointer"},
      {"KInFloat32", [](Args& a) { a.index_k = with_dtype(a.index_k, DType::kFloat32); }, kType,
       k + "float32 [10, 128]"},
      {"KOfTooManyRows", [](Args& a) { a.index_k = with_shape(a.index_k, {2147483647, 128}); },
       kValue, k + "bfloat16 [2147483647, 128]"},
      {"KOnAnotherDevice", [](Args& a) { a.index_k.device = {DeviceKind::kCuda, 0}; }, kValue,
       "index_k must be on cpu as index_q is, got cuda:0"},
      {"WeightsInFloat64",
       [](Args& a) { a.head_weights = with_dtype(a.head_weights, DType::kFloat64); }, kType,
       weights + "float64 [3, 2]"},
      {"WeightsOfOtherHeads", [](Args& a) { a.head_weights = with_shape(a.head_weights, {3, 1}); },
       kValue, weights + "float32 [3, 1]"},
      {"IndicesInInt64",
       [](Args& a) { a.topk_indices = with_dtype(a.topk_indices, DType::kInt64); }, kType,
       indices + "int64 [3, 1, 4]"},
      {"IndicesOfRank2", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 4}); },
       kValue, indices + "int32 [3, 4]"},
      {"WidthOf0", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 1, 0}); }, kValue,
       indices + "int32 [3, 1, 0]"},
      {"WidthOf2049", [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 1, 2049}); },
       kValue, indices + "int32 [3, 1, 2049]"},
      {"IndicesWithStridedSlots",
       [](Args& a) { a.topk_indices = with_strides(a.topk_indices, {8, 8, 2}); }, kValue,
       "topk_indices" + layout + "int32 [3, 1, 4] with strides [8, 8, 2]"},
      {"NullIndices", [](Args& a) { a.topk_indices = null(a.topk_indices); }, kValue,
       "topk_indices must point to 12 elements, got a null pointer"},
      {"LengthsInInt64", [](Args& a) { a.topk_length = with_dtype(*a.topk_length, DType::kInt64); },
       kType, "topk_length must be int32 [T_q] = [3], got int64 [3]"},
      {"LengthsOfAnotherBatch", [](Args& a) { a.topk_length = with_shape(*a.topk_length, {2}); },
       kValue, "topk_length must be int32 [T_q] = [3], got int32 [2]"},
      {"GradScoresInBFloat16",
       [](Args& a) { a.grad_scores = with_dtype(a.grad_scores, DType::kBFloat16); }, kType,
       scores + "bfloat16 [3, 4]"},
      {"GradScoresOfRank3", [](Args& a) { a.grad_scores = with_shape(a.grad_scores, {3, 1, 4}); },
       kValue, scores + "float32 [3, 1, 4]"},
      {"GradScoresOfAnotherWidth",
       [](Args& a) { a.grad_scores = with_shape(a.grad_scores, {3, 3}); }, kValue,
       scores + "float32 [3, 3]"},
      {"GradScoresExpanded", [](Args& a) { a.grad_scores = with_strides(a.grad_scores, {0, 0}); },
       kValue, "grad_scores" + layout + "float32 [3, 4] with strides [0, 0]"},
      {"GradQInFloat32",
       [](Args& a) { a.grad_index_q = with_dtype(a.grad_index_q, DType::kFloat32); }, kType,
       grad_q + "float32 [3, 2, 128]"},
      {"GradQOfOtherRows",
       [](Args& a) { a.grad_index_q = with_shape(a.grad_index_q, {2, 2, 128}); }, kValue,
       grad_q + "bfloat16 [2, 2, 128]"},
      {"GradKInFloat64",
       [](Args& a) { a.grad_index_k = with_dtype(a.grad_index_k, DType::kFloat64); }, kType,
       grad_k + "float64 [10, 128]"},
      {"GradKOfOtherKeys", [](Args& a) { a.grad_index_k = with_shape(a.grad_index_k, {9, 128}); },
       kValue, grad_k + "bfloat16 [9, 128]"},
      {"StridedGradK", [](Args& a) { a.grad_index_k = with_strides(a.grad_index_k, {256, 1}); },
       kValue, "grad_index_k must be contiguous, got bfloat16 [10, 128] with strides [256, 1]"},
      {"NullGradK", [](Args& a) { a.grad_index_k = null(a.grad_index_k); }, kValue,
       "grad_index_k must point to 1280 elements, got a null pointer"},
      {"GradWeightsInBFloat16",
       [](Args& a) { a.grad_head_weights = with_dtype(a.grad_head_weights, DType::kBFloat16); },
       kType, grad_weights + "bfloat16 [3, 2]"},
      {"GradWeightsOfOtherHeads",
       [](Args& a) { a.grad_head_weights = with_shape(a.grad_head_weights, {3, 1}); }, kValue,
       grad_weights + "float32 [3, 1]"},
      {"GradQOverQ", [](Args& a) { a.grad_index_q.data = a.index_q.data; }, kValue,
       "grad_index_q must not overlap index_q, got memory that both use"},
      {"GradWeightsOverGradScores", [](Args& a) { a.grad_head_weights.data = a.grad_scores.data; },
       kValue, "grad_head_weights must not overlap grad_scores, got memory that both use"},
  };
}

class IndexerBackwardRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(IndexerBackwardRefuses, WithItsSentence) {
  Call call;
  GetParam().spoil(call.args);
  expect_error([&] { indexer_backward(call.args); }, GetParam().code,
               "indexer_backward: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

std::string refusal_name(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Of, IndexerBackwardRefuses, ::testing::ValuesIn(refusals()), refusal_name);

TEST(IndexerBackwardErrors, AGoodCallIsNotRefused) {
  Call call;
  EXPECT_NO_THROW(indexer_backward(call.args));
  EXPECT_FALSE(call.outputs_untouched());
}

TEST(IndexerBackwardErrors, Float64IsRefusedByCpuAlone) {
  const ScoreGradientProblem problem = in_float64(integer_score_gradients({1, 3, 1, 2}, 332));
  Runtime cpu;
  cpu.backend = Backend::kCpu;
  expect_error(
      [&] { run_score_gradients(problem, cpu); }, ErrorCode::kUnavailable,
      "indexer_backward: no backend takes this call with backend cpu (cpu: takes bfloat16 only)");
  EXPECT_TRUE(gradients_within_spec(problem, run_score_gradients(problem, {})));
}

// ---------------------------------------------------------------- checking mode, SPEC section 7

class IndexerBackwardChecking : public IndexerBackward {
 protected:
  void expect_data_error(const std::function<void(IndexerBackwardArgs&)>& spoil,
                         const std::string& sentence) {
    Call call;
    spoil(call.args);
    Runtime checking = runtime();
    checking.check = true;
    expect_error([&] { run_placed(call.args, checking); }, ErrorCode::kData,
                 "indexer_backward: " + sentence);
    EXPECT_TRUE(call.outputs_untouched());
    EXPECT_NO_THROW(run_placed(call.args, runtime()));  // tolerated without the option
  }

  void expect_bad_slot(std::int32_t index, const std::string& sentence) {
    expect_data_error([=](auto& a) { a.topk_indices.template as<std::int32_t>()[4 + 2] = index; },
                      sentence);
  }
  void expect_bad_length(std::int32_t length, const std::string& sentence) {
    expect_data_error([=](auto& a) { a.topk_length->template as<std::int32_t>()[1] = length; },
                      sentence);
  }
};

INSTANTIATE_TEST_SUITE_P(Every, IndexerBackwardChecking, ::testing::ValuesIn(engines()),
                         engine_name);

TEST_P(IndexerBackwardChecking, BadIndexIsNamedWithItsRow) {
  expect_bad_slot(10, "topk_indices row 1 must hold -1..9 in slot 2, got 10");
  expect_bad_slot(-2, "topk_indices row 1 must hold -1..9 in slot 2, got -2");
}

TEST_P(IndexerBackwardChecking, BadLengthIsNamedWithItsRow) {
  expect_bad_length(5, "topk_length row 1 must hold 0..4, got 5");
  expect_bad_length(-1, "topk_length row 1 must hold 0..4, got -1");
}

TEST_P(IndexerBackwardChecking, GoodDataGivesTheSameBits) {
  ScoreGradientProblem problem = integer_score_gradients({3, 10, 2, 4}, 333);
  problem.set_row(0, {-1, 3, -1, 9});
  problem.set_row(1, {5, 99, 99, 99});
  problem.set_lengths({4, 1, 0});
  Runtime checking = runtime();
  checking.check = true;
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, checking),
                                 run_score_gradients(problem, runtime())));
}

}  // namespace
}  // namespace flashdsa::test

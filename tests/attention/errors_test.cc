// Every refusal of the attention: code, sentence word for word, outputs untouched.

#include <functional>
#include <limits>

#include "tests/attention/fixture.h"
#include "tests/support/expect_error.h"
#include "tests/support/spoiled_view.h"

namespace flashdsa::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A good call of each kind: T_q = 2, H = 4, T_k = 16, K = 8. Each test spoils one thing.
class Call {
 public:
  Call() : problem_(random_attention({.t_q = 2, .t_k = 16, .heads = 4, .topk = 8}, 121)) {
    problem_.set_lengths({8, 3});
    problem_.set_sink({0, 1, 2, 3});
    static_cast<SparseAttentionInputs&>(forward) = problem_.inputs();
    static_cast<SparseAttentionInputs&>(backward) = problem_.inputs();
    forward.out = out_;
    forward.lse = lse_;
    forward.max_logits = max_logits_;
    backward.out = given_out_;
    backward.lse = given_lse_;
    backward.grad_out = problem_.grad_out;
    backward.grad_q = grad_q_;
    backward.grad_kv = grad_kv_;
    backward.grad_attn_sink = grad_attn_sink_;
  }
  Call(const Call&) = delete;  // the arguments point into the object
  Call& operator=(const Call&) = delete;

  bool outputs_untouched() const {
    for (const HostTensor* tensor :
         {&out_, &lse_, &max_logits_, &grad_q_, &grad_kv_, &grad_attn_sink_}) {
      if (!tensor->untouched() || !tensor->bands_intact()) return false;
    }
    return true;
  }

  AttentionForwardArgs forward;
  AttentionBackwardArgs backward;

 private:
  AttentionProblem problem_;
  HostTensor out_{DType::kBFloat16, {2, 4, 512}}, lse_{DType::kFloat32, {2, 4}};
  HostTensor max_logits_{DType::kFloat32, {2, 4}};
  HostTensor given_out_{DType::kBFloat16, {2, 4, 512}}, given_lse_{DType::kFloat32, {2, 4}};
  HostTensor grad_q_{DType::kBFloat16, {2, 4, 576}}, grad_kv_{DType::kBFloat16, {16, 1, 576}};
  HostTensor grad_attn_sink_{DType::kFloat32, {4}};
};

TensorView on_cuda(TensorView view) {
  view.device = {DeviceKind::kCuda, 1};
  return view;
}

struct Refusal {
  const char* name;  // of the test
  std::function<void(Call&)> spoil;
  ErrorCode code;
  std::string sentence;  // behind "attention_forward: " or "attention_backward: "
};

std::string refusal_name(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

// Mistakes in what forward and backward share are made on both calls.
void on_both(Call& call, const std::function<void(SparseAttentionInputs&)>& spoil) {
  spoil(call.forward);
  spoil(call.backward);
}

Refusal shared(const char* name, std::function<void(SparseAttentionInputs&)> spoil, ErrorCode code,
               std::string sentence) {
  return {name, [spoil = std::move(spoil)](Call& call) { on_both(call, spoil); }, code,
          std::move(sentence)};
}

Refusal bad_scale(const char* name, double scale, const char* text) {
  return shared(
      name, [scale](SparseAttentionInputs& args) { args.softmax_scale = scale; }, ErrorCode::kValue,
      std::string("softmax_scale must be a positive finite FP32 number, got ") + text);
}

std::vector<Refusal> shared_refusals() {
  using Args = SparseAttentionInputs;
  constexpr auto kType = ErrorCode::kType;
  constexpr auto kValue = ErrorCode::kValue;
  const std::string q =
      "q must be bfloat16 or float64 [T_q, H, D] with T_q in 0..2147483646, H in 1..128, D 512 or "
      "576, got ";
  const std::string kv =
      "kv must be bfloat16 [T_k, 1, D] = [T_k, 1, 576] with T_k in 0..2147483646, got ";
  const std::string indices =
      "topk_indices must be int32 [T_q, 1, K] = [2, 1, K] with K in 1..2048, got ";
  return {
      shared(
          "QInFloat32", [](Args& a) { a.q = with_dtype(a.q, DType::kFloat32); }, kType,
          q + "float32 [2, 4, 576]"),
      shared(
          "QOfRank2", [](Args& a) { a.q = with_shape(a.q, {8, 576}); }, kValue,
          q + "bfloat16 [8, 576]"),
      shared(
          "QWithoutHeads", [](Args& a) { a.q = with_shape(a.q, {2, 0, 576}); }, kValue,
          q + "bfloat16 [2, 0, 576]"),
      shared(
          "QWith129Heads", [](Args& a) { a.q = with_shape(a.q, {2, 129, 576}); }, kValue,
          q + "bfloat16 [2, 129, 576]"),
      shared(
          "QOfHeadDim544", [](Args& a) { a.q = with_shape(a.q, {2, 4, 544}); }, kValue,
          q + "bfloat16 [2, 4, 544]"),
      shared(
          "QOfTooManyRows", [](Args& a) { a.q = with_shape(a.q, {2147483647, 4, 576}); }, kValue,
          q + "bfloat16 [2147483647, 4, 576]"),
      shared(
          "QWithStridedChannels", [](Args& a) { a.q = with_strides(a.q, {4608, 1152, 2}); }, kValue,
          "q must be contiguous in its last axis and have no negative stride, got bfloat16 [2, "
          "4, 576] with strides [4608, 1152, 2]"),
      shared(
          "QWithNegativeStride", [](Args& a) { a.q = with_strides(a.q, {-2304, 576, 1}); }, kValue,
          "q must be contiguous in its last axis and have no negative stride, got bfloat16 [2, "
          "4, 576] with strides [-2304, 576, 1]"),
      shared(
          "NullQ", [](Args& a) { a.q = null(a.q); }, kValue,
          "q must point to 4608 elements, got a null pointer"),

      shared(
          "KvInFloat64BesideBFloat16", [](Args& a) { a.kv = with_dtype(a.kv, DType::kFloat64); },
          kType, kv + "float64 [16, 1, 576]"),
      shared(
          "KvOfRank2", [](Args& a) { a.kv = with_shape(a.kv, {16, 576}); }, kValue,
          kv + "bfloat16 [16, 576]"),
      shared(
          "KvOfTwoHeads", [](Args& a) { a.kv = with_shape(a.kv, {8, 2, 576}); }, kValue,
          kv + "bfloat16 [8, 2, 576]"),
      shared(
          "KvOfAnotherHeadDim", [](Args& a) { a.kv = with_shape(a.kv, {16, 1, 512}); }, kValue,
          kv + "bfloat16 [16, 1, 512]"),
      shared(
          "KvOfTooManyRows", [](Args& a) { a.kv = with_shape(a.kv, {2147483647, 1, 576}); }, kValue,
          kv + "bfloat16 [2147483647, 1, 576]"),
      shared(
          "KvWithStridedChannels", [](Args& a) { a.kv = with_strides(a.kv, {1152, 1152, 2}); },
          kValue,
          "kv must be contiguous in its last axis and have no negative stride, got bfloat16 "
          "[16, 1, 576] with strides [1152, 1152, 2]"),
      shared(
          "KvOnAnotherDevice", [](Args& a) { a.kv = on_cuda(a.kv); }, kValue,
          "kv must be on cpu as q is, got cuda:1"),
      shared(
          "NullKv", [](Args& a) { a.kv = null(a.kv); }, kValue,
          "kv must point to 9216 elements, got a null pointer"),

      shared(
          "TopkIndicesInInt64",
          [](Args& a) { a.topk_indices = with_dtype(a.topk_indices, DType::kInt64); }, kType,
          indices + "int64 [2, 1, 8]"),
      shared(
          "TopkIndicesOfRank2",
          [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {2, 8}); }, kValue,
          indices + "int32 [2, 8]"),
      shared(
          "TopkIndicesPerHead",
          [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {2, 4, 8}); }, kValue,
          indices + "int32 [2, 4, 8]"),
      shared(
          "TopkIndicesOfOtherRows",
          [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {3, 1, 8}); }, kValue,
          indices + "int32 [3, 1, 8]"),
      shared(
          "TopkIndicesOfWidth0",
          [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {2, 1, 0}); }, kValue,
          indices + "int32 [2, 1, 0]"),
      shared(
          "TopkIndicesOfWidth2049",
          [](Args& a) { a.topk_indices = with_shape(a.topk_indices, {2, 1, 2049}); }, kValue,
          indices + "int32 [2, 1, 2049]"),
      shared(
          "NullTopkIndices", [](Args& a) { a.topk_indices = null(a.topk_indices); }, kValue,
          "topk_indices must point to 16 elements, got a null pointer"),

      shared(
          "TopkLengthInInt64",
          [](Args& a) { a.topk_length = with_dtype(*a.topk_length, DType::kInt64); }, kType,
          "topk_length must be int32 [T_q] = [2], got int64 [2]"),
      shared(
          "TopkLengthOfRank2", [](Args& a) { a.topk_length = with_shape(*a.topk_length, {2, 1}); },
          kValue, "topk_length must be int32 [T_q] = [2], got int32 [2, 1]"),
      shared(
          "TopkLengthOfOtherRows", [](Args& a) { a.topk_length = with_shape(*a.topk_length, {3}); },
          kValue, "topk_length must be int32 [T_q] = [2], got int32 [3]"),
      shared(
          "StridedTopkLength", [](Args& a) { a.topk_length = with_strides(*a.topk_length, {2}); },
          kValue, "topk_length must be contiguous, got int32 [2] with strides [2]"),
      shared(
          "AttnSinkInBFloat16",
          [](Args& a) { a.attn_sink = with_dtype(*a.attn_sink, DType::kBFloat16); }, kType,
          "attn_sink must be float32 [H] = [4], got bfloat16 [4]"),
      shared(
          "AttnSinkOfOtherHeads", [](Args& a) { a.attn_sink = with_shape(*a.attn_sink, {8}); },
          kValue, "attn_sink must be float32 [H] = [4], got float32 [8]"),
      shared(
          "NullAttnSink", [](Args& a) { a.attn_sink = null(*a.attn_sink); }, kValue,
          "attn_sink must point to 4 elements, got a null pointer"),

      bad_scale("ScaleOfZero", 0, "0"),
      bad_scale("NegativeScale", -0.5, "-0.5"),
      bad_scale("NanScale", std::numeric_limits<double>::quiet_NaN(), "nan"),
      bad_scale("InfiniteScale", kInf, "inf"),
      bad_scale("ScaleThatUnderflowsInFloat32", 1e-60, "1e-60"),
      bad_scale("ScaleThatOverflowsInFloat32", 1e60, "1e+60"),
  };
}

class AttentionRefusesShared : public ::testing::TestWithParam<Refusal> {};

TEST_P(AttentionRefusesShared, Forward) {
  Call call;
  GetParam().spoil(call);
  expect_error([&] { attention_forward(call.forward); }, GetParam().code,
               "attention_forward: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

TEST_P(AttentionRefusesShared, Backward) {
  Call call;
  GetParam().spoil(call);
  expect_error([&] { attention_backward(call.backward); }, GetParam().code,
               "attention_backward: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

INSTANTIATE_TEST_SUITE_P(Of, AttentionRefusesShared, ::testing::ValuesIn(shared_refusals()),
                         refusal_name);

std::vector<Refusal> forward_refusals() {
  constexpr auto kType = ErrorCode::kType;
  constexpr auto kValue = ErrorCode::kValue;
  const std::string out = "out must be bfloat16 [T_q, H, 512] = [2, 4, 512], got ";
  const std::string lse = "lse must be float32 [T_q, H] = [2, 4], got ";
  return {
      {"OutInFloat32", [](Call& c) { c.forward.out = with_dtype(c.forward.out, DType::kFloat32); },
       kType, out + "float32 [2, 4, 512]"},
      {"OutOf576Channels", [](Call& c) { c.forward.out = with_shape(c.forward.out, {2, 4, 576}); },
       kValue, out + "bfloat16 [2, 4, 576]"},
      {"StridedOut", [](Call& c) { c.forward.out = with_strides(c.forward.out, {4096, 1024, 1}); },
       kValue, "out must be contiguous, got bfloat16 [2, 4, 512] with strides [4096, 1024, 1]"},
      {"NullOut", [](Call& c) { c.forward.out = null(c.forward.out); }, kValue,
       "out must point to 4096 elements, got a null pointer"},
      {"LseInFloat64", [](Call& c) { c.forward.lse = with_dtype(c.forward.lse, DType::kFloat64); },
       kType, lse + "float64 [2, 4]"},
      {"LseTransposed", [](Call& c) { c.forward.lse = with_shape(c.forward.lse, {4, 2}); }, kValue,
       lse + "float32 [4, 2]"},
      {"StridedLse", [](Call& c) { c.forward.lse = with_strides(c.forward.lse, {1, 2}); }, kValue,
       "lse must be contiguous, got float32 [2, 4] with strides [1, 2]"},
      {"MaxLogitsInBFloat16",
       [](Call& c) { c.forward.max_logits = with_dtype(*c.forward.max_logits, DType::kBFloat16); },
       kType, "max_logits must be float32 [T_q, H] = [2, 4], got bfloat16 [2, 4]"},
      {"NullMaxLogits", [](Call& c) { c.forward.max_logits = null(*c.forward.max_logits); }, kValue,
       "max_logits must point to 8 elements, got a null pointer"},
      {"OutOverQ", [](Call& c) { c.forward.out.data = c.forward.q.data; }, kValue,
       "out must not overlap q, got memory that both use"},
      {"LseOverMaxLogits",
       [](Call& c) { c.forward.lse.data = c.forward.max_logits->as<float>() + 7; }, kValue,
       "lse must not overlap max_logits, got memory that both use"},
      {"MaxLogitsOverTopkIndices",
       [](Call& c) { c.forward.max_logits->data = c.forward.topk_indices.data; }, kValue,
       "max_logits must not overlap topk_indices, got memory that both use"},
  };
}

class AttentionForwardRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(AttentionForwardRefuses, WithItsSentence) {
  Call call;
  GetParam().spoil(call);
  expect_error([&] { attention_forward(call.forward); }, GetParam().code,
               "attention_forward: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

INSTANTIATE_TEST_SUITE_P(Of, AttentionForwardRefuses, ::testing::ValuesIn(forward_refusals()),
                         refusal_name);

std::vector<Refusal> backward_refusals() {
  constexpr auto kType = ErrorCode::kType;
  constexpr auto kValue = ErrorCode::kValue;
  const std::string grad_q = "grad_q must be bfloat16 [T_q, H, D] = [2, 4, 576], got ";
  const std::string grad_kv =
      "grad_kv must be bfloat16 or float32 [T_k, 1, D] = [16, 1, 576], got ";
  return {
      {"OutInFloat32",
       [](Call& c) { c.backward.out = with_dtype(c.backward.out, DType::kFloat32); }, kType,
       "out must be bfloat16 [T_q, H, 512] = [2, 4, 512], got float32 [2, 4, 512]"},
      {"LseOfOtherHeads", [](Call& c) { c.backward.lse = with_shape(c.backward.lse, {2, 3}); },
       kValue, "lse must be float32 [T_q, H] = [2, 4], got float32 [2, 3]"},
      {"LseWithStridedHeads",
       [](Call& c) { c.backward.lse = with_strides(c.backward.lse, {1, 2}); }, kValue,
       "lse must be contiguous in its last axis and have no negative stride, got float32 [2, 4] "
       "with strides [1, 2]"},
      {"GradOutInFloat32",
       [](Call& c) { c.backward.grad_out = with_dtype(c.backward.grad_out, DType::kFloat32); },
       kType, "grad_out must be bfloat16 [T_q, H, 512] = [2, 4, 512], got float32 [2, 4, 512]"},
      {"GradOutOfRank2",
       [](Call& c) { c.backward.grad_out = with_shape(c.backward.grad_out, {8, 512}); }, kValue,
       "grad_out must be bfloat16 [T_q, H, 512] = [2, 4, 512], got bfloat16 [8, 512]"},
      {"NullGradOut", [](Call& c) { c.backward.grad_out = null(c.backward.grad_out); }, kValue,
       "grad_out must point to 4096 elements, got a null pointer"},
      {"GradQInFloat32",
       [](Call& c) { c.backward.grad_q = with_dtype(c.backward.grad_q, DType::kFloat32); }, kType,
       grad_q + "float32 [2, 4, 576]"},
      {"GradQOf512Channels",
       [](Call& c) { c.backward.grad_q = with_shape(c.backward.grad_q, {2, 4, 512}); }, kValue,
       grad_q + "bfloat16 [2, 4, 512]"},
      {"StridedGradQ",
       [](Call& c) { c.backward.grad_q = with_strides(c.backward.grad_q, {576, 1152, 1}); }, kValue,
       "grad_q must be contiguous, got bfloat16 [2, 4, 576] with strides [576, 1152, 1]"},
      {"GradKvInFloat64",
       [](Call& c) { c.backward.grad_kv = with_dtype(c.backward.grad_kv, DType::kFloat64); }, kType,
       grad_kv + "float64 [16, 1, 576]"},
      {"GradKvOfOtherRows",
       [](Call& c) { c.backward.grad_kv = with_shape(c.backward.grad_kv, {15, 1, 576}); }, kValue,
       grad_kv + "bfloat16 [15, 1, 576]"},
      {"NullGradKv", [](Call& c) { c.backward.grad_kv = null(c.backward.grad_kv); }, kValue,
       "grad_kv must point to 9216 elements, got a null pointer"},
      {"GradAttnSinkInBFloat16",
       [](Call& c) {
         c.backward.grad_attn_sink = with_dtype(*c.backward.grad_attn_sink, DType::kBFloat16);
       },
       kType, "grad_attn_sink must be float32 [H] = [4], got bfloat16 [4]"},
      {"GradAttnSinkWithoutSink", [](Call& c) { c.backward.attn_sink.reset(); }, kValue,
       "grad_attn_sink needs attn_sink, got none"},
      {"GradKvOverKv", [](Call& c) { c.backward.grad_kv.data = c.backward.kv.data; }, kValue,
       "grad_kv must not overlap kv, got memory that both use"},
      {"GradQOverGradOut", [](Call& c) { c.backward.grad_out.data = c.backward.grad_q.data; },
       kValue, "grad_q must not overlap grad_out, got memory that both use"},
      {"GradQOverGradKv", [](Call& c) { c.backward.grad_q.data = c.backward.grad_kv.data; }, kValue,
       "grad_q must not overlap grad_kv, got memory that both use"},
      {"GradAttnSinkOverAttnSink",
       [](Call& c) { c.backward.grad_attn_sink->data = c.backward.attn_sink->data; }, kValue,
       "grad_attn_sink must not overlap attn_sink, got memory that both use"},
  };
}

class AttentionBackwardRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(AttentionBackwardRefuses, WithItsSentence) {
  Call call;
  GetParam().spoil(call);
  expect_error([&] { attention_backward(call.backward); }, GetParam().code,
               "attention_backward: " + GetParam().sentence);
  EXPECT_TRUE(call.outputs_untouched());
}

INSTANTIATE_TEST_SUITE_P(Of, AttentionBackwardRefuses, ::testing::ValuesIn(backward_refusals()),
                         refusal_name);

TEST(AttentionErrors, AGoodCallIsNotRefused) {
  Call call;
  EXPECT_NO_THROW(attention_forward(call.forward));
  EXPECT_FALSE(call.outputs_untouched());
}

TEST(AttentionErrors, SmallestAndLargestFloat32ScalesAreTaken) {
  for (const double scale : {1e-45, 3.4e38}) {
    Call call;
    call.forward.softmax_scale = scale;
    EXPECT_NO_THROW(attention_forward(call.forward)) << scale;
  }
}

TEST(AttentionErrors, Float64IsRefusedByCpuAlone) {
  AttentionProblem problem =
      in_float64(random_attention({.t_q = 1, .t_k = 2, .heads = 1, .topk = 2}, 122));
  Runtime cpu;
  cpu.backend = Backend::kCpu;
  expect_error(
      [&] { run_forward(problem, cpu); }, ErrorCode::kUnavailable,
      "attention_forward: no backend takes this call with backend cpu (cpu: takes bfloat16 "
      "only)");
}

TEST(AttentionErrors, AnInstructionSetThatThisCpuLacksIsUnavailable) {
  Call call;
  Runtime runtime;
  runtime.backend = Backend::kCpu;
  runtime.simd = static_cast<SimdTarget>(200);  // no CPU has it
  for (const bool forward : {true, false}) {
    try {
      forward ? attention_forward(call.forward, runtime)
              : attention_backward(call.backward, runtime);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
      EXPECT_EQ(std::string(error.what()).find("cpu: simd target unknown is not on this CPU"), 0u)
          << error.what();
    }
  }
  EXPECT_TRUE(call.outputs_untouched());
}

// An allocator that has nothing to give.
class EmptyAllocator final : public Allocator {
 public:
  void* allocate(std::size_t, Device, Stream) noexcept override { return nullptr; }
  void deallocate(void*, std::size_t, Device, Stream) noexcept override {}
};

TEST(AttentionErrors, AnEmptyAllocatorIsAMemoryError) {
  Call call;
  EmptyAllocator allocator;
  Runtime runtime;
  runtime.backend = Backend::kCpu;
  runtime.allocator = &allocator;
  for (const bool forward : {true, false}) {
    try {
      forward ? attention_forward(call.forward, runtime)
              : attention_backward(call.backward, runtime);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMemory);
      const std::string text = error.what();
      EXPECT_EQ(text.find("scratch: expected "), 0u) << text;
      EXPECT_NE(text.find(" bytes on cpu, got none"), std::string::npos) << text;
    }
  }
  EXPECT_TRUE(call.outputs_untouched());
}

// Counts what it hands out.
class CountingAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device, Stream) noexcept override {
    ++allocations;
    live += bytes;
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  void deallocate(void* data, std::size_t bytes, Device, Stream) noexcept override {
    live -= bytes;
    std::free(data);
  }

  int allocations = 0;
  std::size_t live = 0;
};

TEST(AttentionRuntime, ScratchComesFromTheCallersAllocatorAndGoesBack) {
  const AttentionProblem problem = random_attention({}, 123);
  const AttentionResult want = run_attention(problem, {});
  CountingAllocator allocator;
  Usage usage;
  Progress progress;
  Runtime runtime;
  runtime.backend = Backend::kCpu;
  runtime.allocator = &allocator;
  runtime.usage = &usage;
  runtime.progress = &progress;
  EXPECT_TRUE(same_result_bits(run_attention(problem, runtime), want));
  EXPECT_GT(allocator.allocations, 0);
  EXPECT_EQ(allocator.live, 0u);
  EXPECT_EQ(usage.scratch_bytes.load(), 0u);
  EXPECT_GT(usage.peak_scratch_bytes.load(), 0u);
  EXPECT_GT(progress.total.load(), 0);
  EXPECT_EQ(progress.done.load(), progress.total.load());
}

// ---------------------------------------------------------------- checking mode, SPEC section 7

class AttentionChecking : public Attention {
 protected:
  Runtime checking() const {
    Runtime result = repeatable();
    result.check = true;
    return result;
  }

  void expect_data_error(const std::function<void(Call&)>& spoil, const std::string& sentence) {
    Call call;
    spoil(call);
    expect_error([&] { run_placed(call.forward, checking()); }, ErrorCode::kData,
                 "attention_forward: " + sentence);
    expect_error([&] { run_placed(call.backward, checking()); }, ErrorCode::kData,
                 "attention_backward: " + sentence);
    EXPECT_TRUE(call.outputs_untouched());
  }

  void expect_bad_index(std::int32_t index, const std::string& got) {
    expect_data_error(
        [&](Call& call) { call.forward.topk_indices.as<std::int32_t>()[8 + 2] = index; },
        "topk_indices row 1 must hold -1..15 in slot 2, got " + got);
  }

  void expect_bad_length(std::int32_t length, const std::string& got) {
    expect_data_error([&](Call& call) { call.forward.topk_length->as<std::int32_t>()[1] = length; },
                      "topk_length row 1 must hold 0..8, got " + got);
  }
};

INSTANTIATE_TEST_SUITE_P(Every, AttentionChecking, ::testing::ValuesIn(engines()), engine_name);

TEST_P(AttentionChecking, BadIndexIsNamedWithItsRowAndSlot) {
  expect_bad_index(16, "16");
  expect_bad_index(-2, "-2");
  expect_bad_index(std::numeric_limits<std::int32_t>::max(), "2147483647");
  expect_bad_index(std::numeric_limits<std::int32_t>::min(), "-2147483648");
}

TEST_P(AttentionChecking, BadLengthIsNamedWithItsRow) {
  expect_bad_length(9, "9");
  expect_bad_length(-1, "-1");
}

TEST_P(AttentionChecking, HolesAndSlotsPastTheLengthPass) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 16, .heads = 2, .topk = 6}, 124);
  problem.set_row(0, {-1, 3, -1, 15, 0, -1});
  problem.set_row(1, {2, 5, 99, -7, 16, -2});
  problem.set_lengths({6, 2});
  EXPECT_TRUE(
      same_result_bits(run_attention(problem, checking()), run_attention(problem, repeatable())));
}

TEST_P(AttentionChecking, GoodDataGivesTheSameBits) {
  const AttentionProblem problem = random_attention({}, 125);
  EXPECT_TRUE(
      same_result_bits(run_attention(problem, checking()), run_attention(problem, repeatable())));
}

TEST_P(AttentionChecking, WithoutTheOptionTheSameDataIsIgnored) {
  Call call;
  call.forward.topk_indices.as<std::int32_t>()[10] = 16;
  call.forward.topk_length->as<std::int32_t>()[0] = 9;
  EXPECT_NO_THROW(run_placed(call.forward, runtime()));
}

}  // namespace
}  // namespace flashdsa::test

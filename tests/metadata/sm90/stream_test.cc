// Packed metadata as work on a stream: an exact build waits once, a capture-safe one never. SPEC
// sections 2 and 7.

#include <algorithm>

#include "tests/metadata/fixture.h"
#include "tests/support/cuda/counted_calls.h"
#include "tests/support/cuda/device_test.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

// Documents of 1..9 tokens in padded storage; all queries from the third on, a third of them
// masked.
PackedLayout layout_of(std::int32_t documents, std::uint64_t seed) {
  Random random(seed);
  PackedLayout layout;
  layout.cu_seqlens = {0};
  layout.cu_seqlens_padded = {0};
  for (std::int32_t d = 0; d < documents; ++d) {
    const auto real = static_cast<std::int32_t>(random.integer(1, 9));
    layout.cu_seqlens.push_back(layout.cu_seqlens.back() + real);
    layout.cu_seqlens_padded->push_back(10 * (d + 1));
  }
  layout.total_key_tokens = 10 * documents;
  layout.query_indices.emplace();
  layout.padding_mask.emplace();
  for (std::int64_t g = 2; g < layout.total_key_tokens; ++g) {
    layout.query_indices->push_back(g);
    layout.padding_mask->push_back(random.integer(0, 2) == 0 ? 1 : 0);
  }
  return layout;
}

// A layout whose tensors lie on the device.
class DeviceLayout {
 public:
  DeviceLayout(PackedLayout layout, Stream stream)
      : layout_(std::move(layout)), mirror_(stream), args_(placed(layout_.args(), mirror_)) {}

  PackedMetadataArgs args(bool capture_safe) const {
    PackedMetadataArgs result = args_;
    result.capture_safe = capture_safe;
    return result;
  }

  // The contents of another layout of the same shapes.
  void upload(const PackedLayout& layout) {
    std::ranges::copy(layout.cu_seqlens, layout_.cu_seqlens.begin());
    std::ranges::copy(*layout.cu_seqlens_padded, layout_.cu_seqlens_padded->begin());
    std::ranges::copy(*layout.query_indices, layout_.query_indices->begin());
    std::ranges::copy(*layout.padding_mask, layout_.padding_mask->begin());
    mirror_.upload();
  }

 private:
  PackedLayout layout_;
  Mirror mirror_;
  PackedMetadataArgs args_;
};

std::string capture_safe_text(PackedLayout layout) {
  PackedMetadataArgs args = layout.args();
  args.capture_safe = true;
  Runtime cpu;
  cpu.backend = Backend::kCpu;
  return text(fields_of(prepare_packed_metadata(args, cpu)));
}

class MetadataOnDevice : public DeviceTest {};

TEST_F(MetadataOnDevice, LargeLayoutsAreTheDefinition) {
  for (const std::int32_t documents : {300, 1024, 1025, 3000}) {
    const PackedLayout layout = layout_of(documents, 351);
    EXPECT_EQ(text(build(layout, runtime())), text(by_definition(layout)));
  }
}

TEST_F(MetadataOnDevice, GraphGivesWhatTheContentsSay) {
  const PackedLayout first = layout_of(40, 352), second = layout_of(40, 353);
  PackedLayout bad = second;
  bad.cu_seqlens[5] = bad.cu_seqlens[4];
  DeviceLayout device(first, stream());
  ArenaAllocator arena(std::size_t{1} << 26);
  Runtime on = runtime();
  on.allocator = &arena;
  prepare_packed_metadata(device.args(true), on);  // loads the kernels
  stream().wait();
  PackedMetadata metadata;
  const CapturedGraph graph(stream(),
                            [&] { metadata = prepare_packed_metadata(device.args(true), on); });
  for (const PackedLayout* layout :
       std::initializer_list<const PackedLayout*>{&first, &second, &bad}) {
    device.upload(*layout);
    graph.replay();
    const PackedMetadata got = on_host(metadata, runtime());
    EXPECT_EQ(text(fields_of(got)), capture_safe_text(*layout));
    EXPECT_EQ(got.status->span<std::int32_t>()[0],
              layout == &bad ? static_cast<int>(MetadataStatus::kCuSeqlensOrder) : 0);
  }
}

TEST_F(MetadataOnDevice, ExactBuildIsRefusedDuringCapture) {
  const DeviceLayout device(layout_of(4, 354), stream());
  ArenaAllocator arena(std::size_t{1} << 26);
  Runtime on = runtime();
  on.allocator = &arena;
  prepare_packed_metadata(device.args(true), on);
  const CapturedGraph graph(stream(), [&] {
    expect_error([&] { prepare_packed_metadata(device.args(false), on); }, ErrorCode::kValue,
                 "prepare_packed_metadata: capture_safe must be on while the stream is captured, "
                 "because an exact build waits for the device, got off");
    prepare_packed_metadata(device.args(true), on);  // the capture goes on
  });
  graph.replay();
  stream().wait();
}

TEST_F(MetadataOnDevice, CaptureSafeBuildIsAsynchronous) {
  const DeviceLayout device(layout_of(100, 355), stream());
  expect_asynchronous(runtime(),
                      [&](const Runtime& on) { prepare_packed_metadata(device.args(true), on); });
}

TEST_F(MetadataOnDevice, ExactBuildWaitsOnce) {
  const DeviceLayout device(layout_of(100, 356), stream());
  ArenaAllocator arena(std::size_t{1} << 26);
  Runtime on = runtime();
  on.allocator = &arena;
  const CountedCalls before = counted_calls();
  prepare_packed_metadata(device.args(false), on);
  EXPECT_EQ((counted_calls() - before), (CountedCalls{.waits = 1, .allocations = 0}));
  EXPECT_EQ(arena.returned(), arena.allocations());
}

TEST_F(MetadataOnDevice, TwoStreamsGiveTheBitsOfOne) {
  const OwnStream other;
  const PackedLayout first = layout_of(1000, 357), second = layout_of(300, 358);
  const DeviceLayout on_first(first, stream()), on_second(second, other);
  Runtime second_runtime = runtime();
  second_runtime.stream = other;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const PackedMetadata a = prepare_packed_metadata(on_first.args(true), runtime());
    const PackedMetadata b = prepare_packed_metadata(on_second.args(true), second_runtime);
    EXPECT_EQ(text(fields_of(on_host(a, runtime()))), capture_safe_text(first));
    EXPECT_EQ(text(fields_of(on_host(b, second_runtime))), capture_safe_text(second));
  }
}

TEST_F(MetadataOnDevice, ResultsLieOnTheDevice) {
  const DeviceLayout device(layout_of(10, 359), stream());
  for (const bool capture_safe : {false, true}) {
    const PackedMetadata got = prepare_packed_metadata(device.args(capture_safe), runtime());
    for (const Tensor* tensor : {&got.starts, &got.causal_lengths, &got.query_valid,
                                 &got.segment_cu_q, &got.segment_cu_k, &got.q_causal_offsets}) {
      EXPECT_EQ(tensor->view().device, kFirstDevice);
    }
  }
}

TEST_F(MetadataOnDevice, TensorsOfTwoDevicesAreRefused) {
  PackedLayout layout = layout_of(10, 360);
  const DeviceLayout device(layout, stream());
  PackedMetadataArgs args = device.args(true);
  args.padding_mask = layout.args().padding_mask;
  expect_error([&] { prepare_packed_metadata(args, runtime()); }, ErrorCode::kValue,
               "prepare_packed_metadata: padding_mask must be on cuda:0 as cu_seqlens is, got cpu");
}

}  // namespace
}  // namespace flashdsa::test

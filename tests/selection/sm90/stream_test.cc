// Canonical rows as work on a stream. SPEC section 7.

#include "tests/support/compare.h"
#include "tests/support/cuda/device_test.h"
#include "tests/support/placement.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kKeys = 500;

HostTensor random_indices(std::int64_t rows, std::int64_t width, std::uint64_t seed) {
  Random random(seed);
  HostTensor indices(DType::kInt32, {rows, width});
  random.fill_integers(indices, -100, kKeys + 100);
  return indices;
}

// A call and its results on the device; `download` brings the results to the host.
class DeviceRows {
 public:
  DeviceRows(HostTensor indices, Stream stream)
      : indices_(std::move(indices)),
        sorted_(DType::kInt32, indices_.shape()),
        lengths_(DType::kInt32, {indices_.size(0)}),
        mirror_(stream),
        args_(placed(CompactAndSortArgs{indices_, kKeys, sorted_, lengths_}, mirror_)) {}

  void run(const Runtime& runtime) const { compact_and_sort(args_, runtime); }

  const CompactAndSortArgs& args() const { return args_; }

  void upload(const HostTensor& indices) {
    for (std::int64_t i = 0; i < indices.elements(); ++i) indices_.set(i, indices.get(i));
    sorted_.fill(-7);
    lengths_.fill(-7);
    mirror_.upload();
  }

  // The results have the bits that the CPU backend gives.
  void expect_right(const HostTensor& indices) {
    mirror_.download();
    const HostTensor sorted(DType::kInt32, indices.shape());
    const HostTensor lengths(DType::kInt32, {indices.size(0)});
    Runtime cpu;
    cpu.backend = Backend::kCpu;
    compact_and_sort({indices, kKeys, sorted, lengths}, cpu);
    EXPECT_TRUE(same_bits(sorted_, sorted));
    EXPECT_TRUE(same_bits(lengths_, lengths));
    EXPECT_TRUE(sorted_.bands_intact() && lengths_.bands_intact());
  }

 private:
  HostTensor indices_, sorted_, lengths_;
  Mirror mirror_;
  CompactAndSortArgs args_;
};

class CompactAndSortOnDevice : public DeviceTest {};

TEST_F(CompactAndSortOnDevice, GraphGivesTheBitsOfTheCall) {
  for (const std::int64_t width : {7, 600, 2048}) {
    const HostTensor first = random_indices(30, width, 341),
                     second = random_indices(30, width, 342);
    DeviceRows rows(first, stream());
    rows.run(runtime());  // loads the kernel
    stream().wait();
    const CapturedGraph graph(stream(), [&] { rows.run(runtime()); });
    for (const HostTensor* indices : {&first, &second}) {
      rows.upload(*indices);
      graph.replay();
      rows.expect_right(*indices);
    }
  }
}

TEST_F(CompactAndSortOnDevice, TwoStreamsGiveTheBitsOfOne) {
  const OwnStream other;
  const HostTensor first = random_indices(300, 2048, 343), second = random_indices(500, 64, 344);
  DeviceRows on_first(first, stream()), on_second(second, other);
  Runtime second_runtime = runtime();
  second_runtime.stream = other;
  for (int repeat = 0; repeat < 20; ++repeat) {
    on_first.run(runtime());
    on_second.run(second_runtime);
  }
  on_first.expect_right(first);
  on_second.expect_right(second);
}

TEST_F(CompactAndSortOnDevice, IsAsynchronous) {
  const DeviceRows rows(random_indices(300, 2048, 345), stream());
  expect_asynchronous(runtime(), [&](const Runtime& on) { rows.run(on); });
}

TEST_F(CompactAndSortOnDevice, CheckingIsRefusedDuringCapture) {
  const DeviceRows rows(random_indices(3, 8, 346), stream());
  rows.run(runtime());
  expect_check_refused_in_capture("compact_and_sort", runtime(),
                                  [&](const Runtime& on) { rows.run(on); });
}

// Checking reads rows with gaps, and one row that stands for all.
TEST_F(CompactAndSortOnDevice, CheckingReadsStridedRows) {
  HostTensor indices = random_indices(4, 5, 347);
  indices.fill(3);
  indices.set({2, 4}, kKeys);
  Runtime checking = runtime();
  checking.check = true;
  const DeviceRows gaps(indices.with_strides({9, 1}), stream());
  expect_error([&] { gaps.run(checking); }, ErrorCode::kData,
               "compact_and_sort: indices row 2 must hold -1..499 in slot 4, got 500");
  const DeviceRows repeated(indices.rows(2, 1), stream());
  CompactAndSortArgs args = repeated.args();
  const DeviceRows outputs(random_indices(4, 5, 348), stream());
  args.indices.shape[0] = 4;
  args.indices.strides[0] = 0;
  args.sorted_indices = outputs.args().sorted_indices;
  args.lengths = outputs.args().lengths;
  expect_error([&] { compact_and_sort(args, checking); }, ErrorCode::kData,
               "compact_and_sort: indices row 0 must hold -1..499 in slot 4, got 500");
}

TEST_F(CompactAndSortOnDevice, TensorsOfTwoDevicesAreRefused) {
  const HostTensor indices = random_indices(3, 8, 349);
  const DeviceRows rows(indices, stream());
  CompactAndSortArgs args = rows.args();
  args.indices = indices;
  expect_error([&] { compact_and_sort(args, runtime()); }, ErrorCode::kValue,
               "compact_and_sort: sorted_indices must be on cpu as indices is, got cuda:0");
}

}  // namespace
}  // namespace flashdsa::test

// The selection plan as work on a stream: captured, beside another stream, without waiting. SPEC
// section 7.

#include "tests/support/cuda/device_test.h"
#include "tests/support/placement.h"
#include "tests/support/selection_plan.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kHeads[] = {8, 16, 32, 64};

// A selection on the device.
class DeviceSelection {
 public:
  DeviceSelection(const Selection& selection, Stream stream)
      : t_k_(selection.t_k),
        indices_(selection.indices()),
        mirror_(stream),
        there_(mirror_.place(indices_)) {}

  SelectionPlanArgs args(std::int64_t heads) const { return {there_, std::nullopt, t_k_, heads}; }

  // Another selection of the same sizes.
  void upload(const Selection& selection) {
    const HostTensor other = selection.indices();
    for (std::int64_t i = 0; i < other.elements(); ++i) indices_.set(i, other.get(i));
    mirror_.upload();
  }

 private:
  std::int64_t t_k_;
  HostTensor indices_;
  Mirror mirror_;
  TensorView there_;
};

Selection without_lengths(Selection selection) {
  selection.lengths.reset();
  return selection;
}

class PlanOnDevice : public DeviceTest {
 protected:
  void expect_plan(const SelectionPlan& got, const Selection& selection, std::int64_t heads,
                   const Runtime& on) const {
    EXPECT_EQ(text(on_host(got, on)), expected_text(selection, heads));
  }
};

TEST_F(PlanOnDevice, GraphGivesThePlanOfTheContents) {
  const Selection first = without_lengths(mixed_selection(300, 130, 900, 361)),
                  second = drifting_selection(300, 130, 900, 362);
  for (const std::int64_t heads : kHeads) {
    DeviceSelection device(first, stream());
    ArenaAllocator arena(std::size_t{1} << 26);
    Runtime on = runtime();
    on.allocator = &arena;
    build_selection_plan(device.args(heads), on);  // loads the kernels
    stream().wait();
    SelectionPlan plan;
    const CapturedGraph graph(stream(),
                              [&] { plan = build_selection_plan(device.args(heads), on); });
    for (const Selection* selection : {&first, &second, &first}) {
      device.upload(*selection);
      graph.replay();
      expect_plan(plan, *selection, heads, runtime());
    }
  }
}

TEST_F(PlanOnDevice, TwoStreamsGiveThePlanOfOne) {
  const OwnStream other;
  const Selection first = drifting_selection(500, 200, 2000, 363),
                  second = without_lengths(mixed_selection(200, 64, 300, 364));
  const DeviceSelection on_first(first, stream()), on_second(second, other);
  Runtime second_runtime = runtime();
  second_runtime.stream = other;
  for (int repeat = 0; repeat < 10; ++repeat) {
    const SelectionPlan a = build_selection_plan(on_first.args(8), runtime());
    const SelectionPlan b = build_selection_plan(on_second.args(16), second_runtime);
    expect_plan(a, first, 8, runtime());
    expect_plan(b, second, 16, second_runtime);
  }
}

TEST_F(PlanOnDevice, IsAsynchronous) {
  const DeviceSelection device(drifting_selection(300, 256, 2000, 365), stream());
  for (const std::int64_t heads : kHeads) {
    expect_asynchronous(runtime(),
                        [&](const Runtime& on) { build_selection_plan(device.args(heads), on); });
  }
}

TEST_F(PlanOnDevice, LiesOnTheDeviceAndScratchIsReturned) {
  const DeviceSelection device(drifting_selection(100, 64, 500, 366), stream());
  for (const std::int64_t heads : kHeads) {
    ArenaAllocator arena(std::size_t{1} << 24);
    Usage usage;
    Runtime on = runtime();
    on.allocator = &arena;
    on.usage = &usage;
    const SelectionPlan plan = build_selection_plan(device.args(heads), on);
    EXPECT_EQ(plan.storage.view().device, kFirstDevice);
    EXPECT_EQ(arena.returned(), arena.allocations() - 1);  // all but the plan
    EXPECT_EQ(usage.scratch_bytes, 0u);
    stream().wait();
  }
}

TEST_F(PlanOnDevice, CheckingIsRefusedDuringCapture) {
  const DeviceSelection device(drifting_selection(10, 64, 500, 367), stream());
  ArenaAllocator arena(std::size_t{1} << 24);
  Runtime on = runtime();
  on.allocator = &arena;
  build_selection_plan(device.args(8), on);
  expect_check_refused_in_capture("build_selection_plan", on, [&](const Runtime& with) {
    build_selection_plan(device.args(8), with);
  });
}

// A row of the size that training has, in every group size, and more groups than fit at once.
TEST_F(PlanOnDevice, LargePlansFollowTheRules) {
  const Selection near = drifting_selection(700, 2048, 8192, 368),
                  far = drifting_selection(200, 2048, 131072, 369);
  for (const Selection* selection : {&near, &far}) {
    const DeviceSelection device(*selection, stream());
    for (const std::int64_t heads : kHeads) {
      expect_plan(build_selection_plan(device.args(heads), runtime()), *selection, heads,
                  runtime());
    }
  }
}

}  // namespace
}  // namespace flashdsa::test

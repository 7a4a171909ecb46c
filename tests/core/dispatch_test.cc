// Which backend a call gets, and what it is told when there is none.

#include "core/dispatch.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

struct Call {
  std::string cpu_refusal;
  std::string reference_refusal;
  std::vector<Backend>* ran;
};

using Entry = core::Implementation<Call>;

const Entry kSm90{Backend::kSm90, [](const Call&) { return std::string("no such device"); },
                  [](const Call& call, const Runtime&) { call.ran->push_back(Backend::kSm90); }};
const Entry kCpu{Backend::kCpu, [](const Call& call) { return call.cpu_refusal; },
                 [](const Call& call, const Runtime&) { call.ran->push_back(Backend::kCpu); }};
const Entry kReference{
    Backend::kReference, [](const Call& call) { return call.reference_refusal; },
    [](const Call& call, const Runtime&) { call.ran->push_back(Backend::kReference); }};

// Runs a call over the three backends and returns who ran.
std::vector<Backend> run(Backend backend, const std::string& cpu_refusal = "",
                         const std::string& reference_refusal = "") {
  const std::vector<Entry> list = {kSm90, kCpu, kReference};
  std::vector<Backend> ran;
  Runtime runtime;
  runtime.backend = backend;
  core::dispatch<Call>("op", list, {cpu_refusal, reference_refusal, &ran}, runtime);
  return ran;
}

TEST(Dispatch, AutoTakesTheFirstThatTakesTheCall) {
  EXPECT_EQ(run(Backend::kAuto), std::vector{Backend::kCpu});
  EXPECT_EQ(run(Backend::kAuto, "float64"), std::vector{Backend::kReference});
}

TEST(Dispatch, NamedBackendIsTheOnlyChoice) {
  EXPECT_EQ(run(Backend::kCpu), std::vector{Backend::kCpu});
  EXPECT_EQ(run(Backend::kReference), std::vector{Backend::kReference});
  expect_error([] { run(Backend::kCpu, "it takes no float64"); }, ErrorCode::kUnavailable,
               "op: no backend takes this call with backend cpu (cpu: it takes no float64)");
}

TEST(Dispatch, ListsTheReasonOfEveryBackend) {
  expect_error([] { run(Backend::kAuto, "it takes no float64", "too slow"); },
               ErrorCode::kUnavailable,
               "op: no backend takes this call with backend auto (sm90: no such device; cpu: it "
               "takes no float64; reference: too slow)");
}

TEST(Dispatch, BackendOutsideTheListIsNotPartOfTheBuild) {
  expect_error([] { run(Backend::kSm80); }, ErrorCode::kUnavailable,
               "op: no backend takes this call with backend sm80 (not part of this build)");
}

TEST(Dispatch, EntryLeftOutOfTheBuildIsPassedOverAndStillListed) {
  const std::vector<Entry> list = {Entry{Backend::kSm90}, kCpu};
  std::vector<Backend> ran;
  core::dispatch<Call>("op", list, {"", "", &ran}, {});
  EXPECT_EQ(ran, std::vector{Backend::kCpu});
  Runtime runtime;
  runtime.backend = Backend::kSm90;
  expect_error([&] { core::dispatch<Call>("op", list, {"", "", &ran}, runtime); },
               ErrorCode::kUnavailable,
               "op: no backend takes this call with backend sm90 (not part of this build)");
  EXPECT_EQ(core::backends_of<Call>(list), (std::vector{Backend::kSm90, Backend::kCpu}));
}

TEST(Dispatch, BackendThatDoesNotDoTheOperationIsNotListed) {
  const std::vector<Entry> list = {Entry{Backend::kSm90, kSm90.refusal}, kReference};
  EXPECT_EQ(core::backends_of<Call>(list), std::vector{Backend::kReference});
}

TEST(Dispatch, ErrorOfTheBackendPassesUnchanged) {
  const auto throw_error = [](const Call&, const Runtime&) {
    throw Error(ErrorCode::kMemory, "scratch: expected 5 bytes on cpu, got none");
  };
  const auto fail = [&] {
    const std::vector<Entry> list = {
        {Backend::kCpu, [](const Call&) { return std::string(); }, throw_error}, kReference};
    std::vector<Backend> ran;
    core::dispatch<Call>("op", list, {"", "", &ran}, Runtime{});
  };
  expect_error(fail, ErrorCode::kMemory, "scratch: expected 5 bytes on cpu, got none");
}

TEST(ErrorType, CarriesEveryCodeAndItsSentence) {
  for (const ErrorCode code :
       {ErrorCode::kType, ErrorCode::kValue, ErrorCode::kData, ErrorCode::kUnavailable,
        ErrorCode::kMemory, ErrorCode::kDevice, ErrorCode::kInternal}) {
    expect_error([&] { throw Error(code, "op: a sentence"); }, code, "op: a sentence");
  }
}

TEST(ErrorType, IsARuntimeError) {
  try {
    throw Error(ErrorCode::kDevice, "cuda: gone");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "cuda: gone");
  }
}

}  // namespace
}  // namespace flashdsa::test

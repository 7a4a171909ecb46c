#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdint>
#include <sstream>
#include <utility>

namespace flashdsa::test {

/// Checks a RapidCheck property on `cases` random cases of a fixed seed. `property` is a callable
/// that draws its input with `*rc::gen::...` and reports by RC_ASSERT.
template <typename Property>
void check_property(int cases, std::uint64_t seed, Property&& property) {
  rc::detail::TestParams params;
  params.seed = seed;
  params.maxSuccess = cases;
  const auto result = rc::detail::checkTestable(std::forward<Property>(property),
                                                rc::detail::TestMetadata(), params);
  if (result.template is<rc::detail::SuccessResult>()) return;
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  ADD_FAILURE() << "seed " << seed << ": " << message.str();
}

}  // namespace flashdsa::test

#pragma once

#include <gtest/gtest.h>

#include <string>

#include "flashdsa/error.h"

namespace flashdsa::test {

/// Expects `call` to throw Error with this code and exactly this sentence.
template <typename Call>
void expect_error(const Call& call, ErrorCode code, const std::string& sentence) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << sentence;
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), sentence);
    EXPECT_EQ(error.code(), code) << sentence;
  }
}

}  // namespace flashdsa::test

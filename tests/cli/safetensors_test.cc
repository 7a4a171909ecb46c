// Headers that are not what they seem, and the strict readings of numbers.

#include "tools/safetensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "flashdsa/error.h"
#include "tools/parse.h"

namespace flashdsa::tools {
namespace {

std::string refusal(const std::string& json, std::uint64_t data_bytes) {
  try {
    parse_safetensors_header(json, data_bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kValue);
    return error.what();
  }
  return "";
}

std::string entry(const std::string& shape, const std::string& offsets,
                  const std::string& dtype = "\"I32\"") {
  return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

// Two tensors of bytes: `a` of 4, and `name` with `size` of them.
std::string two_entries(const std::string& name, int size, const std::string& offsets) {
  return R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},")" + name +
         R"(":{"dtype":"I8","shape":[)" + std::to_string(size) + R"(],"data_offsets":)" + offsets +
         "}}";
}

TEST(SafetensorsHeader, GoodHeadersPass) {
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_EQ(refusal(R"({"__metadata__":{}})", 0), "");
  EXPECT_EQ(refusal(entry("[2,2]", "[0,16]"), 16), "");
  EXPECT_EQ(refusal(entry("[]", "[0,4]"), 4), "");
  EXPECT_EQ(refusal(entry("[0]", "[0,0]"), 0), "");
  EXPECT_EQ(refusal(entry("[4611686018427387904,4,0]", "[0,0]"), 0), "");
  EXPECT_EQ(refusal(entry("[3]", "[0,3]", "\"F8_E4M3\""), 3), "");
  EXPECT_EQ(refusal(two_entries("b", 2, "[4,6]"), 6), "");
  EXPECT_EQ(refusal(" {}", 0), "the header must be a JSON object");  // as the format has it
}

TEST(SafetensorsHeader, ReadsNamesShapesAndStrings) {
  const SafetensorsHeader header = parse_safetensors_header(
      R"({"b":{"shape":[2],"data_offsets":[4,12],"dtype":"F32"},"__metadata__":{"k":"v\u00e9\n"},)"
      R"("a":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}})",
      12);
  EXPECT_EQ(header.metadata.at("k"), "v\xc3\xa9\n");
  EXPECT_EQ(header.entries.at("a").shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(header.entries.at("b").begin, 4U);
  EXPECT_EQ(header.entries.at("b").bytes, 8U);
  EXPECT_EQ(header.entries.at("b").dtype, DType::kFloat32);
}

TEST(SafetensorsHeader, RefusesEveryMalformedHeader) {
  const std::string deep(50000, '[');
  const std::vector<std::pair<std::string, std::uint64_t>> bad = {
      {"", 0},
      {"[]", 0},
      {"null", 0},
      {"{", 0},
      {"{}}", 0},
      {"{} {}", 0},
      {std::string("{}\0", 3), 0},
      {"{\"x\":" + deep, 0},
      {"{\"__metadata__\":" + deep, 0},
      {entry("[2,2]", deep), 16},
      {R"({"__metadata__":{"a":1}})", 0},
      {R"({"__metadata__":{"a":null}})", 0},
      {R"({"__metadata__":{"a":{}}})", 0},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0},
      {R"({"__metadata__":{},"__metadata__":{}})", 0},
      {R"({"__metadata__":"a"})", 0},
      {R"({"x":1})", 0},
      {R"({"x":{}})", 0},
      {R"({"x":{"dtype":"I32","shape":[1]}})", 4},
      {R"({"x":{"dtype":"I32","shape":[1],"data_offsets":[0,4],"more":1}})", 4},
      {R"({"x":{"dtype":"I32","dtype":"I32","shape":[1],"data_offsets":[0,4]}})", 4},
      {two_entries("a", 0, "[4,4]"), 4},
      {entry("[1]", "[0,4]", "\"i32\""), 4},
      {entry("[1]", "[0,4]", "\"\""), 4},
      {entry("[1]", "[0,4]", "7"), 4},
      {entry("[1]", "[0,4]", "null"), 4},
      {entry("1", "[0,4]"), 4},
      {entry("[[1]]", "[0,4]"), 4},
      {entry("[\"1\"]", "[0,4]"), 4},
      {entry("[1.0]", "[0,4]"), 4},
      {entry("[1e0]", "[0,4]"), 4},
      {entry("[-1]", "[0,4]"), 4},
      {entry("[true]", "[0,4]"), 4},
      {entry("[9223372036854775808]", "[0,4]"), 4},
      {entry("[4611686018427387905]", "[0,4]"), 4},
      {entry("[4294967296,4294967296]", "[0,0]"), 0},
      {entry("[1]", "[0]"), 4},
      {entry("[1]", "[0,4,4]"), 4},
      {entry("[1]", "{}"), 4},
      {entry("[1]", "[4,0]"), 4},
      {entry("[1]", "[0,4]"), 3},
      {entry("[1]", "[0,4]"), 5},
      {entry("[1]", "[1,5]"), 5},
      {entry("[1]", "[0,8]"), 8},
      {entry("[0]", "[9223372036854775807,9223372036854775807]"), 4},
      {two_entries("b", 4, "[2,6]"), 6},
      {two_entries("b", 4, "[6,10]"), 10},
      {two_entries("b", 0, "[2,2]"), 4},
      {"{\"\xff\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4},
  };
  for (const auto& [json, bytes] : bad) {
    EXPECT_NE(refusal(json, bytes), "") << json.substr(0, 200);
  }
}

TEST(SafetensorsHeader, SentenceNamesTheTensor) {
  EXPECT_EQ(refusal(entry("[3]", "[0,16]"), 16), "x: I32 [3] needs 12 bytes, data_offsets give 16");
  EXPECT_EQ(refusal(entry("[1]", "[0,4]", "\"I33\""), 4), "x: unknown dtype I33");
}

// The header is good, the bytes vanish before the tensor is loaded.
TEST(SafetensorsReader, FileThatShrinksAfterItWasOpenedIsNamed) {
  const std::string path = ::testing::TempDir() + "shrinking.safetensors";
  const Tensor numbers = Tensor::host(DType::kInt32, {4});
  for (std::int32_t& number : numbers.span<std::int32_t>()) number = 7;
  SafetensorsWriter writer;
  writer.add("numbers", numbers);
  writer.write(path);
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 6);
  try {
    reader.load("numbers");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kValue);
    EXPECT_EQ(error.what(), path + ": cannot read numbers: the file shrank, 6 bytes are missing");
  }
  std::filesystem::remove(path);
}

TEST(Parse, IntegersAreTheWholeText) {
  EXPECT_EQ(parse_integer("-12"), -12);
  EXPECT_EQ(parse_integer("9223372036854775807"), 9223372036854775807);
  for (const char* text : {"", "-", "+1", " 1", "1 ", "1.0", "0x1", "1e3", "9223372036854775808"}) {
    EXPECT_FALSE(parse_integer(text)) << text;
  }
}

TEST(Parse, RealsAreTheWholeText) {
  EXPECT_EQ(parse_real("0.0625"), 0.0625);
  EXPECT_EQ(parse_real("1e-3"), 1e-3);
  for (const char* text : {"", ".", "+1", " 1", "1 ", "0x1p3", "1,5", "1e999", "1f"}) {
    EXPECT_FALSE(parse_real(text)) << text;
  }
}

TEST(Parse, BooleansAreTwoWords) {
  EXPECT_EQ(parse_boolean("true"), true);
  EXPECT_EQ(parse_boolean("false"), false);
  for (const char* text : {"", "True", "1", "yes", "true "}) EXPECT_FALSE(parse_boolean(text));
}

}  // namespace
}  // namespace flashdsa::tools

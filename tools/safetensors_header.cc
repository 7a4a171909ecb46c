// The header of a safetensors file: JSON text to checked entries. Nothing of it is trusted.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "flashdsa/error.h"
#include "tools/safetensors.h"

namespace flashdsa::tools {
namespace {

struct FormatType {
  std::string_view name;
  std::uint64_t bytes;  // of one element
  std::optional<DType> dtype;
};

constexpr std::array kFormatTypes = {
    FormatType{"BOOL", 1, DType::kBool},     FormatType{"U8", 1, DType::kUInt8},
    FormatType{"I8", 1, DType::kInt8},       FormatType{"U16", 2, DType::kUInt16},
    FormatType{"I16", 2, DType::kInt16},     FormatType{"U32", 4, DType::kUInt32},
    FormatType{"I32", 4, DType::kInt32},     FormatType{"U64", 8, DType::kUInt64},
    FormatType{"I64", 8, DType::kInt64},     FormatType{"F16", 2, DType::kFloat16},
    FormatType{"BF16", 2, DType::kBFloat16}, FormatType{"F32", 4, DType::kFloat32},
    FormatType{"F64", 8, DType::kFloat64},   FormatType{"F8_E4M3", 1, std::nullopt},
    FormatType{"F8_E5M2", 1, std::nullopt},  FormatType{"F8_E8M0", 1, std::nullopt},
    FormatType{"C64", 8, std::nullopt},
};

[[noreturn]] void refuse(const std::string& sentence) { throw Error(ErrorCode::kValue, sentence); }

// Receives the header token by token. The only form it takes is
//   {"__metadata__": {name: string, ...}, tensor: {"dtype": string, "shape": [count, ...],
//    "data_offsets": [count, count]}, ...}
// so it never holds more than three open brackets, whatever the text nests.
class HeaderHandler final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kTop;
        return true;
      case Place::kTensor:
        place_ = Place::kField;
        return true;
      case Place::kMetadata:
        place_ = Place::kMetadataName;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& name) override {
    if (place_ == Place::kTop) return open_entry(name);
    if (place_ == Place::kMetadataName) return open_metadata_string(name);
    return open_field(name);  // names stand nowhere else
  }

  bool end_object() override {
    if (place_ == Place::kField) {
      if (!(has_dtype_ && has_shape_ && has_offsets_)) {
        refuse(fmt::format("{}: an entry must have dtype, shape and data_offsets", name_));
      }
      header_.entries.emplace(name_, std::move(entry_));
    }
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShape) {
      place_ = Place::kShapeItem;
    } else if (place_ == Place::kOffsets) {
      place_ = Place::kOffsetItem;
    } else {
      return unexpected("a list");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsetItem && offsets_.size() != 2) {
      refuse(fmt::format("{}: data_offsets must be two numbers, got {}", name_, offsets_.size()));
    }
    if (place_ == Place::kOffsetItem) set_offsets();
    place_ = Place::kField;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    constexpr auto kLargest =
        static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max());
    if (place_ == Place::kShapeItem && value <= kLargest) {
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::kOffsetItem && value <= kLargest) {
      if (offsets_.size() == 2) refuse(fmt::format("{}: data_offsets must be two numbers", name_));
      offsets_.push_back(value);
    } else {
      return unexpected(fmt::format("{}", value));
    }
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::kDType) {
      set_dtype(text);
      place_ = Place::kField;
    } else if (place_ == Place::kMetadataString) {
      header_.metadata.emplace(name_, text);
      place_ = Place::kMetadataName;
    } else {
      return unexpected("a string");
    }
    return true;
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return unexpected(fmt::format("{}", value));
  }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    refuse(fmt::format("the header is not JSON, at byte {} of it", position));
  }

  SafetensorsHeader take() {
    if (place_ != Place::kEnd) refuse("the header must be a JSON object");
    return std::move(header_);
  }

 private:
  // What the next token may be.
  enum class Place {
    kStart,           // the header's bracket
    kTop,             // name of an entry, or the end
    kMetadata,        // value of __metadata__
    kMetadataName,    // name inside __metadata__, or its end
    kMetadataString,  // value of such a name
    kTensor,          // value of a tensor's name
    kField,           // name inside a tensor's entry, or its end
    kDType,
    kShape,
    kShapeItem,
    kOffsets,
    kOffsetItem,
    kEnd,
  };

  bool open_entry(const std::string& name) {
    if (!names_.insert(name).second) refuse(fmt::format("{}: the header names it twice", name));
    if (name == "__metadata__") {
      place_ = Place::kMetadata;
      return true;
    }
    name_ = name;
    entry_ = {};
    offsets_.clear();
    has_dtype_ = has_shape_ = has_offsets_ = false;
    place_ = Place::kTensor;
    return true;
  }

  bool open_metadata_string(const std::string& name) {
    if (header_.metadata.count(name) != 0) {
      refuse(fmt::format("__metadata__: it names {} twice", name));
    }
    name_ = name;
    place_ = Place::kMetadataString;
    return true;
  }

  bool open_field(const std::string& name) {
    bool* seen = nullptr;
    if (name == "dtype") {
      seen = &has_dtype_;
      place_ = Place::kDType;
    } else if (name == "shape") {
      seen = &has_shape_;
      place_ = Place::kShape;
    } else if (name == "data_offsets") {
      seen = &has_offsets_;
      place_ = Place::kOffsets;
    } else {
      refuse(fmt::format("{}: an entry has dtype, shape and data_offsets, got {}", name_, name));
    }
    if (*seen) refuse(fmt::format("{}: its entry names {} twice", name_, name));
    *seen = true;
    return true;
  }

  void set_dtype(const std::string& text) {
    const auto type = std::find_if(kFormatTypes.begin(), kFormatTypes.end(),
                                   [&](const FormatType& known) { return known.name == text; });
    if (type == kFormatTypes.end()) refuse(fmt::format("{}: unknown dtype {}", name_, text));
    entry_.dtype_name = text;
    entry_.dtype = type->dtype;
  }

  void set_offsets() {
    if (offsets_[0] > offsets_[1]) {
      refuse(fmt::format("{}: data_offsets must ascend, got [{}, {}]", name_, offsets_[0],
                         offsets_[1]));
    }
    entry_.begin = offsets_[0];
    entry_.bytes = offsets_[1] - offsets_[0];
  }

  [[noreturn]] bool unexpected(const std::string& what) const {
    switch (place_) {
      case Place::kMetadata:
      case Place::kMetadataString:
        refuse(fmt::format("__metadata__ must map names to strings, got {}", what));
      case Place::kTensor:
        refuse(fmt::format("{}: its entry must be an object, got {}", name_, what));
      case Place::kDType:
        refuse(fmt::format("{}: dtype must be a string, got {}", name_, what));
      case Place::kShape:
      case Place::kShapeItem:
        refuse(fmt::format("{}: shape must be a list of sizes in 0..2^63-1, got {}", name_, what));
      case Place::kOffsets:
      case Place::kOffsetItem:
        refuse(fmt::format("{}: data_offsets must be two sizes in 0..2^63-1, got {}", name_, what));
      default:
        refuse(fmt::format("the header must be a JSON object, got {}", what));
    }
  }

  Place place_ = Place::kStart;
  std::set<std::string> names_;
  std::string name_;  // of the entry, or of the string of __metadata__, being read
  SafetensorsEntry entry_;
  std::vector<std::uint64_t> offsets_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  SafetensorsHeader header_;
};

// Bytes of a tensor, or nothing when they do not fit 63 bits.
std::optional<std::uint64_t> needed_bytes(const SafetensorsEntry& entry) {
  const auto type =
      std::find_if(kFormatTypes.begin(), kFormatTypes.end(),
                   [&](const FormatType& known) { return known.name == entry.dtype_name; });
  const auto& shape = entry.shape;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  auto bytes = static_cast<std::int64_t>(type->bytes);
  for (const std::int64_t size : shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  }
  return static_cast<std::uint64_t>(bytes);
}

void check_sizes(const SafetensorsHeader& header, std::uint64_t data_bytes) {
  for (const auto& [name, entry] : header.entries) {
    if (entry.begin + entry.bytes > data_bytes) {
      refuse(fmt::format("{}: data_offsets must lie in the {} data bytes, got [{}, {}]", name,
                         data_bytes, entry.begin, entry.begin + entry.bytes));
    }
    const auto needed = needed_bytes(entry);
    if (needed != entry.bytes) {
      refuse(fmt::format("{}: {} [{}] needs {} bytes, data_offsets give {}", name, entry.dtype_name,
                         fmt::join(entry.shape, ", "),
                         needed ? fmt::format("{}", *needed) : "more than 2^63", entry.bytes));
    }
  }
}

void check_cover(const SafetensorsHeader& header, std::uint64_t data_bytes) {
  std::vector<std::tuple<std::uint64_t, std::uint64_t, std::string_view>> spans;
  for (const auto& [name, entry] : header.entries) {
    spans.emplace_back(entry.begin, entry.begin + entry.bytes, name);
  }
  std::sort(spans.begin(), spans.end());
  std::uint64_t position = 0;
  for (const auto& [begin, end, name] : spans) {
    if (begin != position) {
      refuse(fmt::format("{}: its data {} what stands before it, expected byte {}, got {}", name,
                         begin < position ? "overlaps" : "leaves a gap to", position, begin));
    }
    position = end;
  }
  if (position != data_bytes) {
    refuse(fmt::format("{} bytes behind the last tensor belong to none", data_bytes - position));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes) {
  if (json.empty() || json.front() != '{') refuse("the header must be a JSON object");
  if (json.find('\0') != std::string_view::npos) {  // the parser takes it for the end of the text
    refuse("the header is not JSON: it holds a NUL byte");
  }
  HeaderHandler handler;
  nlohmann::json::sax_parse(json.begin(), json.end(), &handler);
  SafetensorsHeader header = handler.take();
  check_sizes(header, data_bytes);
  check_cover(header, data_bytes);
  return header;
}

}  // namespace flashdsa::tools

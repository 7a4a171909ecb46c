#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashdsa/tensor_view.h"
#include "tools/output_file.h"

namespace flashdsa::tools {

/// One tensor of a safetensors header.
struct SafetensorsEntry {
  std::string dtype_name;      ///< as the file spells it: "BF16"
  std::optional<DType> dtype;  ///< absent for types of the format that the library has no use for
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< of the data, counted from the end of the header
  std::uint64_t bytes = 0;
};

/// What a safetensors header says, checked as a whole.
struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> entries;
  std::map<std::string, std::string> metadata;
};

/// Parses a header's JSON and checks it against the `data_bytes` that follow it: names, dtypes,
/// shapes, offsets without gap or overlap, nothing behind the last tensor. Throws Error(kValue).
SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes);

/// A safetensors file being read: the header is checked as a whole when it is opened, tensors are
/// loaded one by one. SPEC section 9.
class SafetensorsReader {
 public:
  /// Reads and checks the header. Throws Error(kValue) with the path in it.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  bool has(std::string_view name) const;

  /// Shape of a tensor, without loading it; null when it is absent.
  const std::vector<std::int64_t>* shape(std::string_view name) const;

  /// Type of a tensor, without loading it; absent when the tensor is, or has no DType.
  std::optional<DType> dtype(std::string_view name) const;

  /// Loads a tensor into memory of its own. Throws Error(kValue) naming it when it is absent, has
  /// more than TensorView::kMaxRank axes or cannot be read, Error(kType) when its type has no
  /// DType.
  Tensor load(std::string_view name) const;

  /// The strings of __metadata__.
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const std::string& path() const { return path_; }

  /// True when `path` names this very file.
  bool is_same_file(const std::string& path) const;

 private:
  void read_at(void* data, std::uint64_t bytes, std::uint64_t offset, std::string_view what) const;
  [[noreturn]] void refuse(const std::string& sentence) const;

  std::string path_;
  int file_ = -1;
  std::uint64_t data_begin_ = 0;  // of the first tensor byte, from the file's start
  SafetensorsHeader header_;
};

/// Collects tensors and strings and writes them as one file that appears whole or not at all.
class SafetensorsWriter {
 public:
  void add(std::string name, const TensorView& tensor);  // contiguous; must outlive the writing
  void add_metadata(std::string name, std::string value);

  /// Writes all bytes but leaves `path` as it is until the result's commit(). Throws Error(kValue)
  /// with the path and the reason.
  OutputFile stage(const std::string& path) const;

  /// stage() and commit(). On failure nothing is left behind and an old file stays.
  void write(const std::string& path) const;

  /// Throws Error(kValue) when `write(path)` is bound to fail (missing or unwritable directory,
  /// path is a directory), so that a command can refuse before it computes.
  static void check_writable(const std::string& path) { OutputFile::check_writable(path); }

 private:
  std::vector<std::pair<std::string, TensorView>> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace flashdsa::tools

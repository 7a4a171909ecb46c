#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "flashdsa/tensor_view.h"

namespace flashdsa::tools {

/// A safetensors file being read: the header is checked as a whole when it is opened, tensors are
/// loaded one by one. SPEC section 9.
class SafetensorsReader {
 public:
  /// Reads and checks the header: length, JSON, names, dtypes, shapes, offsets without gap or
  /// overlap, nothing behind the last tensor. Throws Error(kValue) with the path in it.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  bool has(std::string_view name) const;

  /// Loads a tensor into memory of its own. Throws Error(kValue) naming it when it is absent, has
  /// more than TensorView::kMaxRank axes or cannot be read.
  Tensor load(std::string_view name) const;

  /// The strings of __metadata__.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

 private:
  struct Entry {
    DType dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t begin;  // of the data, from the file's start
    std::uint64_t bytes;
  };

  std::string path_;
  int file_ = -1;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::string> metadata_;
};

/// Collects tensors and strings and writes them as one file that appears whole or not at all.
class SafetensorsWriter {
 public:
  void add(std::string name, const TensorView& tensor);  // contiguous; must outlive write()
  void add_metadata(std::string name, std::string value);

  /// Writes beside `path` and renames; a device or pipe is written directly. On failure throws
  /// Error(kValue) with the path and the reason; nothing is left behind and an old file stays.
  void write(const std::string& path) const;

  /// Throws Error(kValue) when `write(path)` is bound to fail (missing or unwritable directory, path
  /// is a directory), so that a command can refuse before it computes.
  static void check_writable(const std::string& path);

 private:
  std::vector<std::pair<std::string, TensorView>> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace flashdsa::tools

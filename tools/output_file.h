#pragma once

#include <cstddef>
#include <string>

namespace flashdsa::tools {

/// A file that appears under its name whole or not at all: it is written beside its target and
/// renamed by commit(). A target that is not a regular file (a device, a pipe) is written directly.
/// Every failure is an Error(kValue) with the path and the system's reason.
class OutputFile {
 public:
  /// Opens the file. A target that exists keeps its permissions, a new one gets what umask leaves;
  /// a symbolic link stays and what it points to is written.
  explicit OutputFile(std::string path);
  ~OutputFile();  // removes what was not committed
  OutputFile(OutputFile&& other) noexcept;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  OutputFile& operator=(OutputFile&&) = delete;

  void write(const void* data, std::size_t bytes);

  /// Closes the file and gives it its name.
  void commit();

  /// Throws when opening `path` is bound to fail, without touching anything.
  static void check_writable(const std::string& path);

 private:
  void open_beside(const std::string& directory);
  void close_file();
  void discard() noexcept;

  std::string path_;       // as the caller wrote it
  std::string target_;     // what is replaced, links resolved
  std::string temporary_;  // empty: the target is written directly
  int file_ = -1;
};

/// Removes the temporary file of a writing process when it is interrupted or terminated, and turns
/// a closed pipe and an exceeded file size limit into write errors.
void install_signal_handlers();

}  // namespace flashdsa::tools

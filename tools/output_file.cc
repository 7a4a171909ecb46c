#include "tools/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "flashdsa/error.h"

namespace flashdsa::tools {
namespace {

constexpr int kMaxLinks = 40;          // as the kernel follows them
constexpr int kMaxTemporaries = 1000;  // names tried before giving up

// Path of the temporary file that a signal has to remove; empty when there is none. The handler has
// no argument, so this cannot be a member.
std::array<char, PATH_MAX> pending_temporary{};

void remember_temporary(const std::string& path) {
  if (path.size() >= pending_temporary.size()) return;
  std::copy(path.begin() + 1, path.end(), pending_temporary.begin() + 1);
  pending_temporary[path.size()] = '\0';
  pending_temporary[0] = path[0];  // last, so that the handler never sees half a path
}

void forget_temporary() { pending_temporary[0] = '\0'; }

extern "C" void remove_temporary_and_die(int signal) {
  if (pending_temporary[0] != '\0') unlink(pending_temporary.data());
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

[[noreturn]] void refuse(const std::string& path, const std::string& reason) {
  throw Error(ErrorCode::kValue, fmt::format("{}: cannot write the output file: {}", path, reason));
}

[[noreturn]] void refuse_errno(const std::string& path) { refuse(path, std::strerror(errno)); }

std::string directory_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// What `path` names after all symbolic links, whether or not it exists.
std::string resolve_links(const std::string& path) {
  std::filesystem::path target = path;
  std::error_code failed;
  for (int links = 0; std::filesystem::is_symlink(std::filesystem::symlink_status(target, failed));
       ++links) {
    if (links == kMaxLinks) refuse(path, std::strerror(ELOOP));
    const auto next = std::filesystem::read_symlink(target, failed);
    if (failed) refuse(path, failed.message());
    target = target.parent_path() / next;
  }
  return target.string();
}

// stat() of what exists under `path`, links followed; absent when nothing does.
std::optional<struct stat> status_of(const std::string& path) {
  struct stat status{};
  if (stat(path.c_str(), &status) == 0) return status;
  if (errno != ENOENT) refuse_errno(path);
  return std::nullopt;
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  check_writable(path_);
  const auto old = status_of(path_);
  if (old && !S_ISREG(old->st_mode)) {
    target_ = path_;
    file_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (file_ < 0) refuse_errno(path_);
    return;
  }
  target_ = resolve_links(path_);
  open_beside(directory_of(target_));
  if (old && fchmod(file_, old->st_mode & 07777) != 0) {
    const int reason = errno;
    discard();
    refuse(path_, std::strerror(reason));
  }
}

OutputFile::~OutputFile() { discard(); }

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      file_(std::exchange(other.file_, -1)) {}

void OutputFile::open_beside(const std::string& directory) {
  for (int attempt = 0; attempt < kMaxTemporaries; ++attempt) {
    const std::string name = fmt::format("{}/.flashdsa-{}-{}.tmp", directory, getpid(), attempt);
    remember_temporary(name);  // first, so that no signal finds a file that nobody remembers
    file_ = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ >= 0) {
      temporary_ = name;
      return;
    }
    const int reason = errno;
    forget_temporary();
    errno = reason;
    if (errno != EEXIST) refuse_errno(path_);
  }
  refuse(path_, "no free name for a temporary file beside it");
}

void OutputFile::write(const void* data, std::size_t bytes) {
  constexpr std::size_t kChunk = std::size_t{1} << 30;  // write() takes less than 2 GiB at once
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file_, next, std::min(bytes, kChunk));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse_errno(path_);
    if (written == 0) refuse(path_, "the device takes no more bytes");
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::commit() {
  close_file();
  if (temporary_.empty()) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) refuse_errno(path_);
  temporary_.clear();
  forget_temporary();
}

void OutputFile::close_file() {
  if (close(std::exchange(file_, -1)) != 0 && errno != EINTR) refuse_errno(path_);
}

void OutputFile::discard() noexcept {
  if (file_ >= 0) close(std::exchange(file_, -1));
  if (temporary_.empty()) return;
  unlink(temporary_.c_str());
  temporary_.clear();
  forget_temporary();
}

void OutputFile::check_writable(const std::string& path) {
  if (path.empty()) refuse(path, "the name is empty");
  const auto old = status_of(path);
  if (old && S_ISDIR(old->st_mode)) refuse(path, "it is a directory");
  if (old && access(path.c_str(), W_OK) != 0) refuse_errno(path);
  if (old && !S_ISREG(old->st_mode)) return;
  const std::string target = resolve_links(path);
  if (target.back() == '/') refuse(path, "it names a directory");
  const std::string directory = directory_of(target);
  const auto status = status_of(directory);
  if (!status) refuse(path, fmt::format("there is no directory {}", directory));
  if (!S_ISDIR(status->st_mode)) refuse(path, fmt::format("{} is not a directory", directory));
  if (access(directory.c_str(), W_OK | X_OK) != 0) refuse_errno(path);
}

void install_signal_handlers() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const bool ignored = std::signal(signal, remove_temporary_and_die) == SIG_IGN;
    if (ignored) std::signal(signal, SIG_IGN);  // as under nohup
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace flashdsa::tools

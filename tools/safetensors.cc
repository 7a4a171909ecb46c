#include "tools/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "flashdsa/error.h"

namespace flashdsa::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // as the format's own library has it
constexpr std::size_t kHeaderAlignment = 8;

std::string_view format_name(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "BOOL";
    case DType::kUInt8:
      return "U8";
    case DType::kInt8:
      return "I8";
    case DType::kUInt16:
      return "U16";
    case DType::kInt16:
      return "I16";
    case DType::kUInt32:
      return "U32";
    case DType::kInt32:
      return "I32";
    case DType::kUInt64:
      return "U64";
    case DType::kInt64:
      return "I64";
    case DType::kFloat16:
      return "F16";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat32:
      return "F32";
    case DType::kFloat64:
      return "F64";
  }
  return "";
}

// A size of 0 among huge ones makes the tensor empty, but strides would still leave 64 bits.
bool strides_fit(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  return std::none_of(shape.begin(), shape.end(), [&](std::int64_t size) {
    return __builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product);
  });
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block
  if (file_ < 0) refuse(fmt::format("cannot read the file: {}", std::strerror(errno)));
  try {
    struct stat status{};
    if (fstat(file_, &status) != 0) refuse(std::strerror(errno));
    if (!S_ISREG(status.st_mode)) refuse("it must be a regular file");
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size < kLengthBytes) {
      refuse(fmt::format("a safetensors file begins with 8 bytes of header length, got {} bytes",
                         size));
    }
    std::uint64_t length = 0;
    read_at(&length, kLengthBytes, 0, "header length");
    if (length > kMaxHeader || length > size - kLengthBytes) {
      refuse(fmt::format("the header must be at most {} bytes, its length says {}",
                         std::min(kMaxHeader, size - kLengthBytes), length));
    }
    std::string json(length, '\0');
    read_at(json.data(), length, kLengthBytes, "header");
    data_begin_ = kLengthBytes + length;
    header_ = parse_safetensors_header(json, size - data_begin_);
  } catch (const Error& error) {
    close(file_);
    if (std::string_view(error.what()).starts_with(path_ + ": ")) throw;
    throw Error(error.code(), fmt::format("{}: {}", path_, error.what()));
  } catch (...) {
    close(file_);
    throw;
  }
}

SafetensorsReader::~SafetensorsReader() { close(file_); }

bool SafetensorsReader::has(std::string_view name) const {
  return header_.entries.find(name) != header_.entries.end();
}

const std::vector<std::int64_t>* SafetensorsReader::shape(std::string_view name) const {
  const auto found = header_.entries.find(name);
  return found == header_.entries.end() ? nullptr : &found->second.shape;
}

std::optional<DType> SafetensorsReader::dtype(std::string_view name) const {
  const auto found = header_.entries.find(name);
  return found == header_.entries.end() ? std::nullopt : found->second.dtype;
}

Tensor SafetensorsReader::load(std::string_view name) const {
  const auto found = header_.entries.find(name);
  if (found == header_.entries.end()) refuse(fmt::format("tensor {} is missing", name));
  const SafetensorsEntry& entry = found->second;
  if (!entry.dtype) {
    throw Error(ErrorCode::kType, fmt::format("{}: tensor {} has dtype {}, which no command takes",
                                              path_, name, entry.dtype_name));
  }
  if (entry.shape.size() > TensorView::kMaxRank || !strides_fit(entry.shape)) {
    refuse(fmt::format("tensor {} must have at most {} axes and 2^63 elements, got {} axes", name,
                       TensorView::kMaxRank, entry.shape.size()));
  }
  Tensor tensor = Tensor::host(*entry.dtype, entry.shape);
  read_at(tensor.view().data, entry.bytes, data_begin_ + entry.begin, name);
  if (*entry.dtype == DType::kBool) {
    const auto bytes = tensor.span<std::uint8_t>();
    const auto bad = std::find_if(bytes.begin(), bytes.end(), [](auto byte) { return byte > 1; });
    if (bad != bytes.end()) {
      refuse(fmt::format("tensor {} must hold bytes 0 or 1, got {} in element {}", name, *bad,
                         bad - bytes.begin()));
    }
  }
  return tensor;
}

bool SafetensorsReader::is_same_file(const std::string& path) const {
  struct stat mine{};
  struct stat other{};
  return fstat(file_, &mine) == 0 && stat(path.c_str(), &other) == 0 &&
         mine.st_dev == other.st_dev && mine.st_ino == other.st_ino;
}

void SafetensorsReader::read_at(void* data, std::uint64_t bytes, std::uint64_t offset,
                                std::string_view what) const {
  constexpr std::uint64_t kChunk = std::uint64_t{1} << 30;  // pread() takes less than 2 GiB at once
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = pread(file_, next, std::min(bytes, kChunk), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(fmt::format("cannot read {}: {}", what, std::strerror(errno)));
    if (got == 0) {
      refuse(fmt::format("cannot read {}: the file shrank, {} bytes are missing", what, bytes));
    }
    next += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

void SafetensorsReader::refuse(const std::string& sentence) const {
  throw Error(ErrorCode::kValue, fmt::format("{}: {}", path_, sentence));
}

void SafetensorsWriter::add(std::string name, const TensorView& tensor) {
  tensors_.emplace_back(std::move(name), tensor);
}

void SafetensorsWriter::add_metadata(std::string name, std::string value) {
  metadata_.insert_or_assign(std::move(name), std::move(value));
}

OutputFile SafetensorsWriter::stage(const std::string& path) const {
  auto tensors = tensors_;  // widest elements first, so that every tensor is aligned
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return dtype_size(a.second.dtype) > dtype_size(b.second.dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata_.empty()) header["__metadata__"] = metadata_;
  std::uint64_t offset = 0;
  for (const auto& [name, view] : tensors) {
    header[name] = {
        {"dtype", format_name(view.dtype)},
        {"shape", std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank)},
        {"data_offsets", {offset, offset + view.bytes()}}};
    offset += view.bytes();
  }
  std::string json = header.dump();
  json.append((kHeaderAlignment - json.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  const std::uint64_t length = json.size();

  OutputFile file(path);
  file.write(&length, kLengthBytes);
  file.write(json.data(), json.size());
  for (const auto& [name, view] : tensors) file.write(view.data, view.bytes());
  return file;
}

void SafetensorsWriter::write(const std::string& path) const { stage(path).commit(); }

}  // namespace flashdsa::tools

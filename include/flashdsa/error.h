#pragma once

#include <stdexcept>
#include <string>

#include "flashdsa/api.h"

namespace flashdsa {

/// What kind of refusal an `Error` is. The Python package raises the exception named behind each
/// code, the CLI ends with the exit code named there.
enum class ErrorCode {
  kType,         ///< wrong dtype; TypeError, exit 2
  kValue,        ///< wrong shape, stride, device, range or content; ValueError, exit 2
  kData,         ///< bad tensor data found by the checking mode; ValueError, exit 2
  kUnavailable,  ///< no backend takes the call; RuntimeError, exit 3
  kMemory,       ///< an allocation failed; RuntimeError, exit 4
  kDevice,       ///< a device or its driver failed; RuntimeError, exit 4
  kInternal,     ///< an invariant of the library is broken; RuntimeError, exit 4
};

/// The one exception type of the library. `what()` is one sentence that names the operation, the
/// argument, what was expected and what came. When a public function throws it, no output tensor
/// has been written.
class FLASHDSA_API Error : public std::runtime_error {
 public:
  /// A refusal of kind `code`; `message` is what `what()` says.
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  /// The kind of refusal.
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace flashdsa

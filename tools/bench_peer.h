#pragma once

#include <memory>
#include <string>

#include "tools/bench_operations.h"

namespace flashdsa::tools {

/// Another library's attention, which a shared library makes callable: bench/peer.h.
class PeerLibrary {
 public:
  /// Throws Error(kValue) when `path` is no such library.
  explicit PeerLibrary(const std::string& path);

  const std::string& name() const { return name_; }  ///< "name@version"

  /// Whether it has this operation at all.
  bool has(std::string_view operation) const;

  /// Its calls, in the place of the library's. They throw Error(kUnavailable) for a problem that it
  /// does not take.
  AttentionCalls calls() const;

 private:
  std::shared_ptr<void> library_;
  std::string name_;
};

}  // namespace flashdsa::tools

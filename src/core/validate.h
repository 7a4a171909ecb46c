#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flashdsa/error.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa::core {

/// One axis of an expected shape: a fixed size, or a symbol of SPEC that the first tensor carrying
/// it binds and that has to agree from then on.
struct Dim {
  std::string_view symbol;  // empty: a fixed size
  std::int64_t low = 0;     // smallest and largest size that may be bound; equal for a fixed size
  std::int64_t high = 0;
  std::int64_t step = 1;  // bound sizes are low, low + step, ..., high

  Dim(std::int64_t size) : low(size), high(size) {}
  Dim(std::string_view name, std::int64_t smallest, std::int64_t largest, std::int64_t pace = 1)
      : symbol(name), low(smallest), high(largest), step(pace) {}
};

/// Which strides an argument may have.
enum class Layout : std::uint8_t {
  kContiguous,       // row-major without gaps
  kInnerContiguous,  // the last axis without gaps, any strides on the others
};

enum class Role : std::uint8_t { kInput, kOutput };

/// One row of an operation's table of arguments.
struct ArgSpec {
  std::string_view name;
  const TensorView* tensor;  // null: absent, which only optional arguments may be
  std::vector<DType> dtypes;
  std::vector<Dim> shape;
  Layout layout = Layout::kContiguous;
  Role role = Role::kInput;
};

/// Checks an operation's arguments against its table and throws the one sentence
/// `operation: argument must be ..., got ...`. Writes nothing.
class Validator {
 public:
  explicit Validator(std::string_view operation) : operation_(operation) {}

  /// Checks dtype, rank, sizes, strides, device and pointer; binds symbols.
  void check(const ArgSpec& spec);
  void check(std::initializer_list<ArgSpec> table);

  /// Binds a symbol whose size no tensor gives.
  void bind(std::string_view symbol, std::int64_t size) { symbols_.emplace_back(symbol, size); }

  /// Size bound to a symbol; the symbol must have been bound.
  std::int64_t size(std::string_view symbol) const;

  /// Refuses outputs that share memory with an input or with each other. `aliasable` names one
  /// output and one input that may be the same memory.
  void check_outputs_disjoint(std::string_view output = {}, std::string_view input = {}) const;

  /// Throws Error(kValue) "operation: <sentence>".
  [[noreturn]] void refuse(const std::string& sentence) const;

 private:
  std::optional<std::int64_t> bound(std::string_view symbol) const;
  std::string expectation(const ArgSpec& spec) const;

  struct Extent {
    std::string_view name;
    Role role;
    std::uintptr_t begin;
    std::uintptr_t end;
  };

  std::string_view operation_;
  std::vector<std::pair<std::string_view, std::int64_t>> symbols_;
  std::vector<Extent> extents_;
  std::optional<Device> device_;  // of the first argument
  std::string_view device_owner_;
};

/// Pointer to an optional argument's view, or null.
inline const TensorView* optional_view(const std::optional<TensorView>& view) {
  return view ? &*view : nullptr;
}

}  // namespace flashdsa::core

#pragma once

#include <cstdint>
#include <functional>

namespace flashdsa::tools {

/// Runs body(i) for every i in [0, count) on `threads` threads. The bodies must not touch the same
/// memory. Rethrows the first exception of a body.
void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& body);

}  // namespace flashdsa::tools

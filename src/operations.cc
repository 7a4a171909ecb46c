#include <new>

#include "attention/backends.h"
#include "core/out_of_memory.h"
#include "flashdsa/runtime.h"
#include "indexer/backends.h"
#include "metadata/backends.h"
#include "selection/backends.h"

namespace flashdsa {

std::vector<OperationSupport> operations() try {
  constexpr auto kIndexes = "int32";
  constexpr auto kReals = "bfloat16; on reference float64, too";
  constexpr auto kIndexer = "H_index in 1..64, head dim 128, K in 1..2048";
  constexpr auto kAttention = "H in 1..128, D 576 or 512, value dim 512, K in 1..2048";
  return {
      {"prepare_packed_metadata", "any number of documents, T_k < 2^31 - 1", kIndexes,
       metadata::build_backends()},
      {"indexer_topk", kIndexer, kReals, indexer::topk_backends()},
      {"indexer_backward", kIndexer, kReals, indexer::backward_backends()},
      {"compact_and_sort", "K in 1..2048", kIndexes, selection::compact_and_sort_backends()},
      {"build_selection_plan", "H in 1..128, K in 1..2048", kIndexes,
       selection::build_plan_backends()},
      {"attention_forward", kAttention, kReals, attention::forward_backends()},
      {"attention_backward", kAttention, kReals, attention::backward_backends()},
  };
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("operations");
}

}  // namespace flashdsa

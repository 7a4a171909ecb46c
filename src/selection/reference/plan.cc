// The selection plan (docs/selection_plan.md), written as its rules.

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

#include "selection/backends.h"

namespace flashdsa::selection::reference {
namespace {

// The counted slots of a row.
struct Row {
  std::vector<std::int32_t> keys;  // in the order of the slots
  std::int32_t extent = 0;         // the last counted slot + 1
  bool ascending = true;           // strictly, and without holes

  bool contiguous() const {
    return ascending && (keys.empty() || keys.back() - keys.front() + 1 == extent);
  }
};

Row read_row(const PlanParams& params, std::int64_t t) {
  const std::int32_t* slots = params.topk_indices + t * params.topk_indices_row_stride;
  std::int64_t length = params.sizes.topk;
  if (params.topk_length != nullptr) {
    length = std::clamp<std::int64_t>(params.topk_length[t], 0, length);
  }
  Row row;
  for (std::int64_t j = 0; j < length; ++j) {
    const std::int32_t key = slots[j];
    if (key < 0 || key >= params.t_k) continue;
    const bool follows = row.keys.empty() || key > row.keys.back();
    row.ascending = row.ascending && follows && j == row.extent;
    row.keys.push_back(key);
    row.extent = static_cast<std::int32_t>(j + 1);
  }
  return row;
}

// Makes the items of one group of rows after another.
class Builder {
 public:
  explicit Builder(const PlanParams& params) : params_(params) {}

  void add_group(std::int64_t first_row) {
    first_row_ = first_row;
    rows_.clear();
    const std::int64_t end = std::min(first_row + params_.sizes.group, params_.sizes.t_q);
    for (std::int64_t t = first_row; t < end; ++t) {
      rows_.push_back(read_row(params_, t));
      params_.plan.row_keys[t] = rows_.back().extent;
    }
    add_run(0, static_cast<std::size_t>(params_.sizes.group));
  }

  std::int32_t items() const { return items_; }

 private:
  // Rows begin .. begin + size - 1 of the group, as far as they exist: one item, or two halves.
  void add_run(std::size_t begin, std::size_t size) {
    if (begin >= rows_.size()) return;
    const std::size_t rows = std::min(size, rows_.size() - begin);
    if (rows == 1) {
      add_single(begin);
    } else if (!add_range(begin, rows) && !add_union(begin, rows)) {
      add_run(begin, size / 2);
      add_run(begin + size / 2, size / 2);
    }
  }

  void add_single(std::size_t r) {
    const Row& row = rows_[r];
    if (row.contiguous() && row.extent > 0) {
      add_item(r, 1, ItemKind::kRange, row.extent, row.keys.front());
    } else {
      add_item(r, 1, ItemKind::kSlots, row.extent, 0);
    }
  }

  bool add_range(std::size_t begin, std::size_t rows) {
    std::int64_t first = params_.t_k, last = -1, sum = 0;
    for (std::size_t r = begin; r < begin + rows; ++r) {
      if (!rows_[r].contiguous()) return false;
      if (rows_[r].extent == 0) continue;
      first = std::min<std::int64_t>(first, rows_[r].keys.front());
      last = std::max<std::int64_t>(last, rows_[r].keys.back());
      sum += rows_[r].extent;
    }
    if (sum == 0 || !pays(last - first + 1, sum)) return false;
    add_item(begin, rows, ItemKind::kRange, static_cast<std::int32_t>(last - first + 1),
             static_cast<std::int32_t>(first));
    return true;
  }

  bool add_union(std::size_t begin, std::size_t rows) {
    std::vector<std::int32_t> list, merged;
    std::int64_t sum = 0;
    for (std::size_t r = begin; r < begin + rows; ++r) {
      if (!rows_[r].ascending) return false;
      merged.clear();
      std::set_union(list.begin(), list.end(), rows_[r].keys.begin(), rows_[r].keys.end(),
                     std::back_inserter(merged));
      list.swap(merged);
      sum += rows_[r].extent;
    }
    const auto keys = static_cast<std::int64_t>(list.size());
    if (sum == 0 || !pays(keys, sum)) return false;

    const std::int64_t t = first_row_ + static_cast<std::int64_t>(begin);
    std::copy(list.begin(), list.end(), params_.plan.lists + t * params_.sizes.topk);
    const std::int64_t chunks_of_row = (params_.sizes.topk + 31) / 32;
    std::uint32_t* masks = params_.plan.masks + t * params_.sizes.group * chunks_of_row;
    std::fill_n(masks, (list.size() + 31) / 32 * rows, 0u);
    for (std::size_t r = 0; r < rows; ++r) {
      for (const std::int32_t key : rows_[begin + r].keys) {
        const auto at = static_cast<std::size_t>(std::lower_bound(list.begin(), list.end(), key) -
                                                 list.begin());
        masks[at / 32 * rows + r] |= 1u << (at % 32);
      }
    }
    add_item(begin, rows, ItemKind::kUnion, static_cast<std::int32_t>(keys), 0);
    return true;
  }

  bool pays(std::int64_t keys, std::int64_t sum) const {
    return 100 * keys <= plan_union_percent(params_.sizes.group) * sum;
  }

  void add_item(std::size_t begin, std::size_t rows, ItemKind kind, std::int32_t keys,
                std::int32_t first_key) {
    const auto t = static_cast<std::int32_t>(first_row_) + static_cast<std::int32_t>(begin);
    params_.plan.items[items_++] = {
        t, static_cast<std::int32_t>(rows), kind, keys, first_key, {0, 0, 0}};
    if (kind != ItemKind::kRange) return;
    for (std::size_t r = begin; r < begin + rows; ++r) {
      if (rows_[r].extent > 0) {
        params_.plan.row_first[first_row_ + static_cast<std::int64_t>(r)] = rows_[r].keys.front();
      }
    }
  }

  const PlanParams& params_;
  std::int64_t first_row_ = 0;  // of the group
  std::vector<Row> rows_;       // of the group
  std::int32_t items_ = 0;
};

}  // namespace

std::string refusal(const PlanParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void build_plan(const PlanParams& params, const Runtime&) {
  Builder builder(params);
  for (std::int64_t t = 0; t < params.sizes.t_q; t += params.sizes.group) builder.add_group(t);
  *params.plan.item_count = builder.items();
}

}  // namespace flashdsa::selection::reference

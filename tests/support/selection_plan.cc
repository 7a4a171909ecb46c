#include "tests/support/selection_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "tests/support/placement.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

using Keys = std::vector<std::int32_t>;

std::string range_text(std::int32_t first, std::int32_t count) {
  return count == 0 ? "{}" : fmt::format("{{{}..{}}}", first, first + count - 1);
}

// An item in words.
std::string rows_text(std::size_t first, std::size_t rows) {
  return fmt::format("rows {}..{}", first, first + rows - 1);
}

std::string text(const selection::PlanView& plan, const selection::PlanItem& item) {
  const auto first = static_cast<std::size_t>(item.first_row);
  const auto rows = static_cast<std::size_t>(item.rows);
  const std::string of_rows = rows_text(first, rows);
  const bool is_range = item.kind == selection::ItemKind::kRange;
  if (std::ranges::any_of(item.reserved, [](auto word) { return word != 0; }) ||
      (!is_range && item.first_key != 0)) {
    return of_rows + " have words that are not zero";
  }
  if (is_range) {
    std::string line =
        fmt::format("{} range {}..{}:", of_rows, item.first_key, item.first_key + item.keys - 1);
    for (std::size_t t = first; t < first + rows; ++t) {
      const std::int32_t keys = plan.row_keys[t];
      line += fmt::format(" {} {}", t, range_text(keys == 0 ? 0 : plan.row_first[t], keys));
    }
    return line;
  }
  if (item.kind == selection::ItemKind::kSlots) {
    if (rows != 1 || item.keys != plan.row_keys[first]) return of_rows + " are no slots";
    return fmt::format("{} slots up to {}", of_rows, item.keys);
  }
  std::string line = fmt::format("{} union of {} keys:", of_rows, item.keys);
  const auto topk = static_cast<std::size_t>(plan.topk);
  const auto keys = static_cast<std::size_t>(item.keys);
  const std::int32_t* list = plan.lists + first * topk;
  const std::uint32_t* masks =
      plan.masks + first * static_cast<std::size_t>(plan.group) * ((topk + 31) / 32);
  for (std::size_t i = 1; i < keys; ++i) {
    if (list[i - 1] >= list[i]) return of_rows + " have a list that does not ascend";
  }
  std::vector<bool> is_used(keys);
  for (std::size_t r = 0; r < rows; ++r) {
    Keys of_row;
    for (std::size_t i = 0; i < (keys + 31) / 32 * 32; ++i) {
      if ((masks[i / 32 * rows + r] >> (i % 32) & 1) == 0) continue;
      if (i >= keys) return of_rows + " have bits behind the list";
      is_used[i] = true;
      of_row.push_back(list[i]);
    }
    if (static_cast<std::int32_t>(of_row.size()) != plan.row_keys[first + r]) {
      return of_rows + " have other keys than they say";
    }
    line += fmt::format(" {} {{{}}}", first + r, fmt::join(of_row, " "));
  }
  if (std::ranges::find(is_used, false) != is_used.end()) {
    return of_rows + " have a key that no row selected";
  }
  return line;
}

// The rules, run by run.
class Rules {
 public:
  Rules(const Selection& selection, std::int64_t heads) : selection_(selection) {
    while (2 * group_ * static_cast<std::size_t>(std::max<std::int64_t>(heads, 8)) <= 64) {
      group_ *= 2;
    }
  }

  std::string text() {
    for (std::size_t t = 0; t < selection_.rows.size(); t += group_) add(t, group_);
    return text_;
  }

 private:
  // Strictly ascending, nothing counted behind a slot that does not count.
  bool is_plain(std::size_t t) const {
    const Keys keys = selection_.keys(t);
    return std::ranges::adjacent_find(keys, std::greater_equal<>()) == keys.end() &&
           std::equal(keys.begin(), keys.end(), selection_.rows[t].begin());
  }

  bool is_range(std::size_t t) const {
    const Keys keys = selection_.keys(t);
    return is_plain(t) && (keys.empty() ||
                           static_cast<std::size_t>(keys.back() - keys.front()) + 1 == keys.size());
  }

  bool pays(std::size_t keys, std::size_t sum) const {
    const double share = group_ == 8 ? 0.58 : group_ == 4 ? 0.64 : 0.81;
    return static_cast<double>(keys) <= share * static_cast<double>(sum) + 1e-9;
  }

  void add(std::size_t begin, std::size_t size) {
    const std::size_t end = std::min(begin + size, selection_.rows.size());
    if (begin >= end) return;
    std::set<std::int32_t> keys;
    std::size_t sum = 0;
    bool all_plain = true, all_ranges = true;
    for (std::size_t t = begin; t < end; ++t) {
      const Keys row = selection_.keys(t);
      keys.insert(row.begin(), row.end());
      sum += row.size();
      all_plain = all_plain && is_plain(t);
      all_ranges = all_ranges && is_range(t);
    }
    const std::string rows = rows_text(begin, end - begin);
    const std::size_t hull =
        keys.empty() ? 0 : static_cast<std::size_t>(*keys.rbegin() - *keys.begin()) + 1;
    const bool is_single = end - begin == 1;
    if (all_ranges && sum > 0 && (is_single || pays(hull, sum))) {
      text_ += fmt::format("{} range {}..{}:", rows, *keys.begin(), *keys.rbegin());
      for (std::size_t t = begin; t < end; ++t) {
        const Keys row = selection_.keys(t);
        text_ += fmt::format(
            " {} {}", t,
            range_text(row.empty() ? 0 : row.front(), static_cast<std::int32_t>(row.size())));
      }
      text_ += "\n";
    } else if (is_single) {
      text_ += fmt::format("{} slots up to {}\n", rows, extent(begin));
    } else if (all_plain && sum > 0 && pays(keys.size(), sum)) {
      text_ += fmt::format("{} union of {} keys:", rows, keys.size());
      for (std::size_t t = begin; t < end; ++t) {
        text_ += fmt::format(" {} {{{}}}", t, fmt::join(selection_.keys(t), " "));
      }
      text_ += "\n";
    } else {
      add(begin, size / 2);
      add(begin + size / 2, size / 2);
    }
  }

  std::size_t extent(std::size_t t) const {
    std::size_t slots = static_cast<std::size_t>(selection_.topk);
    if (selection_.lengths) {
      slots = static_cast<std::size_t>(
          std::clamp<std::int64_t>((*selection_.lengths)[t], 0, selection_.topk));
    }
    slots = std::min(slots, selection_.rows[t].size());
    const auto counts = [&](std::int32_t key) { return key >= 0 && key < selection_.t_k; };
    while (slots > 0 && !counts(selection_.rows[t][slots - 1])) --slots;
    return slots;
  }

  const Selection& selection_;
  std::size_t group_ = 1;
  std::string text_;
};

}  // namespace

HostTensor Selection::indices() const {
  HostTensor tensor(DType::kInt32, {static_cast<std::int64_t>(rows.size()), 1, topk});
  tensor.fill(-1);
  for (std::size_t t = 0; t < rows.size(); ++t) {
    for (std::size_t j = 0; j < rows[t].size(); ++j) {
      tensor.set(static_cast<std::int64_t>(t) * topk + static_cast<std::int64_t>(j), rows[t][j]);
    }
  }
  return tensor;
}

std::optional<HostTensor> Selection::topk_length() const {
  if (!lengths) return std::nullopt;
  HostTensor tensor(DType::kInt32, {static_cast<std::int64_t>(lengths->size())});
  for (std::size_t t = 0; t < lengths->size(); ++t) {
    tensor.set(static_cast<std::int64_t>(t), (*lengths)[t]);
  }
  return tensor;
}

std::vector<std::int32_t> Selection::keys(std::size_t row) const {
  Keys result = rows[row];
  if (lengths && (*lengths)[row] < static_cast<std::int32_t>(result.size())) {
    result.resize(static_cast<std::size_t>(std::max((*lengths)[row], 0)));
  }
  std::erase_if(result, [&](std::int32_t key) { return key < 0 || key >= t_k; });
  return result;
}

Selection drifting_selection(std::int64_t t_q, std::int64_t topk, std::int64_t t_k,
                             std::uint64_t seed) {
  Random random(seed);
  Selection result{{}, topk, t_k, {}};
  std::set<std::int32_t> keys;
  for (std::int64_t t = 0; t < t_q; ++t) {
    if (t > 0) {
      Keys before(keys.begin(), keys.end());
      for (const std::int32_t i : random.subset(topk, topk / 10)) {
        keys.erase(before[static_cast<std::size_t>(i)]);
      }
    }
    while (static_cast<std::int64_t>(keys.size()) < topk) {
      keys.insert(static_cast<std::int32_t>(random.integer(0, t_k - 1)));
    }
    result.rows.emplace_back(keys.begin(), keys.end());
  }
  return result;
}

Selection mixed_selection(std::int64_t t_q, std::int64_t topk, std::int64_t t_k,
                          std::uint64_t seed) {
  Random random(seed);
  Selection result{{}, topk, t_k, {}};
  const std::int64_t most = std::min(topk, t_k);
  const auto pick = [&](const Keys& from) {
    return static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(from.size()) - 1));
  };
  Keys plain;
  for (std::int64_t t = 0; t < t_q; ++t) {
    // Most rows drift, so that whole groups are of one sort, too.
    const std::int64_t sort = random.integer(0, 40);
    if (sort < 24) {
      std::set<std::int32_t> keys(plain.begin(), plain.end());
      keys.insert(static_cast<std::int32_t>(random.integer(0, t_k - 1)));
      plain.assign(keys.begin(), keys.end());
      if (static_cast<std::int64_t>(plain.size()) > topk) plain.pop_back();
    } else if (sort < 30) {
      const std::int64_t length = random.integer(0, most);
      const std::int64_t first = random.integer(0, t_k - length);
      plain.clear();
      for (std::int64_t i = 0; i < length; ++i) {
        plain.push_back(static_cast<std::int32_t>(first + i));
      }
    } else if (sort < 34) {
      plain = random.subset(t_k, random.integer(0, most));
    }
    Keys row = plain;
    if (sort == 34) row.clear();
    if (sort > 34 && !row.empty()) {
      if (sort == 35) row[pick(row)] = -1;
      if (sort == 36) row[pick(row)] = row[pick(row)];
      if (sort == 37) std::swap(row[pick(row)], row[pick(row)]);
      if (sort == 38) row[pick(row)] = static_cast<std::int32_t>(t_k);
      if (sort == 39) row.back() = std::numeric_limits<std::int32_t>::max();
      if (sort == 40) row.front() = std::numeric_limits<std::int32_t>::min();
    }
    result.rows.push_back(row);
  }
  if (random.integer(0, 1) == 1) {
    result.lengths.emplace();
    for (std::int64_t t = 0; t < t_q; ++t) {
      const bool cuts = random.integer(0, 3) == 0;
      result.lengths->push_back(
          static_cast<std::int32_t>(cuts ? random.integer(-1, topk) : topk + t % 2));
    }
  }
  return result;
}

SelectionPlan plan_of(const Selection& selection, std::int64_t heads, const Runtime& runtime) {
  const HostTensor indices = selection.indices();
  const std::optional<HostTensor> lengths = selection.topk_length();
  SelectionPlanArgs args{indices, std::nullopt, selection.t_k, heads};
  if (lengths) args.topk_length = lengths->view();
  return run_placed(args, runtime);
}

selection::PlanView view_of(const SelectionPlan& plan) {
  return selection::plan_view(plan.storage.view().data, {plan.query_rows, plan.topk, plan.group});
}

std::string text(const SelectionPlan& plan) {
  const selection::PlanView view = view_of(plan);
  if (*view.item_count < 0 || *view.item_count > plan.query_rows) {
    return fmt::format("{} items", *view.item_count);
  }
  std::string result;
  std::int64_t next_row = 0;
  for (std::int32_t i = 0; i < *view.item_count; ++i) {
    const selection::PlanItem& item = view.items[i];
    if (item.first_row != next_row || item.rows < 1 || item.rows > plan.group) {
      return result + fmt::format("row {}: an item of row {} and {} more", next_row, item.first_row,
                                  item.rows - 1);
    }
    next_row += item.rows;
    result += text(view, item) + "\n";
  }
  if (next_row != plan.query_rows) result += fmt::format("no item from row {} on\n", next_row);
  return result;
}

std::string expected_text(const Selection& selection, std::int64_t heads) {
  return Rules(selection, heads).text();
}

}  // namespace flashdsa::test

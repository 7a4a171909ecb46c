// Prints the plan of a selection in words: plan_text HEADS K T_K, the rows on standard input, a
// line of slots for each. docs/images/draw.py draws what it prints.

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "tests/support/selection_plan.h"

int main(int argc, char** argv) {
  using namespace flashdsa::test;
  if (argc != 4) {
    std::fprintf(stderr, "plan_text: expected HEADS K T_K, got %d arguments\n", argc - 1);
    return 2;
  }
  Selection selection{{}, std::stoll(argv[2]), std::stoll(argv[3]), {}};
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream slots(line);
    selection.rows.emplace_back();
    for (std::int32_t key; slots >> key;) selection.rows.back().push_back(key);
  }
  std::cout << text(plan_of(selection, std::stoll(argv[1]), {}));
}

#include "tests/indexer/fixture.h"

namespace flashdsa::test {
namespace {

std::vector<Engine> bounded_host_engines() {
  std::vector<Engine> result = bounded_engines();
  std::erase_if(result, [](const Engine& engine) { return works_on_device(engine.backend); });
  return result;
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Every, TopK, ::testing::ValuesIn(engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, TopKOnHost, ::testing::ValuesIn(host_engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, TopKBounded, ::testing::ValuesIn(bounded_engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, IndexerBackward, ::testing::ValuesIn(host_engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, IndexerBackwardBounded, ::testing::ValuesIn(bounded_host_engines()),
                         engine_name);

}  // namespace flashdsa::test

#include "tests/indexer/fixture.h"

namespace flashdsa::test {
INSTANTIATE_TEST_SUITE_P(Every, TopK, ::testing::ValuesIn(engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, TopKOnHost, ::testing::ValuesIn(host_engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, TopKBounded, ::testing::ValuesIn(bounded_engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, IndexerBackward, ::testing::ValuesIn(engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, IndexerBackwardOnHost, ::testing::ValuesIn(host_engines()),
                         engine_name);
INSTANTIATE_TEST_SUITE_P(Every, IndexerBackwardBounded, ::testing::ValuesIn(bounded_engines()),
                         engine_name);

}  // namespace flashdsa::test

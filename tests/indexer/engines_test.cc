#include "tests/indexer/fixture.h"

namespace flashdsa::test {

INSTANTIATE_TEST_SUITE_P(Every, TopK, ::testing::ValuesIn(engines()), engine_name);

}  // namespace flashdsa::test

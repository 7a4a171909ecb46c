#include "tests/attention/fixture.h"

namespace flashdsa::test {

INSTANTIATE_TEST_SUITE_P(Every, Attention, ::testing::ValuesIn(engines()), engine_name);
INSTANTIATE_TEST_SUITE_P(Every, AttentionOnHost, ::testing::ValuesIn(host_engines()), engine_name);

}  // namespace flashdsa::test

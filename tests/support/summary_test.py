"""The summary counts what happened and misses no silence."""

import unittest
import xml.etree.ElementTree as ElementTree

import summary

REPORT = """<testsuite tests="5">
  <testcase name="core.Validate.A" status="run"/>
  <testcase name="core.Validate.B" status="fail"><failure message=""/></testcase>
  <testcase name="indexer.TopK.C" status="notrun">
    <skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
  <testcase name="indexer.TopK.D" status="notrun"><skipped message="Unable to find executable"/>
  </testcase>
  <testcase name="gpu.A" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
</testsuite>"""


class Summary(unittest.TestCase):
    def summarise(self, *suites: str) -> tuple[dict, list[str]]:
        return summary.summarise(ElementTree.fromstring(REPORT), suites)

    def test_a_missing_program_is_a_failure_and_a_skip_is_not(self) -> None:
        counts, _ = self.summarise()
        self.assertEqual(counts, {"passed": 1, "failed": 2, "skipped": 2})

    def test_a_suite_without_tests_or_with_skips_alone_ran_none(self) -> None:
        self.assertEqual(self.summarise("core", "indexer", "gpu", "cli")[1],
                         ["gpu: expected tests that run, got none",
                          "cli: expected tests that run, got none"])


if __name__ == "__main__":
    unittest.main()

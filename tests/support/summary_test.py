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

PYTEST_REPORT = """<testsuites><testsuite name="pytest" tests="4">
  <testcase classname="tests.python.test_api" name="test_a"/>
  <testcase classname="tests.python.test_api" name="test_b"><failure message="x"/></testcase>
  <testcase classname="tests.python.test_api" name="test_c"><error message="x"/></testcase>
  <testcase classname="tests.python.test_api" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


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

    def test_reports_of_pytest_count_alike(self) -> None:
        counts, missing = summary.summarise(ElementTree.fromstring(PYTEST_REPORT), ["pytest"])
        self.assertEqual(counts, {"passed": 1, "failed": 2, "skipped": 1})
        self.assertEqual(missing, [])


if __name__ == "__main__":
    unittest.main()

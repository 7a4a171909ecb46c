"""Adds up JUnit reports of ctest and pytest and prints "N passed, N failed, N skipped".

    summary.py [--failed N] REPORT:SUITE,SUITE,... ...

A test's suite is its name up to the first point, or "pytest". Exits 1 when a test failed, when a suite named
beside its report ran no test, or when `--failed` counts failures from elsewhere.
"""

import argparse
import collections
import sys
import xml.etree.ElementTree as ElementTree
from typing import Iterable


def is_pytests(case: ElementTree.Element) -> bool:
    """ctest gives every test a status, pytest none."""
    return case.get("status") is None


def outcome(case: ElementTree.Element) -> str:
    """passed, failed or skipped; a test whose program was missing has failed."""
    if is_pytests(case):
        if case.find("failure") is not None or case.find("error") is not None:
            return "failed"
        return "passed" if case.find("skipped") is None else "skipped"
    if case.get("status") == "run":
        return "passed"
    skipped = case.find("skipped")
    reason = "" if skipped is None else skipped.get("message", "")
    return "skipped" if reason.startswith("SKIP_") or case.get("status") == "disabled" else "failed"


def summarise(report: ElementTree.Element,
              suites: Iterable[str]) -> tuple[collections.Counter, list[str]]:
    """Counts of outcomes, and a sentence for every suite that ran no test."""
    counts = collections.Counter()
    ran = set()
    for case in report.iter("testcase"):
        result = outcome(case)
        counts[result] += 1
        if result != "skipped":
            ran.add("pytest" if is_pytests(case) else case.get("name", "").split(".")[0])
    return counts, [f"{suite}: expected tests that run, got none"
                    for suite in suites if suite not in ran]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failed", type=int, default=0, help="failures outside of the reports")
    parser.add_argument("reports", nargs="*")
    options = parser.parse_args()

    total = collections.Counter(failed=options.failed)
    for argument in options.reports:
        path, _, suites = argument.rpartition(":")
        counts, missing = summarise(ElementTree.parse(path).getroot(), suites.split(","))
        for sentence in missing:
            print(f"{path}: {sentence}")
        total += counts + collections.Counter(failed=len(missing))
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())

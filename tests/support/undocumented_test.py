"""The docstring check finds what it is there to find."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs/tools"))

import undocumented  # noqa: E402


def function(q, kv, *, scale=1.0):
    pass


class Undocumented(unittest.TestCase):
    def test_prose_or_a_list_may_name_the_arguments(self) -> None:
        for text in ("kv times q, by scale.",
                     "Sum.\n\nArgs:\n    q, kv: arrays.\n    scale: factor."):
            self.assertEqual(undocumented.faults(function, text), [])

    def test_an_argument_that_is_not_named_is_found(self) -> None:
        self.assertEqual(undocumented.faults(function, "q and kvs, rescaled."),
                         ["its docstring does not name the argument kv",
                          "its docstring does not name the argument scale"])

    def test_no_docstring_is_found(self) -> None:
        self.assertEqual(undocumented.faults(function, " \n"), ["has no docstring"])
        self.assertEqual(undocumented.faults(property(), "Alias for field number 0"),
                         ["has no docstring"])

    def test_a_class_needs_words_but_no_arguments(self) -> None:
        self.assertEqual(undocumented.faults(undocumented.Any, "Result of a call."), [])


if __name__ == "__main__":
    unittest.main()

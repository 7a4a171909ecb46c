"""The documentation check finds what it is there to find."""

import pathlib
import tempfile
import unittest

import check_docs

PROGRAM = "int main() {}\n"
README = f"[spec](docs/spec.md#terms)\n\n```cpp\n{PROGRAM}```\n"


class Docs(unittest.TestCase):
    def faults(self, readme: str, spec: str = "") -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs/examples").mkdir(parents=True)
            (root / "docs/examples/a.cc").write_text(PROGRAM)
            (root / "docs/spec.md").write_text(spec)
            (root / "README.md").write_text(readme)
            return check_docs.faults(root)

    def test_a_right_page_passes(self) -> None:
        self.assertEqual(self.faults(README, "[home](../README.md) [web](https://example.org/x)"),
                         [])

    def test_a_changed_example_is_found(self) -> None:
        self.assertEqual(self.faults(README.replace("{}", "{ }")),
                         ["docs/examples/a.cc: no page quotes it as it stands"])

    def test_another_page_may_quote_an_example(self) -> None:
        self.assertEqual(self.faults("", README.replace("docs/", "")), [])

    def test_a_dead_link_is_found_on_every_page(self) -> None:
        self.assertEqual(self.faults(README + "[x](docs/none.md)", "[y](none.md#z)"),
                         ["README.md: link to docs/none.md, which does not exist",
                          "spec.md: link to none.md, which does not exist"])

    def test_brackets_in_code_are_no_links(self) -> None:
        self.assertEqual(self.faults(README + "```\n[x](none)\n```\n"), [])


if __name__ == "__main__":
    unittest.main()

"""The check of docs/troubleshooting.md finds what it is there to find."""

import pathlib
import tempfile
import unittest

import check_sentences

SOURCES = {
    "src/a.cc": 'refuse(fmt::format("{} must be on {}, "\n    "got {:g}", name, device, x));\n',
    "python/b.py": 'raise ValueError(f"{operation}: {name} must be {served!r}, "\n'
                   '                 f"got {got}")\n',
    "scripts/c.sh": 'echo "setup: must be root; run: ${command[*]}" >&2\n',
    "include/flashdsa/metadata.h": "enum class MetadataStatus {\n  kGood = 0,\n  kStart = 1,\n};\n",
}
PAGE = """
- `<operation>: <argument> must be on <device>, got <device>`
  Text.
- `<operation>: <argument> must be <value>, got <value>`
- `setup: must be root; run: <command>`

| 0 | `kGood` | |
| 1 | `kStart` | |

## Sentences of other programs

- `nvcc not found`
"""


class Sentences(unittest.TestCase):
    def faults(self, page: str, changed: dict[str, str] | None = None) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**SOURCES, **(changed or {}), "docs/troubleshooting.md": page}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return check_sentences.faults(root)

    def test_a_right_page_passes(self) -> None:
        self.assertEqual(self.faults(PAGE), [])

    def test_a_changed_source_is_found_in_every_language(self) -> None:
        for name, old, new in (("src/a.cc", "must be on", "must lie on"),
                               ("python/b.py", ", ", "; "), ("scripts/c.sh", "run", "do")):
            with self.subTest(name):
                text = SOURCES[name].replace(old, new)
                self.assertEqual(len(self.faults(PAGE, {name: text})), 1)

    def test_a_field_in_another_place_is_found(self) -> None:
        page = PAGE.replace("must be on <device>", "must be on cuda:0")
        self.assertEqual(self.faults(page), [
            "troubleshooting.md: no source has the sentence: "
            "<operation>: <argument> must be on cuda:0, got <device>"])

    def test_a_sentence_in_a_comment_does_not_count(self) -> None:
        text = "// " + SOURCES["src/a.cc"].replace("\n    ", " ")
        self.assertEqual(len(self.faults(PAGE, {"src/a.cc": text})), 1)

    def test_a_part_of_a_sentence_is_found(self) -> None:
        for whole, part in ((", got <device>`", "`"), (", got <value>`", ", got `")):
            with self.subTest(whole):
                self.assertEqual(len(self.faults(PAGE.replace(whole, part))), 1)

    def test_the_section_of_other_programs_ends(self) -> None:
        self.assertEqual(self.faults(PAGE + "\n## Slow calls\n\n- `too slow`\n"),
                         ["troubleshooting.md: no source has the sentence: too slow"])

    def test_another_status_is_found(self) -> None:
        self.assertEqual(
            self.faults(PAGE.replace("| 1 | `kStart` | |", "| 2 | `kStart` | |")),
            ["troubleshooting.md: the table of the status must be that of MetadataStatus"])

    def test_a_page_without_sentences_is_found(self) -> None:
        self.assertEqual(self.faults("# Nothing\n"),
                         ["troubleshooting.md: expected sentences, got none"])


if __name__ == "__main__":
    unittest.main()

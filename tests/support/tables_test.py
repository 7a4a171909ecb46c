"""Tables between markers: what is not current is found, and brought up to date."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs/tools"))

import support  # noqa: E402
import tables  # noqa: E402

OPEN, CLOSE = "<!-- table: a -->\n", "<!-- end of table -->\n"
CURRENT = f"before\n\n{OPEN}\n| 1 |\n\n{CLOSE}\nafter\n"


class Fill(unittest.TestCase):
    def test_what_stands_between_the_markers_is_replaced(self) -> None:
        for stale in (CURRENT, CURRENT.replace("\n| 1 |\n\n", ""), CURRENT.replace("1", "2")):
            self.assertEqual(tables.fill(stale, {"a": "| 1 |\n"}), CURRENT)

    def test_markers_inside_a_line_are_words(self) -> None:
        words = "between `<!-- table: b -->` and `<!-- end of table -->`\n"
        self.assertEqual(tables.fill(words + CURRENT, {"a": "| 1 |\n"}), words + CURRENT)

    def test_an_unknown_table_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "^no table is called a, expected one of b, c$"):
            tables.fill(CURRENT, {"b": "", "c": ""})

    def test_a_missing_marker_is_refused(self) -> None:
        for page in (CURRENT.replace(CLOSE, ""), CURRENT.replace(OPEN, ""), CLOSE + OPEN,
                     CURRENT.replace("| 1 |", OPEN)):
            with self.assertRaisesRegex(ValueError, "^expected every table between two markers"):
                tables.fill(page, {"a": ""})


class Update(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "docs").mkdir()
        (self.root / "README.md").write_text("none\n")
        self.page = self.root / "docs/a.md"
        self.page.write_text(CURRENT)

    def test_a_current_page_passes(self) -> None:
        self.assertEqual(tables.update(self.root, {"a": "| 1 |\n"}, write=False), [])

    def test_a_stale_page_is_named_and_left_alone_unless_asked(self) -> None:
        stale = ["docs/a.md: its tables are not current"]
        self.assertEqual(tables.update(self.root, {"a": "| 2 |\n"}, write=False), stale)
        self.assertEqual(self.page.read_text(), CURRENT)
        self.assertEqual(tables.update(self.root, {"a": "| 2 |\n"}, write=True), stale)
        self.assertEqual(self.page.read_text(), CURRENT.replace("1", "2"))

    def test_a_fault_on_one_page_leaves_all_alone(self) -> None:
        (self.root / "docs/b.md").write_text(CURRENT.replace("table: a", "table: b"))
        with self.assertRaisesRegex(ValueError, "^no table is called b, expected one of a$"):
            tables.update(self.root, {"a": "| 2 |\n"}, write=True)
        self.assertEqual(self.page.read_text(), CURRENT)

    def test_a_table_without_a_page_is_named(self) -> None:
        self.assertEqual(tables.update(self.root, {"a": "| 1 |\n", "b": ""}, write=False),
                         ["no page shows the table b"])


class Support(unittest.TestCase):
    def test_the_page_does_not_depend_on_the_machine(self) -> None:
        def info(word: str) -> dict:
            return {"operations": [{"name": "f", "sizes": "H in 1..2", "dtypes": "int32",
                                    "backends": {"sm90": word, "sm80": "no", "cpu": "yes"}}]}
        for word in ("yes", "not here"):
            self.assertEqual(support.tables(info(word))["support"], """\
| operation | `sm90` | `sm80` | `cpu` | sizes | element types |
| --- | --- | --- | --- | --- | --- |
| `f` | yes | no | yes | H in 1..2 | int32 |
""")


if __name__ == "__main__":
    unittest.main()

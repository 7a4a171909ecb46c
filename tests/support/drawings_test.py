"""The pictures of docs/concepts.md are those that docs/images/draw.py makes of what the library
computes."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

IMAGES = pathlib.Path(__file__).resolve().parents[2] / "docs/images"
NAMES = ("packing.svg", "context_parallel.svg", "selection_plan.svg")


class Drawings(unittest.TestCase):
    def test_the_committed_pictures_are_current(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, IMAGES / "draw.py", os.environ["FLASHDSA_BIN"],
                            os.environ["PLAN_TEXT"], folder], check=True)
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()),
                             sorted(NAMES))
            for name in NAMES:
                with self.subTest(name):
                    self.assertEqual((IMAGES / name).read_text(encoding="utf-8"),
                                     pathlib.Path(folder, name).read_text(encoding="utf-8"))

    def test_pictures_tell_what_they_show_and_read_on_dark_ground(self) -> None:
        for name in NAMES:
            with self.subTest(name):
                root = xml.etree.ElementTree.parse(IMAGES / name).getroot()
                space = root.tag.removesuffix("svg")
                for part in ("title", "desc"):
                    self.assertTrue(root.findtext(space + part))
                self.assertIn("prefers-color-scheme: dark", root.findtext(space + "style"))


if __name__ == "__main__":
    unittest.main()

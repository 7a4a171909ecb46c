"""The commands of docs/getting_started.md go through, in their order."""
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from command import BINARY, HERE, st

PAGE = HERE.parent.parent / "docs/getting_started.md"


class Pages(unittest.TestCase):
    def test_the_commands_of_the_page_work(self):
        blocks = re.findall(r"```sh\n(flashdsa .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        self.assertEqual(len(blocks), 1)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "flashdsa").symlink_to(BINARY)
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
            done = subprocess.run(["sh", "-e", "-c", blocks[0]], cwd=folder, env=environment,
                                  capture_output=True, text=True, timeout=600)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            results = st.read(Path(folder, "results.safetensors"))
        self.assertEqual(results.tensors["out"].shape[1:], (8, 512))
        self.assertEqual(results.tensors["topk_indices"].shape[1:], (1, 128))


if __name__ == "__main__":
    unittest.main()

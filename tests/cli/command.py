"""What the tests of the command share: calling it, and making input files."""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent / "conformance"
CASES = CONFORMANCE / "cases"
sys.path.insert(0, str(CONFORMANCE / "oracle"))
import safetensors_io as st  # noqa: E402

BINARY = os.environ.get("FLASHDSA_BIN", "")
if not BINARY:
    raise SystemExit("FLASHDSA_BIN must name the flashdsa command")

# FLASHDSA_TEST_BACKEND is the backend of every call() that names none; without it the command
# chooses, and on a machine with a GPU that it can use that is the GPU's.
CHOSEN = os.environ.get("FLASHDSA_TEST_BACKEND", "")
WITH_BACKEND = ("metadata", "topk", "attend", "run", "verify", "bench")


def call(*arguments, env=None, **keywords) -> subprocess.CompletedProcess:
    words = [str(argument) for argument in arguments]
    is_free = words and words[0] in WITH_BACKEND and not any(
        word.startswith("--backend") for word in words)
    if CHOSEN and is_free:
        words[1:1] = ["--backend", CHOSEN]
    return subprocess.run([BINARY, *words], env={**os.environ, **(env or {})},
                          capture_output=True, text=True, timeout=600, **keywords)


BACKEND = CHOSEN or json.loads(call("info", "--json").stdout)["backend"]
ON_HOST = BACKEND in ("cpu", "reference")


def digest(contents: bytes) -> str:
    return f"{len(contents)} bytes, SHA-256 {hashlib.sha256(contents).hexdigest()[:16]}"


def small_problem(rows: int = 12, heads: int = 2, width: int = 4, seed: int = 1) -> st.File:
    """One causal document with everything that `run` takes: documents of 5 and rows-5 tokens."""
    random = np.random.default_rng(seed)

    def bf16(*shape):
        return st.float_to_bf16(random.standard_normal(shape))

    file = st.File(metadata={"index_topk": str(width), "softmax_scale": "0.0417"})
    file.put("cu_seqlens", "I32", np.array([0, 5, rows]))
    file.put("index_q", "BF16", bf16(rows, 3, 128))
    file.put("index_k", "BF16", bf16(rows, 128))
    file.put("head_weights", "F32", random.standard_normal((rows, 3)))
    file.put("q", "BF16", bf16(rows, heads, 576))
    file.put("kv", "BF16", bf16(rows, 1, 576))
    file.put("grad_out", "BF16", bf16(rows, heads, 512))
    file.put("attn_sink", "F32", random.standard_normal(heads))
    return file


class CommandTest(unittest.TestCase):
    """A test with a folder of its own, and checks of what the contract says of failures."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.source = self.folder / "in.safetensors"
        self.out = self.folder / "out.safetensors"

    def write(self, file: st.File) -> None:
        st.write(self.source, file)

    def assert_succeeds(self, *arguments, **keywords) -> subprocess.CompletedProcess:
        done = call(*arguments, **keywords)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done

    def assert_fails(self, code: int, words, *arguments, **keywords) -> str:
        """The exit code, one line on stderr with all the words, no trace in the folder."""
        before = self.listing()
        done = call(*arguments, **keywords)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("flashdsa: "), done.stderr)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, done.stderr)
        self.assertEqual(self.listing(), before)
        return done.stderr

    def listing(self) -> dict:
        """Every name in the folder with what its file holds, in few bytes."""
        return {path.name: digest(path.read_bytes()) if path.is_file() else None
                for path in self.folder.iterdir()}

"""What only a GPU has. Where the command chooses it, the other tests here run on it too."""
import json
import sys
import unittest
import xml.etree.ElementTree as xml

from command import BACKEND, CASES, ON_HOST, CommandTest, call, small_problem, st

if ON_HOST:
    print(f"skipped: the command computes on the host, with backend {BACKEND}", file=sys.stderr)
    raise SystemExit(77)  # as ctest knows it

SMALL = ("--heads", "4", "--index-heads", "2", "--topk", "16")


class Device(CommandTest):
    def setUp(self):
        super().setUp()
        self.write(small_problem())

    def report(self, *arguments, **keywords) -> dict:
        return json.loads(self.assert_succeeds(*arguments, "--json", **keywords).stdout)

    def test_reports_name_the_backend_and_the_copies(self):
        for arguments in (("metadata", self.source, self.out), ("topk", self.source, self.out),
                          ("run", self.source, self.out), ("verify", self.source)):
            with self.subTest(arguments[0]):
                report = self.report(*arguments)
                self.assertEqual(report["backend"], BACKEND)
                self.assertGreater(report["copy_seconds"], 0)
        self.assertEqual(self.report("run", self.source, self.out, "--backend", "cpu")["backend"],
                         "cpu")

    def test_info_names_the_device(self):
        devices = self.report("info")["devices"]
        self.assertTrue(any(line.startswith("cuda:0 ") for line in devices), devices)

    def test_float64_stays_on_the_host(self):
        file = small_problem()
        for name in ("q", "kv", "grad_out", "attn_sink", "index_q", "index_k", "head_weights"):
            file.put(name, "F64", file.as_float(name))
        self.write(file)
        self.assertEqual(self.report("run", self.source, self.out, "--backend", "auto")["backend"],
                         "reference")
        self.assert_fails(3, BACKEND, "run", self.source, self.out, "--backend", BACKEND)

    def test_metadata_is_that_of_the_host(self):
        compared = 0
        for case in sorted(CASES.glob("metadata_*.safetensors")):
            host = call("metadata", case, self.out, "--backend", "cpu")
            if host.returncode != 0:
                continue
            with self.subTest(case.name):
                right = st.read(self.out)
                self.assert_succeeds("metadata", case, self.out, "--backend", BACKEND)
                got = st.read(self.out)
                compared += 1
                self.assertEqual(got.metadata, right.metadata)
                self.assertEqual({name: tensor.tolist() for name, tensor in got.tensors.items()},
                                 {name: tensor.tolist() for name, tensor in right.tensors.items()})
        self.assertGreater(compared, 5)

    def test_bench_has_a_row_for_every_regime(self):
        lines, path = self.folder / "rows.jsonl", self.folder / "a.svg"
        self.assert_succeeds("bench", *SMALL, "--t-q", "64", "--t-k", "512", "--op", "forward",
                             "--regime", "cold,warm,sustained", "--l2", "flushed", "--json", lines,
                             "--svg", path, "--backend", BACKEND)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        self.assertEqual([row["regime"] for row in rows], ["cold", "warm", "sustained"])
        self.assertEqual(rows[0]["samples"], 10)
        for row in rows:
            self.assertEqual((row["backend"], row["l2"]), (BACKEND, "flushed"))
            for name in ("device", "driver", "cuda", "commit"):
                self.assertTrue(row[name], name)
            self.assertNotIn("FAIL", row["error"])
        xml.parse(path)

    def test_bench_refuses_a_peer_that_is_no_library(self):
        self.assert_fails(2, ["--peer-library", str(self.source)], "bench", *SMALL, "--backend",
                          BACKEND, "--peer-library", self.source)


if __name__ == "__main__":
    unittest.main()

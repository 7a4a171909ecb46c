"""`flashdsa bench`: rows, formulae, files, refusals. Nothing here judges a time."""
import csv
import json
import unittest
import xml.etree.ElementTree as xml

from command import BACKEND, ON_HOST, CommandTest, call

SIZES = ("--heads", "4", "--index-heads", "2", "--topk", "16")
SMALL = (*SIZES, "--repeats", "3", "--min-seconds", "0")
FIELDS = ("op backend simd workload shape heads index_heads t_q t_k topk head_dim threads seed "
          "regime l2 simulated check samples median_ms p10_ms p90_ms tflops bytes_per_s "
          "peak_tflops ceiling_share scratch_bytes overlap plan plan_bytes plan_ms error peer peer_median_ms peer_error "
          "ratio device "
          "clock driver cuda load build commit command").split()
SVG = "{http://www.w3.org/2000/svg}"


class BenchTest(CommandTest):
    def rows(self, *options, **keywords) -> dict:
        """The rows of one run by operation."""
        lines = self.folder / "rows.jsonl"
        lines.unlink(missing_ok=True)
        self.assert_succeeds("bench", *SMALL, "--json", lines, *options, **keywords)
        return {row["op"]: row for row in map(json.loads, lines.read_text().splitlines())}

    def assert_flop(self, row: dict, wanted: int) -> None:
        self.assertAlmostEqual(row["tflops"] * 1e9 * row["median_ms"] / wanted, 1, places=9)


class Everywhere(BenchTest):
    def test_rows_of_a_full_workload(self):
        """6 rows, 16 of 64 keys each, 4 heads, 2 indexer heads."""
        options = ("--t-q", "6", "--t-k", "64", "--op",
                   "topk,indexer_backward,compact,forward,backward,backward_deterministic")
        rows = self.rows(*options, "--commit", "abc", "--threads", "1")
        self.assertEqual(list(rows), ["topk", "indexer_backward", "compact", "forward", "backward",
                                      "backward_deterministic"])
        for row in rows.values():
            self.assertEqual(list(row), FIELDS)
            self.assertEqual((row["t_q"], row["t_k"], row["heads"], row["topk"], row["threads"]),
                             (6, 64, 4, 16, 1))
            self.assertEqual((row["commit"], row["workload"], row["shape"], row["regime"],
                              row["l2"], row["check"], row["peer"]),
                             ("abc", "custom", "glm5.2-64", "warm", "warm", False, None))
            self.assertGreaterEqual(row["samples"], 3)
            self.assertTrue(0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"])
            self.assertNotIn("FAIL", row["error"])
            self.assertIn("--t-q 6", row["command"])
        picks = 6 * 16
        self.assert_flop(rows["topk"], 2 * 2 * 128 * 6 * 64)
        self.assert_flop(rows["indexer_backward"], 6 * 2 * 128 * picks)
        self.assert_flop(rows["forward"], 2 * 4 * picks * (576 + 512))
        for op in "backward", "backward_deterministic":
            self.assert_flop(rows[op], 2 * 4 * picks * (3 * 576 + 2 * 512))
        compact, forward = rows["compact"], rows["forward"]
        self.assertEqual((compact["tflops"], compact["ceiling_share"]), (None, None))
        if forward["peak_tflops"] is not None:
            self.assertAlmostEqual(forward["ceiling_share"] * forward["peak_tflops"],
                                   forward["tflops"])
        moved = picks * (2 * 576 + 4) + 6 * 4 * (2 * 576 + 2 * 512 + 4)
        self.assertAlmostEqual(forward["bytes_per_s"] * forward["median_ms"] * 1e-3 / moved, 1,
                               places=9)

        again = self.rows(*options, "--threads", "1")
        other = self.rows(*options, "--threads", "1", "--seed", "2")
        for op in ("topk", "forward"):  # their results are the same on every run
            self.assertEqual(again[op]["error"], rows[op]["error"])
            self.assertIs(other[op]["seed"], 2)
        self.assertNotEqual(other["forward"]["overlap"], rows["forward"]["overlap"])

    def test_rows_of_a_causal_workload(self):
        """The last 20 rows of single8k see 8173..8192 keys, all more than K."""
        rows = self.rows("--workload", "single8k", "--rows", "20", "--op",
                         "metadata,topk,forward,step")
        self.assert_flop(rows["topk"], 2 * 2 * 128 * sum(range(8173, 8193)))
        self.assert_flop(rows["forward"], 2 * 4 * 20 * 16 * 1088)
        self.assertIsNone(rows["metadata"]["tflops"])
        for row in rows.values():
            self.assertEqual((row["t_q"], row["t_k"], row["shape"]), (20, 8192, "glm5.2-8k"))
            self.assertNotIn("FAIL", row["error"])
        self.assertGreater(rows["step"]["scratch_bytes"], 0)

    def test_plans(self):
        """A row for each use of a plan; with 4 heads groups of 8 rows."""
        lines = self.folder / "rows.jsonl"
        self.assert_succeeds("bench", *SMALL, "--t-q", "6", "--t-k", "64", "--op",
                             "plan,forward,backward", "--plan", "none,reused,built", "--json",
                             lines)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        self.assertEqual([(row["op"], row["plan"]) for row in rows],
                         [("plan", "none"), ("forward", "none"), ("forward", "reused"),
                          ("forward", "built"), ("backward", "none"), ("backward", "reused"),
                          ("backward", "built")])
        # Each array rounded up to 64 bytes: the count, items, two numbers a row, lists, masks.
        size = 64 + 6 * 32 + 2 * 64 + 6 * 16 * 4 + 6 * 8 * 4
        self.assertEqual([row["plan_bytes"] for row in rows], [size] + 2 * [None, size, size])
        self.assertEqual([row["plan_ms"] is not None for row in rows],
                         [False] + 2 * [False, True, False])
        for row in rows:
            self.assertNotIn("FAIL", row["error"])
        self.assertIn("differing rows 0", rows[0]["error"])

    def test_several_head_counts(self):
        lines = self.folder / "rows.jsonl"
        self.assert_succeeds("bench", *SMALL[2:], "--heads", "2,3", "--t-q", "6", "--t-k", "64",
                             "--op", "forward", "--json", lines)
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        self.assertEqual([row["heads"] for row in rows], [2, 3])
        for row in rows:
            self.assert_flop(row, 2 * row["heads"] * 6 * 16 * 1088)

    def test_rows_that_select_everything_have_no_arithmetic(self):
        row = self.rows("--t-q", "4", "--t-k", "16", "--op", "topk", "--seed", "3")["topk"]
        self.assertEqual((row["tflops"], row["ceiling_share"]), (None, None))

    def test_workloads(self):
        """drift90 keeps int(0.9 K) keys, the others come from the rest; random shares K / T_k."""
        lines = self.folder / "rows.jsonl"
        self.assert_succeeds("bench", *SMALL, "--workload", "random,drift90,sft4k", "--rows", "400",
                             "--op", "forward", "--json", lines)
        rows = {row["workload"]: row for row in map(json.loads, lines.read_text().splitlines())}
        self.assertEqual({name: (row["t_q"], row["t_k"]) for name, row in rows.items()},
                         {"random": (400, 8192), "drift90": (400, 8192), "sft4k": (400, 32768)})
        kept = int(0.9 * 16)
        drift90 = (kept + (16 - kept) ** 2 / (8192 - kept)) / 16
        self.assertAlmostEqual(rows["drift90"]["overlap"], drift90, delta=1e-3)
        self.assertAlmostEqual(rows["random"]["overlap"], 16 / 8192, delta=2e-3)

    def test_text_workload(self):
        source = self.folder / "text"
        source.write_text("It is a truth universally acknowledged. " * 40)
        row = self.rows("--workload", "text", "--text", source, "--rows", "30", "--op",
                        "step")["step"]
        self.assertEqual((row["t_q"], row["t_k"]), (30, source.stat().st_size))

    def test_operation_that_a_workload_does_not_have(self):
        """Where something else ran it is a line of the report, else an error."""
        custom = (*SMALL, "--t-q", "4", "--t-k", "32", "--op")
        done = self.assert_succeeds("bench", *custom, "metadata,compact")
        self.assertIn("left out: metadata needs documents", done.stdout)
        self.assert_fails(2, ["bench: --op", "step needs documents", "custom"], "bench", *custom,
                          "step")

    def test_files_grow(self):
        lines, table = self.folder / "a.jsonl", self.folder / "a.csv"
        for count in (1, 2):
            self.assert_succeeds("bench", *SMALL, "--t-q", "2", "--t-k", "32", "--op", "forward",
                                 "--json", lines, "--csv", table)
            self.assertEqual(len(lines.read_text().splitlines()), count)
            with open(table, encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self.assertEqual(len(rows), count)
        record = json.loads(lines.read_text().splitlines()[-1])
        self.assertEqual(list(rows[-1]), list(record))
        for name, value in record.items():
            if isinstance(value, str):
                self.assertEqual(rows[-1][name], value)
            elif value is None:
                self.assertEqual(rows[-1][name], "")
            else:
                self.assertEqual(json.loads(rows[-1][name]), value)

    def test_checking_mode_is_on_record(self):
        options = ("--t-q", "2", "--t-k", "32", "--op", "forward")
        self.assertIs(self.rows(*options, env={"FLASHDSA_CHECK": "1"})["forward"]["check"], True)
        self.assert_fails(2, ["bench: FLASHDSA_CHECK", "'yes'"], "bench", *SMALL, *options,
                          env={"FLASHDSA_CHECK": "yes"})

    def test_refusals(self):
        custom = ("--t-q", "4", "--t-k", "32")
        for words, options in (
                (["--op", "forward", "'sort'"], ("--op", "forward,sort")),
                (["--workload", "'short'"], ("--workload", "short")),
                (["custom", "--t-k"], ("--t-q", "4")),
                (["custom"], ("--workload", "custom")),
                (["text", "--text"], ("--workload", "text")),
                (["K = 16", "got 8"], ("--t-q", "4", "--t-k", "8")),
                (["--head-dim", "513"], ("--head-dim", "513")),
                (["--heads must be numbers in 1..128", "'129'"], ("--heads", "8,129")),
                (["--plan must be among none, reused, built", "'yes'"], ("--plan", "none,yes")),
                (["--repeats", "'0'"], ("--repeats", "0")),
                (["--min-seconds", "'-1'"], ("--min-seconds=-1",)),
                (["bench: --preset must be one of", "glm5.2", "'gpt2'"], ("--preset", "gpt2")),
                (["--backend", "'tpu'"], ("--backend", "tpu")),
                (["--simd", "'mmx'"], ("--simd", "mmx")),
                (["--regime", "'hot'"], ("--regime", "warm,hot")),
                (["--l2", "'cold'"], ("--l2", "cold")),
                (["nowhere"], (*custom, "--json", self.folder / "nowhere" / "a")),
                (["nowhere"], (*custom, "--csv", self.folder / "nowhere" / "a")),
                (["nowhere"], (*custom, "--svg", self.folder / "nowhere" / "a"))):
            with self.subTest(options):
                self.assert_fails(2, words, "bench", *SIZES, *options)

    def test_unavailable_backends(self):
        listed = json.loads(call("info", "--json").stdout)["backends"]
        for entry in (e for e in listed if not e["available"]):
            with self.subTest(entry["name"]):
                self.assert_fails(3, ["bench", entry["name"], entry["detail"]], "bench", *SMALL,
                                  "--backend", entry["name"])


@unittest.skipUnless(ON_HOST, f"{BACKEND} computes on a device")
class Host(BenchTest):
    """What host backends alone have."""

    def test_threads_give_scaling_and_a_picture(self):
        path = self.folder / "a.svg"
        done = self.assert_succeeds("bench", *SMALL, "--t-q", "4", "--t-k", "64", "--op",
                                    "forward,backward,compact", "--threads", "2,1", "--svg", path)
        self.assertIn("1 -> 2", done.stdout)
        self.assertIn("products alone", done.stdout)
        root = xml.parse(path).getroot()
        words = " ".join(node.text or "" for node in root.iter(SVG + "text"))
        for word in ("forward custom glm5.2-64, 1 thread", "forward custom glm5.2-64, 2 threads",
                     "share of the peak / %", "threads", "speed-up", "products alone", "GFLOP/s"):
            self.assertIn(word, words)
        self.assertNotIn("compact custom glm5.2-64, 1 thread", words)  # it has no FLOP to count
        self.assertEqual(len(list(root.iter(SVG + "polyline"))), 4)    # 3 operations, the products
        self.assert_inside(root)
        self.assertIn("prefers-color-scheme: dark", path.read_text())

    def assert_inside(self, root) -> None:
        """Every bar, line and beginning of a text lies in the picture; no bar is negative."""
        width, height = (float(root.get(name)) for name in ("width", "height"))
        for node in root.iter():
            for name, limit in (("x", width), ("x1", width), ("x2", width), ("y", height),
                                ("y1", height), ("y2", height)):
                if node.get(name) is not None:
                    self.assertTrue(0 <= float(node.get(name)) <= limit, xml.tostring(node))
            if node.tag == SVG + "rect":
                self.assertGreaterEqual(float(node.get("width")), 0)
                self.assertLessEqual(float(node.get("x")) + float(node.get("width")), width)
            for point in node.get("points", "").split():
                x, y = map(float, point.split(","))
                self.assertTrue(0 <= x <= width and 0 <= y <= height, point)

    def test_reference_backend(self):
        rows = self.rows("--t-q", "2", "--t-k", "32", "--op", "topk,forward,backward", "--backend",
                         "reference")
        self.assertEqual({row["backend"] for row in rows.values()}, {"reference"})

    def test_options_of_devices_are_refused(self):
        for words, options in ((["--regime", "warm", "'cold'"], ("--regime", "cold")),
                               (["--l2", "warm", "'flushed'"], ("--l2", "flushed")),
                               (["--peer-library"], ("--peer-library", "peer.so")),
                               (["--threads", "'0'"], ("--threads", "1,0"))):
            with self.subTest(options):
                self.assert_fails(2, words, "bench", *SIZES, *options)


if __name__ == "__main__":
    unittest.main()

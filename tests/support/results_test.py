"""Which rows of results the tables show, and how."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs/tools"))

import results  # noqa: E402

ROW = {"op": "forward", "backend": "sm90", "device": "NVIDIA H200", "driver": "580", "heads": 8,
       "workload": "random", "t_q": 64, "t_k": 128, "topk": 16, "regime": "warm", "l2": "warm",
       "median_ms": 1.23449, "tflops": 148.4, "ceiling_share": 0.2184,
       "error": "out rmse 2.0e-03 / 4.0e-03", "commit": "aaa"}


class Newest(unittest.TestCase):
    def shown(self, *changes: dict) -> list[dict]:
        return results.newest([{**ROW, **change} for change in changes])

    def test_the_later_row_of_a_key_counts(self) -> None:
        self.assertEqual(self.shown({"commit": "old"}, {"commit": "new", "median_ms": 9.0}),
                         [{**ROW, "commit": "new", "median_ms": 9.0}])

    def test_another_size_regime_plan_or_peer_is_another_key(self) -> None:
        for change in ({"heads": 16}, {"regime": "cold"}, {"plan": "reused"}, {"l2": "flushed"},
                       {"peer": "FlashMLA@1"}, {"simulated": True}, {"device": "NVIDIA H100"}):
            with self.subTest(change):
                self.assertEqual(len(self.shown({}, change)), 2)

    def test_a_newer_version_of_a_peer_replaces_the_older(self) -> None:
        self.assertEqual(len(self.shown({"peer": "FlashMLA@1"}, {"peer": "FlashMLA@2"})), 1)

    def test_rows_older_than_a_field_have_its_first_meaning(self) -> None:
        self.assertEqual(len(self.shown({}, {"plan": "none", "check": False, "peer": None})), 1)

    def test_files_are_read_by_date(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "a-2026-12-03-x.jsonl").write_text('{"n": 2}\n{"n": 3}\n')
            (folder / "b-2026-12-02-x.jsonl").write_text('{"n": 1}\n')
            self.assertEqual([row["n"] for row in results.read(folder)], [1, 2, 3])
            (folder / "undated.jsonl").write_text("{}\n")
            with self.assertRaisesRegex(ValueError, "^undated.jsonl: expected DEVICE-YYYY-MM-DD"):
                results.read(folder)


class Tables(unittest.TestCase):
    def lines(self, name: str, *rows: dict) -> list[str]:
        return results.tables(list(rows))[name].splitlines()

    def test_a_row_is_shown_with_its_units(self) -> None:
        self.assertEqual(self.lines("forward", ROW), [
            "In every row: device NVIDIA H200; driver 580; operation `forward`; workload `random`; "
            "T_q 64; T_k 128; K 16; plan none; regime warm; L2 warm; error of out rmse; "
            "bound 4.0e-03; commit aaa.",
            "",
            "| H | median, ms | TFLOP/s | share of the peak | error |",
            "| --- | --- | --- | --- | --- |",
            "| 8 | 1.234 | 148 | 21.8 % | 2.0e-03 |"])

    def test_columns_that_tell_rows_apart_are_shown(self) -> None:
        said, _, title, _, *shown = self.lines(
            "indexer", {**ROW, "op": "topk", "device": "NVIDIA H100", "workload": "single8k"},
            {**ROW, "op": "indexer_backward"})
        self.assertTrue(said.startswith("In every row: driver 580; T_q 64;"))
        self.assertTrue(title.startswith("| device | operation | workload |"))
        self.assertTrue(shown[0].startswith("| NVIDIA H200 | `indexer_backward` | `random` |"))
        self.assertTrue(shown[1].startswith("| NVIDIA H100 | `topk` | `single8k` |"))

    def test_workloads_heads_and_regimes_have_an_order(self) -> None:
        rows = [{**ROW, **change} for change in
                ({"workload": "drift90"}, {"heads": 64}, {"heads": 8, "regime": "sustained"}, {})]
        self.assertEqual([line[2:].split(" | ")[:3] for line in self.lines("forward", *rows)[4:]],
                         [["`random`", "8", "warm"], ["`random`", "8", "sustained"],
                          ["`random`", "64", "warm"], ["`drift90`", "8", "warm"]])

    def test_steps_of_several_ranks_have_a_table_of_their_own(self) -> None:
        row = {**ROW, "op": "step", "ranks": 4, "order": "zigzag", "simulated": True,
               "balance": 1.0625, "exchange_share": None, "exchange_bytes": 4096}
        self.assertEqual(self.lines("step", row), ["No row yet."])
        self.assertEqual(self.lines("context parallel", row)[2:], [
            "| H | ranks | order | ranks one after another | median, ms | "
            "slowest rank over the mean | received, bytes | error |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            "| 8 | 4 | zigzag | yes | 1.234 | 1.062 | 4096 | 2.0e-03 |"])

    def test_a_section_without_rows_says_so(self) -> None:
        self.assertEqual(self.lines("step", ROW), ["No row yet."])

    def test_a_row_that_no_table_takes_is_refused(self) -> None:
        sentence = r"^expected one table for a row, got \[\] for .*dance"
        with self.assertRaisesRegex(ValueError, sentence):
            results.tables([{**ROW, "op": "dance"}])


if __name__ == "__main__":
    unittest.main()

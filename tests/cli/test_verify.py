"""`flashdsa verify` finds the same errors and grants the same allowances as the NumPy judge."""
import json
import re
import unittest
from unittest import mock

import numpy as np
from command import BACKEND, CASES, CommandTest, call, small_problem, st
import check  # found through command
import run_cases

DIGITS = 0.02   # both print three digits
NOISE = 1e-13   # errors this small are the rounding of float64
CANCELS = 1e3   # an error this large is relative to a result that is the rounding of float64


def worst_vector_by_share(report, name, got, want, bound, floor):
    """check.every_vector, but the worst vector is the one nearest to its bound, with all digits."""
    error, size = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
    allowed = check.VECTOR_FACTOR * bound * size + floor
    if error.size:
        worst = np.unravel_index(int((error / allowed).argmax()), error.shape)
        report.add(name, f"worst vector {[int(i) for i in worst]}, error", f"{error[worst]:.9g}",
                   f"{allowed[worst]:.9g}", bool((error <= allowed).all()))


def numbers(text: str) -> list:
    return [float(word) for word in re.findall(r"[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)", text)]


class Verify(CommandTest):
    def assert_close(self, ours: list, theirs: list, what: str) -> None:
        self.assertEqual(len(ours), len(theirs), what)
        for a, b in zip(ours, theirs):
            if a == b or max(a, b) < NOISE or min(a, b) > CANCELS:
                continue
            self.assertLessEqual(abs(a - b), DIGITS * max(abs(a), abs(b)) + 1e-30,
                                 f"{what}: {a}, {b}")

    def compare(self, case: dict, op: str) -> int:
        """Runs op and verify on a case; returns how many lines of the two tables were compared."""
        source = CASES / case["input"]
        self.assert_succeeds(op, source, self.out, "--backend", BACKEND, "--deterministic")
        problem = check.Problem(st.read(source), case.get("options"))
        report = check.check_file(problem, st.read(self.out), op, BACKEND, strict=True)
        table = json.loads(self.assert_succeeds("verify", source, "--backend", BACKEND,
                                                "--deterministic", "--json").stdout)["errors"]
        ours = {(line["tensor"], line["measure"].split(" [")[0]): line for line in table}
        compared = 0
        for tensor, what, got, bound, _ in report.lines:
            key = (tensor, what.split(" [")[0])
            if key not in ours or tensor.startswith("topk"):
                continue
            line = ours[key]
            where = f"{case['name']}: {tensor} {what}"
            if what == "relative RMSE":
                self.assert_close(numbers(line["got"]), numbers(got), where)
                self.assert_close(numbers(line["bound"]), numbers(bound), where)
                compared += 1
            elif what.startswith("worst vector") and line["measure"] == what:  # no tie of the worst
                self.assert_close(numbers(line["got"]), numbers(got), where)
                self.assert_close(numbers(line["bound"]), numbers(bound), where)
                compared += 1
        return compared

    @mock.patch.object(check, "every_vector", worst_vector_by_share)
    def test_tables_agree_with_the_oracle(self):
        compared = 0
        for case in run_cases.load_cases(CASES):
            if case["group"] not in ("attend", "run") or case["exit"] != [0]:
                continue
            if case.get("options") or case.get("argv"):
                continue
            with self.subTest(case["name"]):
                compared += self.compare(case, case["op"])
        self.assertGreater(compared, 200)

    def test_selections_of_real_and_exact_data_pass(self):
        for name in ("topk_float_h32", "topk_ties_h16", "topk_nan_keys", "topk_wide_range",
                     "topk_signed_zeros", "topk_masked_rows", "topk_zigzag"):
            with self.subTest(name):
                self.assert_succeeds("verify", CASES / f"{name}.safetensors")

    def test_file_without_anything_to_verify(self):
        file = small_problem()
        self.write(st.File({"cu_seqlens": file.tensors["cu_seqlens"]}, {"cu_seqlens": "I32"}))
        self.assert_fails(2, ["index_q", "kv"], "verify", self.source)

    def test_what_cannot_be_run_is_left_out(self):
        file = small_problem()
        del file.tensors["head_weights"]
        file.put("topk_indices", "I32", np.zeros((12, 1, 1)))
        self.write(file)
        report = json.loads(self.assert_succeeds("verify", self.source, "--json").stdout)
        self.assertEqual(list(report["seconds"]), ["forward", "backward", "verify attention"])
        del file.tensors["topk_indices"]
        self.write(file)
        self.assert_fails(2, "head_weights", "verify", self.source)

    def test_second_file_is_refused(self):
        self.write(small_problem())
        self.assert_fails(2, "other", "verify", self.source, self.folder / "other")

    def test_selection_of_the_file_is_used(self):
        self.write(small_problem())
        report = json.loads(call("verify", self.source, "--json").stdout)
        self.assertEqual(report["attention"]["topk"], 4)
        file = small_problem()
        file.put("topk_indices", "I32", [[[0, -1]]] * 12)
        self.write(file)
        report = json.loads(self.assert_succeeds("verify", self.source, "--json").stdout)
        self.assertEqual(report["attention"]["topk"], 2)


if __name__ == "__main__":
    unittest.main()

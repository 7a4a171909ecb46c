"""The judge is judged: right answers pass, answers with one planted fault do not."""
import sys
import unittest
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "oracle"))
import check  # noqa: E402
import dsa_oracle as oracle  # noqa: E402
import run_cases  # noqa: E402
import safetensors_io as st  # noqa: E402

CASES = HERE / "cases"


def copy_of(file: st.File) -> st.File:
    return st.File({name: tensor.copy() for name, tensor in file.tensors.items()},
                   dict(file.dtypes), dict(file.metadata))


def put_real(file: st.File, name: str, dtype: str, values: np.ndarray) -> None:
    file.put(name, dtype, st.float_to_bf16(values) if dtype == "BF16" else values)


def scale(file: st.File, name: str, factor: float) -> None:
    put_real(file, name, file.dtypes[name], file.as_float(name) * factor)


class Metadata(unittest.TestCase):
    def setUp(self):
        self.problem = check.Problem(st.read(CASES / "metadata_worked_example.safetensors"))
        self.answer = copy_of(st.read(CASES / "metadata_worked_example.expected.safetensors"))

    def failures(self) -> list:
        return check.check_file(self.problem, self.answer, "metadata", strict=True).failures()

    def test_right_answer_passes(self):
        self.assertEqual(self.failures(), [])

    def test_every_field_counts(self):
        right = self.answer
        for name in right.tensors:
            with self.subTest(name):
                self.answer = copy_of(right)
                flat = self.answer.tensors[name].reshape(-1)
                flat[-1] = not flat[-1] if flat.dtype == bool else flat[-1] + 1
                self.assertNotEqual(self.failures(), [])

    def test_missing_field_fails(self):
        del self.answer.tensors["starts"]
        self.assertNotEqual(self.failures(), [])

    def test_wrong_scalar_fails(self):
        if "max_seqlen_k" in self.answer.metadata:
            self.answer.metadata["max_seqlen_k"] = "6"
        else:
            self.answer.tensors["max_seqlen_k"] = self.answer.tensors["max_seqlen_k"] + 1
        self.assertNotEqual(self.failures(), [])


class Selection(unittest.TestCase):
    def setUp(self):
        self.problem = check.Problem(st.read(CASES / "topk_ties_h16.safetensors"))
        metadata = self.problem.metadata()
        self.visible = metadata["causal_lengths"]
        indices, lengths, scores = oracle.indexer_topk(
            self.problem.real("index_q"), self.problem.real("index_k"),
            self.problem.real("head_weights"), metadata["starts"], self.visible,
            self.problem.integer("index_topk"))
        self.width = indices.shape[2]
        self.answer = (st.File().put("topk_indices", "I32", indices)
                       .put("topk_length", "I32", lengths).put("topk_scores", "F32", scores))

    def failures(self) -> list:
        return check.check_file(self.problem, self.answer, "topk", strict=True).failures()

    def row_with_choice(self) -> int:
        return int(np.flatnonzero(self.visible > self.width + 1)[0])

    def test_right_answer_passes(self):
        self.assertEqual(self.failures(), [])

    def test_one_exchanged_index_fails(self):
        t = self.row_with_choice()
        row = self.answer.tensors["topk_indices"][t, 0]
        start = self.problem.metadata()["starts"][t]
        others = np.setdiff1d(np.arange(start, start + self.visible[t]), row)
        row[-1] = others[-1]
        row.sort()
        self.assertTrue(any("wrong choice" in line for line in self.failures()))

    def test_two_swapped_indices_fail(self):
        row = self.answer.tensors["topk_indices"][self.row_with_choice(), 0]
        row[[0, 1]] = row[[1, 0]]
        self.assertTrue(any("out of form" in line for line in self.failures()))

    def test_wrong_length_fails(self):
        self.answer.tensors["topk_length"][0] += 1
        self.assertNotEqual(self.failures(), [])

    def test_wrong_score_fails(self):
        self.answer.tensors["topk_scores"][self.row_with_choice(), 0] += 1
        self.assertNotEqual(self.failures(), [])


class Attention(unittest.TestCase):
    def setUp(self):
        self.problem = check.Problem(st.read(CASES / "attend_sink_ramp.safetensors"))
        inputs = self.problem.attention()
        indices = self.problem.raw("topk_indices")
        forward = (inputs["q"], inputs["kv"], indices, inputs["softmax_scale"])
        extra = (inputs["topk_length"], inputs["attn_sink"])
        out, lse, max_logits = oracle.attention_forward(*forward, *extra)
        grad_q, grad_kv, grad_sink = oracle.attention_backward(
            *forward, self.problem.real("grad_out"), *extra)
        self.answer = st.File()
        for name, dtype, values in (
                ("out", "BF16", out), ("lse", "F32", lse), ("max_logits", "F32", max_logits),
                ("grad_q", "BF16", grad_q), ("grad_kv", "BF16", grad_kv),
                ("grad_attn_sink", "F32", grad_sink)):
            put_real(self.answer, name, dtype, values)

    def failures(self) -> list:
        return check.check_file(self.problem, self.answer, "attend", "cpu", strict=True).failures()

    def test_right_answer_passes(self):
        self.assertEqual(self.failures(), [])

    def test_scaled_results_fail(self):
        right = self.answer
        for name, factor in (("out", 1.01), ("grad_q", 1.1), ("grad_kv", 1.1), ("grad_kv", 0.9),
                             ("grad_attn_sink", 1.1), ("max_logits", 1.001)):
            with self.subTest(name=name, factor=factor):
                self.answer = copy_of(right)
                scale(self.answer, name, factor)
                failures = self.failures()
                self.assertTrue(any(line.startswith(name) for line in failures), failures)

    def test_one_wrong_vector_fails(self):
        right = self.answer
        for name in ("out", "grad_q", "grad_kv"):
            with self.subTest(name):
                self.answer = copy_of(right)
                values = self.answer.as_float(name)
                row = int(np.argmax(np.abs(values).reshape(values.shape[0], -1).max(axis=1)))
                values[row, 0] *= 1.1
                put_real(self.answer, name, "BF16", values)
                self.assertTrue(any("worst vector" in line for line in self.failures()))

    def test_logarithm_to_the_base_two_fails(self):
        scale(self.answer, "lse", 1 / np.log(2))
        self.assertNotEqual(self.failures(), [])

    def test_nan_fails(self):
        right = self.answer
        for name in right.tensors:
            with self.subTest(name):
                self.answer = copy_of(right)
                values = self.answer.as_float(name)
                values.reshape(-1)[-1] = np.nan
                put_real(self.answer, name, self.answer.dtypes[name], values)
                self.assertNotEqual(self.failures(), [])

    def test_missing_result_fails(self):
        right = self.answer
        for name in right.tensors:
            with self.subTest(name):
                self.answer = copy_of(right)
                del self.answer.tensors[name]
                self.assertNotEqual(self.failures(), [])

    def test_other_type_fails(self):
        put_real(self.answer, "out", "F32", self.answer.as_float("out"))
        self.assertNotEqual(self.failures(), [])


class Runner(unittest.TestCase):
    """run_cases.py with programs that do what they should not."""

    def run_with(self, group: str, program) -> tuple:
        cases = run_cases.load_cases(CASES, group)[:5]
        passed, failed = run_cases.run_all(cases, CASES, program, "cpu", log=lambda line: None)
        return len(passed), len(failed), len(cases)

    def test_program_that_writes_nothing_fails(self):
        self.assertEqual(self.run_with("metadata", lambda argv, env: (0, "")), (0, 5, 5))

    def test_program_that_hangs_fails(self):
        self.assertEqual(self.run_with("topk", lambda argv, env: (None, "")), (0, 5, 5))

    def test_refusal_without_a_sentence_fails(self):
        cases = [c for c in run_cases.load_cases(CASES, "metadata") if c["exit"] == [2]]
        _, failed = run_cases.run_all(cases, CASES, lambda argv, env: (2, ""), "cpu",
                                      log=lambda line: None)
        self.assertEqual(len(failed), len(cases))

    def test_refusal_that_leaves_a_file_fails(self):
        def program(argv, env):
            Path(argv[2]).write_bytes(b"")
            return 2, "total_key_tokens and every other name\n"
        case = [c for c in run_cases.load_cases(CASES) if c["name"] == "metadata_error_total_zero"]
        _, failed = run_cases.run_all(case, CASES, program, "cpu", log=lambda line: None)
        self.assertEqual(len(failed), 1)


if __name__ == "__main__":
    unittest.main()

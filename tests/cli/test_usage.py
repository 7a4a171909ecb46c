"""Options, their spellings and their refusals. SPEC section 9."""
import json
import re
import unittest

import numpy as np
from command import CommandTest, call, small_problem, st

COMMANDS = ("info", "synth", "metadata", "topk", "attend", "run", "verify", "bench")


class Usage(CommandTest):
    def setUp(self):
        super().setUp()
        self.write(small_problem())

    def test_help_is_there_for_every_command(self):
        for arguments in ([], *([name] for name in COMMANDS)):
            with self.subTest(arguments):
                done = self.assert_succeeds(*arguments, "--help")
                self.assertIn("Usage", done.stdout)

    def test_version(self):
        self.assertRegex(self.assert_succeeds("--version").stdout, r"^\d+\.\d+\.\d+\n$")

    def test_bad_command_lines(self):
        files = (self.source, self.out)
        for words, arguments in (
                ("command", ()),
                ("metadatas", ("metadatas", *files)),
                ("IN", ("metadata",)),
                ("OUT", ("metadata", self.source)),
                ("third", ("metadata", *files, "third")),
                ("frobnicate", ("metadata", *files, "--frobnicate")),
                ("--backend", ("metadata", *files, "--backend")),
                ("tpu", ("metadata", *files, "--backend", "tpu")),
                ("CPU", ("metadata", *files, "--backend", "CPU")),
                ("--simd", ("topk", *files, "--simd", "mmx")),
                ("--grad-kv-dtype", ("attend", *files, "--grad-kv-dtype", "f16")),
                ("--grad-kv-dtype", ("attend", *files, "--grad-kv-dtype", "")),
                ("--softmax-scale", ("run", *files, "--softmax-scale=")),
                ("--json", ("run", *files, "--json=maybe"))):
            with self.subTest(arguments):
                self.assert_fails(2, words, *arguments)

    def test_numbers_are_read_strictly(self):
        for option in ("--index-topk", "--total-key-tokens", "--max-seqlen", "--threads"):
            name = option if option == "--threads" else option[2:].replace("-", "_")
            for text in ("", " 12", "12 ", "12.0", "0x10", "1e1", "+12", "-12", "-0x1", "word",
                         "12,5", "4294967308", "18446744073709551628", "99999999999999999999999"):
                with self.subTest(option=option, text=text):
                    self.assert_fails(2, name, "run", self.source, self.out, option, text)

    def test_threads_range(self):
        for text in ("0", "1025"):
            self.assert_fails(2, "1..1024", "topk", self.source, self.out, "--threads", text)
        for text in ("1", "1024"):
            self.assert_succeeds("topk", self.source, self.out, "--threads", text)

    def test_index_topk_range(self):
        for text in ("0", "2049"):
            self.assert_fails(2, ["index_topk", "1..2048"], "topk", self.source, self.out,
                              "--index-topk", text)

    def test_softmax_scale_is_read_strictly(self):
        for text in ("", " 1", "1 ", "0x1p3", "one", "1,5", "nan", "inf", "-1", "0", "1e-400",
                     "1e400", "1e-60"):
            with self.subTest(text):
                self.assert_fails(2, "softmax_scale", "run", self.source, self.out,
                                  "--softmax-scale", text)

    def test_flags_take_true_and_false_alone(self):
        for flag in ("lenient", "deterministic", "invariant"):
            for text in ("", "True", "1", "yes", "maybe"):
                with self.subTest(flag=flag, text=text):
                    self.assert_fails(2, flag, "run", self.source, self.out, f"--{flag}={text}")
            self.assert_succeeds("run", self.source, self.out, f"--{flag}=true")
            self.assert_succeeds("run", self.source, self.out, f"--{flag}=false")
            self.assert_succeeds("run", self.source, self.out, f"--{flag}")

    def test_strings_of_the_file_are_read_strictly(self):
        for name, text in (("index_topk", "4.0"), ("softmax_scale", "x"), ("query_mode", "zigzag"),
                           ("lenient", "1"), ("deterministic", "yes"), ("invariant", ""),
                           ("total_key_tokens", " 12"), ("max_seqlen", "7x")):
            with self.subTest(name):
                file = small_problem()
                file.metadata[name] = text
                self.write(file)
                self.assert_fails(2, [name, "__metadata__"], "run", self.source, self.out)

    def test_both_spellings_give_the_same_and_win_over_the_file(self):
        for spelling in ("--index-topk", "--index_topk"):
            for style in ([spelling, "3"], [f"{spelling}=3"]):
                self.assert_succeeds("topk", self.source, self.out, *style)
                self.assertEqual(st.read(self.out).tensors["topk_indices"].shape, (12, 1, 3))

    def test_option_wins_over_a_bad_string_of_the_file(self):
        file = small_problem()
        file.metadata["softmax_scale"] = "rubbish"
        self.write(file)
        self.assert_succeeds("run", self.source, self.out, "--softmax_scale", "0.5")

    def test_missing_scalars(self):
        for name in ("index_topk", "softmax_scale"):
            file = small_problem()
            del file.metadata[name]
            self.write(file)
            self.assert_fails(2, name, "run", self.source, self.out)

    def test_total_key_tokens_must_agree_with_the_keys(self):
        self.assert_fails(2, "total_key_tokens", "run", self.source, self.out,
                          "--total-key-tokens", "13")
        file = small_problem()
        file.put("kv", "BF16", np.zeros((13, 1, 576), np.uint16))
        self.write(file)
        self.assert_fails(2, "total_key_tokens", "run", self.source, self.out)

    def test_total_key_tokens_is_needed_without_keys(self):
        file = st.File().put("cu_seqlens", "I32", np.array([0, 3]))
        self.write(file)
        self.assert_fails(2, "total_key_tokens", "metadata", self.source, self.out)
        self.assert_succeeds("metadata", self.source, self.out, "--total-key-tokens", "3")

    def test_unavailable_backend(self):
        files = (self.source, self.out)
        for command in (("info",), ("metadata", *files), ("topk", *files), ("attend", *files),
                        ("run", *files), ("verify", self.source), ("bench",)):
            listed = json.loads(call("info", "--json").stdout)["backends"]
            for entry in (e for e in listed if not e["available"]):
                with self.subTest(command=command[0], backend=entry["name"]):
                    self.assert_fails(3, [entry["name"], entry["detail"]], *command,
                                      "--backend", entry["name"])

    def test_file_named_like_a_command(self):
        for path in (self.folder / "topk", self.folder / "info"):
            path.write_bytes(self.source.read_bytes())
        self.assert_succeeds("metadata", "topk", "out", cwd=self.folder)
        self.assert_succeeds("topk", "info", "out", cwd=self.folder)

    def test_file_named_like_an_option(self):
        (self.folder / "--in_put").write_bytes(self.source.read_bytes())
        self.assert_succeeds("metadata", "--", "--in_put", "out", cwd=self.folder)


class Output(CommandTest):
    def setUp(self):
        super().setUp()
        self.write(small_problem())

    def test_info_says_what_runs_where(self):
        report = json.loads(self.assert_succeeds("info", "--json").stdout)
        available = {entry["name"]: entry["available"] for entry in report["backends"]}
        lines = self.assert_succeeds("info").stdout.splitlines()
        self.assertEqual(len(report["operations"]), 7)
        for operation in report["operations"]:
            with self.subTest(operation["name"]):
                support = operation["backends"]
                self.assertEqual(list(support), list(available))
                self.assertEqual((support["cpu"], support["reference"]), ("yes", "yes"))
                for backend, word in support.items():
                    self.assertIn(word, ("yes", "no") if available[backend] else ("not here", "no"))
                row = [operation["name"], *support.values(), operation["sizes"],
                       operation["dtypes"]]
                self.assertIn(row, [re.split("  +", line) for line in lines])

    def test_json_is_one_object(self):
        for arguments in (("info",), ("metadata", self.source, self.out),
                          ("topk", self.source, self.out), ("run", self.source, self.out),
                          ("run", self.source, self.out, "--verify"), ("verify", self.source)):
            with self.subTest(arguments):
                done = self.assert_succeeds(*arguments, "--json")
                self.assertEqual(json.loads(done.stdout)["command"], arguments[0])
                self.assertEqual(done.stdout.count("\n"), 1)

    def test_run_tells_of_its_rows(self):
        report = json.loads(self.assert_succeeds("run", self.source, self.out, "--json").stdout)
        # Documents of 5 and 7 tokens with K = 4: min(K, 1..5) and min(K, 1..7) keys.
        self.assertEqual(report["documents"], 2)
        self.assertEqual(report["rows"], 12)
        self.assertEqual(report["valid_rows"], 12)
        self.assertEqual(report["empty_rows"], 0)
        self.assertEqual(report["trivial_rows"], 8)
        self.assertEqual(report["selected_keys"], 14 + 22)
        self.assertEqual(list(report["seconds"]), ["metadata", "topk", "forward", "backward"])
        indices = st.read(self.out).tensors["topk_indices"][:, 0]
        shares = [len(set(a) & set(b) - {-1}) / (b >= 0).sum()
                  for t, (a, b) in enumerate(zip(indices, indices[1:])) if t + 1 != 5]
        self.assertAlmostEqual(report["mean_overlap"], np.mean(shares), places=12)

    def test_run_text_names_what_a_person_wants(self):
        text = self.assert_succeeds("run", self.source, self.out, "--verify").stdout
        for word in ("documents", "query rows", "trivial rows", "empty rows", "selected keys",
                     "mean overlap", "time", "peak scratch", "grad_kv", "bound"):
            self.assertIn(word, text)

    def test_run_writes_every_result(self):
        self.assert_succeeds("run", self.source, self.out, "--scores", "--grad-kv-dtype", "f32")
        out = st.read(self.out)
        self.assertEqual(set(out.tensors), {
            "starts", "causal_lengths", "query_valid", "segment_cu_q", "segment_cu_k",
            "q_causal_offsets", "topk_indices", "topk_length", "topk_scores", "out", "lse",
            "max_logits", "grad_q", "grad_kv", "grad_attn_sink"})
        self.assertEqual(out.dtypes["grad_kv"], "F32")
        self.assertEqual(out.metadata, {"max_seqlen_q": "7", "max_seqlen_k": "7",
                                        "total_key_tokens": "12", "all_rows_nonempty": "true"})

    def test_run_does_not_use_a_selection_of_the_file(self):
        self.assert_succeeds("run", self.source, self.out, "--deterministic")
        right = st.read(self.out)
        file = small_problem()
        file.put("topk_indices", "I32", np.zeros((12, 1, 4)))
        file.put("topk_length", "I32", np.zeros(12))
        self.write(file)
        self.assert_succeeds("run", self.source, self.out, "--deterministic")
        for name, tensor in st.read(self.out).tensors.items():
            np.testing.assert_array_equal(tensor, right.tensors[name])

    def test_run_equals_its_three_steps(self):
        self.assert_succeeds("run", self.source, self.out, "--scores", "--deterministic")
        whole = st.read(self.out)
        self.assert_succeeds("topk", self.source, self.out, "--scores")
        selection = st.read(self.out)
        file = small_problem()
        for name in ("topk_indices", "topk_length"):
            file.put(name, "I32", selection.tensors[name])
        self.write(file)
        self.assert_succeeds("attend", self.source, self.out, "--deterministic")
        for name, tensor in {**selection.tensors, **st.read(self.out).tensors}.items():
            np.testing.assert_array_equal(tensor, whole.tensors[name])

    def test_optional_results_stay_away(self):
        file = small_problem()
        del file.tensors["grad_out"]
        self.write(file)
        self.assert_succeeds("run", self.source, self.out)
        for name in ("topk_scores", "grad_q", "grad_kv", "grad_attn_sink"):
            self.assertNotIn(name, st.read(self.out).tensors)

    def test_tensors_in_float64_take_the_reference(self):
        file = small_problem()
        wide = st.File(metadata=file.metadata)
        for name, tensor in file.tensors.items():
            is_integer = file.dtypes[name] == "I32"
            wide.put(name, *(("I32", tensor) if is_integer else ("F64", file.as_float(name))))
        self.write(wide)
        self.assert_succeeds("run", self.source, self.out, "--backend", "auto")
        self.assertEqual({st.read(self.out).dtypes[n] for n in ("out", "lse", "grad_q", "grad_kv")},
                         {"F64"})
        self.assert_fails(3, "cpu", "run", self.source, self.out, "--backend", "cpu")


class CheckingMode(CommandTest):
    def bad_problem(self, index: int, length: int) -> None:
        file = small_problem()
        indices = np.full((12, 1, 4), -1)
        indices[:, 0, 0] = 0
        indices[7, 0, 1] = index
        file.put("topk_indices", "I32", indices)
        lengths = np.full(12, 4)
        lengths[7] = length
        file.put("topk_length", "I32", lengths)
        self.write(file)

    def test_index_out_of_range_names_its_row(self):
        self.bad_problem(12, 4)
        self.assert_fails(2, ["topk_indices", "row 7", "12"], "attend", self.source, self.out,
                          env={"FLASHDSA_CHECK": "1"})

    def test_length_above_k_names_its_row(self):
        self.bad_problem(1, 5)
        self.assert_fails(2, ["topk_length", "row 7", "5"], "attend", self.source, self.out,
                          env={"FLASHDSA_CHECK": "1"})

    def test_hole_is_no_error(self):
        self.bad_problem(-1, 4)
        self.assert_succeeds("attend", self.source, self.out, env={"FLASHDSA_CHECK": "1"})

    def test_without_it_such_slots_do_not_count(self):
        self.bad_problem(12, 9)
        for value in ("", "0"):
            self.assert_succeeds("attend", self.source, self.out, env={"FLASHDSA_CHECK": value})
        self.assertEqual(st.read(self.out).dtypes["out"], "BF16")

    def test_odd_value_is_refused(self):
        self.bad_problem(1, 4)
        self.assert_fails(2, "FLASHDSA_CHECK", "attend", self.source, self.out,
                          env={"FLASHDSA_CHECK": "yes"})


if __name__ == "__main__":
    unittest.main()

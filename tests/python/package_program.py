"""The package as a program: what the command does with a case of tests/conformance, through the
functions of the package, so that the runner of the conformance cases can judge it."""

import contextlib
import os

import ml_dtypes
import numpy as np

import flashdsa
import safetensors_io as st

EXIT_OF = ((TypeError, 2), (ValueError, 2), (RuntimeError, 4))
METADATA_TENSORS = ("starts", "causal_lengths", "query_valid", "valid_row_indices", "segment_cu_q",
                    "segment_cu_k", "q_causal_offsets", "key_source_indices")
METADATA_SCALARS = ("max_seqlen_q", "max_seqlen_k", "total_key_tokens", "all_rows_nonempty")


class NumpyTensors:
    """The file's tensors as NumPy arrays, which are read-only, and results back."""

    def load(self, array, dtype):
        return array.view(ml_dtypes.bfloat16) if dtype == "BF16" else array

    def store(self, result):
        return result


class TorchTensors:
    """The same as tensors of PyTorch on a device."""

    def __init__(self, device):
        import torch

        self.torch = torch
        self.device = device

    def load(self, array, dtype):
        tensor = self.torch.from_numpy(array.view(np.int16).copy() if dtype == "BF16"
                                       else array.copy())
        tensor = tensor.to(self.device)
        return tensor.view(self.torch.bfloat16) if dtype == "BF16" else tensor

    def store(self, result):
        result = result.cpu()
        if result.dtype == self.torch.bfloat16:
            return result.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return result.numpy()


class Problem:
    """A case's input, its scalars as numbers where they are some, and the options of a call."""

    def __init__(self, path, options, tensors):
        file = st.read(path)
        self.arrays = {name: tensors.load(array, file.dtypes[name])
                       for name, array in file.tensors.items()}
        self.scalars = {**file.metadata, **options}
        self.runtime = {"backend": self.scalars.pop("backend", "auto"),
                        "threads": self.number("threads", int) or 0}

    def get(self, name):
        return self.arrays.get(name)

    def number(self, name, kind):
        """None when absent; text that is no number stays text, for the package to refuse."""
        text = self.scalars.get(name)
        if text is None:
            return None
        try:
            return kind(text)
        except ValueError:
            return text

    def flag(self, name):
        text = self.scalars.get(name, "false")
        return {"true": True, "false": False}.get(text, text)

    def total_key_tokens(self):
        total = self.number("total_key_tokens", int)
        for name in ("index_k", "kv"):
            if total is None and self.get(name) is not None:
                total = self.get(name).shape[0]
        return total


def metadata(problem):
    return flashdsa.prepare_packed_metadata(
        problem.get("cu_seqlens"), problem.total_key_tokens(), problem.number("max_seqlen", int),
        query_indices=problem.get("query_indices"),
        cu_seqlens_padded=problem.get("cu_seqlens_padded"),
        padding_mask=problem.get("padding_mask"),
        query_mode=problem.scalars.get("query_mode", "contiguous"),
        lenient=problem.flag("lenient"), **problem.runtime)


def topk(problem, rows, scores):
    return flashdsa.indexer_topk(
        problem.get("index_q"), problem.get("index_k"), problem.get("head_weights"), rows,
        problem.number("index_topk", int), return_scores=scores, **problem.runtime)._asdict()


def attend(problem, topk_indices, topk_length):
    inputs = (problem.get("q"), problem.get("kv"), topk_indices,
              problem.number("softmax_scale", float))
    extra = {"topk_length": topk_length, "attn_sink": problem.get("attn_sink"),
             "deterministic": problem.flag("deterministic"),
             "invariant": problem.flag("invariant"), **problem.runtime}
    results = flashdsa.attention_forward(*inputs, return_max_logits=True, **extra)._asdict()
    if problem.get("grad_out") is not None:
        results.update(flashdsa.attention_backward(
            *inputs, results["out"], results["lse"], problem.get("grad_out"), **extra)._asdict())
    return results


def run(command, problem):
    """The tensors and scalars that the command would write."""
    if command == "attend":
        return attend(problem, problem.get("topk_indices"), problem.get("topk_length")), {}
    rows = metadata(problem)
    results = {}
    if command == "metadata":
        results = {name: getattr(rows, name) for name in METADATA_TENSORS}
    scalars = {name: getattr(rows, name) for name in METADATA_SCALARS}
    if command in ("topk", "run"):
        results.update(topk(problem, rows, scores=command == "topk"))
    if command == "run":
        results.update(attend(problem, results["topk_indices"], results["topk_length"]))
    return results, scalars


DTYPE_NAMES = {"bool": "BOOL", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64",
               "bfloat16": "BF16"}


def write(path, results, scalars, tensors):
    file = st.File(metadata={name: str(value).lower() for name, value in scalars.items()})
    for name, result in results.items():
        if result is None:
            continue
        array = tensors.store(result)
        dtype = DTYPE_NAMES[array.dtype.name]
        file.put(name, dtype, array.view(np.uint16) if dtype == "BF16" else array)
    st.write(path, file)


@contextlib.contextmanager
def environment(changes):
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def program(tensors):
    """What run_cases calls: argv and changes of the environment to exit code and stderr."""
    def call(argv, env):
        command, source, target, *words = argv
        options = {name.lstrip("-").replace("-", "_"): value
                   for name, value in zip(words[::2], words[1::2])}
        try:
            with environment(env):
                write(target, *run(command, Problem(source, options, tensors)), tensors)
        except tuple(kind for kind, _ in EXIT_OF) as error:
            return next(code for kind, code in EXIT_OF if isinstance(error, kind)), str(error)
        return 0, ""
    return call

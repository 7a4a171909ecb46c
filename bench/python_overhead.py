#!/usr/bin/env python3
"""What one call through Python costs over the same call from C++.

    python_overhead.py [--library build/release/src/libflashdsa.a] [--json]

Every operation runs on the smallest problem, on one thread, so that almost nothing but the call is
left; the two sides take turns, batch by batch. Needs the package, and the static library of a
release build for the C++ side. Microseconds. The overhead is that of the fastest batches, in which
nobody else had the core; the medians tell how busy the machine was. A call that autograd records
pays for PyTorch's bookkeeping besides: the last row is that of a function that does nothing.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time

import ml_dtypes
import numpy as np

import flashdsa

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 15.0  # microseconds over the C++ call
NOTHING = "a function that does nothing"


def build(library, folder):
    program = pathlib.Path(folder) / "python_overhead"
    subprocess.run(["c++", "-std=c++20", "-O2", "-DNDEBUG", f"-I{ROOT / 'include'}",
                    str(ROOT / "bench/python_overhead.cc"), str(library), "-fopenmp", "-o",
                    str(program)], check=True)
    return program


def time_cpp(program, batches, calls):
    """Microseconds per call of every batch, by operation."""
    done = subprocess.run([str(program), str(batches), str(calls)], check=True, capture_output=True,
                          text=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {name: [float(x) / 1000 for x in figures] for name, *figures in lines}


def time_python(call, batches, calls):
    for _ in range(calls):
        call()
    figures = []
    for _ in range(batches):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        figures.append((time.perf_counter_ns() - begin) / calls / 1000)
    return figures


def numpy_arrays(*shape, dtype=ml_dtypes.bfloat16):
    return np.zeros(shape, dtype)


def plain_calls(zeros, int32, float32, boundaries):
    """The calls of the plain functions; `zeros` makes the framework's arrays."""
    q, kv, indices = zeros(1, 1, 512), zeros(1, 1, 512), zeros(1, 1, 1, dtype=int32)
    forward = flashdsa.attention_forward(q, kv, indices, 1.0)
    index = zeros(1, 1, 128), zeros(1, 128), zeros(1, 1, dtype=float32)
    rows = flashdsa.prepare_packed_metadata(boundaries, 1)
    row = zeros(1, 1, dtype=int32)
    return {
        "attention_forward": lambda: flashdsa.attention_forward(q, kv, indices, 1.0, threads=1),
        "attention_backward": lambda: flashdsa.attention_backward(
            q, kv, indices, 1.0, forward.out, forward.lse, q, threads=1),
        "indexer_topk": lambda: flashdsa.indexer_topk(*index, rows, 1, threads=1),
        "compact_and_sort": lambda: flashdsa.compact_and_sort(row, 1, threads=1),
        "prepare_packed_metadata": lambda: flashdsa.prepare_packed_metadata(boundaries, 1,
                                                                            threads=1),
    }


def operator_calls(torch):
    """The calls of flashdsa.torch, by name and by what they are compared with."""
    import flashdsa.torch

    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype)

    q, kv, indices = zeros(1, 1, 512), zeros(1, 1, 512), zeros(1, 1, 1, dtype=torch.int32)
    trained = q.clone().requires_grad_()
    run = flashdsa.torch.sparse_attention
    return {"sparse_attention": lambda: run(q, kv, indices, 1.0, threads=1),
            "sparse_attention, gradient wanted": lambda: run(trained, kv, indices, 1.0, threads=1)}


def autograd_calls(torch):
    """What PyTorch takes to record a call of as many arguments, with the same tensors saved."""
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, kv, indices, *options):
            ctx.save_for_backward(q, kv, indices)
            return kv.detach()

        @staticmethod
        def backward(ctx, grad):
            return None

    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16, requires_grad=True)
    kv, indices = torch.zeros_like(q), torch.zeros(1, 1, 1, dtype=torch.int32)
    options = (1.0, None, None, "auto", 1, False, False, None)
    return {NOTHING: lambda: Nothing.apply(q, kv, indices, *options)}


def summary(figures):
    return {"best": min(figures), "median": statistics.median(figures)}


def measure(program, batches, calls):
    suites = {"numpy": plain_calls(numpy_arrays, np.int32, np.float32, np.array([0, 1], np.int32))}
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None:
        suites["torch"] = plain_calls(
            lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype), torch.int32,
            torch.float32, torch.tensor([0, 1], dtype=torch.int32))
        suites["flashdsa.torch"] = operator_calls(torch)
        suites["torch.autograd"] = autograd_calls(torch)
    pairs = {(suite, name): ([], []) for suite, ops in suites.items() for name in ops}
    for _ in range(batches):
        cpp = {**time_cpp(program, 1, calls), NOTHING: [0.0]}
        for (suite, name), (python, other) in pairs.items():
            python += time_python(suites[suite][name], 1, calls)
            other += cpp["attention_forward" if suite == "flashdsa.torch" else name]
    for (suite, name), (python, other) in pairs.items():
        yield {"op": name, "through": suite, "cpp_us": summary(other), "python_us": summary(python),
               "overhead_us": min(python) - min(other)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path,
                        default=ROOT / "build/release/src/libflashdsa.a")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--calls", type=int, default=500, help="calls in a batch")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--commit", help="commit of the build, for the JSON objects")
    options = parser.parse_args()
    where = {"device": platform.processor() or platform.machine(),
             "python": platform.python_version(),
             "build": f"{flashdsa.__version__} ({flashdsa.build_description()})"}
    if not options.json:
        print(f"{where['device']}, Python {where['python']}, flashdsa {where['build']}; "
              "microseconds")
        print(f"{'operation':34} {'through':15} {'C++':>6} {'median':>7} {'Python':>7} "
              f"{'median':>7} {'over':>6}")
    with tempfile.TemporaryDirectory() as folder:
        program = build(options.library, folder)
        for record in measure(program, options.batches, options.calls):
            if options.json:
                print(json.dumps({**record, **where, "commit": options.commit}))
                continue
            cpp, python, over = record["cpp_us"], record["python_us"], record["overhead_us"]
            mark = "" if over <= LIMIT else f"  more than {LIMIT:g}"
            print(f"{record['op']:34} {record['through']:15} {cpp['best']:6.2f} "
                  f"{cpp['median']:7.2f} {python['best']:7.2f} {python['median']:7.2f} "
                  f"{over:6.2f}{mark}")


if __name__ == "__main__":
    main()

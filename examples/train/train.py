"""Trains the model of model.py on real text, with dense and with sparse attention.

    python train.py --out results.json --svg curves.svg
    torchrun --nproc-per-node 2 train.py --attention sparse --expect results.json

docs/training.md says what is trained and what came out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, NoReturn, Optional, Sequence, Union

import torch
import torch.distributed as dist
import torch.nn.functional as F
from flashdsa.torch.context_parallel import ContextParallel
from torch import Tensor

import plot
from data import batches, default_texts, unigram_entropy
from model import Config, Model, Rows
from shards import OneRank

ATTENTIONS = ("dense", "sparse")
MAX_KEYS = 2048  # of one query, by the kernels
TOLERANCE = 1e-4  # relative, for --expect
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
RANK = int(os.environ.get("RANK", "0"))


def fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"train.py: {sentence}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = Parser(description="Trains a small DSA model on real text.", allow_abbrev=False,
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both"), default="both")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=30,
                        help="first steps of the sparse run, in which attention takes every key")
    parser.add_argument("--tokens", type=int, default=512, help="bytes of a batch")
    parser.add_argument("--length", type=int, default=256, help="bytes of the longest document")
    parser.add_argument("--topk", type=int, default=32, help="keys of a query")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=2,
                        help="parts of a batch: with torchrun the number of ranks; one rank sums "
                             "up like so many")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64",
                        help="of all but the kernels")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="of a rank (default: PyTorch's)")
    parser.add_argument("--text", type=pathlib.Path, nargs="+",
                        help="files (default: Debian's licence texts; elsewhere this project's "
                             "pages)")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for options and losses")
    parser.add_argument("--svg", type=pathlib.Path, help="file for the curves")
    parser.add_argument("--expect", type=pathlib.Path, metavar="FILE",
                        help=f"of an earlier --out: fail if a loss differs by more than "
                             f"{TOLERANCE:g} of it")
    options = parser.parse_args(arguments)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    for name, low, high in (("steps", 1, None), ("warmup", 0, None), ("tokens", 1, None),
                            ("length", 1, MAX_KEYS), ("topk", 1, MAX_KEYS), ("shards", 1, None),
                            ("threads", 1, None)):
        value = getattr(options, name)
        if value is not None and (value < low or (high is not None and value > high)):
            expected = f"in {low}..{high}" if high is not None else f"at least {low}"
            fail(f"--{name} must be {expected}, got {value}")
    if not 0 < options.lr < math.inf:
        fail(f"--lr must be positive and finite, got {options.lr}")
    if options.tokens % (2 * options.shards) != 0:
        fail(f"--tokens must be a multiple of {2 * options.shards}, twice the shards, "
             f"got {options.tokens}")
    if RANKS not in (1, options.shards):
        fail(f"--shards must be the number of ranks, {RANKS}, got {options.shards}")
    for path in (options.out, options.svg):
        if path is not None and not path.parent.is_dir():
            fail(f"cannot write {path}: no such folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda needs a GPU, got none")


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """A rise over 20 steps, within half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
    return options.lr * min(1, (step + 1) / 20) * cosine


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """In place. One exchange, in the tensors' own precision."""
    if RANKS == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def train(attention: str, documents: Sequence[bytes], options: argparse.Namespace,
          device: torch.device) -> dict[str, Any]:
    """One run: losses of all its steps, the same for the same options."""
    torch.manual_seed(options.seed)
    config = Config()
    model = Model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    indexers = -(-config.layers // config.layers_per_selection)
    shards: Union[ContextParallel, OneRank] = OneRank(options.tokens, options.shards)
    if RANKS > 1:
        shards = ContextParallel(options.tokens, order="zigzag")

    run: dict[str, Any] = {"loss": [], "indexer_loss": []}
    start = time.perf_counter()
    text = batches(documents, options.tokens, options.length, options.seed)
    for step, batch in zip(range(options.steps), text):
        if attention == "dense":
            topk = None
        else:
            topk = options.length if step < options.warmup else options.topk
        rows = Rows(shards.prepare_packed_metadata(batch.cu_seqlens.to(device)), shards)
        logits, indexer_loss = model(shards.shard(batch.tokens.to(device)), rows, topk)
        loss = F.cross_entropy(logits, shards.shard(batch.targets.to(device)), reduction="sum")

        optimizer.zero_grad()
        ((loss + indexer_loss) / options.tokens).backward()
        sums = torch.stack((loss.detach() / options.tokens,
                            indexer_loss.detach() / (options.tokens * indexers)))
        sum_over_ranks([sums, *(p.grad for p in model.parameters() if p.grad is not None)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        optimizer.step()

        for name, value in zip(("loss", "indexer_loss"), sums.tolist()):
            run[name].append(value)
        if RANK == 0 and (step % 20 == 0 or step == options.steps - 1):
            indexers_part = f", indexers {sums[1]:.4f}" if attention == "sparse" else ""
            print(f"{attention}, step {step + 1}: loss {sums[0]:.4f}{indexers_part}", flush=True)
    if attention == "dense":
        del run["indexer_loss"]
    run["seconds"] = round(time.perf_counter() - start, 1)
    return run


def check_same_task(results: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless an earlier run had the same options and text, and all attentions of this one."""
    for name in ("options", "text"):
        if results[name] != expected.get(name):
            fail(f"--expect needs a file of the same {name}, {results[name]}, "
                 f"got {expected.get(name)}")
    for name in results["runs"]:
        if name not in expected["runs"]:
            fail(f"--expect needs a file with a {name} run, got {', '.join(expected['runs'])}")


def check_same_losses(results: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless every loss is within TOLERANCE of that of the earlier run."""
    difference = max(abs(got - want) / abs(want) for name, run in results["runs"].items()
                     for got, want in zip(run["loss"], expected["runs"][name]["loss"]))
    print(f"largest relative difference of a loss: {difference:.1e}")
    if difference > TOLERANCE:
        fail(f"expected at most {TOLERANCE:g} as the relative difference of a loss", code=1)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parse(arguments)
    try:
        documents = [path.read_bytes() for path in options.text or default_texts()]
        expected = json.loads(options.expect.read_text()) if options.expect else None
    except OSError as error:
        fail(f"cannot read {error.filename}: {error.strerror}")
    except ValueError:
        fail(f"--expect must be a file of --out, got {options.expect}, which is no JSON")
    if max(map(len, documents)) < 2:
        fail("--text must hold at least 2 bytes")
    kept = ("steps", "warmup", "tokens", "length", "topk", "lr", "seed", "shards", "dtype")
    results: dict[str, Any] = {
        "options": {name: getattr(options, name) for name in kept},
        "text": {"documents": len(documents), "bytes": sum(map(len, documents)),
                 "sha256": hashlib.sha256(b"".join(documents)).hexdigest(),
                 "unigram_entropy": unigram_entropy(documents)},
        "ranks": RANKS,
        "runs": dict.fromkeys(ATTENTIONS if options.attention == "both" else [options.attention]),
    }
    if expected is not None:
        check_same_task(results, expected)

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism takes on a GPU
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_default_dtype(getattr(torch, options.dtype))
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if RANKS > 1:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    for attention in results["runs"]:
        results["runs"][attention] = train(attention, documents, options, device)
    if RANKS > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return 0

    try:
        if options.out:
            options.out.write_text(json.dumps(results) + "\n")
        if options.svg:
            plot.draw(results, options.svg)
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")
    if expected is not None:
        check_same_losses(results, expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())

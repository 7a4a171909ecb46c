#!/usr/bin/env python3
"""What autograd keeps of sparse_attention between a forward and its backward.

    python_saved_memory.py [--device fake|cpu|cuda] [--tokens 32768] [--heads 64] [--layers 4]

The layers share one selection. Needs PyTorch. Fake tensors have the sizes and no memory, so that
any machine can tell what a large layer would keep; on a GPU it is measured too, by what PyTorch's
allocator holds more after the layers than before. Mebibytes; a storage counts once.
"""

import argparse
import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashdsa.torch

MIB = 2**20
ARGUMENTS = ("q", "kv", "topk_indices", "topk_length", "out", "lse")


def run(options, device):
    """Bytes of every argument that is kept, by name and storage, and what the device holds more."""
    tokens, dim = options.tokens, options.dim
    indices = torch.zeros(tokens, 1, options.topk, dtype=torch.int32, device=device)
    length = torch.full((tokens,), options.topk, dtype=torch.int32, device=device)
    layers = [(torch.zeros(tokens, options.heads, dim, dtype=torch.bfloat16, device=device),
               torch.zeros(tokens, 1, dim, dtype=torch.bfloat16, device=device))
              for _ in range(options.layers)]
    kept = {}
    names = iter(ARGUMENTS * options.layers)

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[next(names), storage._cdata] = storage.nbytes()
        return tensor

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outs = [flashdsa.torch.sparse_attention(q.requires_grad_(), kv, indices, dim**-0.5, length)
                for q, kv in layers]
    if device != "cuda":
        return kept, None
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    del outs
    return kept, grown


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["fake", "cpu", "cuda"], default="fake")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4, help="layers that share the selection")
    options = parser.parse_args()
    fake = options.device == "fake"
    with FakeTensorMode() if fake else contextlib.nullcontext():
        kept, grown = run(options, "cpu" if fake else options.device)
    print(f"{options.tokens} tokens, {options.heads} heads of {options.dim}, top-k {options.topk}, "
          f"{options.layers} layers ({options.device}); MiB")
    for name in ARGUMENTS:
        sizes = [size for (owner, _), size in kept.items() if owner == name]
        print(f"{name:13} {max(sizes) / MIB:9.2f} x {len(sizes)}")
    total = sum(kept.values())
    print(f"{'all':13} {total / MIB:9.2f} = {total / options.layers / MIB:.2f} per layer")
    if grown is not None:
        print(f"{'allocated':13} {grown / MIB:9.2f} = {grown / options.layers / MIB:.2f} per layer "
              "(out and lse; the rest is the caller's)")


if __name__ == "__main__":
    main()

"""What the programs of the peer `tilelang` use of TileLang, by NumPy, one thread block after the
other. A parallel loop runs once, over arrays of indices."""

import itertools
import types

import ml_dtypes
import numpy as np
import torch

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int32": np.int32}

GemmWarpPolicy = types.SimpleNamespace(FullCol=None)
exp2, log2, if_then_else = np.exp2, np.log2, np.where
max = np.maximum


class Tile(np.ndarray):
    """An array whose parts know their place in it."""

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(part, Tile):
            part.place = (self, index)
        return part


class Kernel:
    """The blocks of a grid, one for each call of the program."""

    blocks = block = None

    def __init__(self, *grid, threads):
        if Kernel.blocks is None:
            Kernel.blocks = itertools.product(*map(range, grid))
            Kernel.block = next(Kernel.blocks)

    def __enter__(self):
        return Kernel.block

    def __exit__(self, *error):
        pass


def compile(program, out_idx):
    declared = list(program.__annotations__.values())

    def run(*inputs):
        given = iter(inputs)
        tensors = [torch.full(shape, torch.nan, dtype=getattr(torch, dtype)) if at in out_idx
                   else next(given) for at, (shape, dtype) in enumerate(declared)]
        assert list(given) == []
        assert [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors] == [
            (shape, f"torch.{dtype}") for shape, dtype in declared]
        tiles = [_tile_of(tensor) for tensor in tensors]
        Kernel.blocks = None
        program(*tiles)
        for Kernel.block in Kernel.blocks:
            program(*tiles)
        results = [tensors[at] for at in out_idx]
        return results if len(results) > 1 else results[0]

    return run


def _tile_of(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).view(Tile)
    return tensor.numpy().view(Tile)


def prim_func(program):
    return program


def Tensor(shape, dtype):
    return shape, dtype


def alloc_shared(shape, dtype):
    return np.full(shape, np.nan, DTYPES[dtype]).view(Tile)


alloc_fragment = alloc_shared


def Parallel(*sizes):
    yield np.ogrid[tuple(map(slice, sizes))] if len(sizes) > 1 else np.arange(sizes[0])


def serial(count):
    return range(count)


def Pipelined(count, num_stages):
    return range(count)


def ceildiv(a, b):
    return -(-a // b)


def infinity(dtype):
    return np.inf


def cast(value, dtype):
    return value.astype(DTYPES[dtype])


def fill(tile, value):
    tile[...] = value


def copy(source, target):
    """What lies beyond the edge of a tensor is read as zero, and not written."""
    common = tuple(slice(np.minimum(a, b)) for a, b in zip(source.shape, target.shape))
    if target.size > source.size:
        target[...] = 0
    target[common] = source[common]


def gemm(a, b, c, transpose_A=False, transpose_B=False, clear_accum=False, policy=None):
    a, b = (x.T if transposed else x for x, transposed in ((a, transpose_A), (b, transpose_B)))
    product = a.astype(np.float32) @ b.astype(np.float32)
    c[...] = product if clear_accum else c + product


def reduce_max(tile, result, dim, clear=True):
    result[...] = tile.max(dim) if clear else np.maximum(result, tile.max(dim))


def reduce_sum(tile, result, dim):
    result[...] = tile.sum(dim)


def atomic_add(target, value):
    tile, index = target.place
    np.add.at(tile.view(np.ndarray), index, value)

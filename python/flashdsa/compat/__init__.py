"""Calls of FlashMLA and of cuDNN Frontend's `cudnn.DSA` on FlashDSA.

Code written for either runs unchanged after

    import flashdsa.compat
    flashdsa.compat.install()

which registers the import names `flash_mla` and `cudnn.DSA` where the packages are absent. The
functions work on the host too. They take no part in autograd, as the originals do not.
"""

from ._cudnn_dsa import (compactify_wrapper, indexer_forward_wrapper, indexer_top_k_wrapper,
                         local_to_global_wrapper, sparse_attention_backward_wrapper)
from ._flash_mla import flash_mla_sparse_fwd
from ._install import install

__all__ = [
    "compactify_wrapper",
    "flash_mla_sparse_fwd",
    "indexer_forward_wrapper",
    "indexer_top_k_wrapper",
    "install",
    "local_to_global_wrapper",
    "sparse_attention_backward_wrapper",
]

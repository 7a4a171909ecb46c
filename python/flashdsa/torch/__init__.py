"""FlashDSA as operators of PyTorch: autograd, torch.compile, checkpointing, autocast.

The operators are `torch.ops.flashdsa.sparse_attention`, `sparse_attention_backward`,
`build_selection_plan`, `indexer_topk` and `indexer_backward`; the functions here check their
arguments and fill in what PyTorch's own switches say. The package's plain functions
(`flashdsa.prepare_packed_metadata` and the others) take PyTorch's tensors too, but know nothing of
autograd; metadata is built by them, outside of a compiled region.
"""

from ._attention import sparse_attention
from ._indexer import indexer_topk
from ._plan import build_selection_plan

__all__ = ["build_selection_plan", "indexer_topk", "sparse_attention"]

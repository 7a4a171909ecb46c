"""FlashDSA: DeepSeek Sparse Attention on NumPy, PyTorch and other DLPack arrays.

Packed-THD metadata, the lightning indexer's top-k selection and its gradient, the selection plan,
and sparse MLA attention, forward and backward. The functions here are plain functions of arrays:
results are new arrays of the caller's framework, on the device of the inputs. `flashdsa.torch` has
the same as operators of PyTorch, with autograd and torch.compile.

Every function raises TypeError for a wrong kind of argument or dtype, ValueError for a wrong shape,
stride, device, range or content, and RuntimeError where no backend takes the call or memory or a
device fails; the sentence names function, argument, what was expected and what came.
"""

from ._attention import AttentionForward, AttentionGradients, attention_backward, attention_forward
from ._indexer import IndexerGradients, Selection, indexer_backward, indexer_topk
from ._info import BackendStatus, backends, build_description
from ._info import version as _version
from ._metadata import PackedMetadata, prepare_packed_metadata
from ._plan import SelectionPlan, build_selection_plan
from ._selection import CompactRows, compact_and_sort

__version__ = _version()

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "BackendStatus",
    "CompactRows",
    "IndexerGradients",
    "PackedMetadata",
    "Selection",
    "SelectionPlan",
    "attention_backward",
    "attention_forward",
    "backends",
    "build_description",
    "build_selection_plan",
    "compact_and_sort",
    "indexer_backward",
    "indexer_topk",
    "prepare_packed_metadata",
]

"""NeMo AutoModel's kernel module for GLM-5.2 on FlashDSA.

The names, signatures, defaults and exception types are those of
`nemo_automodel.components.models.glm_moe_dsa.kernels.cudnn_dsa`, which this module replaces:

    import flashdsa.nemo
    flashdsa.nemo.install()     # before the model is imported

or, in code that imports the kernels itself, by one changed import. What differs is lifted limits:
every number of index heads from 1 to 64 and of query heads from 1 to 128, and the rope-free latent
of 512 channels.
"""

from ._install import install
from ._kernels import cudnn_indexer_topk, cudnn_sparse_attention, is_cudnn_dsa_available
from ._metadata import (CudnnDsaPackedMetadata, _compact_and_sort_indices, _unpack_packed_metadata,
                        prepare_cudnn_dsa_packed_metadata)

# The reference module's own list; `install` is not among its names.
__all__ = [
    "CudnnDsaPackedMetadata",
    "cudnn_indexer_topk",
    "cudnn_sparse_attention",
    "is_cudnn_dsa_available",
    "prepare_cudnn_dsa_packed_metadata",
]

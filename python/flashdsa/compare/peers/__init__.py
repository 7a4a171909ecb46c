"""The libraries that FlashDSA is compared with, by name."""

from __future__ import annotations

from ..library import Library
from ._cudnn import Cudnn
from ._flash_mla import FlashMla
from ._pair import FlashMlaAndCudnn
from ._pytorch import PyTorch
from ._tilelang import TileLang

PEERS: dict[str, type[Library]] = {
    peer.name: peer for peer in (FlashMla, Cudnn, FlashMlaAndCudnn, TileLang, PyTorch)
}

"""Context parallelism: every rank holds some rows of the packed sequence and attends to all of it.

On torch.distributed, NCCL between GPUs and gloo between hosts. What travels, per layer and rank of
R, T rows of storage in all:

    forward    index_k, bfloat16 [T, 128]    all-gather       256 T (R-1)/R bytes
    forward    kv, bfloat16 [T, 1, D]        all-gather       2 D T (R-1)/R bytes
    backward   grad_kv, float32 [T, 1, D]    reduce-scatter   4 D T (R-1)/R bytes

and 512 T (R-1)/R bytes of grad_index_k where the indexer's scores have a gradient. Gradients of
keys are summed in float32 and rounded once, by the rank that owns the row. Layers that share a
selection gather no index_k.

::

    cp = ContextParallel(total_tokens, order="zigzag")
    rows = cp.prepare_packed_metadata(cu_seqlens, cu_seqlens_padded=cu_seqlens_padded)
    x = cp.shard(x)                                 # [T, ...], the same on all ranks, to [T/R, ...]
    index_k = cp.start_gather(index_keys(x))        # these travel behind what follows, in order
    kv = cp.start_gather(latent(x)[:, None])
    q = queries(x)
    keys = cp.indexer_topk(index_q(x), index_k, head_weights(x), rows, 2048)
    out = cp.sparse_attention(q, kv, keys.topk_indices, scale, keys.topk_length)

All ranks make the same calls in the same order, backward passes included; a rank that raises alone
leaves the others waiting. torch.compile leaves the methods that communicate out of its graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _checks
from .._attention import attention_backward, attention_forward
from .._indexer import Selection, indexer_backward, indexer_topk
from .._metadata import PackedMetadata, prepare_packed_metadata
from .._plan import SelectionPlan, from_parts, parts_of
from .._torch_framework import is_plain
from ._attention import autocast_inputs
from ._operators import is_deterministic, require_tensors

ORDERS = ("contiguous", "zigzag")

# PyTorch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class IndexedAttention(NamedTuple):
    """Result of `ContextParallel.indexer_sparse_attention`."""

    out: Tensor
    """bfloat16 [T/R, H, 512]"""
    selection: Selection
    """for the layers that share it"""


class ContextParallel:
    """How a packed sequence is cut over the ranks of a group.

    With "contiguous", rank r of R holds the r-th of R chunks of storage. With "zigzag" it holds
    chunks r and 2R-1-r of 2R, so that all ranks see about as many keys in a long document. Local
    rows stand in ascending order of their storage position.

    Args:
        total_tokens: T, rows of the padded storage: a multiple of R, with "zigzag" of 2R; the same
            on every rank, as is `order`.
        order: "contiguous" or "zigzag".
        group: ProcessGroup that this rank belongs to (of a mesh: mesh.get_group("cp")); None: the
            default group.

    Attributes:
        rank, world_size: r and R.
        local_tokens: T / R, rows of every rank.

    Raises:
        TypeError: total_tokens that is no int, group that is no ProcessGroup.
        ValueError: another order, a total_tokens that R or 2R does not divide, a group without this
            rank.
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(self, total_tokens: int, *, order: str = "contiguous",
                 group: Optional[dist.ProcessGroup] = None):
        name = "ContextParallel"
        if not isinstance(order, str) or order not in ORDERS:
            raise ValueError(f"{name}: order must be contiguous or zigzag, got {order!r}")
        self.total_tokens = _checks.integer(name, "total_tokens", total_tokens, 1, 2**31 - 2)
        self.order = order
        self.group = _group(name, group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        per_rank = len(self._chunks_of(0))
        chunks = per_rank * self.world_size
        if total_tokens % chunks != 0:
            raise ValueError(f"{name}: total_tokens must be a multiple of {chunks} for {order} "
                             f"shards of {self.world_size} ranks, got {total_tokens}")
        self.local_tokens = total_tokens // self.world_size
        self._chunk_tokens = total_tokens // chunks
        # The chunks of storage as an all-gather lines them up, and where it puts each.
        self._held = [chunk for rank in range(self.world_size) for chunk in self._chunks_of(rank)]
        self._places = sorted(range(chunks), key=self._held.__getitem__)

    def _chunks_of(self, rank: int) -> list[int]:
        if self.order == "contiguous":
            return [rank]
        return [rank, 2 * self.world_size - 1 - rank]

    def query_indices(self, device: Any = None) -> Tensor:
        """int64 [T/R] on `device`: storage positions of this rank's rows, ascending."""
        size = self._chunk_tokens
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device)
                          for chunk in self._chunks_of(self.rank)])

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows [T/R, ...] of x [T, ...], a tensor that every rank has.

        Differentiable; nothing is exchanged, so that a gradient of x is that of this rank's rows.
        With "contiguous" the result is a view.

        Raises:
            TypeError: x is no tensor.
            ValueError: x has another number of rows than T.
        """
        require_tensors("shard", ("x",), (x,))
        _require_rows("shard", "T", self.total_tokens, x)
        return self._select(x, self._chunks_of(self.rank))

    def _select(self, x: Tensor, chunks: list[int]) -> Tensor:
        """The chunks of x, one behind the other; x itself, or a view, where they lie so."""
        size = self._chunk_tokens
        if chunks == list(range(chunks[0], chunks[0] + len(chunks))):
            return x.narrow(0, chunks[0] * size, len(chunks) * size)
        return torch.cat([x.narrow(0, chunk * size, size) for chunk in chunks])

    def prepare_packed_metadata(self, cu_seqlens: Tensor, max_seqlen: Optional[Any] = None, *,
                                cu_seqlens_padded: Optional[Tensor] = None,
                                padding_mask: Optional[Tensor] = None,
                                **options: Any) -> PackedMetadata:
        """`flashdsa.prepare_packed_metadata` of this rank's rows.

        Args:
            cu_seqlens, max_seqlen, cu_seqlens_padded: of the whole sequence.
            padding_mask: bool [T/R], of this rank's rows: `shard` of the whole mask.
            options: lenient, capture_safe, key_sources, backend, threads, check.

        Raises:
            TypeError, ValueError, RuntimeError: as `flashdsa.prepare_packed_metadata`.
        """
        require_tensors("prepare_packed_metadata", ("cu_seqlens",), (cu_seqlens,))
        mode = "general" if self.order == "zigzag" else "contiguous"
        return prepare_packed_metadata(
            cu_seqlens, self.total_tokens, max_seqlen, cu_seqlens_padded=cu_seqlens_padded,
            padding_mask=padding_mask, query_indices=self.query_indices(cu_seqlens.device),
            query_mode=mode, **options)

    @torch.compiler.disable
    def start_gather(self, x: Tensor) -> Gather:
        """Starts to collect the rows of all ranks and returns at once.

        Called on kv before q is computed, the gather in the forward pass runs beside q and the
        indexer, and the reduce-scatter in the backward pass beside the gradients of what came
        between this call and the attention.

        Args:
            x: [T/R, ...], this rank's rows, any dtype; contiguous, or a copy is made.

        Raises:
            TypeError: x is no plain tensor.
            ValueError: x has another number of rows than T/R, or lies on a device that the group's
                backend does not serve.
            RuntimeError: the exchange fails.
        """
        return Gather(self, "start_gather", "x", x)

    @torch.compiler.disable
    def gather(self, x: Tensor, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """`start_gather(x).wait(dtype)`."""
        return Gather(self, "gather", "x", x).wait(dtype)

    @torch.compiler.disable
    def indexer_topk(self, index_q: Tensor, index_k: Union[Tensor, Gather], head_weights: Tensor,
                     packed_metadata: Any, index_topk: int, *, return_scores: bool = False,
                     backend: str = "auto", threads: int = 0,
                     check: Optional[bool] = None) -> Selection:
        """`flashdsa.torch.indexer_topk` of this rank's rows over the keys of all ranks.

        The selection of a row is, bit for bit, that of one rank with the whole sequence. It has no
        gradient; the scores have one, and that of index_k is summed over ranks as that of kv is.

        Args:
            index_q: bfloat16 [T/R, H_index, 128].
            index_k: bfloat16 [T/R, 128], this rank's keys, or what `start_gather` made of them.
            head_weights: float32 or bfloat16 [T/R, H_index].
            packed_metadata: of `prepare_packed_metadata`.
            index_topk, return_scores, backend, threads, check: as there.

        Raises:
            TypeError, ValueError, RuntimeError: as `flashdsa.indexer_topk` and `start_gather`.
        """
        name = "indexer_topk"
        require_tensors(name, ("index_q", "head_weights"), (index_q, head_weights))
        _checks.boolean(name, "return_scores", return_scores)
        keys = self._gather_of(name, "index_k", index_k)
        options = {"backend": backend, "threads": threads, "check": check}
        if return_scores:
            return Selection(*_Scores.apply(index_q, *keys.take_anchor(), keys.received(),
                                            head_weights, packed_metadata, index_topk, options))
        return indexer_topk(index_q, keys.received(), head_weights, packed_metadata, index_topk,
                            **options)

    @torch.compiler.disable
    def sparse_attention(self, q: Tensor, kv: Union[Tensor, Gather], topk_indices: Tensor,
                         softmax_scale: float, topk_length: Optional[Tensor] = None,
                         attn_sink: Optional[Tensor] = None, *, return_lse: bool = False,
                         plan: Optional[SelectionPlan] = None, backend: str = "auto",
                         threads: int = 0, deterministic: Optional[bool] = None,
                         invariant: bool = False,
                         check: Optional[bool] = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """`flashdsa.torch.sparse_attention` of this rank's rows over the keys of all ranks.

        The gradient of kv is the sum of all ranks' for this rank's rows, taken in float32 and
        rounded once. That of attn_sink is this rank's part, as of every replicated weight. The
        gathered kv is saved for the backward; activation checkpointing gathers it again instead.

        Args:
            q: bfloat16 [T/R, H, D].
            kv: bfloat16 [T/R, 1, D], this rank's keys, or what `start_gather` made of them.
            topk_indices: int32 [T/R, 1, K], storage positions.
            topk_length: int32 [T/R].
            plan: of `flashdsa.torch.build_selection_plan` for these rows, with T as
                total_key_tokens.
            softmax_scale, attn_sink, return_lse: as there.
            backend, threads, deterministic, invariant, check: as there.

        Returns:
            out, bfloat16 [T/R, H, 512], or (out, lse), lse float32 [T/R, H], not differentiable.

        Raises:
            TypeError, ValueError, RuntimeError: as `flashdsa.attention_forward` and `start_gather`.
        """
        name = "attention_forward"
        names = ("q", "topk_indices", "topk_length", "attn_sink", "plan.storage")
        storage, sizes = parts_of(name, plan)
        require_tensors(name, names, (q, topk_indices, topk_length, attn_sink, storage), optional=3)
        if (not q.is_meta and torch.is_autocast_enabled(q.device.type)
                and isinstance(kv, Tensor)):
            q, kv, attn_sink = autocast_inputs(q, kv, attn_sink)
        keys = self._gather_of(name, "kv", kv)
        options = {"backend": backend, "threads": threads, "check": check, "invariant": invariant,
                   "deterministic": is_deterministic(deterministic)}
        out, lse = _Attention.apply(q, *keys.take_anchor(), keys.received(), topk_indices,
                                    softmax_scale, topk_length, attn_sink, storage, sizes,
                                    options)
        return (out, lse) if return_lse else out

    @torch.compiler.disable
    def indexer_sparse_attention(self, index_q: Tensor, index_k: Union[Tensor, Gather],
                                 head_weights: Tensor, q: Tensor, kv: Union[Tensor, Gather],
                                 packed_metadata: Any, index_topk: int, softmax_scale: float,
                                 attn_sink: Optional[Tensor] = None, *, backend: str = "auto",
                                 threads: int = 0, deterministic: Optional[bool] = None,
                                 invariant: bool = False,
                                 check: Optional[bool] = None) -> IndexedAttention:
        """`indexer_topk`, and `sparse_attention` over its selection; kv travels meanwhile.

        Args:
            index_q, index_k, head_weights, packed_metadata, index_topk: as in `indexer_topk`.
            q, kv, softmax_scale, attn_sink, deterministic, invariant: as in `sparse_attention`.
            backend, threads, check: of both.

        Raises:
            TypeError, ValueError, RuntimeError: as the two.
        """
        index_keys = self._gather_of("indexer_topk", "index_k", index_k)
        keys = self._gather_of("attention_forward", "kv", kv)
        selection = self.indexer_topk(index_q, index_keys, head_weights, packed_metadata,
                                      index_topk, backend=backend, threads=threads, check=check)
        out = self.sparse_attention(q, keys, selection.topk_indices, softmax_scale,
                                    selection.topk_length, attn_sink, backend=backend,
                                    threads=threads, deterministic=deterministic,
                                    invariant=invariant, check=check)
        return IndexedAttention(out, selection)

    def _gather_of(self, operation: str, name: str, x: Union[Tensor, Gather]) -> Gather:
        if not isinstance(x, Gather):
            return Gather(self, operation, name, x)
        if x.shards is not self:
            raise ValueError(f"{operation}: {name} must be gathered by the same ContextParallel, "
                             "got one of another")
        return x

    def to_storage_order(self, gathered: Tensor) -> Tensor:
        """gathered [T, ...], as an all-gather leaves it, in the order of storage."""
        return self._select(gathered, self._places)

    def to_rank_order(self, x: Tensor) -> Tensor:
        """x [T, ...], in the order of storage, in that of a reduce-scatter, contiguous."""
        return self._select(x, self._held).contiguous()


class Gather:
    """The rows of all ranks, on their way or here; `ContextParallel.start_gather` makes it."""

    def __init__(self, shards: ContextParallel, operation: str, name: str, x: Tensor):
        require_tensors(operation, (name,), (x,))
        if not is_plain(type(x)):
            raise TypeError(f"{operation}: {name} must be a plain torch.Tensor, "
                            f"got {_checks.type_name(x)}")
        _require_rows(operation, "T/R", shards.local_tokens, x, name)
        _require_backend(operation, name, shards.group, x)
        self.shards = shards
        self._x = x
        # Recorded here and not by the attention, so that autograd comes to it later.
        self._anchor = self._new_anchor() if x.requires_grad else None
        own = x.detach().contiguous()
        self._received = own.new_empty((shards.total_tokens, *own.shape[1:]))
        self._work = _all_gather(self._received, own, group=shards.group, async_op=True)

    @torch.compiler.disable
    def wait(self, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The rows of all ranks, [T, ...] in the order of storage, differentiable.

        On a GPU the current stream waits, the host does not. The gradient is summed over ranks in
        float32 and rounded once; it arrives here in the dtype of the result, so a BF16 tensor whose
        gradient shall not be rounded before the sum is asked for with dtype=torch.float32. It
        travels in its own dtype all the same.
        """
        full = self.received()
        return _Gathered.apply(self._x, full, dtype or full.dtype, self.shards)

    def received(self) -> Tensor:
        """`wait()` without a gradient."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._received = self.shards.to_storage_order(self._received)
        return self._received

    def take_anchor(self) -> tuple[Tensor, _Reduction]:
        """What stands for x in the graph of one use: a tensor of x's shape, in the dtype in which
        its gradient is summed, and what takes that gradient there."""
        anchor, self._anchor = self._anchor, None
        return anchor or self._new_anchor()

    def _new_anchor(self) -> tuple[Tensor, _Reduction]:
        reduction = _Reduction(self.shards)
        return _Anchor.apply(self._x, reduction), reduction


class _Reduction:
    """The reduce-scatter of a gradient."""

    def __init__(self, shards: ContextParallel):
        self._shards = shards
        self._work: Optional[dist.Work] = None

    def start(self, grad: Tensor) -> Tensor:
        """Memory for this rank's rows of the sum over ranks, float32 [T/R, ...]; `wait` fills it.
        grad [T, ...], float32, or float64 beside float64."""
        grad = self._shards.to_rank_order(grad)
        own = grad.new_empty((self._shards.local_tokens, *grad.shape[1:]))
        self._work = _reduce_scatter(own, grad, group=self._shards.group, async_op=True)
        if torch.is_anomaly_enabled():  # which looks for NaN in what `own` holds now
            self.wait()
        return own

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class _Anchor(torch.autograd.Function):
    """Takes the place of kv before the attention. Autograd wants a gradient in the dtype of its
    tensor, and that of the gathered kv has to stay in float32 until it is summed; so the gradient
    flows through this tensor without memory, and the gathered kv has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: _Reduction) -> Tensor:
        ctx.reduction = reduction
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=_sum_dtype(x)).expand(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.reduction.wait()
        return grad.to(ctx.dtype), None


class _Gathered(torch.autograd.Function):
    """From this rank's rows to those of all, which are here already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, full: Tensor, dtype: torch.dtype,
                shards: ContextParallel) -> Tensor:
        ctx.dtype = x.dtype
        ctx.shards = shards
        return full.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        reduction = _Reduction(ctx.shards)
        own = reduction.start(grad.to(_sum_dtype(grad)))
        reduction.wait()
        return own.to(ctx.dtype), None, None, None


class _Scores(torch.autograd.Function):
    """The selection and its scores over the gathered index_k, which has no gradient here: `anchor`
    is given it."""

    @staticmethod
    def forward(ctx: Any, index_q: Tensor, anchor: Tensor, reduction: _Reduction, index_k: Tensor,
                head_weights: Tensor, packed_metadata: Any, index_topk: int,
                options: dict[str, Any]) -> Selection:
        selection = indexer_topk(index_q, index_k, head_weights, packed_metadata, index_topk,
                                 return_scores=True, **options)
        ctx.save_for_backward(index_q, index_k, head_weights, selection.topk_indices)
        ctx.reduction = reduction
        ctx.options = options
        ctx.mark_non_differentiable(selection.topk_indices, selection.topk_length)
        return selection

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _indices: Any, _length: Any, grad_scores: Tensor) -> tuple[Any, ...]:
        index_q, index_k, head_weights, topk_indices = ctx.saved_tensors
        if grad_scores.stride(-1) != 1:
            grad_scores = grad_scores.contiguous()
        grads = indexer_backward(index_q, index_k, head_weights, topk_indices, grad_scores,
                                 grad_index_k_float32=index_q.dtype != torch.float64, **ctx.options)
        grad_anchor = ctx.reduction.start(grads.grad_index_k) if ctx.needs_input_grad[1] else None
        return (grads.grad_index_q, grad_anchor, None, None, grads.grad_head_weights, None, None,
                None)


class _Attention(torch.autograd.Function):
    """Attention over the gathered kv, which has no gradient here: `anchor` is given it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, anchor: Tensor, reduction: _Reduction, kv: Tensor,
                topk_indices: Tensor, softmax_scale: float, topk_length: Optional[Tensor],
                attn_sink: Optional[Tensor], plan: Optional[Tensor],
                plan_sizes: Optional[tuple[int, ...]],
                options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        result = attention_forward(q, kv, topk_indices, softmax_scale, topk_length, attn_sink,
                                   plan=from_parts(plan, plan_sizes), **options)
        ctx.save_for_backward(q, kv, topk_indices, topk_length, attn_sink, plan, result.out,
                              result.lse)
        ctx.reduction = reduction
        ctx.plan_sizes = plan_sizes
        ctx.softmax_scale = softmax_scale
        ctx.options = options
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    # A rank whose out went nowhere takes part too, with a grad_out of zeros.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Any) -> tuple[Any, ...]:
        q, kv, topk_indices, topk_length, attn_sink, plan, out, lse = ctx.saved_tensors
        if grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        grads = attention_backward(q, kv, topk_indices, ctx.softmax_scale, out, lse, grad_out,
                                   topk_length, attn_sink, plan=from_parts(plan, ctx.plan_sizes),
                                   grad_kv_float32=q.dtype != torch.float64, **ctx.options)
        grad_anchor = ctx.reduction.start(grads.grad_kv) if ctx.needs_input_grad[1] else None
        return (grads.grad_q, grad_anchor, None, None, None, None, None, grads.grad_attn_sink, None,
                None, None)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _group(operation: str, group: Optional[dist.ProcessGroup]) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(f"{operation}: expected torch.distributed.init_process_group to have "
                           "been called, got no process group")
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
        raise ValueError(f"{operation}: group must have this rank, {dist.get_rank()}, among its "
                         "members, got one without it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{operation}: group must be a torch.distributed.ProcessGroup, "
                        f"got {_checks.type_name(group)}")
    return group


def _require_rows(operation: str, size: str, rows: int, x: Tensor, name: str = "x") -> None:
    if x.dim() == 0 or x.shape[0] != rows:
        raise ValueError(f"{operation}: {name} must have {size} = {rows} rows, "
                         f"got shape {list(x.shape)}")


def _require_backend(operation: str, name: str, group: dist.ProcessGroup, x: Tensor) -> None:
    try:
        group._get_backend(x.device)
    except RuntimeError:
        raise ValueError(f"{operation}: {name} must be on a device that the group's backend, "
                         f"{dist.get_backend(group)}, serves, got {x.device}") from None

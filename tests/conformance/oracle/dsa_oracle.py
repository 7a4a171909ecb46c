"""Float64 oracle of FlashDSA, written from docs/spec.md for clarity, not for speed. Numpy only.

Real-valued arrays are float64 here; callers decode BF16 with safetensors_io. Section numbers are the specification's.
"""
import numpy as np

VALUE_DIM = 512


class BadInput(ValueError):
    """An argument that the contract refuses; `name` is the argument at fault."""

    def __init__(self, name, message):
        super().__init__(f"{name}: {message}")
        self.name = name


# --------------------------------------------------------------------------- section 2: packed metadata

def check_metadata(cu, total, max_seqlen, queries, padded, mask, query_mode, lenient):
    """Raise BadInput for every error that section 2 lists. cu, padded int [N+1]; queries int [T_q]; mask bool [T_q]."""
    def need(ok, name, message):
        if not ok:
            raise BadInput(name, message)

    need(1 <= total <= 2**31 - 2, "total_key_tokens", f"expected 1..2^31-2, got {total}")
    need(cu.ndim == 1 and cu.size >= 2, "cu_seqlens", f"expected shape [N+1] with N >= 1, got {cu.shape}")
    need(padded.shape == cu.shape, "cu_seqlens_padded", f"expected shape {cu.shape}, got {padded.shape}")
    need(cu[0] == 0, "cu_seqlens", f"must start at 0, got {cu[0]}")
    shortest = 0 if lenient else 1
    need(np.all(np.diff(cu) >= shortest), "cu_seqlens", "must be strictly increasing")
    need(padded[0] == 0, "cu_seqlens_padded", f"must start at 0, got {padded[0]}")
    need(np.all(np.diff(padded) >= shortest), "cu_seqlens_padded", "must be strictly increasing")
    need(padded[-1] == total, "total_key_tokens",
         f"the last boundary of cu_seqlens_padded / cu_seqlens is {padded[-1]}, total_key_tokens is {total}")
    need(np.all(np.diff(padded) >= np.diff(cu)), "cu_seqlens_padded", "a padded length is below the real one")
    longest = int(np.diff(cu).max())
    need(max_seqlen in (None, longest), "max_seqlen", f"expected the largest real length {longest}, got {max_seqlen}")
    need(query_mode in ("contiguous", "general"), "query_mode", f"expected contiguous or general, got {query_mode}")
    need(queries.ndim == 1 and queries.size >= 1, "query_indices", f"expected shape [T_q], got {queries.shape}")
    need(queries.min() >= 0 and queries.max() < total, "query_indices", f"positions must lie in 0..{total - 1}")
    steps = np.diff(queries)
    need(np.all(steps > 0), "query_indices", "must be strictly increasing")
    need(query_mode == "general" or np.all(steps == 1), "query_indices", "must be one interval in contiguous mode")
    need(mask.shape == queries.shape, "padding_mask", f"expected shape {queries.shape}, got {mask.shape}")


def metadata(cu_seqlens, total_key_tokens, max_seqlen=None, query_indices=None, cu_seqlens_padded=None,
             padding_mask=None, query_mode="contiguous", lenient=False):
    """Section 2. cu_seqlens, cu_seqlens_padded int [N+1]; query_indices int [T_q]; padding_mask bool [T_q].

    lenient: documents of length 0 are allowed. Returns a dict of the output fields; an absent field is None.
    """
    cu = np.asarray(cu_seqlens).astype(np.int64)
    padded = cu if cu_seqlens_padded is None else np.asarray(cu_seqlens_padded).astype(np.int64)
    total = int(total_key_tokens)
    if query_indices is None and not 1 <= total <= 2**31 - 2:
        raise BadInput("total_key_tokens", f"expected 1..2^31-2, got {total}")
    if query_indices is None and padded.ndim == 1 and padded.size and padded[-1] != total:
        raise BadInput("total_key_tokens", f"the layout ends at {padded[-1]}, total_key_tokens is {total}")
    g = np.arange(total) if query_indices is None else np.asarray(query_indices).astype(np.int64)
    mask = np.zeros(g.shape, bool) if padding_mask is None else np.asarray(padding_mask)
    check_metadata(cu, total, max_seqlen, g, padded, mask, query_mode, lenient)

    document = np.searchsorted(padded, g, side="right") - 1
    start = padded[document]
    real_end = start + np.diff(cu)[document]
    valid = (g < real_end) & ~mask
    causal = np.where(valid, g + 1 - start, 0)

    first = np.flatnonzero(np.r_[True, document[1:] != document[:-1]])   # first row of every segment
    last = np.r_[first[1:], g.size] - 1
    segment_start = start[first]
    key_count = g[last] + 1 - segment_start
    whole = g.size == total                       # strictly increasing and inside, so it is 0..T_k-1
    return {
        "starts": start.astype(np.int32),
        "causal_lengths": causal.astype(np.int32),
        "query_valid": valid,
        "valid_row_indices": None if valid.all() else np.flatnonzero(valid).astype(np.int64),
        "segment_cu_q": np.r_[first, g.size].astype(np.int32),
        "segment_cu_k": np.r_[0, np.cumsum(key_count)].astype(np.int32),
        "q_causal_offsets": (g[first] - segment_start).astype(np.int32),
        "key_source_indices": None if whole else np.concatenate(
            [np.arange(s, s + n) for s, n in zip(segment_start, key_count)]).astype(np.int64),
        "max_seqlen_q": int((last - first + 1).max()),
        "max_seqlen_k": int(key_count.max()),
        "total_key_tokens": total,
        "all_rows_nonempty": bool(np.all(causal > 0)),
    }


# --------------------------------------------------------------------------- section 3: indexer

def indexer_scores(q_row, k, w_row):
    """Section 3, one query row: q_row [H_index,128], k [S,128] (its visible keys), w_row [H_index] -> scores [S]."""
    with np.errstate(invalid="ignore", over="ignore"):
        dots = np.maximum(0.0, q_row @ k.T)                 # numpy's maximum hands NaN on, as torch.relu does
        return (w_row[:, None] * dots).sum(axis=0)


def ranking(scores):
    """Section 3, total order: positions of scores [S] from best to worst.

    Higher first, NaN above +inf, -0.0 equal to +0.0, and the smaller position first among equals.
    """
    is_nan = np.isnan(scores)
    value = np.where(is_nan, 0.0, scores) + 0.0             # + 0.0 turns -0.0 into +0.0
    return np.lexsort((np.arange(scores.size), -value, ~is_nan))


def indexer_topk(q, k, w, starts, causal_lengths, index_topk):
    """Section 3. q [T_q,H_index,128], k [T_k,128], w [T_q,H_index], starts and causal_lengths int [T_q].

    Returns topk_indices int32 [T_q,1,K], topk_length int32 [T_q], topk_scores float64 [T_q,K].
    """
    rows = q.shape[0]
    indices = np.full((rows, 1, index_topk), -1, np.int32)
    scores = np.full((rows, index_topk), -np.inf)
    lengths = np.minimum(index_topk, causal_lengths).astype(np.int32)
    for t in range(rows):
        n = lengths[t]
        if n == 0:
            continue
        row = indexer_scores(q[t], k[starts[t]:starts[t] + causal_lengths[t]], w[t])
        chosen = np.sort(ranking(row)[:n])
        indices[t, 0, :n] = starts[t] + chosen
        scores[t, :n] = row[chosen]
    return indices, lengths, scores


# --------------------------------------------------------------------------- section 4: canonicalisation

def compact_and_sort(indices, key_count):
    """Section 4. indices int [T,K] -> (int32 [T,K] ascending valid prefix then -1, int32 [T] lengths)."""
    valid = (indices >= 0) & (indices < key_count)
    ordered = np.sort(np.where(valid, indices, np.iinfo(np.int64).max), axis=1)
    lengths = valid.sum(axis=1)
    ordered[np.arange(indices.shape[1]) >= lengths[:, None]] = -1
    return ordered.astype(np.int32), lengths.astype(np.int32)


# --------------------------------------------------------------------------- sections 5 and 6: attention

def row_keys(topk_indices, topk_length, key_count, t):
    """Section 5: the keys of row t, one entry per counted slot. topk_indices int [T_q,1,K] -> int64 [n]."""
    slots = topk_indices[t, 0].astype(np.int64)
    if topk_length is not None:
        slots = slots[:max(0, int(topk_length[t]))]
    return slots[(slots >= 0) & (slots < key_count)]


def row_softmax(q_row, keys, softmax_scale, attn_sink):
    """Section 5, one row with n >= 1 keys: q_row [H,D], keys [n,D], attn_sink [H] or None.

    Returns P [H,n], lse [H] (without the sink), max_logits [H] and the sink's probability [H].
    """
    logits = softmax_scale * (q_row @ keys.T)
    top = logits.max(axis=1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    sink = np.full(lse.shape, -np.inf) if attn_sink is None else attn_sink
    total = np.logaddexp(lse, sink)
    finite = np.where(np.isposinf(sink), 0.0, sink)            # a sink of +inf takes everything
    p_sink = np.where(np.isposinf(sink), 1.0, np.exp(finite - np.where(np.isposinf(sink), 0.0, total)))
    return np.exp(logits - total[:, None]), lse, top, p_sink


def attention_forward(q, kv, topk_indices, softmax_scale, topk_length=None, attn_sink=None):
    """Section 5. q [T_q,H,D], kv [T_k,1,D] with D 576 or 512, topk_indices int [T_q,1,K].

    Returns out [T_q,H,512], lse [T_q,H], max_logits [T_q,H], all float64.
    """
    rows, heads, _ = q.shape
    out = np.zeros((rows, heads, VALUE_DIM))
    lse = np.full((rows, heads), -np.inf)
    max_logits = np.full((rows, heads), -np.inf)
    for t in range(rows):
        i = row_keys(topk_indices, topk_length, kv.shape[0], t)
        if i.size == 0:
            continue
        keys = kv[i, 0]
        p, lse[t], max_logits[t], _ = row_softmax(q[t], keys, softmax_scale, attn_sink)
        out[t] = p @ keys[:, :VALUE_DIM]
    return out, lse, max_logits


def attention_backward(q, kv, topk_indices, softmax_scale, grad_out, topk_length=None, attn_sink=None):
    """Section 6. Shapes as in attention_forward, grad_out [T_q,H,512].

    Returns grad_q [T_q,H,D], grad_kv [T_k,1,D], grad_attn_sink [H] (None without a sink), all float64.
    """
    grad_q = np.zeros(q.shape)
    grad_kv = np.zeros((kv.shape[0], kv.shape[2]))
    grad_sink = np.zeros(q.shape[1])
    for t in range(q.shape[0]):
        i = row_keys(topk_indices, topk_length, kv.shape[0], t)
        if i.size == 0:
            continue
        keys, values, g = kv[i, 0], kv[i, 0, :VALUE_DIM], grad_out[t]
        p, _, _, p_sink = row_softmax(q[t], keys, softmax_scale, attn_sink)
        d_p = g @ values.T                                    # [H,n]
        d = (g * (p @ values)).sum(axis=1)                    # [H]
        d_s = p * (d_p - d[:, None]) * softmax_scale          # [H,n]
        grad_q[t] = d_s @ keys
        per_slot = d_s.T @ q[t]                               # [n,D]
        per_slot[:, :VALUE_DIM] += p.T @ g
        np.add.at(grad_kv, i, per_slot)                       # a duplicate slot adds again
        grad_sink -= p_sink * d
    return grad_q, grad_kv[:, None, :], (None if attn_sink is None else grad_sink)

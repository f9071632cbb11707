"""The kernels, in Triton. What a program computes for a row never depends on how many rows there are: tiles have one size for all of them, sums run
over the inputs, or the keys, in blocks of one size from the first on, and what is masked adds zeros.

Shapes: M members, R rows, S summed, C columns; H query heads, K key/value heads, G query heads of a key head, E head dimension, P places of a block.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "columns"])
def multiply(
    out_MRC,
    a_MRS,
    b_MSC,
    rows,
    summed,
    columns,
    out_m,
    out_r,
    out_c,
    a_m,
    a_r,
    a_s,
    b_m,
    b_s,
    b_c,
    ADDS: tl.constexpr,
    WHOLE: tl.constexpr,
    R_BY: tl.constexpr,
    C_BY: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """`out = a @ b`, or `out += a @ b` rounded once. `WHOLE`: sums come in whole tiles. Rows and columns are multiples of `R_BY` and `C_BY`.

    Where the compiler knows how strides and bounds are aligned it reads vectors, and ahead of what it multiplies.
    """
    member = tl.program_id(2).to(tl.int64)
    first_r = tl.program_id(0) * TILE_R
    first_c = tl.program_id(1) * TILE_C
    r, s, c = tl.arange(0, TILE_R), tl.arange(0, TILE_S), tl.arange(0, TILE_C)
    in_R = r[:, None] < tl.multiple_of(rows - first_r, R_BY)
    in_C = c[None, :] < tl.multiple_of(columns - first_c, C_BY)
    a_MRS += member * a_m + first_r.to(tl.int64) * a_r
    b_MSC += member * b_m + first_c.to(tl.int64) * b_c
    sum_RC = tl.zeros((TILE_R, TILE_C), tl.float32)
    for first in range(0, summed, TILE_S):
        in_RS, in_SC = in_R, in_C
        if not WHOLE:
            in_RS = in_R & (s[None, :] < summed - first)
            in_SC = (s[:, None] < summed - first) & in_C
        a = tl.load(a_MRS + r[:, None] * a_r + s[None, :] * a_s, mask=in_RS, other=0.0)
        b = tl.load(b_MSC + s[:, None] * b_s + c[None, :] * b_c, mask=in_SC, other=0.0)
        sum_RC = tl.dot(a, b, sum_RC, input_precision="ieee")
        a_MRS += TILE_S * a_s
        b_MSC += TILE_S * b_s
    out_MRC += member * out_m + first_r.to(tl.int64) * out_r + first_c.to(tl.int64) * out_c
    place = out_MRC + r[:, None] * out_r + c[None, :] * out_c
    if ADDS:
        sum_RC += tl.load(place, mask=in_R & in_C, other=0.0).to(tl.float32)
    tl.store(place, sum_RC.to(out_MRC.dtype.element_ty), mask=in_R & in_C)


@triton.jit
def rms_norm(out, scale, x, weight, width, heads, x_r, x_h, eps, TILE: tl.constexpr):
    """`x * scale`, rounded, times the weight; `scale = 1 / sqrt(mean(x ** 2) + eps)`. One program for each row of each head."""
    row = tl.program_id(0).to(tl.int64)
    x += row // heads * x_r + row % heads * x_h
    out += row * width
    place = tl.arange(0, TILE)
    squares = tl.zeros((TILE,), tl.float32)
    for first in range(0, width, TILE):
        value = tl.load(x + first + place, mask=first + place < width, other=0.0).to(tl.float32)
        squares += value * value
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares) / width + eps)
    tl.store(scale + row, factor)
    for first in range(0, width, TILE):
        real = first + place < width
        value = tl.load(x + first + place, mask=real, other=0.0).to(tl.float32) * factor
        value = value.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + first + place, mask=real, other=0.0).to(tl.float32)
        tl.store(out + first + place, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def row_sum(out, x, width, TILE: tl.constexpr):
    """Of float32 rows in one piece."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    sums = tl.zeros((TILE,), tl.float32)
    for first in range(0, width, TILE):
        sums += tl.load(x + row * width + first + place, mask=first + place < width, other=0.0)
    tl.store(out + row, tl.sum(sums))


@triton.jit
def logsumexp(out, x, width, TILE: tl.constexpr):
    """Of float32 rows in one piece."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, TILE)
    x += row * width
    most = tl.full((TILE,), float("-inf"), tl.float32)
    for first in range(0, width, TILE):
        most = tl.maximum(most, tl.load(x + first + place, mask=first + place < width, other=float("-inf")))
    largest = tl.max(most)
    # A row of nothing but -inf sums to that.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.zeros((TILE,), tl.float32)
    for first in range(0, width, TILE):
        sums += tl.exp(tl.load(x + first + place, mask=first + place < width, other=float("-inf")) - base)
    tl.store(out + row, base + tl.log(tl.sum(sums)))


@triton.jit
def _keys_of(storage, table, at, real, head, block, own_head, place, dim_E, width, PLACES: tl.constexpr, PAGED: tl.constexpr):
    """Where the keys, or values, at these positions of a sequence begin; without pages `table` is the first row of the sequence."""
    if PAGED:
        base = tl.load(table + at // PLACES, mask=real, other=0).to(tl.int64) * block + (at % PLACES) * place
    else:
        base = (table + at).to(tl.int64) * place
    return storage + head * own_head + base


@triton.jit
def _first_key(position, window, TILE_K: tl.constexpr):
    """Where the first tile of keys begins that anybody from this position on sees."""
    first = 0
    if window > 0:
        first = tl.maximum(0, position - window + 1) // TILE_K * TILE_K
    return first


@triton.jit
def _seen(at_Q, at_K, window):
    """Which keys each query sees; without a window it is 0."""
    seen = at_K[None, :] <= at_Q[:, None]
    if window > 0:
        seen = seen & (at_K[None, :] > at_Q[:, None] - window)
    return seen


@triton.jit(do_not_specialize=["heads", "window", "table_s"])
def attend(
    out_RHE,
    logs_RH,
    q_RHE,
    keys,
    values,
    tiles_T4,
    tables_SM,
    heads,
    dim,
    window,
    scale,
    q_r,
    q_h,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    table_s,
    GROUP: tl.constexpr,
    PAGED: tl.constexpr,
    PLACES: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_E: tl.constexpr,
):
    """What queries gather of the keys up to themselves. A tile has the query heads of a key head for as many tokens as it holds.

    `tiles_T4`: first row, slot (or first row of the sequence), position of the first token, tokens.
    """
    tile = tiles_T4 + tl.program_id(0) * 4
    row, slot, position, tokens = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    head = tl.program_id(1)
    line = tl.arange(0, TILE_Q)
    token = line // GROUP
    own = (head * GROUP + line % GROUP).to(tl.int64)
    real_Q = token < tokens
    at_Q = position + token
    e = tl.arange(0, TILE_E)
    in_E = e < dim
    q = tl.load(q_RHE + (row + token).to(tl.int64)[:, None] * q_r + own[:, None] * q_h + e[None, :], mask=real_Q[:, None] & in_E[None, :], other=0.0)
    most = tl.full((TILE_Q,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q,), tl.float32)
    gathered = tl.zeros((TILE_Q, TILE_E), tl.float32)
    table = tables_SM + slot * table_s if PAGED else slot
    stop = position + tokens
    for start in range(_first_key(position, window, TILE_K), stop, TILE_K):
        at_K = start + tl.arange(0, TILE_K)
        in_K = at_K < stop
        k = tl.load(
            _keys_of(keys, table, at_K, in_K, head.to(tl.int64), k_block, k_head, k_place, e, dim, PLACES, PAGED)[None, :] + e[:, None],
            mask=in_E[:, None] & in_K[None, :],
            other=0.0,
        )
        v = tl.load(
            _keys_of(values, table, at_K, in_K, head.to(tl.int64), v_block, v_head, v_place, e, dim, PLACES, PAGED)[:, None] + e[None, :],
            mask=in_K[:, None] & in_E[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(_seen(at_Q, at_K, window), scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(most - base)
        total = total * kept + tl.sum(weights, 1)
        gathered = tl.dot(weights.to(v.dtype), v, gathered * kept[:, None], input_precision="ieee")
        most = higher
    place = (row + token).to(tl.int64) * heads + own
    tl.store(
        out_RHE + place[:, None] * dim + e[None, :], (gathered / total[:, None]).to(out_RHE.dtype.element_ty), mask=real_Q[:, None] & in_E[None, :]
    )
    tl.store(logs_RH + place, most + tl.log(total), mask=real_Q)


@triton.jit
def _weights(q, k, logs, scale, seen):
    """The forward's once more."""
    return tl.where(seen, tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - logs[:, None]), 0.0)


@triton.jit
def _slope(weights, grad, v, along):
    """What reaches the scores."""
    return weights * (tl.dot(grad, tl.trans(v), input_precision="ieee") - along[:, None])


@triton.jit(do_not_specialize=["heads", "window"])
def attend_backward_queries(
    grad_q_RHE,
    grad_RHE,
    q_RHE,
    k_RKE,
    v_RKE,
    logs_RH,
    along_RH,
    tiles_T4,
    heads,
    dim,
    window,
    scale,
    q_r,
    q_h,
    k_r,
    k_h,
    v_r,
    v_h,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_E: tl.constexpr,
):
    """What reaches the queries, tile by tile as `attend` has them."""
    tile = tiles_T4 + tl.program_id(0) * 4
    row, begin, position, tokens = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    head = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, TILE_Q)
    token = line // GROUP
    own = head * GROUP + line % GROUP
    real_Q = token < tokens
    at_Q = position + token
    e = tl.arange(0, TILE_E)
    real_QE = real_Q[:, None] & (e < dim)[None, :]
    place = (row + token).to(tl.int64) * heads + own
    q = tl.load(q_RHE + (row + token).to(tl.int64)[:, None] * q_r + own[:, None] * q_h + e[None, :], mask=real_QE, other=0.0)
    grad = tl.load(grad_RHE + place[:, None] * dim + e[None, :], mask=real_QE, other=0.0)
    logs = tl.load(logs_RH + place, mask=real_Q, other=0.0)
    along = tl.load(along_RH + place, mask=real_Q, other=0.0)
    found = tl.zeros((TILE_Q, TILE_E), tl.float32)
    stop = position + tokens
    for start in range(_first_key(position, window, TILE_K), stop, TILE_K):
        at_K = start + tl.arange(0, TILE_K)
        real_KE = (at_K < stop)[:, None] & (e < dim)[None, :]
        rows_K = (begin + at_K).to(tl.int64)
        k = tl.load(k_RKE + rows_K[:, None] * k_r + head * k_h + e[None, :], mask=real_KE, other=0.0)
        v = tl.load(v_RKE + rows_K[:, None] * v_r + head * v_h + e[None, :], mask=real_KE, other=0.0)
        weights = _weights(q, k, logs, scale, _seen(at_Q, at_K, window))
        slope = _slope(weights, grad, v, along)
        found = tl.dot(slope.to(k.dtype), k, found, input_precision="ieee")
    tl.store(grad_q_RHE + place[:, None] * dim + e[None, :], (found * scale).to(grad_q_RHE.dtype.element_ty), mask=real_QE)


@triton.jit(do_not_specialize=["heads", "window"])
def attend_backward_keys(
    grad_k_RKE,
    grad_v_RKE,
    grad_RHE,
    q_RHE,
    k_RKE,
    v_RKE,
    logs_RH,
    along_RH,
    tiles_T4,
    heads,
    kv_heads,
    dim,
    window,
    scale,
    q_r,
    q_h,
    k_r,
    k_h,
    v_r,
    v_h,
    GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_E: tl.constexpr,
):
    """What reaches keys and values. `tiles_T4`: first row of the sequence, first position of the tile, tokens of the sequence, unused."""
    tile = tiles_T4 + tl.program_id(0) * 4
    begin, position, tokens = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    head = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, TILE_E)
    at_K = position + tl.arange(0, TILE_K)
    real_KE = (at_K < tokens)[:, None] & (e < dim)[None, :]
    rows_K = (begin + at_K).to(tl.int64)
    k = tl.load(k_RKE + rows_K[:, None] * k_r + head * k_h + e[None, :], mask=real_KE, other=0.0)
    v = tl.load(v_RKE + rows_K[:, None] * v_r + head * v_h + e[None, :], mask=real_KE, other=0.0)
    grad_k = tl.zeros((TILE_K, TILE_E), tl.float32)
    grad_v = tl.zeros((TILE_K, TILE_E), tl.float32)
    stop = tokens
    if window > 0:
        stop = tl.minimum(tokens, position + TILE_K + window - 1)
    for lines in range(position * GROUP, stop * GROUP, TILE_Q):
        line = lines + tl.arange(0, TILE_Q)
        at_Q = line // GROUP
        own = head * GROUP + line % GROUP
        real_Q = at_Q < tokens
        real_QE = real_Q[:, None] & (e < dim)[None, :]
        rows_Q = (begin + at_Q).to(tl.int64)
        place = rows_Q * heads + own
        q = tl.load(q_RHE + rows_Q[:, None] * q_r + own[:, None] * q_h + e[None, :], mask=real_QE, other=0.0)
        grad = tl.load(grad_RHE + place[:, None] * dim + e[None, :], mask=real_QE, other=0.0)
        logs = tl.load(logs_RH + place, mask=real_Q, other=0.0)
        along = tl.load(along_RH + place, mask=real_Q, other=0.0)
        weights = _weights(q, k, logs, scale, _seen(at_Q, at_K, window) & real_Q[:, None])
        grad_v = tl.dot(tl.trans(weights).to(grad.dtype), grad, grad_v, input_precision="ieee")
        slope = _slope(weights, grad, v, along)
        grad_k = tl.dot(tl.trans(slope).to(q.dtype), q, grad_k, input_precision="ieee")
    place = (rows_K * kv_heads + head)[:, None] * dim + e[None, :]
    tl.store(grad_k_RKE + place, (grad_k * scale).to(grad_k_RKE.dtype.element_ty), mask=real_KE)
    tl.store(grad_v_RKE + place, grad_v.to(grad_v_RKE.dtype.element_ty), mask=real_KE)

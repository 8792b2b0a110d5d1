"""Triton kernels for the operations of `ops.py`. Imported on a machine with a GPU only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def _attend(
    query, cells, out, length, new, ancestor, bias, query_stride, slot_stride, new_stride, steps, size, scaling,
    rows: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, CELLS: tl.constexpr,
    OWN: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """All rows of one slot, one head: softmax on the fly over the slot's cells, which are read once for all rows.

    OWN: each row also has a new cell, which is written behind the others, and of those sees its path alone.
    """
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(length + slot)
    row, dim, cell = tl.arange(0, ROWS), tl.arange(0, DIMS), tl.arange(0, CELLS)
    is_row, is_dim = row < rows, dim < HEAD
    is_real = is_row[:, None] & is_dim[None, :]
    q_at = (slot * rows + row)[:, None] * query_stride + head * HEAD + dim[None, :]
    q = tl.load(query + q_at, mask=is_real, other=0.0)
    base = cells + slot * slot_stride + head * HEAD
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    if OWN:
        new_at = (slot * rows + row)[:, None] * new_stride + head * HEAD + dim[None, :]
        k_new = tl.load(new + new_at, mask=is_real, other=0.0)
        v_new = tl.load(new + size + new_at, mask=is_real, other=0.0)
        count -= rows
        write_at = (count + row)[:, None] * (2 * size) + dim[None, :]
        tl.store(base + write_at, k_new, mask=is_real)
        tl.store(base + size + write_at, v_new, mask=is_real)
        best = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scaling
        if BIASED:
            best += tl.load(bias + head * steps)
        total += 1.0
        result = v_new.to(tl.float32)
    for start in range(0, count, CELLS):
        at = start + cell
        real = at < count
        k = tl.load(base + at[None, :] * (2 * size) + dim[:, None], mask=real[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(base + size + at[:, None] * (2 * size) + dim[None, :], mask=real[:, None] & is_dim[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scaling
        seen = real[None, :] & is_row[:, None]
        if OWN:
            step = at // rows
            writer = tl.load(ancestor + (slot * rows + row)[:, None] * steps + step[None, :], mask=seen, other=-1)
            seen = seen & (writer == (at % rows)[None, :])
            if BIASED:
                score += tl.load(bias + head * steps + count // rows - step, mask=real, other=0.0)[None, :]
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - shift[:, None])
        decay = tl.exp(best - shift)
        total = total * decay + tl.sum(weight, 1)
        result = tl.dot(weight.to(v.dtype), v, result * decay[:, None], input_precision="ieee")
        best = higher
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (slot * rows + row)[:, None] * size + head * HEAD + dim[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=is_real)


def attend(
    query: Tensor, cells: Tensor, length: Tensor, new: Tensor | None, ancestor: Tensor | None, bias: Tensor | None,
    rows: int, heads: int, scaling: float,
) -> Tensor:  # fmt: skip
    size = query.shape[-1]
    head, is_own = size // heads, new is not None
    out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
    _attend[(cells.shape[0], heads)](
        query, cells, out, length, new, ancestor, bias, query.stride(0), cells.stride(0), 0 if new is None else new.stride(0),
        1 if ancestor is None else ancestor.shape[-1], size, scaling,
        rows=rows, HEAD=head, ROWS=max(16, triton.next_power_of_2(rows)), DIMS=max(16, triton.next_power_of_2(head)),
        CELLS=64 if is_own and query.dtype != torch.float32 else 32, OWN=is_own, BIASED=bias is not None,
        num_warps=1, num_stages=1 if is_own else 3,
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    states, delta, delta_bias, weight, bias, out_sum, out_norm, out_moments, size, epsilon, delta_stride,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr, DELTA_BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(states + row * size + at, mask=real, other=0.0).to(tl.float32)
    x += tl.load(delta + row * delta_stride + at, mask=real, other=0.0).to(tl.float32)
    if DELTA_BIASED:
        x += tl.load(delta_bias + at, mask=real, other=0.0).to(tl.float32)
    rounded = x.to(out_sum.dtype.element_ty)
    tl.store(out_sum + row * size + at, rounded, mask=real)
    x = rounded.to(tl.float32)
    mean = tl.sum(x, 0) / size if CENTRED else 0.0
    x = tl.where(real, x - mean, 0.0)
    deviation = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    tl.store(out_moments + 2 * row, mean)
    tl.store(out_moments + 2 * row + 1, deviation)
    x = x * deviation
    x = x * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_norm + row * size + at, x.to(out_norm.dtype.element_ty), mask=real)


def add_norm(
    states: Tensor, delta: Tensor, delta_bias: Tensor | None, norm: nn.Module, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, that normalised, as `dtype`, and of every row what it was shifted and scaled by [rows, 2]."""
    rows, size = states.shape
    centred, bias = isinstance(norm, nn.LayerNorm), getattr(norm, "bias", None)
    epsilon = norm.eps if centred else norm.variance_epsilon
    total, normed = torch.empty_like(states), torch.empty_like(states, dtype=dtype)
    moments = states.new_empty(rows, 2, dtype=torch.float32)
    _add_norm[(rows,)](
        states, delta, delta_bias, norm.weight, bias, total, normed, moments, size, epsilon, delta.stride(0),
        BLOCK=triton.next_power_of_2(size), CENTRED=centred, BIASED=bias is not None, DELTA_BIASED=delta_bias is not None,
        num_warps=4,
    )  # fmt: skip
    return total, normed, moments


@triton.jit
def _norm(total, moments, weight, bias, out, size, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(total + row * size + at, mask=real, other=0.0).to(tl.float32)
    x = (x - tl.load(moments + 2 * row)) * tl.load(moments + 2 * row + 1)
    x = x * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, x.to(out.dtype.element_ty), mask=real)


def norm_again(total: Tensor, moments: Tensor, norm: nn.Module, dtype: torch.dtype) -> Tensor:
    """What `add_norm` gave [rows, size], from what it kept."""
    (rows, size), bias, out = total.shape, getattr(norm, "bias", None), torch.empty_like(total, dtype=dtype)
    _norm[(rows,)](
        total, moments, norm.weight, bias, out, size, BLOCK=triton.next_power_of_2(size), BIASED=bias is not None, num_warps=4
    )
    return out


@triton.jit
def _add_norm_gradient(
    total, moments, weight, of_total, of_norm, out, sums, rows, size,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, WITH_TOTAL: tl.constexpr,
):  # fmt: skip
    """Some rows: the gradient of each, and the sum over them: of it, and of those of the norm's weight and bias."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < size
    scale = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    own_sum = tl.zeros([BLOCK], tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * size + at
        mean, deviation = tl.load(moments + 2 * row), tl.load(moments + 2 * row + 1)
        x = (tl.load(total + here, mask=real, other=0.0).to(tl.float32) - mean) * deviation
        g = tl.load(of_norm + here, mask=real, other=0.0).to(tl.float32)
        weight_sum += g * x
        bias_sum += g
        g = g * scale
        slope = tl.sum(g * x, 0) / size
        if CENTRED:
            g = g - tl.sum(g, 0) / size
        g = (g - x * slope) * deviation
        if WITH_TOTAL:
            g += tl.load(of_total + here, mask=real, other=0.0).to(tl.float32)
        own_sum += g
        tl.store(out + here, g.to(out.dtype.element_ty), mask=real)
    sums += program * 3 * size
    tl.store(sums + at, own_sum, mask=real)
    tl.store(sums + size + at, weight_sum, mask=real)
    tl.store(sums + 2 * size + at, bias_sum, mask=real)


def add_norm_gradient(
    total: Tensor, moments: Tensor, norm: nn.Module, of_total: Tensor | None, of_norm: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of what was added [rows, size]; and [3 * size]: the sum of that, and the gradients of the norm's weight and bias."""
    rows, size = total.shape
    programs = min(rows, 768)
    out, sums = torch.empty_like(total), total.new_empty(programs, 3, size, dtype=torch.float32)
    _add_norm_gradient[(programs,)](
        total, moments, norm.weight, of_total, of_norm, out, sums, rows, size,
        BLOCK=triton.next_power_of_2(size), CENTRED=isinstance(norm, nn.LayerNorm), WITH_TOTAL=of_total is not None, num_warps=4,
    )  # fmt: skip
    return out, _sum_of_parts(sums.view(programs, -1), sums.new_empty(3 * size, dtype=dtype))


@triton.jit
def _column_sums(
    first, second, third, activated, passed, sums, rows, columns, width, each,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Of some columns of one of three over `each` rows. GATED: of the values whose places are activated, which are passed on."""
    column, part, which = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1), tl.program_id(2)
    values = first
    if which == 1:
        values = second
    if which == 2:
        values = third
    last = tl.minimum(part * each + each, rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * each, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        real = (row < last)[:, None] & (column < columns)[None, :]
        value = tl.load(values + at, mask=real, other=0.0)
        if GATED:
            value = tl.where(tl.load(activated + at, mask=real, other=0.0) > 0, value, 0.0)
            tl.store(passed + at, value.to(passed.dtype.element_ty), mask=real)
        total += value.to(tl.float32)
    out = sums + part * width + which * columns
    tl.store(out + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)


def column_sums(*every: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of each of up to three [rows, columns], added up in float32: `dtype` [columns]."""
    return _sum_columns(every, None, None, dtype).chunk(len(every))


def rectified_gradient(gradient: Tensor, activated: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient [rows, columns] where something was activated and 0 elsewhere, and the sums of its columns."""
    passed = torch.empty_like(gradient)
    return passed, _sum_columns((gradient,), activated, passed, dtype)


def _sum_columns(every: tuple[Tensor, ...], activated: Tensor | None, passed: Tensor | None, dtype: torch.dtype) -> Tensor:
    (rows, columns), width = every[0].shape, len(every) * every[0].shape[1]
    parts = max(1, min(64, rows // 64))
    sums, out = (every[0].new_empty(count, width, dtype=kind) for count, kind in ((parts, torch.float32), (1, dtype)))
    first, second, third = (*every, *every, *every)[:3]
    _column_sums[(triton.cdiv(columns, 64), parts, len(every))](
        first, second, third, activated, passed, sums, rows, columns, width, triton.cdiv(rows, parts),
        ROWS=64, COLUMNS=64, GATED=activated is not None, num_warps=4,
    )  # fmt: skip
    return _sum_of_parts(sums, out)


def _sum_of_parts(sums: Tensor, out: Tensor) -> Tensor:
    """[parts, columns] -> [columns]"""
    parts, columns = sums.shape
    _column_sums[(triton.cdiv(columns, 16), 1, 1)](
        sums, sums, sums, None, None, out, parts, columns, columns, parts, ROWS=128, COLUMNS=16, GATED=False, num_warps=4
    )
    return out.view(-1)


@triton.jit
def _read(base, at, vocabulary, readable):
    """Logits of a row, -inf beyond the vocabulary. Loads whose mask ends at an odd place would be of one number each."""
    x = tl.load(base + at, mask=at < readable, other=float("-inf")).to(tl.float32)
    return tl.where(at < vocabulary, x, float("-inf"))


def _readable(logits: Tensor) -> int:
    """How many columns of every row may be read: the vocabulary, and what a padded head gives beyond it."""
    columns = triton.cdiv(logits.shape[1], 16) * 16
    return columns if logits.stride(0) >= columns else logits.shape[1]


@triton.jit
def _chunk_maxima(
    logits, maxima, block_max, block_sum, stride, vocabulary, readable, chunks, blocks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """One block of a row: the maximum of each chunk, and max and sum of exp of the block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = block * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = _read(logits + row * stride, at, vocabulary, readable)
    best = tl.max(x, 1)
    tl.store(maxima + row * chunks + chunk, best, mask=chunk < chunks)
    highest = tl.max(best, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(block_max + row * blocks + block, highest)
    tl.store(block_sum + row * blocks + block, tl.sum(tl.sum(tl.exp(x - shift), 1), 0))


def chunk_maxima(logits: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The maximum of every chunk of each row, and logsumexp of the row, from one reading of the logits."""
    (rows, vocabulary), at_once = logits.shape, 16
    chunks, blocks = triton.cdiv(vocabulary, chunk), triton.cdiv(vocabulary, chunk * at_once)
    maxima = logits.new_empty(rows, chunks, dtype=torch.float32)
    block_max, block_sum = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
    _chunk_maxima[(rows, blocks)](
        logits,
        maxima,
        block_max,
        block_sum,
        logits.stride(0),
        vocabulary,
        _readable(logits),
        chunks,
        blocks,
        CHUNK=chunk,
        CHUNKS=at_once,
        num_warps=1,
    )
    highest = block_max.amax(1, keepdim=True)
    return maxima, (block_sum * (block_max - highest).exp()).sum(1).log() + highest[:, 0]


@triton.jit
def _weigh(logits, log_sum, factor, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < columns
    x = tl.load(logits + row * stride + at, mask=real, other=0.0).to(tl.float32)
    x = tl.exp(tl.minimum(x - tl.load(log_sum + row), 0.0)) * tl.load(factor + row)  # columns beyond must not overflow
    tl.store(logits + row * stride + at, x.to(logits.dtype.element_ty), mask=real)


def weigh(logits: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """factor * softmax, in place."""
    rows, columns = logits.shape
    _weigh[(rows, triton.cdiv(columns, 4096))](logits, log_sum, factor, logits.stride(0), columns, BLOCK=4096, num_warps=8)
    return logits


@triton.jit
def _divergence(logits, reference, found, log_sum, shift, stride, reference_stride, vocabulary, readable, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ours, theirs = logits + row * stride, reference + row * reference_stride
    at = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    their_top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    their_total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, y = _read(ours, start + at, vocabulary, readable), _read(theirs, start + at, vocabulary, readable)
        higher, their_higher = tl.maximum(top, tl.max(x, 0)), tl.maximum(their_top, tl.max(y, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        their_total = their_total * tl.exp(their_top - their_higher) + tl.sum(tl.exp(y - their_higher), 0)
        top, their_top = higher, their_higher
    own_sum = top + tl.log(total)
    ratio = own_sum - (their_top + tl.log(their_total))
    divergence = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x, y = _read(ours, start + at, vocabulary, readable), _read(theirs, start + at, vocabulary, readable)
        divergence += tl.sum(tl.where(start + at < vocabulary, tl.exp(x - own_sum) * (x - y - ratio), 0.0), 0)
    tl.store(found + row, divergence)
    tl.store(log_sum + row, own_sum)
    tl.store(shift + row, ratio + divergence)


def divergence(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = logits.shape
    found, log_sum, shift = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    _divergence[(rows,)](
        logits, reference, found, log_sum, shift, logits.stride(0), reference.stride(0), vocabulary,
        min(_readable(logits), _readable(reference)), BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return found, log_sum, shift


@triton.jit
def _weigh_divergence(
    logits, reference, log_sum, shift, factor, stride, reference_stride, columns, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < columns
    x = tl.load(logits + row * stride + at, mask=real, other=0.0).to(tl.float32)
    y = tl.load(reference + row * reference_stride + at, mask=real, other=0.0).to(tl.float32)
    share = tl.exp(tl.minimum(x - tl.load(log_sum + row), 0.0)) * tl.load(factor + row)
    x = share * (x - y - tl.load(shift + row))
    tl.store(logits + row * stride + at, x.to(logits.dtype.element_ty), mask=real)


def weigh_divergence(logits: Tensor, reference: Tensor, log_sum: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
    rows, columns = logits.shape
    _weigh_divergence[(rows, triton.cdiv(columns, 4096))](
        logits, reference, log_sum, shift, factor, logits.stride(0), reference.stride(0), columns, BLOCK=4096, num_warps=8
    )
    return logits


@triton.jit
def _draw(
    logits, uniform, top_p, chosen, stride, vocabulary, readable,
    BLOCK: tl.constexpr, HALVINGS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One row: halve the interval that holds the nucleus's lowest logit, then invert the distribution at `uniform`."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    at = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = _read(base, start + at, vocabulary, readable)
        top = tl.maximum(top, tl.max(x, 0))
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = _read(base, start + at, vocabulary, readable)
        total += tl.sum(tl.exp(x - top), 0)
    low, high, mass = top - 60.0, top + 0.0, total
    if WHOLE:
        low = tl.full([], -3.0e38, tl.float32)
    else:
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            above = tl.full([], 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                x = _read(base, start + at, vocabulary, readable)
                above += tl.sum(tl.where(x >= middle, tl.exp(x - top), 0.0), 0)
            enough = above >= top_p * total
            low = tl.where(enough, middle, low)
            mass = tl.where(enough, above, mass)
            high = tl.where(enough, high, middle)
    wanted = tl.load(uniform + row) * mass
    before = tl.full([], 0.0, tl.float32)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        x = _read(base, start + at, vocabulary, readable)
        inside = x >= low
        p = tl.where(inside, tl.exp(x - top), 0.0)
        cumulative = before + tl.cumsum(p, 0)
        here = tl.min(tl.where(inside & (cumulative > wanted), start + at, vocabulary), 0)
        token = tl.where((token < 0) & (here < vocabulary), here, token)
        last = tl.maximum(last, tl.max(tl.where(inside, start + at, 0), 0))
        before += tl.sum(p, 0)
    tl.store(chosen + row, tl.where(token < 0, last, token).to(tl.int64))


def draw(logits: Tensor, top_p: float, uniform: Tensor) -> Tensor:
    """One token per row from its nucleus. [rows]"""
    chosen = torch.empty(logits.shape[0], device=logits.device, dtype=torch.int64)
    _draw[(logits.shape[0],)](
        logits,
        uniform,
        top_p,
        chosen,
        logits.stride(0),
        logits.shape[1],
        _readable(logits),
        BLOCK=4096,
        HALVINGS=30 if logits.dtype == torch.float32 else 18,
        WHOLE=top_p >= 1.0,
        num_warps=8,
    )
    return chosen

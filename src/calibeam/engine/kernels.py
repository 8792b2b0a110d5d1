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
    states, delta, weight, bias, out_sum, out_norm, size, epsilon, delta_stride,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(states + row * size + at, mask=real, other=0.0).to(tl.float32)
    x += tl.load(delta + row * delta_stride + at, mask=real, other=0.0).to(tl.float32)
    rounded = x.to(out_sum.dtype.element_ty)
    tl.store(out_sum + row * size + at, rounded, mask=real)
    x = rounded.to(tl.float32)
    if CENTRED:
        x = tl.where(real, x - tl.sum(x, 0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    x = x * tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_norm + row * size + at, x.to(out_norm.dtype.element_ty), mask=real)


def add_norm(states: Tensor, delta: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    rows, size = states.shape
    centred, bias = isinstance(norm, nn.LayerNorm), getattr(norm, "bias", None)
    epsilon = norm.eps if centred else norm.variance_epsilon
    total, normed = torch.empty_like(states), torch.empty_like(states)
    _add_norm[(rows,)](
        states, delta, norm.weight, bias, total, normed, size, epsilon, delta.stride(0),
        BLOCK=triton.next_power_of_2(size), CENTRED=centred, BIASED=bias is not None, num_warps=4,
    )  # fmt: skip
    return total, normed


@triton.jit
def _chunk_maxima(
    logits, maxima, block_max, block_sum, stride, vocabulary, chunks, blocks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """One block of a row: the maximum of each chunk, and max and sum of exp of the block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = block * CHUNKS + tl.arange(0, CHUNKS)
    at = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
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
        chunks,
        blocks,
        CHUNK=chunk,
        CHUNKS=at_once,
        num_warps=1,
    )
    highest = block_max.amax(1, keepdim=True)
    return maxima, (block_sum * (block_max - highest).exp()).sum(1).log() + highest[:, 0]


@triton.jit
def _weigh(logits, log_sum, factor, stride, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < vocabulary
    x = tl.load(logits + row * stride + at, mask=real, other=0.0).to(tl.float32)
    x = tl.exp(x - tl.load(log_sum + row)) * tl.load(factor + row)
    tl.store(logits + row * stride + at, x.to(logits.dtype.element_ty), mask=real)


def weigh(logits: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """factor * softmax, in place."""
    rows, vocabulary = logits.shape
    _weigh[(rows, triton.cdiv(vocabulary, 4096))](logits, log_sum, factor, logits.stride(0), vocabulary, BLOCK=4096, num_warps=8)
    return logits


@triton.jit
def _draw(logits, uniform, top_p, chosen, stride, vocabulary, BLOCK: tl.constexpr, HALVINGS: tl.constexpr, WHOLE: tl.constexpr):
    """One row: halve the interval that holds the nucleus's lowest logit, then invert the distribution at `uniform`."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    at = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top), 0)
    low, high, mass = top - 60.0, top + 0.0, total
    if WHOLE:
        low = tl.full([], -3.0e38, tl.float32)
    else:
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            above = tl.full([], 0.0, tl.float32)
            for start in range(0, vocabulary, BLOCK):
                x = tl.load(base + start + at, mask=start + at < vocabulary, other=float("-inf")).to(tl.float32)
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
        x = tl.load(base + start + at, mask=start + at < vocabulary, other=float("-inf")).to(tl.float32)
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
        BLOCK=4096,
        HALVINGS=30 if logits.dtype == torch.float32 else 18,
        WHOLE=top_p >= 1.0,
        num_warps=8,
    )
    return chosen

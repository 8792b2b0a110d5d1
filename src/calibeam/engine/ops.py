"""The few operations that a search or a step of training spends its time in.

By Triton kernels on a GPU that has them, by PyTorch elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibeam.families import Block, aligned
from calibeam.paper.decoding import draw_above, least_of_nucleus
from calibeam.paper.likelihood import wide

CHUNK = 64  # of the vocabulary: the best K tokens of a row lie in the K chunks with the best maxima
NUCLEUS_GUESS = 512  # tokens among which a nucleus is looked for before the whole vocabulary is sorted


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def by_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()


class Product:
    """Linear layers with one input, as one product, with the weights in the form that the device likes best."""

    def __init__(self, *layers: tuple[Tensor, Tensor | None], rows: int) -> None:
        """layers: weights and biases; all of them have a bias or none has. rows: as many as are multiplied at once."""
        self._layers, self._rows = layers, rows
        weight = layers[0][0]
        self._columns = sum(len(weight) for weight, _ in layers)
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        self._weight, self._bias = self._stacked()
        self._is_copy = self._weight is not weight

    def __call__(self, states: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]"""
        if self._packed:
            # oneDNN, for packed weights faster than F.linear with as few rows as a search has.
            return torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")
        # T5 keeps some weights in float32.
        product = F.linear(states.to(self._weight.dtype), self._weight, self._bias).to(states.dtype)
        return product[..., : self._columns]

    def refresh(self) -> None:
        """Take over weights that have changed in place."""
        if self._is_copy:
            weight, bias = self._stacked()
            self._weight.copy_(weight)
            if self._bias is not None and bias is not None:
                self._bias.copy_(bias)

    def _stacked(self) -> tuple[Tensor, Tensor | None]:
        weights, biases = zip(*self._layers, strict=True)
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = None if biases[0] is None else torch.cat(biases) if len(biases) > 1 else biases[0]
        weight, bias = aligned(weight, bias)
        return torch.ops.mkldnn._reorder_linear_weight(weight, self._rows) if self._packed else weight, bias


@dataclass(frozen=True)
class Reach:
    """Which of its source's cells each row attends to: the first `length` of them, or its own path among those."""

    length: Tensor
    """[slots], int32"""
    longest: int
    mask: Tensor | None
    """For PyTorch, and None for the kernel: True or what a score gains, -inf for what is out of reach."""
    ancestor: Tensor | None = None
    """[slots, rows, steps]: the row that wrote each step of a row's path. Cells are ordered by step, then row."""
    bias: Tensor | None = None
    """[heads, distance]"""
    position: Tensor | None = None
    """[slots]: the step at which new cells are written."""


def source_reach(length: Tensor, longest: int) -> Reach:
    if by_kernel(length):
        return Reach(length, longest, None)
    longest = int(length.max()) if length.device.type == "cpu" else longest
    mask = torch.arange(longest, device=length.device) < length[:, None]
    return Reach(length, longest, mask[:, None, None])


def own_reach(ancestor: Tensor, position: Tensor, bias: Tensor | None, steps: int) -> Reach:
    """The path of every row up to its slot's position [slots]."""
    rows = ancestor.shape[1]
    length = ((position + 1) * rows).int()
    if by_kernel(ancestor):
        return Reach(length, steps * rows, None, ancestor, bias, position)
    step, row = torch.arange(steps, device=length.device), torch.arange(rows, device=length.device)
    distance = position[:, None] - step
    mask = (ancestor[:, :, :steps, None] == row) & (distance >= 0)[:, None, :, None]
    mask = mask.flatten(2)[:, None]
    if bias is not None:
        gain = bias[:, distance.clamp(min=0)].transpose(0, 1).repeat_interleave(rows, -1)
        mask = gain[:, :, None].masked_fill(~mask, float("-inf"))
    return Reach(length, steps * rows, mask, position=position)


def attend(
    query: Tensor, cells: Tensor, reach: Reach, new: Tensor | None = None, *, rows: int, heads: int, scaling: float
) -> Tensor:
    """Queries [slots * rows, size] over their slot's cells [slots, cells, 2 * size]: keys, then values. [slots * rows, size]

    new: cells [slots * rows, 2 * size] of this step, which are written first.
    """
    slots = cells.shape[0]
    if reach.mask is None:
        from calibeam.engine import kernels

        return kernels.attend(query, cells, reach.length, new, reach.ancestor, reach.bias, rows, heads, scaling)
    if new is not None:
        every_slot = torch.arange(slots, device=cells.device)
        cells.unflatten(1, (-1, rows)).index_put_((every_slot, reach.position), new.view(slots, rows, -1))
    keys, values = cells[:, : reach.longest].unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    mask = reach.mask.to(query.dtype) if reach.mask.is_floating_point() else reach.mask
    queries = query.view(slots, rows, heads, -1).transpose(1, 2)
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    return attended.transpose(1, 2).reshape(slots * rows, -1)


def add_norm(
    states: Tensor, delta: Tensor | None, norm: nn.Module, delta_bias: Tensor | None = None, *, narrow: bool = False
) -> tuple[Tensor, Tensor]:
    """states + delta + delta_bias, and that normalised. [..., size] each

    The latter is not kept for the gradients of products with it: it is made again from the sum, which is kept for the norm's.
    narrow: it goes into products only, and may have their type.
    """
    dtype = dtype_of_products(states) if narrow else states.dtype
    if by_kernel(states) and delta is not None:
        weights = norm.weight, getattr(norm, "bias", None)
        total, normed, moments = _AddNorm.apply(states, delta, delta_bias, norm, dtype, *weights)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            normed.again = _Again(total.detach().flatten(0, -2), moments, norm, dtype)
        return total, normed
    for each in (delta, delta_bias):
        states = states if each is None else states + each
    return states, norm(states)


def dtype_of_products(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, delta: Tensor, delta_bias: Tensor | None, norm: nn.Module, dtype: torch.dtype,
        *norm_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from calibeam.engine import kernels

        ctx.set_materialize_grads(False)
        ctx.norm, ctx.dtypes = norm, [None if each is None else each.dtype for each in (delta, delta_bias, *norm_weights)]
        ctx.shape, size = states.shape, states.shape[-1]
        total, normed, moments = kernels.add_norm(states.reshape(-1, size), delta.reshape(-1, size), delta_bias, norm, dtype)
        ctx.save_for_backward(total, moments)
        ctx.mark_non_differentiable(moments)
        return total.view_as(states), normed.view_as(states), moments

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from calibeam.engine import kernels

        (total, moments), (of_total, of_norm, _) = ctx.saved_tensors, gradients
        flat = of_total if of_total is None else of_total.reshape(total.shape).contiguous()
        sums: Sequence[Tensor | None] = (None, None, None)
        if of_norm is None:
            of_states = flat
            sums = (None if flat is None else flat.sum(0), None, None)
        else:
            of_states, every = kernels.add_norm_gradient(
                total, moments, ctx.norm, flat, of_norm.reshape(total.shape).contiguous(), ctx.dtypes[2]
            )
            sums = every.view(3, -1).unbind()
        of_states = None if of_states is None else of_states.view(ctx.shape)
        found = zip((of_states, *sums), ctx.dtypes, strict=True)
        of_delta, of_bias, *of_norm_weights = (None if g is None or dtype is None else g.to(dtype) for g, dtype in found)
        return of_states, of_delta, of_bias, None, None, *of_norm_weights


class _Again(NamedTuple):
    """How to make again what a norm gave."""

    total: Tensor
    moments: Tensor
    norm: nn.Module
    dtype: torch.dtype


def _keep(ctx: Any, states: Tensor, *others: Tensor) -> Tensor:
    """Whatever the gradients of a product with states need: how these are made again, or themselves, in the type of others."""
    cast = states.to(others[0].dtype)
    again: _Again | None = getattr(states, "again", None) if cast is states else None
    ctx.norm = (again.norm, again.dtype) if again else None
    ctx.save_for_backward(*others, *((again.total, again.moments) if again else (cast,)))
    return cast


def _kept(ctx: Any, others: int) -> tuple[Tensor, Sequence[Tensor]]:
    """States [rows, size], and the others."""
    from calibeam.engine import kernels

    saved = ctx.saved_tensors
    states = kernels.norm_again(*saved[others:], *ctx.norm) if ctx.norm else saved[others].flatten(0, -2)
    return states, saved[:others]


@contextmanager
def cast_at_once(blocks: Iterable[Block]) -> Iterator[None]:
    """Under autocast on a GPU: while this is open, products use weights of their own type that were cast together.

    A model has hundreds, and to start that many small operations takes longer than they do.
    """
    layers = [layer for block in blocks for layer in block.layers if type(layer) is nn.Linear and layer.weight.requires_grad]
    names = [(layer, name) for layer in layers for name in ("weight", "bias") if getattr(layer, name) is not None]
    own = [getattr(layer, name) for layer, name in names]
    if not own or not own[0].is_cuda or dtype_of_products(own[0]) == own[0].dtype:
        yield
        return
    cast = _Cast.apply(dtype_of_products(own[0]), *own)  # type: ignore[no-untyped-call]
    with cast_again({id(weight): other for weight, other in zip(own, cast, strict=True)}):
        yield


_cast: dict[int, Tensor] = {}


def cast_now() -> dict[int, Tensor]:
    """What `cast_at_once` has made, to compute something again after it is closed."""
    return dict(_cast)


@contextmanager
def cast_again(cast: Mapping[int, Tensor]) -> Iterator[None]:
    _cast.update(cast)
    try:
        yield
    finally:
        _cast.clear()


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return _cast_all(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast_all(tuple(gradient for gradient in gradients if gradient is not None), ctx.dtype))
        return None, *(None if gradient is None else next(cast) for gradient in gradients)


def _cast_all(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    found = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    if found:
        torch._foreach_copy_(found, tensors)
    return found


def _weights(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias = layer.bias
    return _cast.get(id(layer.weight), layer.weight), None if bias is None else _cast.get(id(bias), bias)


def _is_ours(states: Tensor, *layers: nn.Linear) -> bool:
    """Whether the gradients of these layers are computed here: of plain ones that are trained, on a GPU, in the right type."""
    if not (torch.is_grad_enabled() and by_kernel(states)):
        return False
    plain = [type(layer) is nn.Linear and layer.weight.requires_grad for layer in layers]
    return all(plain) and _weights(layers[0])[0].dtype == dtype_of_products(states)


def linears(states: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """The outputs of layers with one input.

    The gradients by it are added up as they are computed. A bias's gradient is a sum over many rows of few columns
    each, which PyTorch is slow at.
    """
    if not _is_ours(states, *layers):
        return [layer(states) for layer in layers]
    weights, biases = zip(*(_weights(layer) for layer in layers), strict=True)
    return _Linears.apply(states, *weights, *biases)  # type: ignore[no-untyped-call]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, *weights_and_biases: Tensor) -> tuple[Tensor, ...]:
        half = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:half], weights_and_biases[half:]
        ctx.dtype, ctx.bias_dtype = states.dtype, None if biases[0] is None else biases[0].dtype  # all have one, or none
        ctx.shape, states = states.shape, _keep(ctx, states, *weights)
        with torch.autocast(states.device.type, enabled=False):
            return tuple(F.linear(states, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from calibeam.engine import kernels

        rows, weights = _kept(ctx, len(gradients))
        flat = [gradient.flatten(0, -2).contiguous() for gradient in gradients]
        of_states = flat[0] @ weights[0]
        for gradient, weight in zip(flat[1:], weights[1:], strict=True):
            of_states.addmm_(gradient, weight)
        of_weights = [gradient.T @ rows for gradient in flat]
        of_biases: Sequence[Tensor | None] = [None] * len(flat)
        if ctx.bias_dtype is not None:
            of_biases = kernels.column_sums(*flat, dtype=ctx.bias_dtype)
        return of_states.view(ctx.shape).to(ctx.dtype), *of_weights, *of_biases


def activated(states: Tensor, layer: nn.Linear, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer's output, activated."""
    if isinstance(activation, nn.ReLU) and type(layer) is nn.Linear and by_kernel(states):
        return _Rectified.apply(states, *_weights(layer))  # type: ignore[no-untyped-call]
    return activation(linears(states, layer)[0])


class _Rectified(torch.autograd.Function):
    """Of a linear layer, in the same pass as the product."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = dtype_of_products(states)
        ctx.dtype, ctx.weight_dtype, ctx.bias_dtype = states.dtype, weight.dtype, None if bias is None else bias.dtype
        weight = weight.to(dtype)
        with torch.autocast(states.device.type, enabled=False):
            rows = states.to(dtype).flatten(0, -2)
            found = (rows @ weight.T).relu_() if bias is None else torch._addmm_activation(bias.to(dtype), rows, weight.T)
        _keep(ctx, states, weight, found)
        return found.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from calibeam.engine import kernels

        rows, (weight, found) = _kept(ctx, 2)
        gradient = gradients[0].reshape(found.shape).contiguous()
        gradient, sums = kernels.rectified_gradient(gradient, found, ctx.bias_dtype or weight.dtype)
        of_states = (gradient @ weight).view(*gradients[0].shape[:-1], -1).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return of_states, None, None
        of_weight = (gradient.T @ rows).to(ctx.weight_dtype)
        return of_states, of_weight, None if ctx.bias_dtype is None else sums


def product(states: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The layer's output less a bias, and the bias: `add_norm` adds it, and sums up its gradient, at no cost."""
    if type(layer) is not nn.Linear or not by_kernel(states):
        return layer(states), None
    weight, _ = _weights(layer)
    return F.linear(states, weight), layer.bias


def best_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """log P and ids of the best `count` tokens of every row, best first, and logsumexp of the row."""
    vocabulary = logits.shape[-1]
    count = min(count, vocabulary)
    if by_kernel(logits):
        from calibeam.engine import kernels

        maxima, log_sum = kernels.chunk_maxima(logits, CHUNK)
    else:
        if vocabulary <= 2 * CHUNK * count:  # too small a vocabulary to gain anything
            best, tokens = logits.topk(count)
            log_sum = log_sum_exp(logits)
            return best.float() - log_sum[:, None], tokens, log_sum
        whole = vocabulary - vocabulary % CHUNK
        maxima = logits[:, :whole].unflatten(-1, (-1, CHUNK)).amax(-1)
        if whole < vocabulary:
            maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], 1)
        # The largest of softmax is 1 / sum of exp(x - max).
        log_sum = maxima.amax(-1).float() - logits.softmax(-1, dtype=torch.float32).amax(-1).log()
    chunks = maxima.topk(min(count, maxima.shape[1]), sorted=False).indices
    tokens = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    values = logits.gather(1, tokens.clamp(max=vocabulary - 1)).float().masked_fill(tokens >= vocabulary, float("-inf"))
    best, index = values.topk(count)
    return best - log_sum[:, None], tokens.gather(1, index), log_sum


def log_sum_exp(logits: Tensor) -> Tensor:
    """[rows]"""
    if by_kernel(logits):
        from calibeam.engine import kernels

        return kernels.chunk_maxima(logits, CHUNK)[1]
    return wide(logits).logsumexp(-1)


def weigh(logits: Tensor, log_sum: Tensor, factor: Tensor) -> Tensor:
    """factor * softmax(logits), given the rows' logsumexp; in place. [rows, vocabulary]"""
    if by_kernel(logits):
        from calibeam.engine import kernels

        return kernels.weigh(logits, log_sum, factor)
    return logits.sub_(log_sum[:, None]).exp_().mul_(factor[:, None])


def divergence(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(softmax(logits) || softmax(reference)) of every row, and two numbers of each that its gradient needs."""
    if by_kernel(logits):
        from calibeam.engine import kernels

        return kernels.divergence(logits, reference)
    logits, reference = wide(logits), wide(reference)
    log_sum = logits.logsumexp(-1)
    ratio = log_sum - reference.logsumexp(-1)
    found = ((logits - log_sum[:, None]).exp() * (logits - reference - ratio[:, None])).sum(-1)
    return found, log_sum, ratio + found


def weigh_divergence(logits: Tensor, reference: Tensor, log_sum: Tensor, shift: Tensor, factor: Tensor) -> Tensor:
    """factor times the gradient of `divergence` by the logits, in their place. [rows, vocabulary]"""
    if by_kernel(logits):
        from calibeam.engine import kernels

        return kernels.weigh_divergence(logits, reference, log_sum, shift, factor)
    difference = logits - reference - shift[:, None]
    return logits.sub_(log_sum[:, None]).exp_().mul_(factor[:, None]).mul_(difference)


def draw(logits: Tensor, top_p: float, uniform: Tensor) -> Tensor:
    """One token per row from its nucleus. [rows]"""
    if by_kernel(logits):
        from calibeam.engine import kernels

        return kernels.draw(logits, top_p, uniform)
    probabilities = logits.float().softmax(-1)
    highest = probabilities.topk(min(NUCLEUS_GUESS, probabilities.shape[-1])).values
    if highest.device.type != "cpu" or bool((highest.sum(-1) < top_p).any()):
        highest = probabilities.sort(descending=True).values
    return draw_above(probabilities, least_of_nucleus(highest, top_p), uniform)

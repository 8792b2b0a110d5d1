"""The decoder's pass over given sequences, with all sequences of a source in one row.

The source is encoded once, and its keys and values are projected once, for all its sequences. The sequences
are a prefix tree: what several of them begin with is computed once. A node stands for a prefix, takes its last
token as input, sees its ancestors, and predicts every token that follows it. Where prefixes are not shared
the sequences simply stand one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calibeam import families, seq2seq
from calibeam.engine import ops
from calibeam.paper import likelihood

CHUNK = 2048  # tokens whose logits are held at once


@dataclass(frozen=True)
class Tree:
    """The sequences of every source as nodes."""

    tokens: Tensor
    """[batch, nodes]: what the decoder reads at each node."""
    depth: Tensor
    """[batch, nodes]: its position."""
    exists: Tensor
    """bool [batch, nodes]"""
    reach: Tensor | None
    """bool [batch, nodes, nodes]: whom a node sees. None: rows of as many nodes as a sequence is long, each causal."""
    place: Tensor
    """[batch, sequences, length]: the node that predicts each token."""


def plant(token_ids: Tensor, mask: Tensor, start: int, size: int) -> Tree:
    """The tree of sequences [batch, sequences, length], or the sequences one after another where that is less work.

    size: of the model's states, which decides what attention over many nodes costs beside the rest.
    """
    batch, sequences, length = token_ids.shape
    shifted = seq2seq.shifted(token_ids, start)
    # A prefix of several sequences belongs to the first of them: owner [batch, sequences, length].
    same = (shifted[:, :, None] == shifted[:, None]) & mask[:, :, None] & mask[:, None]
    owner = (same.cumsum(-1) == torch.arange(1, length + 1, device=mask.device)).int().argmax(2)
    every = torch.arange(sequences, device=mask.device)[:, None]
    is_new = (owner == every) & mask
    count = is_new.flatten(1).sum(1)
    nodes = -int(count.max()) // 8 * -8  # attention's kernels want multiples of 8
    if nodes * (6 * size + nodes) >= sequences * length * (6 * size + length):
        place = torch.arange(sequences * length, device=mask.device).view(1, sequences, length).expand(batch, -1, -1)
        depth = torch.arange(length, device=mask.device).repeat(sequences).expand(batch, -1)
        return Tree(shifted.flatten(1), depth, mask.flatten(1), None, place)
    number = (is_new.flatten(1).cumsum(1) - 1).clamp(min=0).view_as(owner)
    place = number.gather(1, owner)
    exists = torch.arange(nodes, device=mask.device) < count[:, None]

    def of_nodes(values: Tensor) -> Tensor:
        """Values of prefixes [batch, sequences, length, ...], of those that are nodes."""
        return values.new_zeros(batch, nodes, *values.shape[3:]).masked_scatter_(
            exists.view(*exists.shape, *[1] * (values.dim() - 3)), values[is_new]
        )

    depth = of_nodes(torch.arange(length, device=mask.device).expand_as(owner))
    path = of_nodes(place[:, :, None].expand(-1, -1, length, -1))  # of a node: the nodes of its sequence, by depth
    ancestor = path.gather(2, depth[:, None].expand(-1, nodes, -1)) == torch.arange(nodes, device=mask.device)
    reach = ancestor & (depth[:, None] <= depth[:, :, None]) & exists[:, None]
    reach |= torch.eye(nodes, dtype=torch.bool, device=mask.device)  # also where nothing exists: attention wants a key
    return Tree(of_nodes(shifted), depth, exists, reach, place)


def write(anatomy: families.Anatomy, tree: Tree, source_states: Tensor, source_mask: Tensor) -> Tensor:
    """The decoder's output states at every node. [batch, nodes, size]"""
    batch, nodes = tree.tokens.shape
    length = nodes if tree.reach is not None else tree.place.shape[-1]
    source_mask = source_mask.bool()
    every_mask = None if bool(source_mask.all()) else source_mask[:, None, None]  # without one, attention is faster
    own_mask = None if tree.reach is None else tree.reach[:, None]
    if anatomy.bias_of_distance is not None:
        depth = tree.depth if tree.reach is not None else tree.depth[:1, :length]
        own_mask = _biased(anatomy.bias_of_distance(int(tree.depth.max()) + 1), depth, own_mask)

    def heads(states: Tensor, rows: int) -> Tensor:
        """[batch, n, size] -> [rows, heads, ..., head size]"""
        return states.view(rows, -1, anatomy.heads, states.shape[-1] // anatomy.heads).transpose(1, 2)

    def attend(layer: families.Attention, states: Tensor, seen: Tensor, mask: Tensor | None, rows: int) -> Tensor:
        query, key, value = (heads(part, rows) for part in (layer.query(states), layer.key(seen), layer.value(seen)))
        mask = mask.to(query.dtype) if mask is not None and mask.is_floating_point() else mask
        causal = mask is None and seen is states
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=anatomy.scaling)
        return layer.out(attended.transpose(1, 2).reshape(batch, nodes, -1))

    def attend_own(states: Tensor, layer: families.Attention) -> Tensor:
        return attend(layer, states, states, own_mask, batch * nodes // length)

    def attend_source(states: Tensor, layer: families.Attention) -> Tensor:
        return attend(layer, states, source_states, every_mask, batch)

    def parts() -> Iterator[families.Part]:
        for block in anatomy.blocks:
            yield partial(attend_own, layer=block.own), block.own.norm
            yield partial(attend_source, layer=block.cross), block.cross.norm
            yield block.feed_forward, block.feed_forward_norm

    return anatomy.run(anatomy.embed(tree.tokens, tree.depth), parts(), _add_norm)


def _biased(bias: Tensor, depth: Tensor, reach: Tensor | None) -> Tensor:
    """What scores gain by the distance of keys [batch, heads, nodes, nodes], -inf for what is out of reach."""
    distance = depth[:, :, None] - depth[:, None]
    seen = (distance >= 0)[:, None] if reach is None else reach
    return bias[:, distance.clamp(min=0)].transpose(0, 1).masked_fill(~seen, float("-inf"))


def _add_norm(states: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    states = states if delta is None else states + delta
    return states, norm(states)


class Forced:
    """What a decoder made of sequences [batch, sequences, length] that it was given, of sources that are encoded."""

    def __init__(self, model: Any, source_states: Tensor, source_mask: Tensor, token_ids: Tensor, mask: Tensor) -> None:
        self._model, self._token_ids, self._mask = model, token_ids, mask
        self._source = (source_states, source_mask)
        self._anatomy = families.anatomy(model)
        if self._anatomy is not None:
            size = self._anatomy.head_weight.shape[1]
            self._tree = plant(token_ids, mask, seq2seq.special_ids(model).start, size)
            self._nodes = write(self._anatomy, self._tree, source_states, source_mask)

    def states(self) -> Tensor:
        """The decoder's output states, which predict each token. [batch, sequences, length, size]"""
        if self._anatomy is None:
            return seq2seq.force_states(self._model, *self._source, self._token_ids)
        index = self._tree.place.flatten(1)[..., None].expand(-1, -1, self._nodes.shape[-1])
        return self._nodes.gather(1, index).view(*self._token_ids.shape, -1)

    def log_p(self) -> Tensor:
        """log P(y|x) of every sequence. [batch, sequences]"""
        if self._anatomy is None:
            return likelihood.sequence_log_p(likelihood.token_log_p(self._logits, self._token_ids), self._mask)
        tree, head = self._tree, self._anatomy
        exists = tree.exists
        log_sum: Tensor = LogSum.apply(  # type: ignore[no-untyped-call]
            self._nodes[exists] * head.head_scale, head.head_weight, head.head_bias
        )
        every_log_sum = log_sum.new_zeros(exists.shape).masked_scatter(exists, log_sum)
        # The logit of each token: the scalar product of the state that predicts it with the token's own weights.
        states = likelihood.wide(self.states()) * head.head_scale
        logit = (states * likelihood.wide(F.embedding(self._token_ids, head.head_weight))).sum(-1)
        if head.head_bias is not None:
            logit = logit + head.head_bias[self._token_ids]
        log_p = logit - every_log_sum.gather(1, tree.place.flatten(1)).view_as(logit)
        return likelihood.sequence_log_p(log_p, self._mask)

    def regularization(self, function: Callable[..., Tensor], reference: Forced | None) -> Tensor:
        """A function of Eq. 2 on the first sequence of every source, some sources at a time. [batch]"""
        states, reference_states = self._first_states(), None if reference is None else reference._first_states()

        def some(part: Tensor, of: slice) -> Tensor:
            theirs = None if reference is None or reference_states is None else reference._first_logits(reference_states, of)
            return function(self._first_logits(part, slice(None)), theirs, self._token_ids[of, 0], self._mask[of, 0])

        at_once = max(1, CHUNK // self._token_ids.shape[-1])
        slices = [slice(first, first + at_once) for first in range(0, len(states), at_once)]
        return torch.cat([_checkpointed(some, states[of], of) for of in slices])

    def _first_states(self) -> Tensor:
        return self._logits[:, 0] if self._anatomy is None else self.states()[:, 0]

    def _first_logits(self, states: Tensor, of: slice) -> Tensor:
        return states[of] if self._anatomy is None else self._anatomy.logits(states[of])

    @cached_property
    def _logits(self) -> Tensor:
        return seq2seq.force(self._model, *self._source, self._token_ids)


class LogSum(torch.autograd.Function):
    """logsumexp of states [rows, size] times the head's weights, with logits of no more than a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        autocast = torch.is_autocast_enabled(states.device.type)
        ctx.dtype = torch.get_autocast_dtype(states.device.type) if autocast else states.dtype
        with torch.autocast(states.device.type, enabled=False):
            head = families.aligned(weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype))
            chunks = states.to(ctx.dtype).split(CHUNK)
            log_sum = torch.cat([ops.log_sum_exp(F.linear(part, *head)[:, : len(weight)]) for part in chunks])
        ctx.save_for_backward(states, weight, bias, log_sum)
        return log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gradient,), (states, weight, bias, log_sum) = gradients, ctx.saved_tensors
        with torch.autocast(states.device.type, enabled=False):
            head = families.aligned(weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype))
            of_states, of_weight = torch.empty_like(states, dtype=ctx.dtype), torch.zeros_like(head[0])
            of_bias = torch.zeros(len(head[0]), dtype=log_sum.dtype, device=weight.device)
            parts = (states.to(ctx.dtype), log_sum, gradient, of_states)
            for part, sums, factor, result in zip(*(each.split(CHUNK) for each in parts), strict=True):
                share = F.linear(part, *head)
                ops.weigh(share[:, : len(weight)], sums, factor)  # the columns beyond are 0 and stay 0
                torch.mm(share, head[0], out=result)
                of_weight.addmm_(share.T, part)
                if ctx.needs_input_grad[2]:
                    of_bias += share.sum(0, dtype=of_bias.dtype)
        of_weight, of_bias = of_weight[: len(weight)], of_bias[: len(weight)]
        return of_states.to(states.dtype), of_weight.to(weight.dtype), of_bias.to(bias.dtype) if ctx.needs_input_grad[2] else None


def _checkpointed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

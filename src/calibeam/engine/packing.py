"""The decoder's pass over given sequences, with all sequences of a source in one row.

The source is encoded once, and its keys and values are projected once, for all its sequences. The sequences
are a prefix tree: what several of them begin with is computed once. A node stands for a prefix, takes its last
token as input, sees its ancestors, and predicts every token that follows it. Where prefixes are not shared
the sequences simply stand one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from calibeam import families, seq2seq
from calibeam.engine import ops
from calibeam.engine.graphs import room
from calibeam.paper import likelihood, regularization

CHUNK = 2048  # tokens whose logits are held at once
Delta = tuple[Tensor, Tensor | None]
"""What a part of a block adds to its input: a product, and the bias that is still to be added to it."""


@dataclass(frozen=True)
class Plan:
    """How much room the sequences of a batch take: what must be known of them before a GPU begins."""

    nodes: int | None
    """Of the source that has most. None: the sequences stand one after another, each a row of its own."""
    existing: int
    """Of all sources."""


def plan(token_ids: Tensor, mask: Tensor, size: int, device: torch.device) -> Plan:
    """For sequences [batch, sequences, length], kept on the host: a tree, or one after another where that is less work.

    size: of the model's states, beside which attention over many nodes costs little or much.
    """
    batch, sequences, length = token_ids.shape
    count = _distinct_prefixes(token_ids.numpy(), mask.numpy())
    nodes = -room(int(count.max()), device, per_octave=4) // 8 * -8  # attention's kernels want multiples of 8
    if nodes * (6 * size + nodes) < sequences * length * (6 * size + length):
        return Plan(nodes, min(room(int(count.sum()), device, per_octave=4), batch * nodes))
    return Plan(None, min(room(int(mask.sum()), device, per_octave=4), mask.numel()))


def _distinct_prefixes(token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """How many each source has, of those that a token follows. [batch]"""
    rows = np.ascontiguousarray(np.where(mask, token_ids, -1))
    # Sorted, by whatever order of tokens, a sequence stands beside the one it shares most with.
    rows = np.sort(rows.view(f"V{rows.itemsize * rows.shape[-1]}"), axis=1).view(rows.dtype).reshape(mask.shape)
    length = (rows >= 0).sum(-1)
    shared = np.cumprod(rows[:, 1:] == rows[:, :-1], axis=-1).sum(-1) + 1
    return length.sum(1) - np.minimum(shared, np.minimum(length[:, 1:], length[:, :-1])).sum(1)


@dataclass(frozen=True)
class Tree:
    """Sequences of every source as nodes."""

    token_ids: Tensor
    """[batch, sequences, length]"""
    mask: Tensor
    """bool [batch, sequences, length]: the tokens that count"""
    tokens: Tensor
    """[batch, nodes]: what the decoder reads at each node."""
    depth: Tensor
    """[batch, nodes]: its position."""
    existing: Tensor
    """The nodes that exist, and perhaps some more, as places in [batch * nodes]."""
    reach: Tensor | None
    """bool [batch, nodes, nodes]: whom a node sees. None: rows of as many nodes as a sequence is long, each causal."""
    place: Tensor
    """[batch, sequences, length]: the node that predicts each token."""


def plant(model: Any, token_ids: Tensor, mask: Tensor, planned: Plan | None = None) -> Tree:
    """The tree of sequences [batch, sequences, length]. Only without a plan does this wait for a GPU."""
    if planned is None:
        planned = plan(token_ids.cpu(), mask.cpu(), model.config.hidden_size, mask.device)
    batch, sequences, length = token_ids.shape
    shifted = seq2seq.shifted(token_ids, seq2seq.special_ids(model).start)
    every_place, every_depth = (torch.arange(n, device=mask.device) for n in (sequences * length, length))
    if planned.nodes is None:
        place, depth = (
            every_place.view(1, sequences, length).expand(batch, -1, -1),
            every_depth.repeat(sequences).expand(batch, -1),
        )
        return Tree(token_ids, mask, shifted.flatten(1), depth, _first(mask.flatten(), planned.existing), None, place)
    # A prefix of several sequences belongs to the first of them: owner [batch, sequences, length].
    same = (shifted[:, :, None] == shifted[:, None]) & mask[:, :, None] & mask[:, None]
    owner = (same.cumsum(-1) == every_depth + 1).int().argmax(2)
    is_new = ((owner == torch.arange(sequences, device=mask.device)[:, None]) & mask).flatten(1)
    number = (is_new.cumsum(1) - 1).clamp(min=0)
    place = number.view_as(owner).gather(1, owner)
    nodes = planned.nodes
    every_node = torch.arange(nodes, device=mask.device)
    exists = every_node < is_new.sum(1, keepdim=True)
    number = number.masked_fill(~is_new, nodes)  # one beyond, for what is no node

    def of_nodes(values: Tensor) -> Tensor:
        """Values of prefixes [batch, sequences, length, ...], of those that are nodes."""
        values = values.flatten(1, 2)
        index = number.view(*number.shape, *[1] * (values.dim() - 2)).expand_as(values)
        return values.new_zeros(batch, nodes + 1, *values.shape[2:]).scatter_(1, index, values)[:, :nodes]

    depth = of_nodes(every_depth.expand_as(owner))
    path = of_nodes(place[:, :, None].expand(-1, -1, length, -1))  # of a node: the nodes of its sequence, by depth
    ancestor = path.gather(2, depth[:, None].expand(-1, nodes, -1)) == every_node
    reach = ancestor & (depth[:, None] <= depth[:, :, None]) & exists[:, None]
    reach |= every_node[:, None] == every_node  # also where nothing exists: attention wants a key
    return Tree(token_ids, mask, of_nodes(shifted), depth, _first(exists.flatten(), planned.existing), reach, place)


def _first(chosen: Tensor, count: int) -> Tensor:
    """The places of what is chosen, followed by some of the others if there are fewer than `count`."""
    return chosen.int().argsort(descending=True, stable=True)[:count]


class Source:
    """Sources as a decoder sees them: encoded once, their keys and values projected once, for all their sequences."""

    def __init__(self, model: Any, input_ids: Tensor, attention_mask: Tensor, *, whole: bool | None = None) -> None:
        """whole: whether the mask keeps everything, which makes attention faster. Only if not given is a GPU waited for."""
        self.model, self.mask, self.anatomy = model, attention_mask.bool(), families.anatomy(model)
        encoder = families.encoder(model)
        if self.anatomy is None or encoder is None:
            self.states = seq2seq.encode(model, input_ids, attention_mask)
            return
        whole = bool(self.mask.all()) if whole is None else whole
        self._seen = None if whole else self.mask[:, None, None]
        self.states = encode(encoder, input_ids, self._seen)
        self._keys_and_values = [
            [_heads(ops.linear(self.states, part), self.anatomy.heads) for part in (block.cross.key, block.cross.value)]
            for block in self.anatomy.blocks
            if block.cross is not None
        ]

    def write(self, tree: Tree) -> Tensor:
        """The decoder's output states at every node. [batch, nodes, size]"""
        anatomy, length = self.anatomy, tree.place.shape[-1]
        assert anatomy is not None
        # Where every sequence is a row of its own, causal attention needs no mask.
        row = length if tree.reach is None else tree.tokens.shape[1]
        mask = None if tree.reach is None else tree.reach[:, None]
        if anatomy.bias is not None:
            depth = tree.depth if tree.reach is not None else tree.depth[:1, :length]
            mask = _biased(anatomy.bias_of_distance(length), depth, mask).to(_dtype_of_products(self.states))

        def attend_source(states: Tensor, layer: families.Attention, key: Tensor, value: Tensor) -> Delta:
            query = _heads(ops.linear(states, layer.query), anatomy.heads)
            return _attend(anatomy, layer, states.shape[:-1], query, key, value, self._seen)

        def parts() -> Iterator[families.Part]:
            for block, (key, value) in zip(anatomy.blocks, self._keys_and_values, strict=True):
                assert block.cross is not None
                yield partial(_attend_own, anatomy, block.own, row, mask, mask is None), block.own.norm
                yield partial(attend_source, layer=block.cross, key=key, value=value), block.cross.norm
                yield partial(_feed_forward, block), block.feed_forward_norm

        with _attention_kernels(anatomy):
            return anatomy.run(anatomy.embed(tree.tokens, tree.depth), parts(), _add_norm)


def encode(encoder: families.Stack, input_ids: Tensor, seen: Tensor | None) -> Tensor:
    """The encoder's output states [batch, length, size], as Hugging Face computes them. seen: bool [batch, 1, 1, length]"""
    length = input_ids.shape[1]
    positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    states = encoder.embed(input_ids, positions)
    if encoder.bias is not None:
        bias = encoder.bias(length)[None].to(_dtype_of_products(states))
        seen = bias if seen is None else bias.masked_fill(~seen, float("-inf"))

    def parts() -> Iterator[families.Part]:
        for block in encoder.blocks:
            yield partial(_attend_own, encoder, block.own, length, seen, False), block.own.norm
            yield partial(_feed_forward, block), block.feed_forward_norm

    with _attention_kernels(encoder):
        return encoder.run(states, parts(), _add_norm)


def _attend_own(
    stack: families.Stack, layer: families.Attention, row: int, seen: Tensor | None, causal: bool, states: Tensor
) -> Delta:
    """Attention of states [batch, n, size] to those of the same row, of which there are so many."""
    query, key, value = (
        _heads(ops.linear(states, part).view(-1, row, part.out_features), stack.heads)
        for part in (layer.query, layer.key, layer.value)
    )
    return _attend(stack, layer, states.shape[:-1], query, key, value, seen, causal)


def _attend(
    stack: families.Stack, layer: families.Attention, shape: torch.Size, query: Tensor, key: Tensor, value: Tensor,
    seen: Tensor | None, causal: bool = False,
) -> Delta:  # fmt: skip
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal, scale=stack.scaling)
    return ops.product(found.transpose(1, 2).reshape(*shape, -1), layer.out)


def _attention_kernels(stack: families.Stack) -> AbstractContextManager[Any]:
    """Not cuDNN's, which take a tenth of a second to get ready for each new shape. A learned bias has a gradient in a model
    that is trained and none in its reference, and must be given to the same kernel in both, lest they differ by rounding."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels if stack.bias is not None else [SDPBackend.FLASH_ATTENTION, *kernels])


def _dtype_of_products(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _feed_forward(block: families.Block, states: Tensor) -> Delta:
    activated = block.activation(ops.linear(states, block.expand[0]))
    activated = activated * ops.linear(states, block.expand[1]) if len(block.expand) > 1 else activated
    if activated.dtype == states.dtype != block.contract.weight.dtype and not torch.is_autocast_enabled(states.device.type):
        return block.contract(activated.to(block.contract.weight.dtype)).to(states.dtype), None  # T5 keeps it in float32
    return ops.product(activated, block.contract)


def _add_norm(states: Tensor, delta: Delta | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    change, bias = delta or (None, None)
    return ops.add_norm(states, change, norm, bias)


def _heads(states: Tensor, heads: int) -> Tensor:
    """[rows, length, size] -> [rows, heads, length, size of a head]"""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def _biased(bias: Tensor, depth: Tensor, reach: Tensor | None) -> Tensor:
    """What scores gain by the distance of keys [batch, heads, nodes, nodes], -inf for what is out of reach."""
    distance = depth[:, :, None] - depth[:, None]
    seen = (distance >= 0)[:, None] if reach is None else reach
    return bias[:, distance.clamp(min=0)].transpose(0, 1).masked_fill(~seen, float("-inf"))


class Forced:
    """What a decoder made of sequences that it was given, of sources that are encoded."""

    def __init__(self, source: Source, tree: Tree) -> None:
        self._source, self._tree, self._head = source, tree, source.anatomy
        if self._head is not None:
            self._nodes = source.write(tree)

    def states(self) -> Tensor:
        """The decoder's output states, which predict each token. [batch, sequences, length, size]"""
        if self._head is None:
            return seq2seq.force_states(self._source.model, self._source.states, self._source.mask, self._tree.token_ids)
        return _at(self._tree, self._nodes)

    def settled(self) -> Forced:
        """With nothing left to compute but products with the head: what the model is may change after this."""
        if self._head is None:
            self._logits  # noqa: B018
        return self

    def log_p(self) -> Tensor:
        """log P(y|x) of every sequence. [batch, sequences]"""
        return likelihood.sequence_log_p(self.token_log_p(), self._tree.mask)

    def token_log_p(self) -> Tensor:
        """log P(y^t | y^0 ... y^{t-1}, x) of every token; what is not masked means nothing. [batch, sequences, length]"""
        tree, head = self._tree, self._head
        if head is None:
            return likelihood.token_log_p(self._logits, tree.token_ids)
        nodes = head.scaled(self._nodes.flatten(0, 1)[tree.existing])
        log_sum: Tensor = LogSum.apply(nodes, head.head_weight, head.head_bias)  # type: ignore[no-untyped-call]
        every_log_sum = log_sum.new_zeros(tree.tokens.numel()).index_copy(0, tree.existing, log_sum).view_as(tree.tokens)
        logit = _checkpointed(self._token_logits, self._nodes)
        return logit - every_log_sum.gather(1, tree.place.flatten(1)).view_as(logit)

    def _token_logits(self, nodes: Tensor) -> Tensor:
        """Of each token: the scalar product of the state that predicts it with the token's own weights. As `token_ids`"""
        tree, head = self._tree, self._head
        assert head is not None
        states = likelihood.wide(head.scaled(_at(tree, nodes)))
        logits = (states * likelihood.wide(F.embedding(tree.token_ids, head.head_weight))).sum(-1)
        return logits if head.head_bias is None else logits + head.head_bias[tree.token_ids]

    def regularization(self, function: Callable[..., Tensor], reference: Forced | None) -> Tensor:
        """A function of Eq. 2 on the first sequence of every source, some sources at a time. [batch]"""
        tree, states = self._tree, self._first_states()
        reference_states = None if reference is None else reference._first_states()
        if function is regularization.kl and self._head and reference and reference._head and reference_states is not None:
            scaled = (self._head.scaled(each.flatten(0, 1)) for each in (states, reference_states))
            heads = (part for head in (self._head, reference._head) for part in (head.head_weight, head.head_bias))
            divergence: Tensor = Divergence.apply(*scaled, *heads)  # type: ignore[no-untyped-call]
            return divergence.view_as(tree.mask[:, 0]).masked_fill(~tree.mask[:, 0], 0.0).sum(-1)

        def some(part: Tensor, of: slice) -> Tensor:
            theirs = None if reference is None or reference_states is None else reference._first_logits(reference_states[of])
            return function(self._first_logits(part), theirs, tree.token_ids[of, 0], tree.mask[of, 0])

        at_once = max(1, CHUNK // tree.mask.shape[-1])
        slices = [slice(first, first + at_once) for first in range(0, len(states), at_once)]
        return torch.cat([_checkpointed(some, states[of], of) for of in slices])

    def _first_states(self) -> Tensor:
        return self._logits[:, 0] if self._head is None else self.states()[:, 0]

    def _first_logits(self, states: Tensor) -> Tensor:
        return states if self._head is None else self._head.logits(states)

    @cached_property
    def _logits(self) -> Tensor:
        return seq2seq.force(self._source.model, self._source.states, self._source.mask, self._tree.token_ids)


def _at(tree: Tree, nodes: Tensor) -> Tensor:
    """Of nodes [batch, nodes, size], the one that predicts each token. [batch, sequences, length, size]"""
    index = tree.place.flatten(1)[..., None].expand(-1, -1, nodes.shape[-1])
    return nodes.gather(1, index).view(*tree.token_ids.shape, -1)


class LogSum(torch.autograd.Function):
    """logsumexp of states [rows, size] times the head's weights, with logits of no more than a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.head = _Head(states, weight, bias)
        with ctx.head as head:
            log_sum = torch.cat([ops.log_sum_exp(head.logits(part)) for part in states.split(CHUNK)])
        ctx.save_for_backward(states, log_sum)
        return log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (states, log_sum) = gradients, ctx.saved_tensors

        def of_logits(of: slice) -> Tensor:
            return ops.weigh(ctx.head.padded_logits(states[of]), log_sum[of], gradient[of])

        with ctx.head as head:
            return head.gradients(states, of_logits, *ctx.needs_input_grad[1:])


class Divergence(torch.autograd.Function):
    """KL(current || reference) of the distributions that states [rows, size] give, some rows at a time. [rows]"""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, reference: Tensor, weight: Tensor, bias: Tensor | None,
        reference_weight: Tensor, reference_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.head, ctx.reference_head = _Head(states, weight, bias), _Head(states, reference_weight, reference_bias)
        parts = zip(states.split(CHUNK), reference.split(CHUNK), strict=True)
        with ctx.head as head, ctx.reference_head as reference_head:
            found = [ops.divergence(head.logits(ours), reference_head.logits(theirs)) for ours, theirs in parts]
        divergence, log_sum, shift = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(states, reference, log_sum, shift)
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (states, reference, log_sum, shift) = gradients, ctx.saved_tensors

        def of_logits(of: slice) -> Tensor:
            logits, theirs = ctx.head.padded_logits(states[of]), ctx.reference_head.padded_logits(reference[of])
            return ops.weigh_divergence(logits, theirs, log_sum[of], shift[of], gradient[of])

        with ctx.head as head, ctx.reference_head:
            of_states, of_weight, of_bias = head.gradients(states, of_logits, *ctx.needs_input_grad[2:4])
        return of_states, None, of_weight, of_bias, None, None


class _Head:
    """An output head, in the type and the form that its products want while it is open."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._dtype, self._autocast = _dtype_of_products(states), torch.autocast(states.device.type, enabled=False)
        self._weight, self._bias = weight, bias

    def __enter__(self) -> _Head:
        bias = None if self._bias is None else self._bias.to(self._dtype)
        self._aligned = families.aligned(self._weight.to(self._dtype), bias)
        self._autocast.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._autocast.__exit__(*reason)
        del self._aligned  # which may be a copy

    def logits(self, states: Tensor) -> Tensor:
        return self.padded_logits(states)[:, : len(self._weight)]

    def padded_logits(self, states: Tensor) -> Tensor:
        return F.linear(states.to(self._dtype), *self._aligned)

    def gradients(
        self, states: Tensor, of_logits: Callable[[slice], Tensor], with_weight: bool, with_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of states, weight and bias, given a function for the gradients of the logits of some rows, padded as they are.

        In the padding the head is 0, so whatever stands there is lost.
        """
        weight, size = self._aligned[0], len(self._weight)
        of_states = torch.empty_like(states, dtype=self._dtype)
        of_weight = torch.zeros_like(weight) if with_weight else None  # none while the head is frozen
        of_bias = torch.zeros(len(weight), dtype=likelihood.wide(states[:0]).dtype, device=weight.device)
        for first in range(0, len(states), CHUNK):
            of = slice(first, first + CHUNK)
            share = of_logits(of)
            torch.mm(share, weight, out=of_states[of])
            if of_weight is not None:
                of_weight.addmm_(share.T, states[of].to(self._dtype))
            if with_bias:
                of_bias += share.sum(0, dtype=of_bias.dtype)
        own_bias = of_bias[:size].to(self._bias.dtype) if with_bias and self._bias is not None else None
        own_weight = None if of_weight is None else of_weight[:size].to(self._weight.dtype)
        return of_states.to(states.dtype), own_weight, own_bias


def _checkpointed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

"""The decoder's pass over given sequences, with all sequences of a source in one row.

The source is encoded once, and its keys and values are projected once, for all its sequences. The sequences
are a prefix tree: what several of them begin with is computed once. A node stands for a prefix, takes its last
token as input, sees its ancestors, and predicts every token that follows it. Where prefixes are not shared
the sequences simply stand one after another. Short sources, with their trees, share rows (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from calibeam import families, seq2seq
from calibeam.engine import ops, sharding
from calibeam.engine.graphs import room
from calibeam.engine.layout import Shared
from calibeam.paper import likelihood, regularization

CHUNK = 2048  # tokens whose logits are held at once
LARGE = 1024  # states of a model that spends long enough on each batch for kernels that take long to get ready
Delta = tuple[Tensor, Tensor | None]
"""What a part of a block adds to its input: a product, and the bias that is still to be added to it."""


@dataclass(frozen=True)
class Plan:
    """How much room the sequences of a batch take: what must be known of them before a GPU begins."""

    rows: int
    nodes: int | None
    """Of the row that has most. None: the sequences stand one after another, each a row of its own."""
    asked: int
    """Nodes of all rows that predict tokens whose log P is asked for."""
    told: int
    """Tokens whose log P is asked for."""
    first: int
    """The sequences before this one are not asked for theirs."""
    targets: int
    """Tokens of the first sequences of all sources."""


def plan(
    token_ids: Tensor, mask: Tensor, size: int, device: torch.device, *, first: int = 0, rows: int = 0, row: Tensor | None = None
) -> Plan:
    """For sequences [batch, sequences, length], kept on the host: a tree, or one after another where that is less work.

    size: of the model's states, beside which attention over many nodes costs little or much. row: of every source, where so
    many rows are shared.
    """
    batch, sequences, length = token_ids.shape
    count = distinct_prefixes(token_ids.numpy(), mask.numpy())
    # The larger the model, the more a place costs beside one more shape to record.
    of_nodes, of_tokens = (8, 8) if size >= LARGE else (2, 1)
    own = count if row is None else np.bincount(row.numpy(), weights=count).astype(int)
    nodes = -room(int(own.max()), device, per_octave=of_nodes) // 8 * -8  # attention's kernels want multiples of 8
    is_tree = row is not None or (sequences > 1 and nodes * (6 * size + nodes) < sequences * length * (6 * size + length))

    def places(some: Tensor, per_octave: int) -> int:
        return min(room(int(some.sum()), device, per_octave=per_octave), some.numel())

    # What is told of a node of a tree is no more than looked up, once it is asked.
    told, targets = places(mask[:, first:], 1 if is_tree else of_tokens), places(mask[:, 0], min(2, of_tokens))
    if not is_tree:
        return Plan(batch, None, told, told, first, targets)
    asked = distinct_prefixes(token_ids.numpy()[:, first:], mask.numpy()[:, first:]) if first else count
    rows = batch if row is None else rows
    return Plan(rows, nodes, min(room(int(asked.sum()), device, per_octave=of_tokens), rows * nodes), told, first, targets)


def distinct_prefixes(token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
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
    """[rows, nodes]: what the decoder reads at each node."""
    depth: Tensor
    """[rows, nodes]: its position."""
    asked: Tensor
    """The nodes that predict tokens whose log P is asked for, and perhaps some more, as places in [rows * nodes]."""
    told: Tensor
    """Those tokens, and perhaps some more, as places in [batch * sequences * length]."""
    targets: Tensor
    """The tokens of the first sequences, and perhaps some more, as places in [batch * length]."""
    first: int
    """The sequences before this one are not asked for theirs."""
    reach: Tensor | None
    """bool [rows, nodes, nodes]: whom a node sees. None: rows of as many nodes as a sequence is long, each causal."""
    place: Tensor
    """[batch, sequences, length]: the node that predicts each token, as a place in [rows * nodes]."""
    segment: Tensor | None
    """[rows, nodes]: whose node this is, counting sources from 1 on, where they share rows."""


def plant(model: Any, token_ids: Tensor, mask: Tensor, planned: Plan | None = None, row: Tensor | None = None) -> Tree:
    """The tree of sequences [batch, sequences, length]. Only without a plan does this wait for a GPU.

    row: of every source, where they share rows.
    """
    if planned is None:
        planned = plan(token_ids.cpu(), mask.cpu(), model.config.hidden_size, mask.device)
    batch, sequences, length = token_ids.shape
    shifted = seq2seq.shifted(token_ids, seq2seq.special_ids(model).start)
    every_depth = torch.arange(length, device=mask.device)
    is_told = mask.clone()
    is_told[:, : planned.first] = False
    told, targets = _first(is_told.flatten(), planned.told), _first(mask[:, 0].flatten(), planned.targets)
    tree = partial(Tree, token_ids=token_ids, mask=mask, told=told, targets=targets, first=planned.first)
    if planned.nodes is None:
        place = torch.arange(mask.numel(), device=mask.device).view_as(mask)
        depth = every_depth.repeat(sequences).expand(batch, -1)
        return tree(tokens=shifted.flatten(1), depth=depth, asked=told, reach=None, place=place, segment=None)
    # A prefix of several sequences belongs to the first of them: owner [batch, sequences, length].
    same = (shifted[:, :, None] == shifted[:, None]) & mask[:, :, None] & mask[:, None]
    owner = (same.cumsum(-1) == every_depth + 1).int().argmax(2)
    is_new = ((owner == torch.arange(sequences, device=mask.device)[:, None]) & mask).flatten(1)
    number = (is_new.cumsum(1) - 1).clamp(min=0)
    rows, nodes, every_source = planned.rows, planned.nodes, torch.arange(batch, device=mask.device)
    own_row, count = every_source if row is None else row, is_new.sum(1)
    if row is not None:  # after those of the sources before it
        number = number + ((row[:, None] == row) & (every_source[:, None] > every_source)).long().mul(count).sum(1, keepdim=True)
    number = number.view_as(owner).gather(1, owner)
    every_node = torch.arange(nodes, device=mask.device)
    exists = every_node < count.new_zeros(rows).index_add_(0, own_row, count)[:, None]
    place = number + nodes * own_row[:, None, None]
    beyond = rows * nodes  # for what is no node
    at = place.flatten().masked_fill(~is_new.flatten(), beyond)

    def of_nodes(values: Tensor) -> Tensor:
        """Values of prefixes [batch, sequences, length, ...], of those that are nodes."""
        values = values.flatten(0, 2)
        index = at.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        found = values.new_zeros(beyond + 1, *values.shape[1:]).scatter_(0, index, values)
        return found[:beyond].view(rows, nodes, *values.shape[1:])

    depth = of_nodes(every_depth.expand_as(owner))
    path = of_nodes(number[:, :, None].expand(-1, -1, length, -1))  # of a node: the nodes of its sequence, by depth
    ancestor = path.gather(2, depth[:, None].expand(-1, nodes, -1)) == every_node
    reach = ancestor & (depth[:, None] <= depth[:, :, None]) & exists[:, None]
    reach |= every_node[:, None] == every_node  # also where nothing exists: attention wants a key
    asked = exists.flatten()
    if planned.first:
        predicting = place.masked_fill(~is_told, beyond).flatten()
        asked = torch.zeros(beyond + 1, dtype=torch.bool, device=mask.device).scatter_(0, predicting, True)[:beyond]
    segment = None if row is None else of_nodes((every_source + 1)[:, None, None].expand_as(owner))
    asked = _first(asked, planned.asked)
    return tree(tokens=of_nodes(shifted), depth=depth, asked=asked, reach=reach, place=place, segment=segment)


def _first(chosen: Tensor, count: int) -> Tensor:
    """The places of what is chosen, followed by some of the others if there are fewer than `count`."""
    number, others = chosen.cumsum(0), (~chosen).cumsum(0)
    order = torch.where(chosen, number, number[-1] + others) - 1
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))[:count]


class Source:
    """Sources as a decoder sees them: encoded once, their keys and values projected once, for all their sequences."""

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        whole: bool | None = None,
        often: bool = False,
        shared: Shared | None = None,
    ) -> None:
        """whole: whether the mask keeps everything, which makes attention faster. Only if not given is a GPU waited for.

        often: batches of the same shape come again and again. shared: whose token is whose, where several sources share a row.
        """
        self.model, self.mask, self.anatomy = model, attention_mask.bool(), families.anatomy(model)
        self.shared = shared
        self.head: Head | None = None
        encoder = families.encoder(model)
        if self.anatomy is None or encoder is None:
            self.states = seq2seq.encode(model, input_ids, attention_mask)
            return
        self.head = Head(self.anatomy)
        whole = bool(self.mask.all()) if whole is None else whole
        self._seen = None if whole else self.mask[:, None, None]
        seen, position = (_same(shared.segment, shared.segment), shared.position) if shared else (self._seen, None)
        self.states = encode(encoder, input_ids, seen, position, often=often)
        self._often = often
        self._projected: list[Sequence[Tensor] | None] = [
            None if _is_apart(self.anatomy, block) else self._keys_and_values(block, self.states) for block in self.anatomy.blocks
        ]

    def _keys_and_values(self, block: families.Block, states: Tensor) -> Sequence[Tensor]:
        assert self.anatomy is not None and block.cross is not None  # noqa: PT018
        return [_heads(each, self.anatomy.heads) for each in ops.linears(states, block.cross.key, block.cross.value)]

    def write(self, tree: Tree) -> Tensor:
        """The decoder's output states at every node. [batch, nodes, size]"""
        anatomy, length = self.anatomy, tree.place.shape[-1]
        assert anatomy is not None
        # Where every sequence is a row of its own, causal attention needs no mask.
        row = length if tree.reach is None else tree.tokens.shape[1]
        mask = None if tree.reach is None else tree.reach[:, None]
        dtype, seen = ops.dtype_of_products(self.states), self._seen
        if anatomy.bias is not None:
            depth = tree.depth if tree.reach is not None else tree.depth[:1, :length]
            mask = _biased(anatomy.bias_of_distance(length), depth, mask).to(dtype)
        elif mask is not None:
            mask = _as_gain(mask, dtype)
        if self.shared and tree.segment is not None:  # a node that does not exist looks where the row begins
            of_node = torch.where(tree.segment > 0, tree.segment, self.shared.segment[:, :1])
            seen = _as_gain(_same(of_node, self.shared.segment), dtype)

        def attend_source(states: Tensor, layer: families.Attention, key: Tensor, value: Tensor) -> Delta:
            query = _heads(ops.linears(states, layer.query)[0], anatomy.heads)
            return _attend(anatomy, layer, states.shape[:-1], query, key, value, seen)

        def parts(block: families.Block, projected: Sequence[Tensor] | None, source: Tensor) -> list[families.Part]:
            assert block.cross is not None
            key, value = projected or self._keys_and_values(block, source)
            return [
                (partial(_attend_own, anatomy, block.own, row, mask, mask is None), block.own.norm),
                (partial(attend_source, layer=block.cross, key=key, value=value), block.cross.norm),
                (partial(_feed_forward, anatomy, block), block.feed_forward_norm),
            ]

        blocks = [partial(parts, *each) for each in zip(anatomy.blocks, self._projected, strict=True)]
        return _run(anatomy, anatomy.embed(tree.tokens, tree.depth), blocks, self._often, self.states)


def encode(
    encoder: families.Stack, input_ids: Tensor, seen: Tensor | None, position: Tensor | None = None, *, often: bool = False
) -> Tensor:
    """The encoder's output states [batch, length, size], as Hugging Face computes them.

    seen: bool [batch, 1, 1 or length, length]. position: [batch, length], if not that in the row.
    """
    length = input_ids.shape[1]
    if position is None:
        position = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    states = encoder.embed(input_ids, position)
    dtype = ops.dtype_of_products(states)
    if encoder.bias is not None:  # by distance, which is the same in a row as in a source
        bias = encoder.bias(length)[None].to(dtype)
        seen = bias if seen is None else bias.masked_fill(~seen, float("-inf"))
    elif seen is not None and seen.shape[2] > 1:
        seen = _as_gain(seen, dtype)

    def parts(block: families.Block) -> list[families.Part]:
        return [
            (partial(_attend_own, encoder, block.own, length, seen, False), block.own.norm),
            (partial(_feed_forward, encoder, block), block.feed_forward_norm),
        ]

    return _run(encoder, states, [partial(parts, block) for block in encoder.blocks], often)


def _run(
    stack: families.Stack, states: Tensor, blocks: Sequence[Callable[..., list[families.Part]]], often: bool, *others: Tensor
) -> Tensor:
    """Through all blocks, each given by what makes its parts of some other tensors."""
    states, delta = _dropped(states, stack.dropout.states), None
    for block, parts in zip(stack.blocks, blocks, strict=True):
        states, delta = _block(stack, block, parts, often)(states, *(delta or (None, None)), *others)
    return _dropped(stack.finish(states, delta, _add_norm), stack.dropout.output)


def _block(
    stack: families.Stack, block: families.Block, parts: Callable[..., list[families.Part]], often: bool
) -> Callable[..., tuple[Tensor, Delta | None]]:
    """What a block makes of states and what is still to be added to them; it may be computed again, or on gathered weights."""
    unit = sharding.unit(block)

    def run(states: Tensor, change: Tensor | None, bias: Tensor | None, *others: Tensor) -> tuple[Tensor, Delta | None]:
        delta = None if change is None else (change, bias)
        with _attention_kernels(stack, states, often):
            states, delta = stack.through(parts(*others), states, delta, _add_norm)
        if unit and delta and delta[1] is not None:  # a weight of this block, which is freed after it
            delta = delta[0], delta[1].clone()
        return states, delta

    function: Callable[..., Any] = partial(_checkpointed, run, dropout=any(stack.dropout)) if stack.checkpointed else run
    return partial(unit, function) if unit else function


def _is_apart(stack: families.Stack, block: families.Block) -> bool:
    """Whether all that a block computes must be computed in it."""
    return stack.checkpointed or sharding.unit(block) is not None


def _dropped(states: Tensor, share: float) -> Tensor:
    return F.dropout(states, share) if share else states


def _attend_own(
    stack: families.Stack, layer: families.Attention, row: int, seen: Tensor | None, causal: bool, states: Tensor
) -> Delta:
    """Attention of states [batch, n, size] to those of the same row, of which there are so many."""
    query, key, value = (
        _heads(each.view(-1, row, each.shape[-1]), stack.heads)
        for each in ops.linears(states, layer.query, layer.key, layer.value)
    )
    return _attend(stack, layer, states.shape[:-1], query, key, value, seen, causal)


def _attend(
    stack: families.Stack, layer: families.Attention, shape: torch.Size, query: Tensor, key: Tensor, value: Tensor,
    seen: Tensor | None, causal: bool = False,
) -> Delta:  # fmt: skip
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=stack.dropout.attention, is_causal=causal, scale=stack.scaling
    )
    return _delta(stack, found.transpose(1, 2).reshape(*shape, -1), layer.out)


def _attention_kernels(stack: families.Stack, states: Tensor, often: bool) -> AbstractContextManager[Any]:
    """cuDNN's are the fastest, but take a tenth of a second to get ready for each new shape. A learned bias has a gradient in
    a model that is trained and none in its reference, and must be given to the same kernel in both, lest they differ by
    rounding."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if stack.bias is None:
        kernels = [SDPBackend.FLASH_ATTENTION, *kernels]
        if often and states.shape[-1] >= LARGE:
            kernels = [SDPBackend.CUDNN_ATTENTION, *kernels]
    return sdpa_kernel(kernels, set_priority=True)


def _feed_forward(stack: families.Stack, block: families.Block, states: Tensor) -> Delta:
    activated = ops.activated(states, block.expand[0], block.activation)
    activated = activated * ops.linears(states, block.expand[1])[0] if len(block.expand) > 1 else activated
    activated = _dropped(activated, stack.dropout.activation)
    if activated.dtype == states.dtype != block.contract.weight.dtype and not torch.is_autocast_enabled(states.device.type):
        found = block.contract(activated.to(block.contract.weight.dtype)).to(states.dtype)  # T5 keeps it in float32
        return _dropped(found, stack.dropout.states), None
    return _delta(stack, activated, block.contract)


def _delta(stack: families.Stack, states: Tensor, layer: nn.Linear) -> Delta:
    if stack.dropout.states:
        return F.dropout(ops.linears(states, layer)[0], stack.dropout.states), None
    return ops.product(states, layer)


def _add_norm(states: Tensor, delta: Delta | None, norm: nn.Module, *, narrow: bool = False) -> tuple[Tensor, Tensor]:
    change, bias = delta or (None, None)
    return ops.add_norm(states, change, norm, bias, narrow=narrow)


def _heads(states: Tensor, heads: int) -> Tensor:
    """[rows, length, size] -> [rows, heads, length, size of a head]"""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Which places of rows are of the same segment. bool [rows, 1, places, others]"""
    return (one[:, :, None] == other[:, None])[:, None]


def _as_gain(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what scores gain, which every layer would make of it anew."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _biased(bias: Tensor, depth: Tensor, reach: Tensor | None) -> Tensor:
    """What scores gain by the distance of keys [rows, heads, nodes, nodes], -inf for what is out of reach."""
    seen = (depth[:, :, None] >= depth[:, None])[:, None] if reach is None else reach
    return ByDistance.apply(bias, depth).masked_fill(~seen, float("-inf"))  # type: ignore[no-untyped-call]


class ByDistance(torch.autograd.Function):
    """bias [heads, distances] at every two nodes, whose depths are [batch, nodes].

    Millions of pairs share a few distances, over which a plain index adds up gradients one after another. Products with what
    says which nodes are how deep add up most of them. Nodes that come before their key have no part in it: they must be masked.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, depth: Tensor) -> Tensor:
        ctx.save_for_backward(depth)
        ctx.distances = bias.shape[1]
        return bias[:, (depth[:, :, None] - depth[:, None]).clamp(min=0)].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (depth,) = ctx.saved_tensors
        every = torch.arange(ctx.distances, device=depth.device)
        is_at = (depth[..., None] == every).to(gradient.dtype)[:, None]
        by_depths = (is_at.mT @ (gradient @ is_at)).sum(0)  # [heads, of the query, of the key]
        query = every[:, None] + every  # [distance, key]
        at_distance = by_depths.gather(1, query.clamp(max=len(every) - 1).expand_as(by_depths))
        return at_distance.masked_fill(query >= len(every), 0.0).sum(-1), None


@dataclass(frozen=True)
class AtTarget:
    """What a model makes of targets: the logits that each token of them is compared with, before the last product."""

    states: Tensor
    """[batch, length, size]: what the head's weights are multiplied with; of a family that is not known here, the logits."""
    head: Head | None

    def logits(self, of: slice) -> Tensor:
        """Of some of the targets, without a gradient."""
        return self.states[of] if self.head is None else self.head.logits(self.states[of])


class Forced:
    """What a decoder made of sequences that it was given, of sources that are encoded."""

    def __init__(self, source: Source, tree: Tree) -> None:
        self._source, self._tree, self._head = source, tree, source.head
        if self._head is not None:
            self._nodes = source.write(tree)

    def states(self) -> Tensor:
        """The decoder's output states, which predict each token. [batch, sequences, length, size]"""
        if self._head is None:
            return seq2seq.force_states(self._source.model, self._source.states, self._source.mask, self._tree.token_ids)
        return _at(self._nodes, self._tree.place)

    def settled(self) -> Forced:
        """With nothing left to compute but products with the head: what the model is may change after this."""
        if self._head is None:
            self._logits  # noqa: B018
        return self

    def log_p(self) -> Tensor:
        """log P(y|x) of every sequence that is asked for it. [batch, sequences]"""
        return likelihood.sequence_log_p(self.token_log_p(), self._tree.mask[:, self._tree.first :])

    def token_log_p(self) -> Tensor:
        """log P(y^t | y^0 ... y^{t-1}, x) of their tokens; what is not masked means nothing. [batch, sequences, length]"""
        if self._head is None:
            asked = slice(self._tree.first, None)
            return likelihood.token_log_p(self._logits[:, asked], self._tree.token_ids[:, asked])
        return self._told(self._head, 0.0)

    def cross_entropy(self, smoothing: float = 0.0) -> Tensor:
        """-log P(y|x) of these sequences, or what label smoothing makes of it. [batch, sequences]"""
        token_ids, mask = (each[:, self._tree.first :] for each in (self._tree.token_ids, self._tree.mask))
        if self._head is None:
            return likelihood.smoothed_cross_entropy(self._logits[:, self._tree.first :], token_ids, mask, smoothing)
        return -likelihood.sequence_log_p(self._told(self._head, smoothing), mask)

    def _told(self, head: Head, smoothing: float) -> Tensor:
        """log P of tokens, mixed with the mean over the vocabulary. [batch, sequences, length]"""
        tree = self._tree
        token_ids, place = (each.flatten()[tree.told] for each in (tree.token_ids, tree.place))
        gain = _checkpointed(lambda nodes: head.gain(_at(nodes, place), token_ids, smoothing), self._nodes)
        log_sum = head.log_sum(self._nodes.flatten(0, 1)[tree.asked])
        every = log_sum.new_zeros(tree.tokens.numel()).index_copy(0, tree.asked, log_sum)
        found = gain.new_zeros(tree.mask.numel()).index_copy(0, tree.told, gain - every.gather(0, place))
        return found.view_as(tree.mask)[:, tree.first :]

    def at_target(self) -> AtTarget:
        """Of the first sequence of every source. What the model is may change after this."""
        states = self._first_states(self._tree.mask.shape[-1])
        return AtTarget(states if self._head is None else self._head.scaled(states), self._head)

    def regularization(self, function: Callable[..., Tensor], reference: AtTarget | None) -> Tensor:
        """A function of Eq. 2 on the first sequence of every source, some sources at a time. [batch]

        reference: of that sequence, in as many places as it takes.
        """
        tree = self._tree
        if function is regularization.kl and self._head and reference and reference.head:
            mask, place = (each[:, 0].flatten() for each in (tree.mask, tree.place))
            of_example, in_target = tree.targets // tree.mask.shape[-1], tree.targets % tree.mask.shape[-1]
            theirs = reference.states[of_example, in_target.clamp(max=reference.states.shape[1] - 1)]
            ours = self._head.scaled(_at(self._nodes, place[tree.targets]))
            divergence = self._head.divergence(ours, reference.head, theirs).masked_fill(~mask[tree.targets], 0.0)
            return divergence.new_zeros(mask.numel()).index_copy(0, tree.targets, divergence).view(len(tree.mask), -1).sum(-1)
        length = tree.mask.shape[-1] if reference is None else reference.states.shape[1]
        token_ids, mask = (each[:, 0, :length] for each in (tree.token_ids, tree.mask))
        states = self._first_states(length)

        def some(part: Tensor, of: slice) -> Tensor:
            logits = part if self._source.anatomy is None else self._source.anatomy.logits(part)
            return function(logits, None if reference is None else reference.logits(of), token_ids[of], mask[of])

        at_once = max(1, CHUNK // length)
        slices = [slice(first, first + at_once) for first in range(0, len(states), at_once)]
        return torch.cat([_checkpointed(some, states[of], of) for of in slices])

    def _first_states(self, length: int) -> Tensor:
        """Of the first sequence of every source; of a family that is not known here, its logits."""
        return self._logits[:, 0, :length] if self._head is None else _at(self._nodes, self._tree.place[:, 0, :length])

    @cached_property
    def _logits(self) -> Tensor:
        return seq2seq.force(self._source.model, self._source.states, self._source.mask, self._tree.token_ids)


def _at(nodes: Tensor, place: Tensor) -> Tensor:
    """Of nodes [rows, nodes, size], those in some places of [rows * nodes]. [*place, size]"""
    index = place.reshape(-1, 1).expand(-1, nodes.shape[-1])
    return nodes.flatten(0, 1).gather(0, index).view(*place.shape, -1)


class Head:
    """A decoder's output head, whose logits are never held for more than a chunk of tokens."""

    def __init__(self, anatomy: families.Anatomy) -> None:
        self._anatomy = anatomy
        self._aligned: tuple[Tensor, Tensor | None] | None = None

    def cross_entropy(self, states: Tensor, token_ids: Tensor, smoothing: float) -> Tensor:
        """-log P of each token, given the state that predicts it, or what label smoothing makes of it. As `token_ids`"""
        gain = _checkpointed(lambda states: self.gain(states, token_ids, smoothing), states)
        return self.log_sum(states.flatten(0, -2)).view(token_ids.shape) - gain

    def log_sum(self, states: Tensor) -> Tensor:
        """logsumexp of the logits that states [rows, size] give. [rows]"""
        anatomy = self._anatomy
        return LogSum.apply(anatomy.scaled(states), self, anatomy.head_weight, anatomy.head_bias)  # type: ignore[no-untyped-call]

    def gain(self, states: Tensor, token_ids: Tensor, smoothing: float) -> Tensor:
        """The logit of each token: the scalar product of the state that predicts it with the token's own weights.

        With label smoothing, mixed with the mean of all logits: that with the mean of all weights.
        """
        weight, bias = self._anatomy.head_weight, self._anatomy.head_bias
        states = likelihood.wide(self._anatomy.scaled(states))
        logits = (states * likelihood.wide(F.embedding(token_ids, weight))).sum(-1)
        logits = logits if bias is None else logits + bias[token_ids]
        if not smoothing:
            return logits
        mean = (states * likelihood.wide(weight).mean(0)).sum(-1)
        return (1 - smoothing) * logits + smoothing * (mean if bias is None else mean + bias.mean())

    def divergence(self, scaled: Tensor, reference: Head, theirs: Tensor) -> Tensor:
        """KL(current || reference) of the distributions that scaled states [rows, size] give. [rows]"""
        weight, bias = self._anatomy.head_weight, self._anatomy.head_bias
        return Divergence.apply(scaled, theirs, self, reference, weight, bias)  # type: ignore[no-untyped-call]

    def scaled(self, states: Tensor) -> Tensor:
        """What the weights are multiplied with."""
        return self._anatomy.scaled(states)

    def frozen(self, dtype: torch.dtype) -> Head:
        """As it is now, whatever the model becomes."""

        def kept(weight: Tensor) -> Tensor:
            return weight.detach().to(dtype, copy=weight.requires_grad)

        anatomy, bias = self._anatomy, self._anatomy.head_bias
        weight, bias = kept(anatomy.head_weight), None if bias is None else kept(bias)
        return Head(replace(anatomy, blocks=[], head_weight=weight, head_bias=bias))

    def padded_logits(self, states: Tensor) -> Tensor:
        """Of scaled states [..., size], with columns beyond the vocabulary."""
        if self._aligned is None:
            dtype, bias = ops.dtype_of_products(states), self._anatomy.head_bias
            bias = None if bias is None else bias.detach().to(dtype)
            self._aligned = families.aligned(self._anatomy.head_weight.detach().to(dtype), bias)
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.to(self._aligned[0].dtype), *self._aligned)

    def logits(self, states: Tensor) -> Tensor:
        """The same, without these."""
        return self.padded_logits(states)[..., : len(self._anatomy.head_weight)]

    def gradients(
        self, states: Tensor, of_logits: Callable[[slice], Tensor], with_weight: bool, with_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of states, weight and bias, given a function for the gradients of the logits of some rows, padded as they are.

        In the padding the head is 0, so whatever stands there is lost.
        """
        assert self._aligned is not None
        weight, own_weight, own_bias = self._aligned[0], self._anatomy.head_weight, self._anatomy.head_bias
        of_states = torch.empty_like(states, dtype=weight.dtype)
        of_weight = torch.zeros_like(weight) if with_weight else None  # none while the head is frozen
        of_bias = torch.zeros(len(weight), dtype=likelihood.wide(states[:0]).dtype, device=weight.device)
        for first in range(0, len(states), CHUNK):
            of = slice(first, first + CHUNK)
            share = of_logits(of)
            torch.mm(share, weight, out=of_states[of])
            if of_weight is not None:
                of_weight.addmm_(share.T, states[of].to(weight.dtype))
            if with_bias:
                of_bias += share.sum(0, dtype=of_bias.dtype)
        size = len(own_weight)
        return (
            of_states.to(states.dtype),
            None if of_weight is None else of_weight[:size].to(own_weight.dtype),
            of_bias[:size].to(own_bias.dtype) if with_bias and own_bias is not None else None,
        )


class LogSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Head, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = []
        for part in states.split(CHUNK):
            logits = head.padded_logits(part)
            found.append(ops.log_sum_exp(logits[:, : len(weight)]))
        log_sum = torch.cat(found)
        ctx.head, ctx.last = head, logits  # the last chunk's are kept, and need not be computed again
        ctx.save_for_backward(states, log_sum)
        return log_sum

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (states, log_sum) = gradients, ctx.saved_tensors

        def of_logits(of: slice) -> Tensor:
            logits = None
            if of.stop >= len(states):
                logits, ctx.last = ctx.last, None
            return ops.weigh(ctx.head.padded_logits(states[of]) if logits is None else logits, log_sum[of], gradient[of])

        of_states, of_weight, of_bias = ctx.head.gradients(states, of_logits, *ctx.needs_input_grad[2:])
        return of_states, None, of_weight, of_bias


class Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, reference: Tensor, head: Head, reference_head: Head, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.head, ctx.reference_head = head, reference_head
        parts = zip(states.split(CHUNK), reference.split(CHUNK), strict=True)
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

        of_states, of_weight, of_bias = ctx.head.gradients(states, of_logits, *ctx.needs_input_grad[4:])
        return of_states, None, None, None, of_weight, of_bias


def _checkpointed(function: Callable[..., Any], *arguments: Any, dropout: bool = False) -> Any:
    """What a function finds, computed again for its gradients: with the same noise, and weights that were cast at once."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    cast = ops.cast_now()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), ops.cast_again(cast)

    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout, context_fn=contexts)

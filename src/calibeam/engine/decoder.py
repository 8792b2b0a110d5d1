"""The decoder of a search: several rows of outputs for every source, one token at a time.

`Decoder` runs the families of `families.py`. The keys and values of a source are held once, for all its rows.
Those of the rows are never moved: a row remembers which row wrote each step of its path, and attends to
those cells alone among all that its source's rows wrote. Sources come and go in slots of their own.
`PlainDecoder` does the same for every `AutoModelForSeq2SeqLM`, through Hugging Face's own forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calibeam import families, seq2seq
from calibeam.engine import ops


class Decoder:
    rolling = True
    """A source may enter while others are being written."""

    def __init__(self, anatomy: families.Anatomy, slots: int, rows: int, steps: int, source_length: int) -> None:
        self._anatomy = anatomy
        own = anatomy.blocks[0].own
        device, dtype, size = own.query.weight.device, own.query.weight.dtype, own.query.out_features
        self._rows, self._size = rows, size
        layers = len(anatomy.blocks)
        # Keys, then values. What is not yet written must be finite, for it is multiplied by a weight of 0.
        self._own = torch.zeros(layers, slots, steps * rows, 2 * size, device=device, dtype=dtype)
        self._cross = torch.zeros(layers, slots, source_length, 2 * size, device=device, dtype=dtype)
        self._source_length = torch.ones(slots, device=device, dtype=torch.int32)
        self._ancestor = torch.zeros(slots, rows, steps, device=device, dtype=torch.int32)
        """Which row wrote each step of a row's path."""
        self._every_slot = torch.arange(slots, device=device)
        self._every_row = torch.arange(rows, device=device, dtype=torch.int32)
        self._bias = None if anatomy.bias is None else anatomy.bias_of_distance(steps).float().contiguous()
        self._layers = [_Layer(block, slots * rows) for block in anatomy.blocks]
        self._head = ops.Product((anatomy.head_weight, anatomy.head_bias), rows=slots * rows)

    @staticmethod
    def bytes_per_slot(anatomy: families.Anatomy, rows: int, steps: int, source_length: int) -> int:
        weight = anatomy.blocks[0].own.query.weight
        return len(anatomy.blocks) * 2 * weight.shape[0] * (steps * rows + source_length) * weight.element_size()

    def refresh(self) -> None:
        """Take over weights that have changed in place."""
        if self._bias is not None:
            self._bias.copy_(self._anatomy.bias_of_distance(self._bias.shape[-1]))
        for product in (self._head, *(product for layer in self._layers for product in layer.products)):
            product.refresh()

    def enter(self, slots: Tensor, states: Tensor, attention_mask: Tensor) -> None:
        """New sources in the given slots: what the encoder made of them."""
        mask = attention_mask.bool()
        if (mask[:, 1:] & ~mask[:, :-1]).any():  # padding anywhere but at the end: move it there
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            states = states.gather(1, order[..., None].expand_as(states))
        states = states.to(self._cross.dtype)
        for cells, layer in zip(self._cross, self._layers, strict=True):
            cells[slots, : states.shape[1]] = layer.source(states)
        self._source_length[slots] = mask.sum(1).int()

    def step(self, tokens: Tensor, position: Tensor, longest: int) -> Tensor:
        """The logits after tokens [slots, rows], written at position [slots] < longest. [slots * rows, vocabulary]"""
        with torch.autocast(tokens.device.type, enabled=False):  # the weights have the type wanted
            return self._step(tokens, position, longest)

    def _step(self, tokens: Tensor, position: Tensor, longest: int) -> Tensor:
        anatomy = self._anatomy
        self._ancestor[self._every_slot, :, position] = self._every_row
        own = ops.own_reach(self._ancestor, position, self._bias, longest)
        cross = ops.source_reach(self._source_length, self._cross.shape[2])
        states = anatomy.embed(tokens, position[:, None].expand_as(tokens)).flatten(0, 1)
        states = anatomy.run(states, self._blocks(own, cross), ops.add_norm)
        return self._head(anatomy.scaled(states))

    def reorder(self, parents: Tensor) -> None:
        """Let each row go on from what the row parents [slots, rows] of its source wrote."""
        self._ancestor.copy_(self._ancestor.gather(1, parents[..., None].expand_as(self._ancestor)))

    def _blocks(self, own: ops.Reach, cross: ops.Reach) -> Iterator[list[families.Part]]:
        """The three parts of every block, in order."""

        def attend_own(states: Tensor, layer: _Layer, cells: Tensor) -> Tensor:
            query, new = layer.own(states).tensor_split([self._size], -1)
            return layer.own_out(self._attend(query, cells, own, new))

        def attend_source(states: Tensor, layer: _Layer, cells: Tensor) -> Tensor:
            return layer.cross_out(self._attend(layer.cross_query(states), cells, cross))

        for layer, own_cells, source_cells in zip(self._layers, self._own, self._cross, strict=True):
            block = layer.block
            yield [
                (partial(attend_own, layer=layer, cells=own_cells), block.own.norm),
                (partial(attend_source, layer=layer, cells=source_cells), layer.cross_norm),
                (layer.feed_forward, block.feed_forward_norm),
            ]

    def _attend(self, query: Tensor, cells: Tensor, reach: ops.Reach, new: Tensor | None = None) -> Tensor:
        return ops.attend(query, cells, reach, new, rows=self._rows, heads=self._anatomy.heads, scaling=self._anatomy.scaling)


class PlainDecoder:
    """All slots begin together and go on until the last is done."""

    rolling = False

    def __init__(self, model: Any, rows: int) -> None:
        self._model, self._rows = model, rows

    def enter(self, slots: Tensor, states: Tensor, attention_mask: Tensor) -> None:
        self._stepper = seq2seq.Stepper(self._model, states, attention_mask, self._rows)
        self._first = torch.arange(len(slots), device=states.device)[:, None] * self._rows

    def step(self, tokens: Tensor, position: Tensor, longest: int) -> Tensor:
        return self._stepper.step(tokens.flatten())

    def reorder(self, parents: Tensor) -> None:
        self._stepper.reorder((self._first + parents).flatten())


class _Layer:
    """The products of a block."""

    def __init__(self, block: families.Block, rows: int) -> None:
        def product(*layers: nn.Linear) -> ops.Product:
            return ops.Product(*((layer.weight, layer.bias) for layer in layers), rows=rows)

        self.block = block
        self.own = product(block.own.query, block.own.key, block.own.value)
        self.own_out = product(block.own.out)
        assert block.cross is not None
        self.cross_norm = block.cross.norm
        self.source = product(block.cross.key, block.cross.value)
        self.cross_query, self.cross_out = product(block.cross.query), product(block.cross.out)
        self.expand, self.contract = product(*block.expand), product(block.contract)
        self.products = [part for part in vars(self).values() if isinstance(part, ops.Product)]

    def feed_forward(self, states: Tensor) -> Tensor:
        expanded = self.expand(states)
        if len(self.block.expand) == 1:
            return self.contract(self.block.activation(expanded))
        activated, gate = expanded.chunk(2, -1)
        return self.contract(self.block.activation(activated) * gate)

"""How a family's decoder is built, in one form, so that the engine need not know which family it runs.

T5, BART, mBART, PEGASUS and Marian. Nothing here is a copy of a layer: every part is the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # a product with an odd number of columns takes many times as long on a GPU
Part = tuple[Callable[[Tensor], Tensor], nn.Module]
"""What a block does to its input, attention or feed-forward, and the norm that belongs to it."""
AddNorm = Callable[[Tensor, Tensor | None, nn.Module], tuple[Tensor, Tensor]]
"""The sum of two tensors, and that normalised."""


@dataclass(frozen=True)
class Attention:
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    norm: nn.Module


@dataclass(frozen=True)
class Block:
    own: Attention
    """Over what the decoder has written."""
    cross: Attention
    """Over the source."""
    expand: tuple[nn.Linear, ...]
    """One layer, or two: what is activated, and the gate that it is multiplied with."""
    activation: Callable[[Tensor], Tensor]
    contract: nn.Linear
    feed_forward_norm: nn.Module

    def feed_forward(self, states: Tensor) -> Tensor:
        activated = self.activation(self.expand[0](states))
        activated = activated * self.expand[1](states) if len(self.expand) > 1 else activated
        if activated.dtype == states.dtype != self.contract.weight.dtype and not torch.is_autocast_enabled(states.device.type):
            return self.contract(activated.to(self.contract.weight.dtype)).to(states.dtype)  # T5 keeps it in float32
        return self.contract(activated)


@dataclass(frozen=True)
class Anatomy:
    """A decoder and its output head."""

    blocks: list[Block]
    heads: int
    scaling: float
    norm_first: bool
    """Whether a block normalises what goes into each part, or what comes out of it."""
    embed: Callable[[Tensor, Tensor], Tensor]
    """Tokens and their positions, of one shape -> [..., size]"""
    final_norm: nn.Module | None
    head_weight: Tensor
    head_bias: Tensor | None
    head_scale: float
    """Logits are head_weight (head_scale states) + head_bias."""
    bias_of_distance: Callable[[int], Tensor] | None
    """For relative positions: what a score gains by the distance to the key, up to a length. [heads, length]"""

    def logits(self, states: Tensor) -> Tensor:
        """[..., size] -> [..., vocabulary]"""
        states = states if self.head_scale == 1.0 else states * self.head_scale
        logits = nn.functional.linear(states, *aligned(self.head_weight, self.head_bias))
        return logits[..., : len(self.head_weight)]

    def run(self, states: Tensor, parts: Iterable[Part], add_norm: AddNorm) -> Tensor:
        """From embeddings to the states that the head reads, through the parts of all blocks, each with its norm."""
        if not self.norm_first:
            for part, norm in parts:
                _, states = add_norm(states, part(states), norm)
            return states
        delta = None
        for part, norm in parts:
            states, inner = add_norm(states, delta, norm)
            delta = part(inner)
        assert self.final_norm is not None
        return add_norm(states, delta, self.final_norm)[1]


def aligned(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A layer's weights, on a GPU with as many rows as its products want; the rows beyond give 0."""
    spare = -len(weight) % ALIGNMENT if weight.is_cuda else 0
    if not spare:
        return weight, bias
    return nn.functional.pad(weight, (0, 0, 0, spare)), None if bias is None else nn.functional.pad(bias, (0, spare))


def anatomy(model: Any, dtype: torch.dtype | None = None) -> Anatomy | None:
    """None for a family that is not known here. Weights of another type than the one wanted are copied."""
    describe = FAMILIES.get(model.config.model_type)
    if describe is None:
        return None
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if dtype is not None and next(decoder.parameters()).dtype != dtype:
        decoder, head = copy.deepcopy(decoder).to(dtype), copy.deepcopy(head).to(dtype)
    return describe(model, decoder, head)


def _bart(model: Any, decoder: Any, head: nn.Linear) -> Anatomy:
    def attention(part: Any, norm: nn.Module) -> Attention:
        return Attention(part.q_proj, part.k_proj, part.v_proj, part.out_proj, norm)

    def block(layer: Any) -> Block:
        return Block(
            attention(layer.self_attn, layer.self_attn_layer_norm),
            attention(layer.encoder_attn, layer.encoder_attn_layer_norm),
            (layer.fc1,),
            layer.activation_fn,
            layer.fc2,
            layer.final_layer_norm,
        )

    # BART and mBART scale inside embed_tokens.
    scale = 1.0 if hasattr(decoder.embed_tokens, "embed_scale") else decoder.embed_scale
    offset = getattr(decoder.embed_positions, "offset", 0)
    norm = getattr(decoder, "layernorm_embedding", None)

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        states = decoder.embed_tokens(tokens) * scale + nn.functional.embedding(
            positions + offset, decoder.embed_positions.weight
        )
        return states if norm is None else norm(states)

    first = decoder.layers[0].self_attn
    return Anatomy(
        blocks=[block(layer) for layer in decoder.layers],
        heads=first.num_heads,
        scaling=first.head_dim**-0.5,
        norm_first=model.config.model_type in ("mbart", "pegasus"),
        embed=embed,
        final_norm=getattr(decoder, "layer_norm", None),
        head_weight=head.weight,
        head_bias=model.final_logits_bias[0].to(head.weight.dtype),
        head_scale=1.0,
        bias_of_distance=None,
    )


def _t5(model: Any, decoder: Any, head: nn.Linear) -> Anatomy:
    def attention(part: Any, norm: nn.Module) -> Attention:
        return Attention(part.q, part.k, part.v, part.o, norm)

    def block(layer: Any) -> Block:
        own, cross, last = layer.layer
        dense = last.DenseReluDense
        return Block(
            attention(own.SelfAttention, own.layer_norm),
            attention(cross.EncDecAttention, cross.layer_norm),
            (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,),
            dense.act,
            dense.wo,
            last.layer_norm,
        )

    first = decoder.block[0].layer[0].SelfAttention
    scaled = getattr(model.config, "scale_decoder_outputs", model.config.tie_word_embeddings)

    def bias_of_distance(length: int) -> Tensor:
        # The last query of `length` sees keys at distances length - 1 ... 0.
        return first.compute_bias(length, length)[0, :, -1].flip(-1)

    return Anatomy(
        blocks=[block(layer) for layer in decoder.block],
        heads=first.n_heads,
        scaling=1.0,
        norm_first=True,
        embed=lambda tokens, positions: decoder.embed_tokens(tokens),
        final_norm=decoder.final_layer_norm,
        head_weight=head.weight,
        head_bias=None,
        head_scale=model.model_dim**-0.5 if scaled else 1.0,
        bias_of_distance=bias_of_distance,
    )


FAMILIES: dict[str, Callable[[Any, Any, nn.Linear], Anatomy]] = {
    "t5": _t5,
    "bart": _bart,
    "mbart": _bart,
    "pegasus": _bart,
    "marian": _bart,
}

"""How a family's encoder and decoder are built, in one form, so that the engine need not know which family it runs.

T5, mT5, BART, mBART, PEGASUS and Marian. Nothing here is a copy of a layer: every part is the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from calibeam.records import CalibeamError

ALIGNMENT = 64  # a product with an odd number of columns takes many times as long on a GPU
Part = tuple[Callable[[Tensor], Any], nn.Module]
"""What a block adds to its input, attention or feed-forward, and the norm that belongs to it."""
AddNorm = Callable[..., tuple[Tensor, Tensor]]
"""Of states, what a part adds to them, if anything, and a norm: the sum, and that normalised. narrow=True: for products only."""


class Dropout(NamedTuple):
    """The shares that are dropped in training."""

    states: float = 0.0
    """Of embeddings, and of what each part adds."""
    attention: float = 0.0
    activation: float = 0.0
    output: float = 0.0


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
    cross: Attention | None
    """Over the source, in a decoder."""
    expand: tuple[nn.Linear, ...]
    """One layer, or two: what is activated, and the gate that it is multiplied with."""
    activation: Callable[[Tensor], Tensor]
    contract: nn.Linear
    feed_forward_norm: nn.Module

    @property
    def layers(self) -> list[nn.Linear]:
        attentions = (self.own, self.cross) if self.cross else (self.own,)
        projections = [layer for each in attentions for layer in (each.query, each.key, each.value, each.out)]
        return [*projections, *self.expand, self.contract]

    @property
    def is_plain(self) -> bool:
        """Whether the weights of its layers say all that they do: adapters and quantised layers do something else."""
        return all(type(layer) is nn.Linear for layer in self.layers)


@dataclass(frozen=True)
class Stack:
    """An encoder, or a decoder without its output head."""

    blocks: list[Block]
    heads: int
    scaling: float
    norm_first: bool
    """Whether a block normalises what goes into each part, or what comes out of it."""
    embed: Callable[[Tensor, Tensor], Tensor]
    """Tokens and their positions, of one shape -> [..., size]"""
    final_norm: nn.Module | None
    bias: Callable[[int], Tensor] | None
    """For relative positions: what scores gain, between so many. [heads, queries, keys]"""
    dropout: Dropout
    checkpointed: bool
    """Whether what a block keeps for its gradients is made again when they are computed."""

    def bias_of_distance(self, length: int) -> Tensor:
        """What a decoder's score gains by the distance to a key that lies before it. [heads, length]"""
        assert self.bias is not None
        return self.bias(length)[:, -1].flip(-1)  # the last query sees keys at distances length - 1 ... 0

    def run(self, states: Tensor, blocks: Iterable[Iterable[Part]], add_norm: AddNorm) -> Tensor:
        """From embeddings to the states that come out, through the parts of all blocks, each with its norm."""
        delta = None
        for parts in blocks:
            states, delta = self.through(parts, states, delta, add_norm)
        return self.finish(states, delta, add_norm)

    def through(self, parts: Iterable[Part], states: Tensor, delta: Any, add_norm: AddNorm) -> tuple[Tensor, Any]:
        """One block: the states after it, and what its last part adds to them, if that is for the next norm to do."""
        for part, norm in parts:
            if self.norm_first:
                states, inner = add_norm(states, delta, norm, narrow=True)
                delta = part(inner)
            else:
                _, states = add_norm(states, part(states), norm)
        return states, delta

    def finish(self, states: Tensor, delta: Any, add_norm: AddNorm) -> Tensor:
        """What comes out after the last block."""
        if not self.norm_first:
            return states
        assert self.final_norm is not None
        return add_norm(states, delta, self.final_norm)[1]


@dataclass(frozen=True)
class Anatomy(Stack):
    """A decoder and its output head."""

    head_weight: Tensor
    head_bias: Tensor | None
    head_scale: float
    """Logits are head_weight (head_scale states) + head_bias."""

    def scaled(self, states: Tensor) -> Tensor:
        """What the head's weights are multiplied with."""
        return states if self.head_scale == 1.0 else states * self.head_scale

    def logits(self, states: Tensor) -> Tensor:
        """[..., size] -> [..., vocabulary]"""
        logits = nn.functional.linear(self.scaled(states), *aligned(self.head_weight, self.head_bias))
        return logits[..., : len(self.head_weight)]


def aligned(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A layer's weights, on a GPU with as many rows as its products want; the rows beyond give 0."""
    spare = -len(weight) % ALIGNMENT if weight.is_cuda else 0
    if not spare:
        return weight, bias
    return nn.functional.pad(weight, (0, 0, 0, spare)), None if bias is None else nn.functional.pad(bias, (0, spare))


def anatomy(model: Any, dtype: torch.dtype | None = None) -> Anatomy | None:
    """None for a family that is not known here. Weights of another type than the one wanted are copied."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise CalibeamError("prompts learnt by peft are not part of the model, and calibeam cannot run them")
    if not is_known(model):
        return None
    family, decoder, head = FAMILIES[model.config.model_type], model.get_decoder(), model.get_output_embeddings()
    if dtype is not None and next(decoder.parameters()).dtype != dtype:
        decoder, head = copy.deepcopy(decoder).to(dtype), copy.deepcopy(head).to(dtype)
    stack, (bias, scale) = family.stack(model.config, decoder), family.head(model)
    bias = None if bias is None else bias.to(head.weight.dtype)
    return Anatomy(**vars(stack), head_weight=head.weight, head_bias=bias, head_scale=scale)


def is_known(model: Any) -> bool:
    """Whether `anatomy` has an answer."""
    return model.config.model_type in FAMILIES and type(model.get_output_embeddings()) is nn.Linear


def encoder(model: Any) -> Stack | None:
    """None for a family that is not known here."""
    family = FAMILIES.get(model.config.model_type)
    return None if family is None else family.stack(model.config, model.get_encoder())


def blocks(model: Any) -> list[Block]:
    """Of encoder and decoder; none of a family that is not known here."""
    stacks = (encoder(model), anatomy(model))
    return [block for stack in stacks if stack is not None for block in stack.blocks]


def _bart(config: Any, half: Any) -> Stack:
    def attention(part: Any, norm: nn.Module) -> Attention:
        return Attention(part.q_proj, part.k_proj, part.v_proj, part.out_proj, norm)

    def block(layer: Any) -> Block:
        return Block(
            attention(layer.self_attn, layer.self_attn_layer_norm),
            attention(layer.encoder_attn, layer.encoder_attn_layer_norm) if hasattr(layer, "encoder_attn") else None,
            (layer.fc1,),
            layer.activation_fn,
            layer.fc2,
            layer.final_layer_norm,
        )

    # BART and mBART scale inside embed_tokens.
    scale = 1.0 if hasattr(half.embed_tokens, "embed_scale") else half.embed_scale
    offset = getattr(half.embed_positions, "offset", 0)
    norm = getattr(half, "layernorm_embedding", None)

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        states = half.embed_tokens(tokens) * scale + nn.functional.embedding(positions + offset, half.embed_positions.weight)
        return states if norm is None else norm(states)

    first = half.layers[0].self_attn
    return Stack(
        blocks=[block(layer) for layer in half.layers],
        heads=first.num_heads,
        scaling=first.head_dim**-0.5,
        norm_first=config.model_type in ("mbart", "pegasus"),
        embed=embed,
        final_norm=getattr(half, "layer_norm", None),
        bias=None,
        dropout=Dropout(config.dropout, config.attention_dropout, config.activation_dropout) if half.training else Dropout(),
        checkpointed=half.gradient_checkpointing,
    )


def _t5(config: Any, half: Any) -> Stack:
    def attention(part: Any, norm: nn.Module) -> Attention:
        return Attention(part.q, part.k, part.v, part.o, norm)

    def block(layer: Any) -> Block:
        own, *cross, last = layer.layer
        dense = last.DenseReluDense
        return Block(
            attention(own.SelfAttention, own.layer_norm),
            attention(cross[0].EncDecAttention, cross[0].layer_norm) if cross else None,
            (dense.wi_0, dense.wi_1) if hasattr(dense, "wi_0") else (dense.wi,),
            _one_operation(dense.act),
            dense.wo,
            last.layer_norm,
        )

    first = half.block[0].layer[0].SelfAttention
    return Stack(
        blocks=[block(layer) for layer in half.block],
        heads=first.n_heads,
        scaling=1.0,
        norm_first=True,
        embed=lambda tokens, positions: half.embed_tokens(tokens),
        final_norm=half.final_layer_norm,
        bias=lambda length: first.compute_bias(length, length)[0],
        dropout=Dropout(*[config.dropout_rate] * 4) if half.training else Dropout(),
        checkpointed=half.gradient_checkpointing,
    )


def _one_operation(activation: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same function as PyTorch has it, where Hugging Face's is eight operations, each with its gradient."""
    return partial(nn.functional.gelu, approximate="tanh") if isinstance(activation, NewGELUActivation) else activation


def _bart_head(model: Any) -> tuple[Tensor | None, float]:
    return model.final_logits_bias[0], 1.0


def _t5_head(model: Any) -> tuple[Tensor | None, float]:
    scaled = getattr(model.config, "scale_decoder_outputs", model.config.tie_word_embeddings)
    return None, model.model_dim**-0.5 if scaled else 1.0


def _mt5_head(model: Any) -> tuple[Tensor | None, float]:
    return None, 1.0  # it has a head of its own, and never scales


class Family(NamedTuple):
    stack: Callable[[Any, Any], Stack]
    """Of the model's config and its encoder or decoder."""
    head: Callable[[Any], tuple[Tensor | None, float]]
    """The bias and the scale of the model's logits."""


BART = Family(_bart, _bart_head)
FAMILIES = {
    "t5": Family(_t5, _t5_head), "mt5": Family(_t5, _mt5_head), "bart": BART, "mbart": BART, "pegasus": BART, "marian": BART,
}  # fmt: skip

"""Make a new model: random weights of a given size, and a tokenizer that was made for it or is trained on the training split.

Reads:   the folder written by tokenizer, or the one written by prepare
Writes:  model/: a PEGASUS of the size asked for, with its tokenizer, ready for pretrain or finetune
Example: calibeam create output=out/new tokenizer=out/tokenizer size=base
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calibeam import display, signals, store
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError
from calibeam.stages.tokenizer import SPECIAL, TOKENIZER, ending


class Size(NamedTuple):
    layers: int
    """Of the encoder, and of the decoder."""
    d_model: int
    num_heads: int
    ffn_dim: int
    parameters: int | None = None
    """Millions of them, by the paper's table."""


SIZES = {
    "tiny": Size(4, 256, 4, 1024),
    "small": Size(8, 512, 8, 1024, 108),  # which the paper's table does not give: see docs/pretraining.md
    "base": Size(12, 768, 12, 3072, 272),
    "large": Size(16, 1024, 16, 4096, 568),
    "2b": Size(24, 1024, 16, 16384, 2012),
}


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    data: str = option("", "the folder written by prepare, to train a small tokenizer on", identity=False)
    tokenizer: str = option("", "the folder written by tokenizer, instead", identity=False)
    vocab_size: int = option(8192, "tokens of the vocabulary, if it is trained here", at_least=256 + len(SPECIAL))
    size: str = option("tiny", "a size by name, the last four the paper's; the settings below override it", choices=lambda: SIZES)
    d_model: int | None = option(None, "hidden size", at_least=8)
    encoder_layers: int | None = option(None, "layers of the encoder", at_least=1)
    decoder_layers: int | None = option(None, "layers of the decoder", at_least=1)
    num_heads: int | None = option(None, "attention heads", at_least=1)
    ffn_dim: int | None = option(None, "size of the feed-forward layers", at_least=8)
    dropout: float = option(0.1, "while training", at_least=0, at_most=1)
    max_position_embeddings: int = option(512, "the longest sequence", at_least=8)
    seed: int = option(0, "of the random weights", at_least=0)


def run(config: Config, *, force: bool = False) -> Path:
    import torch
    from transformers import AutoTokenizer, PegasusForConditionalGeneration

    from calibeam.seq2seq import Seq2Seq, save

    if bool(config.data) == bool(config.tokenizer):
        raise CalibeamError("create needs either data, to train a tokenizer on, or a tokenizer")
    inputs = (
        {"tokenizer": store.read(config.tokenizer, "tokenizer")}
        if config.tokenizer
        else {"data": store.read(config.data, "prepare")}
    )
    output = store.Output("create", config, inputs, force=force)
    if output.done:
        return output.path
    with output.writing():
        if config.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(inputs["tokenizer"].path / TOKENIZER)
        else:
            examples = inputs["data"].examples("train")
            texts = (text for e in examples for text in (e.source, *e.targets))
            tokenizer = signals.aside(lambda: train_tokenizer(texts, config.vocab_size))
        tokenizer.model_max_length = config.max_position_embeddings
        torch.manual_seed(config.seed)
        model = PegasusForConditionalGeneration(
            architecture(config, len(tokenizer), pad=tokenizer.pad_token_id, eos=tokenizer.eos_token_id)
        )
        save(Seq2Seq(model, tokenizer), output.folder / "model")
        output.counts |= {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    display.say(f"create: {output.counts['parameters']:,} parameters, vocabulary {output.counts['vocabulary']:,}")
    return output.path


def architecture(config: Config, vocabulary: int, *, pad: int = 0, eos: int = 1) -> Any:
    from transformers import PegasusConfig

    size = SIZES[config.size]
    heads, ffn_dim = config.num_heads or size.num_heads, config.ffn_dim or size.ffn_dim
    d_model = config.d_model or size.d_model
    if d_model % heads:
        raise CalibeamError(f"d_model must be a multiple of num_heads, got {d_model} and {heads}")
    return PegasusConfig(
        vocab_size=vocabulary,
        d_model=d_model,
        encoder_layers=config.encoder_layers or size.layers,
        decoder_layers=config.decoder_layers or size.layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn_dim,
        decoder_ffn_dim=ffn_dim,
        dropout=config.dropout,
        attention_dropout=config.dropout,
        activation_dropout=config.dropout,
        max_position_embeddings=config.max_position_embeddings,
        scale_embedding=True,
        pad_token_id=pad,
        eos_token_id=eos,
        decoder_start_token_id=pad,
        forced_eos_token_id=None,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE, which can write any text, with an end token after every sequence and what pretraining masks with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return ending(tokenizer)

"""Make a new model: a tokenizer trained on the training split, and random weights of a given size.

Reads:   the folder written by prepare
Writes:  model/: a PEGASUS of the size asked for, with its tokenizer, ready for finetune
Example: calibeam create output=out/new data=out/data vocab_size=8192 d_model=256 encoder_layers=4 decoder_layers=4
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import display, store
from calibeam.recipe import StageConfig, option

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    data: str = option(help="the folder written by prepare", identity=False)
    vocab_size: int = option(8192, "tokens of the vocabulary", at_least=260)
    d_model: int = option(256, "hidden size", at_least=8)
    encoder_layers: int = option(4, "layers of the encoder", at_least=1)
    decoder_layers: int = option(4, "layers of the decoder", at_least=1)
    num_heads: int = option(4, "attention heads", at_least=1)
    ffn_dim: int = option(1024, "size of the feed-forward layers", at_least=8)
    dropout: float = option(0.1, "while training", at_least=0, at_most=1)
    max_position_embeddings: int = option(512, "the longest sequence", at_least=8)
    seed: int = option(0, "of the random weights", at_least=0)


def run(config: Config, *, force: bool = False) -> Path:
    import torch
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    from calibeam.seq2seq import Seq2Seq, save

    data = store.read(config.data, "prepare")
    output = store.Output("create", config, {"data": data}, force=force)
    if output.done:
        return output.path
    with output.writing():
        examples = data.examples("train")
        tokenizer = train_tokenizer((text for e in examples for text in (e.source, *e.targets)), config.vocab_size)
        tokenizer.model_max_length = config.max_position_embeddings
        torch.manual_seed(config.seed)
        model = PegasusForConditionalGeneration(
            PegasusConfig(
                vocab_size=len(tokenizer),
                d_model=config.d_model,
                encoder_layers=config.encoder_layers,
                decoder_layers=config.decoder_layers,
                encoder_attention_heads=config.num_heads,
                decoder_attention_heads=config.num_heads,
                encoder_ffn_dim=config.ffn_dim,
                decoder_ffn_dim=config.ffn_dim,
                dropout=config.dropout,
                attention_dropout=config.dropout,
                activation_dropout=config.dropout,
                max_position_embeddings=config.max_position_embeddings,
                scale_embedding=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                decoder_start_token_id=tokenizer.pad_token_id,
                forced_eos_token_id=None,
            )
        )
        save(Seq2Seq(model, tokenizer), output.folder / "model")
        output.counts |= {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}
    display.say(f"create: {output.counts['parameters']:,} parameters, vocabulary {output.counts['vocabulary']:,}")
    return output.path


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Byte-level BPE, which can write any text, with an end token after every sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, EOS, UNK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK)

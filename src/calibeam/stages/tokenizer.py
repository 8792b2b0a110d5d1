"""Train a vocabulary on a corpus: sentencepiece's unigram model, with bytes for what it has no piece for.

Reads:   files of documents
Writes:  tokenizer/: a tokenizer for AutoTokenizer; sentencepiece.model: the same for sentencepiece
Example: calibeam tokenizer output=out/tokenizer files='["corpus/*.jsonl.gz"]' vocab_size=32000
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import corpus, display, signals, store
from calibeam.corpus import CorpusConfig
from calibeam.paper.gap_sentences import split_sentences
from calibeam.recipe import option
from calibeam.records import CalibeamError

PAD, EOS, MASK_SENTENCE, MASK_TOKEN, UNK = SPECIAL = ("<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>")
"""With the ids 0, 1, 2 and 3 that they have in PEGASUS's own vocabulary, and <unk> next."""
TOKENIZER = "tokenizer"
SPACE = "▁"
LONGEST_SENTENCE = 4192  # bytes; sentencepiece leaves out what is longer
GRAIN = 64
"""Scores are rounded to 1/64. Sums of such numbers are exact in float32, which sentencepiece adds in, up to 2^18: so it and
`tokenizers`, which adds in float64, find the same ties and break them alike, in texts of up to some 20,000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Config(CorpusConfig):
    vocab_size: int = option(96_000, "tokens of the vocabulary, with 256 bytes and 5 special ones", at_least=300)
    max_sentences: int = option(5_000_000, "train on this many sentences, drawn at random; 0 for all", at_least=0)
    character_coverage: float = option(0.9995, "the share of characters that are pieces, not bytes", above=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_sentences <= 100:
            raise CalibeamError(f"max_sentences must be 0 or above 100, got {self.max_sentences}")


def run(config: Config, *, force: bool = False) -> Path:
    files = corpus.find(config.files)
    output = store.Output("tokenizer", config, {"files": store.read_files(files)}, force=force)
    if output.done:
        return output.path
    with output.writing():
        counts = {"documents": 0, "skipped": 0, "sentences": 0, "overlong": 0}

        def sentences() -> Iterator[str]:
            for text in (text for file in files for text in corpus.read(file, config)):
                if text is None:
                    counts["skipped"] += 1
                    continue
                counts["documents"] += 1
                for start, end in split_sentences(text):
                    counts["sentences"] += 1
                    counts["overlong"] += len(text[start:end].encode()) > LONGEST_SENTENCE
                    yield text[start:end]

        model = signals.aside(lambda: train(sentences(), config.vocab_size, config.max_sentences, config.character_coverage))
        (output.folder / "sentencepiece.model").write_bytes(model)
        tokenizer = fast(model)
        tokenizer.save_pretrained(output.folder / TOKENIZER)
        output.counts |= counts | {"vocabulary": len(tokenizer)}
        if counts["overlong"]:
            output.notes.append(f"{counts['overlong']:,} sentences of more than {LONGEST_SENTENCE} bytes were left out")
    display.say(f"tokenizer: {output.counts['vocabulary']:,} tokens, from {counts['sentences']:,} sentences")
    return output.path


def train(sentences: Iterable[str], vocab_size: int, most: int = 0, coverage: float = 0.9995) -> bytes:
    """A sentencepiece model. Text is taken as it is: nothing is normalised, and no space is dropped."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(sentence.replace("\0", "") for sentence in sentences),
            model_writer=trained,
            model_type="unigram",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            character_coverage=coverage,
            input_sentence_size=most,
            shuffle_input_sentence=True,
            max_sentence_length=LONGEST_SENTENCE,
            num_threads=16,  # part of the result, by the order of sums: so the same on every machine
            pad_id=SPECIAL.index(PAD),
            eos_id=SPECIAL.index(EOS),
            unk_id=SPECIAL.index(UNK),
            bos_id=-1,
            pad_piece=PAD,
            eos_piece=EOS,
            unk_piece=UNK,
            control_symbols=[MASK_SENTENCE, MASK_TOKEN],
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise CalibeamError(f"no vocabulary of {vocab_size:,} tokens can be trained: {_reason(error)}") from error
    model = sentencepiece_model_pb2.ModelProto.FromString(trained.getvalue())
    for piece in model.pieces:
        piece.score = round(piece.score * GRAIN) / GRAIN
    return model.SerializeToString()


def _reason(error: Exception) -> str:
    """Without the place in sentencepiece's source that its messages begin with."""
    return re.sub(r"^.*\[.*?\]\s*", "", str(error).strip()).strip() or "the corpus has no text"


def fast(model: bytes) -> Any:
    """A tokenizer for Hugging Face that gives the ids that sentencepiece gives, with an end token after every sequence.

    Both take the names of special tokens and bytes in text for what they are, text. `tokenizers` would match them like any
    piece, so a word is split inside such a name, where no piece goes on: pieces hold one script, and none is punctuation and
    letters.
    """
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [(piece.piece, piece.score) for piece in sentencepiece_model_pb2.ModelProto.FromString(model).pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=SPECIAL.index(UNK), byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(SPACE)
    names = Regex(r"<(?=pad>|unk>|mask_[12]>)|</(?=s>)|<0(?=x[0-9A-F]{2}>)")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(SPACE, prepend_scheme="never"),
        pre_tokenizers.Split(names, "merged_with_previous"),
    ])  # fmt: skip
    tokenizer.decoder = decoders.Sequence([
        decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return ending(tokenizer)


def ending(tokenizer: Any) -> Any:
    """A tokenizer of `tokenizers` for Hugging Face, with an end token after every sequence. Names of special tokens in a text are
    text."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A $B {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
    )
    named = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK, "mask_token": MASK_TOKEN}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **named, additional_special_tokens=[MASK_SENTENCE], split_special_tokens=True
    )

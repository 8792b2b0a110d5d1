"""The tokenizer beside sentencepiece itself, on strings of every kind."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from calibeam import seq2seq, store
from calibeam.records import CalibeamError
from calibeam.stages import create, tokenizer
from conftest import sentence

TEXT = """Le café coûte 3,50 €. The <b>quick</b> brown fox, it is said, jumps over 13 lazy dogs! Does it? "Yes," she said;
0x41 is A. a < b and c > d. She wrote: x_1 = f(y_2)... aaaa aaaaaaa banana. Die Straße ist naß. 日本語 の 文章。"""
NAMES = [
    "</s>",
    "<pad>",
    "<unk>",
    "<mask_1>",
    "x<mask_2>y",
    " <mask_1> </s>",
    "<0x41>",
    "<0x0A><0xFF>",
    "<0x4",
    "0x41>",
    "<0x4g>",
]
ODD = [
    "", " ", "  ", "\n", "a", " a", "a ", "a  b", "\t\r", "line\nnext\n\n  more", "😀", "👩\u200d👩\u200d👧 family", "e\u0301 é",
    "\u200b", "\ufeffx", "\0", "▁", "a▁b", "▁▁ ▁", *NAMES, "a" * 3000, "ab" * 3000, "😀" * 500, "ﬁ ½ Ⅷ \uff41", "\U0010ffff",
    "مرحبا", "the the the " * 800,
]  # fmt: skip
ALPHABET = [
    *"abcdefghijklmnopqrstuvwxyzAEIOU0123456789.,!?<>/_'\"-  \n\té€日▁😀\u0301\u200b\u2028",
    *NAMES,
    "the",
    "ing",
    "quick ",
]


def made_up(count: int) -> list[str]:
    source = random.Random(0)  # noqa: S311
    words = ["".join(source.choices(ALPHABET, k=source.randint(0, 40))) for _ in range(count)]
    anything = [
        "".join(chr(c) for c in (source.randrange(0x110000) for _ in range(12)) if not 0xD800 <= c < 0xE000) for _ in range(count)
    ]
    return words + anything


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    with gzip.open(place / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": f"{TEXT}\n{sentence(i, 30)}."}) + "\n" for i in range(60))
    (place / "b.txt").write_text("A document\nof two lines.\n\n\nAnother one.\n", encoding="utf-8")
    files = (str(place / "*.gz"), str(place / "b.txt"))
    return tokenizer.run(tokenizer.Config(output=str(place / "out"), files=files, vocab_size=380, character_coverage=0.99))


def load(folder: Path) -> tuple[Any, sentencepiece.SentencePieceProcessor]:
    return AutoTokenizer.from_pretrained(folder / "tokenizer"), sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "sentencepiece.model")
    )


def test_the_same_ids_as_sentencepiece_on_any_string(folder: Path) -> None:
    ours, theirs = load(folder)
    assert ours.is_fast
    for text in (*ODD, TEXT, *made_up(4000)):
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids), text
        assert not {*ids} & {*range(5)}, text


def test_text_comes_back_as_it_was(folder: Path) -> None:
    ours, _ = load(folder)
    for text in (*ODD, TEXT, *made_up(500)):
        if "▁" not in text:  # which is sentencepiece's sign for a space
            assert ours.decode(ours(text)["input_ids"], skip_special_tokens=True) == text


def test_the_special_tokens_are_pegasus_own(folder: Path) -> None:
    ours, theirs = load(folder)
    tokens = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>", "<0x00>"]
    assert ours.convert_ids_to_tokens(range(6)) == [theirs.id_to_piece(i) for i in range(6)] == tokens
    assert (ours.pad_token, ours.eos_token, ours.mask_token, ours.unk_token) == ("<pad>", "</s>", "<mask_2>", "<unk>")
    assert len(ours) == theirs.vocab_size() == 380
    assert ours("the fox")["input_ids"][-1] == ours.eos_token_id
    assert ours("the fox", "the dog")["input_ids"].count(ours.eos_token_id) == 1


def test_no_piece_goes_on_where_a_name_is_split(folder: Path) -> None:
    """With <, /, _ and 0x all in the training text."""
    _, theirs = load(folder)
    pieces = [theirs.id_to_piece(i) for i in range(5 + 256, theirs.vocab_size())]
    assert any("<" in piece for piece in pieces)
    assert not any(pair in piece for piece in pieces for pair in ("<p", "<u", "<m", "/s", "0x"))
    assert not any("▁" in piece[1:] for piece in pieces)


def test_what_was_read_is_counted(folder: Path) -> None:
    counts = store.read(folder, "tokenizer").manifest["counts"]
    assert counts["documents"] == 62
    assert counts["vocabulary"] == 380
    assert counts["sentences"] == 60 * 9 + 2
    assert counts["skipped"] == counts["overlong"] == 0


def test_the_same_corpus_gives_the_same_bytes() -> None:
    texts = [sentence(i, 20) for i in range(400)]
    whole, first, again = (tokenizer.train(texts, 300, most=most) for most in (0, 150, 150))
    assert first == again != whole


def test_a_vocabulary_too_large_for_its_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("one two three four")
    with pytest.raises(CalibeamError, match=r"no vocabulary of 96,000 tokens can be trained: Vocabulary size too high"):
        tokenizer.run(tokenizer.Config(output=str(tmp_path / "out"), files=(str(tmp_path / "small.txt"),)))
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(CalibeamError, match="can be trained"):
        tokenizer.run(tokenizer.Config(output=str(tmp_path / "out"), files=(str(tmp_path / "empty.txt"),)))
    assert not (tmp_path / "out").exists()


def test_bad_rows_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    rows = [json.dumps({"text": sentence(i, 20)}) for i in range(50)]
    rows[3], rows[7] = '{"body": "x"}', '{"text": "\\ud800"}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    given = {"output": str(tmp_path / "out"), "files": (str(tmp_path / "rows.jsonl"),), "vocab_size": 300}
    with pytest.raises(CalibeamError, match=r"rows\.jsonl, row 4: no field 'text'; it has 'body'"):
        tokenizer.run(tokenizer.Config(**given))
    counts = store.read(tokenizer.run(tokenizer.Config(**given, bad_rows="skip")), "tokenizer").manifest["counts"]
    assert (counts["documents"], counts["skipped"]) == (48, 2)
    with pytest.raises(CalibeamError, match="max_sentences must be 0 or above 100"):
        tokenizer.Config(**given, max_sentences=100)
    with pytest.raises(CalibeamError, match=r"no file matches .*\.parquet"):
        tokenizer.run(tokenizer.Config(output=str(tmp_path / "other"), files=(str(tmp_path / "*.parquet"),)))


def test_create_takes_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    made = create.run(create.Config(output=str(tmp_path / "new"), tokenizer=str(folder), d_model=16, num_heads=2, ffn_dim=8))
    model = seq2seq.load(made / "model", device="cpu")
    assert model.model.config.encoder_layers == model.model.config.decoder_layers == 4
    assert model.model.get_input_embeddings().num_embeddings == 380
    _, theirs = load(folder)
    for text in ODD:
        assert model.tokenizer(text)["input_ids"] == [*theirs.encode(text), 1]


def test_create_wants_data_or_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match="either data"):
        create.run(create.Config(output=str(tmp_path / "new")))
    with pytest.raises(CalibeamError, match="either data"):
        create.run(create.Config(output=str(tmp_path / "new"), data="a", tokenizer="b"))


PAPER = {"small": 108, "base": 272, "large": 568, "2b": 2012}
"""Millions of parameters, by the paper's table; its vocabulary has 96,103 tokens."""


@pytest.mark.parametrize("name", PAPER)
def test_the_named_sizes_have_the_papers_parameters(name: str) -> None:
    """Without memory for them. The table's SMALL is not the sum of its own dimensions: with a feed-forward size of 2048 it is."""
    import torch
    from transformers import PegasusForConditionalGeneration

    def millions(**changes: int) -> float:
        with torch.device("meta"):
            config = create.Config(output="x", size=name, **changes)
            model = PegasusForConditionalGeneration(create.architecture(config, 96_103))
        return model.num_parameters(only_trainable=True) / 1e6

    assert create.SIZES[name].parameters == PAPER[name]
    if name == "small":
        assert millions() == pytest.approx(91, abs=0.5)
        assert millions(ffn_dim=2048) == pytest.approx(PAPER[name], abs=0.5)
    else:
        assert millions() == pytest.approx(PAPER[name], abs=0.9)

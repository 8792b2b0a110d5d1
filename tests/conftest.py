"""Tiny models of every family, with a tokenizer, made on the spot: real code, no downloads."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="calibeam-datasets-")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported, if it is there at all

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from calibeam.seq2seq import Seq2Seq, save
from calibeam.stages import prepare
from calibeam.stages.create import train_tokenizer

torch.set_num_threads(1)

VOCABULARY = 300
SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "init_std": 0.3,
}  # fmt: skip
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}

FAMILIES: dict[str, Callable[[int], Any]] = {
    "t5": lambda v: T5ForConditionalGeneration(T5Config(vocab_size=v, decoder_start_token_id=0, **T5_SIZES, **IDS)),
    "t5-untied": lambda v: T5ForConditionalGeneration(
        T5Config(
            vocab_size=v, decoder_start_token_id=0, tie_word_embeddings=False, feed_forward_proj="gated-gelu", **T5_SIZES, **IDS
        )
    ),
    "mt5": lambda v: MT5ForConditionalGeneration(MT5Config(vocab_size=v, decoder_start_token_id=0, **T5_SIZES, **IDS)),
    "bart": lambda v: BartForConditionalGeneration(BartConfig(vocab_size=v, decoder_start_token_id=1, **SIZES, **IDS)),
    "mbart": lambda v: MBartForConditionalGeneration(MBartConfig(vocab_size=v, decoder_start_token_id=1, **SIZES, **IDS)),
    "pegasus": lambda v: PegasusForConditionalGeneration(PegasusConfig(vocab_size=v, decoder_start_token_id=0, **SIZES, **IDS)),
    "marian": lambda v: MarianMTModel(MarianConfig(vocab_size=v, decoder_start_token_id=0, **SIZES, **IDS)),
}
# Those that the engine does not know.
STRANGERS: dict[str, Callable[[int], Any]] = {
    "umt5": lambda v: UMT5ForConditionalGeneration(UMT5Config(vocab_size=v, decoder_start_token_id=0, **T5_SIZES, **IDS)),
    "m2m_100": lambda v: M2M100ForConditionalGeneration(M2M100Config(vocab_size=v, decoder_start_token_id=1, **SIZES, **IDS)),
}

TEXT = "the red fox and a blue bird ran over one old green hill to see two small dogs sleep under some tall trees"
WORDS = TEXT.split()

TINY_RECIPE = """
output = "out"
[prepare]
train = "train.jsonl"
validation = "validation.jsonl"
[create]
vocab_size = 282
d_model = 16
encoder_layers = 1
decoder_layers = 1
num_heads = 2
ffn_dim = 32
max_position_embeddings = 32
"""
"""The beginning of a recipe that makes a model so small that it learns in a second."""


def sentence(seed: int, words: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=generator).tolist())


def tiny_model(family: str, seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """Random weights, wide enough apart that outputs are not all alike."""
    torch.manual_seed(seed)
    return (FAMILIES | STRANGERS)[family](vocabulary).eval()


def model_of_words() -> Seq2Seq:
    """A PEGASUS whose vocabulary is the words, with weights that do not depend on how transformers draws them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    model = PegasusForConditionalGeneration(
        PegasusConfig(
            vocab_size=len(ids), d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
            scale_embedding=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
        )
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.requires_grad:  # positions are not learnt
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator) + float("norm.weight" in name))
    return Seq2Seq(model, tokenizer)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer([sentence(seed, 20) for seed in range(50)], VOCABULARY)


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer: Any) -> Callable[..., Path]:
    """A saved model of a family."""

    def make(family: str = "pegasus", seed: int = 0, name: str = "") -> Path:
        folder = tmp_path / (name or f"{family}-{seed}")
        save(Seq2Seq(tiny_model(family, seed, len(tokenizer)), tokenizer), folder)
        return folder

    return make


def prepared(folder: Path, count: int, *, words: int, **settings: Any) -> str:
    """A dataset of sources of many lengths, each with a target of so many words."""
    rows = [{"id": f"row-{i}", "source": sentence(i, 3 + 5 * i % 19), "target": sentence(i, words)} for i in range(count)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(prepare.run(prepare.Config(output=str(folder / "data"), train=str(file), validation=str(file), **settings)))


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """A JSONL file of made-up rows: the target is the source's first words."""

    def make(name: str, count: int, first: int = 0) -> Path:
        path = tmp_path / name
        rows = []
        for i in range(first, first + count):
            source = sentence(i, 8 + i % 5)
            rows.append({"id": f"row-{i}", "source": source, "target": " ".join(source.split()[:4])})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return make


Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of its own, with the options given; only who may mount one can test this."""
    place = tmp_path / "disk"

    def make(options: str) -> Path:
        again = place.is_mount()
        place.mkdir(exist_ok=True)
        line = ["mount", "-t", "tmpfs", "-o", f"remount,{options}" if again else options, "tmpfs", str(place)]
        done = subprocess.run(line, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        return place

    yield make
    if place.is_mount():
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # noqa: S603, S607


def tiny_encoder(family: str, folder: Path) -> Path:
    """A saved BERT or RoBERTa of three layers, with the tokenizer of its kind; "fox" is no word that BERT knows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, BertTokenizer, RobertaConfig, RobertaModel, RobertaTokenizer

    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
            "max_position_embeddings": 40, "initializer_range": 0.5}  # fmt: skip
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    if family == "bert":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS) - {"fox"})]
        (folder / "vocab.txt").write_text("\n".join(words))
        tokenizer: Any = BertTokenizer(str(folder / "vocab.txt"))
        model: Any = BertModel(BertConfig(vocab_size=len(words), **size))
    else:
        pieces = Tokenizer(models.BPE(unk_token="<unk>"))
        pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trainer = trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        pieces.train_from_iterator([TEXT] * 20, trainer)
        pieces.model.save(str(folder))
        tokenizer = RobertaTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
        model = RobertaModel(RobertaConfig(vocab_size=len(tokenizer), pad_token_id=1, bos_token_id=0, eos_token_id=2, **size))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that is made by the first test process that needs it, and used by all of them."""
    together = "PYTEST_XDIST_WORKER" in os.environ
    place = (factory.getbasetemp().parent if together else factory.getbasetemp()) / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.with_suffix(".made").exists():
            make(place)
            place.with_suffix(".made").touch()
    return place


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or what is installed in its place; nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "these tests need a browser: install chromium (or chromium-browser, or google-chrome)"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()

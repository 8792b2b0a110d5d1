"""Pretraining: examples by hand, the stream from any position, and a stopped run that ends as if it had not been."""

from __future__ import annotations

import itertools
import json
import lzma
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from calibeam import seq2seq, signals, store
from calibeam.corpus import CorpusConfig
from calibeam.records import CalibeamError
from calibeam.stages import create, pretrain, tokenizer
from calibeam.stream import Example, Maker, Stream, Task, first_examples, pack, unpack
from conftest import model_of_words, sentence


def document(seed: int, sentences: int = 8) -> str:
    return " ".join(sentence(100 * seed + i, 4 + i % 3).capitalize() + "." for i in range(sentences))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vocabulary")
    (place / "text.txt").write_text("\n\n".join(document(i) for i in range(60)))
    return tokenizer.run(tokenizer.Config(output=str(place / "out"), files=(str(place / "text.txt"),), vocab_size=320))


@pytest.fixture(scope="module")
def model(vocabulary: Path) -> str:
    size = {"d_model": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    return str(create.run(create.Config(output=str(vocabulary.with_name("new")), tokenizer=str(vocabulary), **size)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """70 documents in three files of three kinds."""
    place = tmp_path_factory.mktemp("corpus")
    documents = [document(i, 3 + i % 9) for i in range(70)]
    with lzma.open(place / "a.jsonl.xz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents[:30])
    pq.write_table(pa.table({"text": documents[30:50]}), place / "b.parquet")
    (place / "c.txt").write_text("\n\n".join(documents[50:]))
    return tuple(str(place / name) for name in ("a.jsonl.xz", "b.parquet", "c.txt"))


def task(vocabulary: Path, **changes: Any) -> Task:
    given: dict[str, Any] = {
        "tokenizer": (vocabulary / "tokenizer" / "tokenizer.json").read_text(), "eos": 1, "mask_sentence": 2, "mask_token": 3,
        "ordinary": (5, 320), "max_source_length": 60, "max_target_length": 60, "selection": "ind_orig", "ratio": 0.15,
        "highest_ratio": 0.0, "noise": 0.0, "mlm_ratio": 0.0, "seed": 0,
    }  # fmt: skip
    return Task(**{**given, **changes})


def text_of(vocabulary: Path, token_ids: np.ndarray) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vocabulary / "tokenizer").decode(token_ids.tolist())


# Examples


def test_an_example_by_hand(vocabulary: Path) -> None:
    """The second sentence shares the, dog and fox with the rest; the others two words, or none."""
    text = "The red fox. The dog and fox.\nThe dog sleep.  Trees. Over one."
    (example,), counts = Maker(task(vocabulary))(0, [(1, text)])
    assert text_of(vocabulary, example.source) == "The red fox.<mask_1>\nThe dog sleep.  Trees. Over one.</s>"
    assert text_of(vocabulary, example.target) == "The dog and fox.</s>"
    assert example.name == "0:1"
    assert not len(example.places)
    assert counts == {"documents": 1, "examples": 1, "targets_cut": 0}
    (example,), _ = Maker(task(vocabulary, selection="lead", ratio=0.4))(0, [(1, text)])
    assert text_of(vocabulary, example.source) == "<mask_1><mask_1>\nThe dog sleep.  Trees. Over one.</s>"
    assert text_of(vocabulary, example.target) == "The red fox. The dog and fox.</s>"


def test_a_gap_that_begins_a_line_is_a_sentence_of_its_own_in_the_target(vocabulary: Path) -> None:
    text = "A fox.\nThe dog and the fox.\nThe dog."
    (example,), _ = Maker(task(vocabulary, selection="lead", ratio=0.6))(0, [(1, text)])
    assert text_of(vocabulary, example.source) == "<mask_1>\n<mask_1>\nThe dog.</s>"
    assert text_of(vocabulary, example.target) == "A fox. The dog and the fox.</s>"


def test_odd_documents_are_counted(vocabulary: Path) -> None:
    """None, without text, of one sentence, all equal, with the names of special tokens, and of 10,000 sentences."""
    names = "A fox </s> ran. The fox <mask_1> ran. The <pad> dog."
    texts = [None, "", " \n ", "One.", "The fox. " * 6, names, "The red fox ran over. " * 10_000]
    examples, counts = Maker(task(vocabulary))(0, list(enumerate(texts, start=1)))
    assert counts["skipped"] == 1
    assert counts["documents"] == 6
    assert counts["documents_without_sentences"] == 2
    assert counts["sentences_left_out"] <= 2  # the one, and perhaps the last of the long document
    assert counts["examples"] == len(examples) > 500
    equal, named = examples[:2]
    assert text_of(vocabulary, equal.source) == "<mask_1> The fox. The fox. The fox. The fox. The fox.</s>"
    assert text_of(vocabulary, equal.target) == "The fox.</s>"
    assert [(named.source == i).sum() + (named.target == i).sum() for i in range(5)] == [0, 2, 1, 0, 0]
    assert all(len(e.source) <= 60 and len(e.target) <= 60 and e.source[-1] == e.target[-1] == 1 for e in examples)


def test_a_long_document_is_cut_between_sentences(vocabulary: Path) -> None:
    """Every sentence but those left alone is in exactly one example: in its source or in its target."""
    text = document(1, 40)
    examples, counts = Maker(task(vocabulary, selection="random", ratio=0.3))(0, [(1, text)])
    assert len(examples) > 3
    found = "".join(text_of(vocabulary, part) for e in examples for part in (e.source, e.target))
    for one in text.split(". "):
        assert one.strip(".") in found
    assert found.count(".") == 40 - counts["sentences_left_out"]


def test_a_sentence_longer_than_a_source_is_left_out(vocabulary: Path) -> None:
    text = f"The dog. {sentence(0, 100).capitalize()}. The fox ran. The dog ran."
    examples, counts = Maker(task(vocabulary))(0, [(1, text)])
    assert counts["sentences_left_out"] == 2  # the first, and the long one
    assert counts["examples"] == len(examples) == 1
    _, counts = Maker(task(vocabulary, max_target_length=4, selection="lead"))(0, [(1, "The red fox ran over a hill. The dog.")])
    assert counts["targets_cut"] == 1


def test_the_ratio_is_drawn_and_depends_on_seed_epoch_and_document(vocabulary: Path) -> None:
    make = Maker(task(vocabulary, ratio=0.1, highest_ratio=0.9, selection="random"))
    text = document(3, 10)
    gaps = [int((make(epoch, [(number, text)])[0][0].source == 2).sum()) for epoch in range(5) for number in range(5)]
    assert len(set(gaps)) > 4
    first, again = (make(3, [(9, text)])[0][0] for _ in range(2))
    assert np.array_equal(first.source, again.source)


def test_masked_tokens_are_told(vocabulary: Path) -> None:
    plain, masked = (Maker(task(vocabulary, mlm_ratio=ratio))(0, [(1, document(5))])[0][0] for ratio in (0.0, 0.3))
    ordinary = int((plain.source >= 5).sum())
    assert len(masked.places) == int(0.3 * ordinary + 0.5)
    assert np.array_equal(plain.source[masked.places], masked.told)
    assert np.array_equal(np.delete(plain.source, masked.places), np.delete(masked.source, masked.places))
    assert (masked.source == 3).any()


# The stream


def stream(files: tuple[str, ...], vocabulary: Path, workers: int = 0, buffer_size: int = 16, **changes: Any) -> Stream:
    config = CorpusConfig(output="", files=files)
    return Stream(files, config, task(vocabulary, **changes), batch_size=8, buffer_size=buffer_size, workers=workers)


def same(left: list[Example], right: list[Example]) -> bool:
    return len(left) == len(right) and all(
        a.name == b.name and all(np.array_equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))
        for a, b in zip(left, right, strict=True)
    )


def test_every_document_comes_once_an_epoch_in_another_order(files: tuple[str, ...], vocabulary: Path) -> None:
    with stream(files, vocabulary) as source:
        batches = [source.batch() for _ in range(60)]
    names = [example.name for batch, _ in batches for example in batch]
    first = {name for name in names if name.startswith("0:")}
    assert len(first) == 70
    numbers = [int(name.partition(":")[2]) for name in dict.fromkeys(names) if name.startswith("0:")]
    assert numbers != sorted(numbers)
    assert all(len(snapshot.buffer) <= 16 for _, snapshot in batches)
    assert batches[-1][1].epoch > 1
    assert batches[-1][1].counts["documents"] == 70 * batches[-1][1].epoch + batches[-1][1].documents


def test_workers_change_nothing(files: tuple[str, ...], vocabulary: Path) -> None:
    with stream(files, vocabulary, mlm_ratio=0.2) as one, stream(files, vocabulary, workers=2, mlm_ratio=0.2) as other:
        for _ in range(20):
            assert same(one.batch()[0], other.batch()[0])


def test_fault_09_a_worker_that_is_killed_is_an_error_that_says_so(files: tuple[str, ...], vocabulary: Path) -> None:
    with stream(files, vocabulary, workers=1) as source:
        source.batch()
        assert source._pool is not None
        (worker,) = source._pool._processes
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(CalibeamError, match="a process that prepares data has died"):
            deque((source.batch() for _ in range(100)), maxlen=0)


def test_fault_02_a_signal_does_not_wait_for_the_first_batch(files: tuple[str, ...], vocabulary: Path) -> None:
    """The buffer would never be full."""
    with signals.listening(), stream(files, vocabulary, buffer_size=10**9) as source:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(signals.Stopped), signals.postponed():
            source.batch()


@pytest.mark.parametrize("stop", [1, 7, 23])
def test_a_stream_goes_on_from_any_position(stop: int, files: tuple[str, ...], vocabulary: Path) -> None:
    with stream(files, vocabulary, mlm_ratio=0.2) as source:
        *_, (_, snapshot) = (source.batch() for _ in range(stop))
        expected = [source.batch()[0] for _ in range(30)]
    facts, arrays = pack(snapshot)
    with stream(files, vocabulary, mlm_ratio=0.2) as later:
        later.restore(unpack(json.loads(json.dumps(facts)), arrays))
        assert all(same(batch, later.batch()[0]) for batch in expected)


def test_a_corpus_without_examples_is_refused(tmp_path: Path, vocabulary: Path) -> None:
    for text, message in (("", "there is no document in"), ("one\n\ntwo\n\nthree", "no document has two sentences")):
        (tmp_path / "text.txt").write_text(text)
        with stream((str(tmp_path / "text.txt"),), vocabulary) as source, pytest.raises(CalibeamError, match=message):
            source.batch()


def test_validation_examples_are_the_first(files: tuple[str, ...], vocabulary: Path) -> None:
    found = first_examples(files, CorpusConfig(output="", files=files), task(vocabulary, mlm_ratio=0.5), 5)
    assert len(found) == 5
    assert not any(len(example.places) for example in found)


# The stage


def config(model: str, files: tuple[str, ...], output: Path, **changes: Any) -> pretrain.Config:
    given: dict[str, Any] = {
        "max_steps": 9, "batch_size": 8, "micro_batch_size": 3, "max_source_length": 60, "max_target_length": 40,
        "buffer_size": 16, "workers": 0, "warmup_steps": 2, "save_steps": 2, "eval_steps": 4, "validation_files": files[2:],
        "validation_examples": 6, "gap_selection": "seq_uniq", "highest_gap_ratio": 0.4, "gap_noise": 0.2, "device": "cpu",
    }  # fmt: skip
    return pretrain.Config(output=str(output), model=model, files=files, **{**given, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


class Stopped(BaseException):
    """As a signal would."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stops runs when they log the step of so many."""
    write = store.Output.append_log

    def arrange(*steps: int) -> None:
        left = list(steps)

        def append(self: store.Output, record: dict[str, Any]) -> None:
            write(self, record)
            if left and record["step"] == left[0] and "train" in record:
                left.pop(0)
                raise Stopped

        monkeypatch.setattr(store.Output, "append_log", append)

    return arrange


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "adafactor"}, {"optimizer": "adamw", "learning_rate": 1e-3, "mlm_ratio": 0.2, "workers": 1}],
    ids=["adafactor", "adamw"],
)
def test_fault_13_stopped_anywhere_it_ends_at_the_same_bits(
    changes: dict[str, Any], model: str, files: tuple[str, ...], tmp_path: Path, stop_at: Any
) -> None:
    whole = pretrain.run(config(model, files, tmp_path / "whole", **changes))
    again = config(model, files, tmp_path / "again", **changes)
    stop_at(1, 4, 7)
    for _ in range(3):
        with pytest.raises(Stopped):
            pretrain.run(again)
        assert not (tmp_path / "again").exists()
    resumed = pretrain.run(again)
    assert weights(resumed).keys() == weights(whole).keys()
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(resumed).items())
    assert (resumed / "log.jsonl").read_text() == (whole / "log.jsonl").read_text()
    counts = [store.read(folder, "pretrain").manifest["counts"] for folder in (whole, resumed)]
    assert counts[0] == counts[1]
    assert {file.name for file in resumed.iterdir()} == {"manifest.json", "log.jsonl", "model"}


def test_it_learns(model: str, files: tuple[str, ...], tmp_path: Path) -> None:
    given = {"max_steps": 60, "optimizer": "adamw", "learning_rate": 1e-2, "label_smoothing": 0.0, "mlm_ratio": 0.15}
    folder = pretrain.run(config(model, files, tmp_path / "out", **given, eval_steps=60))
    moved = {name: not torch.equal(weight, weights(Path(model))[name]) for name, weight in weights(folder).items()}
    assert all(changed == ("embed_positions" not in name) for name, changed in moved.items() if name != "final_logits_bias")
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    before, after = (record["validation"]["perplexity"] for record in records if "validation" in record)
    assert after < before / 3
    steps = [record["train"] for record in records if "train" in record]
    assert all(figures["loss"] == pytest.approx(figures["gaps"] + figures["tokens"], rel=1e-5) for figures in steps)
    assert steps[-1]["tokens"] < steps[0]["tokens"]
    assert np.mean([f["loss"] for f in itertools.islice(reversed(steps), 5)]) < 0.7 * steps[0]["loss"]


def test_a_tokenizer_without_masks_is_refused(files: tuple[str, ...], tmp_path: Path) -> None:
    seq2seq.save(model_of_words(), tmp_path / "model")
    with pytest.raises(CalibeamError, match="has no <mask_1> and no <mask_2>: make one with calibeam tokenizer"):
        pretrain.run(config(str(tmp_path / "model"), files, tmp_path / "out", max_source_length=30, max_target_length=30))


def test_a_model_that_create_made_of_a_dataset_can_be_pretrained(
    model_folder: Any, files: tuple[str, ...], tmp_path: Path
) -> None:
    """Its vocabulary is of bytes, and has PEGASUS's masks."""
    folder = pretrain.run(config(str(model_folder("pegasus")), files, tmp_path / "out", max_steps=2, eval_steps=2))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk>"]) == [0, 1, 2, 3, 4]
    assert len((folder / "log.jsonl").read_text().splitlines()) == 4

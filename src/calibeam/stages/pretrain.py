"""Pretrain a model on text by gap-sentence generation, PEGASUS's task: write the sentences that were masked.

Reads:   files of documents, and a model to begin with, which create makes
Writes:  model/: the last weights; log.jsonl: every step and validation
Example: calibeam pretrain output=out/pretrained model=out/new files='["corpus/*.jsonl.gz"]' max_steps=100000

If stopped, it resumes from its last checkpoint when it is run again, to the same weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import corpus, distributed, store
from calibeam.corpus import CorpusConfig
from calibeam.paper.gap_sentences import GAP_SELECTIONS
from calibeam.recipe import option
from calibeam.records import CalibeamError
from calibeam.stages.tokenizer import MASK_SENTENCE, MASK_TOKEN
from calibeam.training import (
    OPTIMIZERS,
    SCHEDULES,
    Item,
    Plan,
    Problem,
    TrainingConfig,
    autocast,
    batch_of_pairs,
    encoded,
    forced,
    train,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.checkpoint import Position
    from calibeam.engine.graphs import Batch
    from calibeam.seq2seq import Seq2Seq
    from calibeam.stream import Example, Snapshot, Stream, Task


@dataclass(frozen=True, kw_only=True)
class Config(CorpusConfig, TrainingConfig):
    max_steps: int = option(help="how many steps to train", at_least=1)
    batch_size: int = option(256, "examples per step", at_least=1)
    learning_rate: float = option(0.01, "the peak learning rate", above=0, at_most=1000)
    optimizer: str = option("adafactor", "the optimizer", choices=lambda: OPTIMIZERS)
    lr_scheduler_type: str = option("inverse_sqrt", "as in transformers", choices=lambda: SCHEDULES)
    warmup_steps: int = option(10_000, "steps over which the learning rate rises", at_least=0)
    label_smoothing: float = option(0.1, "the share of a token's weight that goes to the whole vocabulary", at_least=0, at_most=1)
    max_target_length: int = option(256, "target tokens; longer targets are cut", at_least=1)
    gap_selection: str = option("ind_orig", "which sentences are masked", choices=lambda: GAP_SELECTIONS)
    gap_ratio: float = option(0.15, "the share of sentences that are masked", above=0, at_most=1)
    highest_gap_ratio: float = option(0.0, "draw the share of every example between gap_ratio and this", at_least=0, at_most=1)
    gap_noise: float = option(0.0, "multiply scores by numbers drawn from 1 - this to 1 + this", at_least=0, at_most=1)
    mlm_ratio: float = option(
        0.0, "the share of the other tokens that are masked for the encoder to predict, as in BERT", at_least=0, at_most=1
    )
    buffer_size: int = option(10_000, "examples that are held and drawn from at random", at_least=1)
    workers: int | None = option(
        None,
        "processes that prepare data; as many as cores but one, at most 8, if not given",
        at_least=0,
        identity=False,
    )
    validation_files: tuple[str, ...] = option((), "files of documents to measure perplexity on", identity=False)
    validation_examples: int = option(500, "how many of their examples, from the first on; 0 for all", at_least=0)
    eval_steps: int = option(1000, "steps between validations", at_least=1)


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import families, seq2seq
    from calibeam.stages.decode import check_lengths
    from calibeam.stages.evaluate import perplexity_of
    from calibeam.stream import Stream, first_examples

    files = corpus.find(config.files)
    inputs = {"files": store.read_files(files), "model": store.read_model(seq2seq.locate(config.model))}
    validation = corpus.find(config.validation_files) if config.validation_files else []
    if validation:
        inputs["validation_files"] = store.read_files(validation)
    output = store.Output("pretrain", config, inputs, force=force)
    if output.done:
        return output.path
    model = seq2seq.load(inputs["model"].path, device=config.device)
    check_lengths("pretrain", config, seq2seq.max_positions(model.model.config))
    task = _task(model, config)
    if config.mlm_ratio and families.anatomy(model.model) is None:
        raise CalibeamError(f"mlm_ratio needs a model of one of these kinds: {', '.join(families.FAMILIES)}")
    held_out = first_examples(validation, config, task, config.validation_examples)

    def batch(some: Sequence[Example], seeds: Sequence[int]) -> Batch:
        sources, targets = [e.source for e in some], [e.target for e in some]
        found = batch_of_pairs(model, sources, targets, config, apart=config.mlm_ratio > 0)
        if config.mlm_ratio:
            most = math.ceil(config.mlm_ratio * found["input_ids"].shape[1])
            found["places"], found["told_mask"] = seq2seq.pad_rows([e.places for e in some], 0, most)
            found["told"], _ = seq2seq.pad_rows([e.told for e in some], 0, most)
        return found

    def loss(batch: Batch) -> dict[str, Tensor]:
        source = encoded(model.model, batch)
        total = forced(source, batch).cross_entropy(config.label_smoothing).sum()
        if not config.mlm_ratio:
            return {"loss": total}
        assert source.head is not None
        there = source.states.gather(1, batch["places"][..., None].expand(-1, -1, source.states.shape[-1]))
        told = source.head.cross_entropy(there, batch["told"], config.label_smoothing)
        told = told.masked_fill(~batch["told_mask"], 0.0).sum()
        return {"loss": total + told, "gaps": total, "tokens": told}

    def validate() -> dict[str, float]:
        sources, targets = [e.source.tolist() for e in held_out], [e.target.tolist() for e in held_out]
        with autocast(model.device, config):
            return {"perplexity": perplexity_of(model, sources, targets)} if held_out else {}

    workers = min(8, (os.cpu_count() or 1) - 1) if config.workers is None else config.workers
    stream = Stream(files, config, task, batch_size=config.batch_size, buffer_size=config.buffer_size, workers=workers)
    with output.writing(resume=True), stream:
        batches = _Batches(stream)
        plan = Plan(config.max_steps, config.eval_steps, None)
        problem = Problem(
            batches=batches,
            batch=batch,
            loss=loss,
            validate=validate,
            save=partial(seq2seq.save, model),
            dropout=True,
            shown={"loss": "loss"},
        )
        train(model.model, config, plan, problem, output)
        output.counts |= batches.counts()
    return output.path


def _task(model: Seq2Seq, config: Config) -> Task:
    from calibeam.stream import Task

    tokenizer = model.tokenizer
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in (MASK_SENTENCE, MASK_TOKEN) if token not in vocabulary]
    if missing or not tokenizer.is_fast:
        raise CalibeamError(
            f"the tokenizer of {config.model} has no {' and no '.join(missing) or 'fast form'}: make one with calibeam tokenizer"
        )
    return Task(
        tokenizer=tokenizer.backend_tokenizer.to_str(),
        eos=model.ids.eos[0],
        mask_sentence=vocabulary[MASK_SENTENCE],
        mask_token=vocabulary[MASK_TOKEN],
        ordinary=(max(tokenizer.all_special_ids) + 1, len(tokenizer)),
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        selection=config.gap_selection,
        ratio=config.gap_ratio,
        highest_ratio=config.highest_gap_ratio,
        noise=config.gap_noise,
        mlm_ratio=config.mlm_ratio,
        seed=config.seed,
    )


class _Batches:
    """A stream, as the training loop wants it. Of several processes the first has it, and sends the others what comes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._snapshot: Snapshot | None = None

    def next(self) -> list[Item]:
        from calibeam.stream import from_bytes, to_bytes

        examples: list[Example] = []
        if distributed.is_first():
            examples, self._snapshot = self._stream.batch()
        if distributed.size() > 1:
            examples = from_bytes(distributed.from_first(to_bytes(examples) if examples else b""))
        return [Item(e.name, len(e.source), len(e.target) + len(e.places), e) for e in examples]

    def position(self) -> Position:
        import torch

        from calibeam.checkpoint import Position
        from calibeam.stream import pack

        assert self._snapshot is not None
        facts, arrays = pack(self._snapshot)
        return Position(facts, {name: torch.from_numpy(array) for name, array in arrays.items()})

    def restore(self, position: Position) -> None:
        from calibeam.stream import unpack

        self._snapshot = unpack(position.facts, {name: tensor.numpy() for name, tensor in position.tensors.items()})
        self._stream.restore(self._snapshot)

    def counts(self) -> dict[str, Any]:
        """Of what was read, the examples that wait in the buffer included."""
        return {} if self._snapshot is None else {**self._snapshot.counts, "epochs_begun": self._snapshot.epoch + 1}

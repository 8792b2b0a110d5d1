"""Measure how similar every candidate is to the target, in the model's own latent space by default.

Reads:   the folders written by prepare and decode, and the fine-tuned model
Writes:  scored-00000.parquet and so on: the candidates with their similarity; of several references the best counts.
         An interrupted run resumes where it stopped
Example: calibeam score out/data.toml similarity=rouge
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibeam import display, functions, shards, store
from calibeam.paper.metrics import pair_agreement
from calibeam.paper.similarity import SIMILARITIES
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example, Outputs
from calibeam.stages.decode import load_for_inference

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.bertscore import BertScore
    from calibeam.engine.packing import Source
    from calibeam.seq2seq import Seq2Seq

BERTSCORE = "bertscore"


@dataclass(frozen=True, kw_only=True)
class SimilarityConfig(StageConfig):
    """How a stage compares texts, and the encoder that it needs for BERTScore."""

    similarity: str | Callable[..., Any] = option(
        "decoder", "what a candidate and the target are compared by", choices=lambda: (*SIMILARITIES, BERTSCORE)
    )
    bertscore_model: str = option("", "for bertscore: an encoder, a folder or a Hub id", identity=False)
    bertscore_layer: int = option(0, "for bertscore: the layer whose states are compared; 0 for the last", at_least=0)
    bertscore_idf: bool = option(False, "for bertscore: weigh tokens by their rarity in the references")
    bertscore_baseline: tuple[float, ...] = option((), "for bertscore: P, R and F to rescale by, so that they become 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_bertscore and not self.bertscore_model:
            raise CalibeamError("bertscore_model must name an encoder for bertscore: a folder or a Hub id")
        if len(self.bertscore_baseline) not in (0, 3) or any(value >= 1 for value in self.bertscore_baseline):
            raise CalibeamError(f"bertscore_baseline must be P, R and F, each below 1, got {list(self.bertscore_baseline)}")

    @property
    def uses_bertscore(self) -> bool:
        return self.similarity == BERTSCORE

    def encoder(self) -> dict[str, store.Folder]:
        """The encoder as an input of the stage, if one is needed."""
        from calibeam import seq2seq

        return {BERTSCORE: store.read_model(seq2seq.locate(self.bertscore_model))} if self.uses_bertscore else {}

    def load_bertscore(self, encoder: dict[str, store.Folder], targets: Sequence[Sequence[str]], device: str) -> BertScore | None:
        """What `encoder` gave, loaded; idf counts all of the targets."""
        from calibeam.bertscore import BertScore

        if not encoder:
            return None
        references = [text for texts in targets for text in texts] if self.bertscore_idf else None
        return BertScore(
            encoder[BERTSCORE].path,
            layer=self.bertscore_layer,
            idf_references=references,
            baseline=self.bertscore_baseline,
            device=device,
        )

    def compares_by(self, bertscore: BertScore | None) -> Callable[[Outputs, Outputs], Tensor]:
        """The similarity as a function."""
        if callable(self.similarity):
            return functions.looked_at(self.similarity, "similarity", lambda candidates, _: candidates.mask.shape[:-1])
        return bertscore.similarity if bertscore and self.similarity == BERTSCORE else SIMILARITIES[self.similarity]


@dataclass(frozen=True, kw_only=True)
class Config(SimilarityConfig, shards.EngineConfig):
    data: str = option(help="the folder written by prepare", identity=False)
    candidates: str = option(help="the folder written by decode", identity=False)
    model: str = option(help="the fine-tuned model, whose decoder states are compared", identity=False)
    max_target_length: int = option(128, "target tokens, or the model's positions; longer targets are cut", at_least=1)
    batch_size: int = option(32, "sources scored together", at_least=1, identity=False)


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq

    data = store.read(config.data, "prepare")
    candidates = store.read(config.candidates, "decode")
    model = store.read_model(seq2seq.locate(config.model))
    candidates.must_come_from(data=data, model=model)
    encoder = config.encoder()
    output = store.Output("score", config, {"data": data, "candidates": candidates, "model": model, **encoder}, force=force)
    if output.done:
        return output.path
    split, max_source_length = (candidates.manifest["settings"][name] for name in ("split", "max_source_length"))
    name = functions.name_of(config.similarity) if callable(config.similarity) else config.similarity
    table = candidates.table("candidates", store.CANDIDATES)
    maker, total = Scorer(config, data, split, table, model.path, encoder, max_source_length), data.count(split)
    if candidates.manifest["counts"]["sources"] != total:
        raise maker.of_others()
    if config.engine == "local":
        maker.load()
    with output.writing(resume=True):
        counts, _ = shards.fill(output.shards("scored", store.SCORED), maker, total, f"score {name}")
        compared, agreeing = counts.pop("pairs"), counts.pop("agreeing")
        output.counts |= {"split": split, **counts, "likelihood_agrees": agreeing / compared if compared else None}
    if compared:
        display.say(f"score: the order by likelihood agrees with similarity in {agreeing / compared:.1%} of {compared:,} pairs")
    return output.path


@dataclass
class Scorer:
    """Makes the similarities of a shard."""

    config: Config
    data: store.Folder
    split: str
    candidates: store.Table
    model: Path
    encoder: dict[str, store.Folder]
    max_source_length: int
    size: int = field(default_factory=lambda: shards.SIZE)

    def __post_init__(self) -> None:
        self.examples = self.data.example_table(self.split)

    def of_others(self) -> CalibeamError:
        return CalibeamError(f"{self.candidates.folder} does not hold the examples of {self.data.path} in their order")

    @cached_property
    def tuned(self) -> Seq2Seq:
        return load_for_inference(self.model, self.config)

    @cached_property
    def function(self) -> Callable[[Outputs, Outputs], Tensor]:
        config = self.config
        targets = [example.targets for example in self.data.stream_examples(self.split)] if config.bertscore_idf else []
        return config.compares_by(config.load_bertscore(self.encoder, targets, config.device))

    def load(self) -> object:
        return self.tuned, self.function

    def inputs(self, number: int) -> dict[str, tuple[Example, dict[str, Any]]]:
        tables = self.examples, self.candidates
        examples, rows = (table.between(number * self.size, (number + 1) * self.size) for table in tables)
        if [row["id"] for row in rows] != [example["id"] for example in examples]:
            raise self.of_others()
        return {row["id"]: (store.example_of(example), row) for example, row in zip(examples, rows, strict=True)}

    def make(
        self, inputs: dict[str, tuple[Example, dict[str, Any]]], advance: Callable[..., None]
    ) -> tuple[list[dict[str, Any]], shards.Facts]:
        from calibeam.seq2seq import max_positions

        longest = self.config.max_target_length
        longest = min(longest, max_positions(self.tuned.model.config) or longest)
        examples, rows = zip(*inputs.values(), strict=True)
        sources, _ = self.tuned.encode_sources([example.source for example in examples], self.max_source_length)
        scores = similarities(
            self.tuned, self.function, sources, [example.targets for example in examples], rows, advance,
            max_target_length=longest, batch_size=self.config.batch_size,
        )  # fmt: skip
        _, cut = self.tuned.encode_targets([target for example in examples for target in example.targets], longest)
        # In the numbers that the table will hold: what is equal there is no pair.
        scored = [{**row, "similarity": np.array(values, np.float32).tolist()} for row, values in zip(rows, scores, strict=True)]
        agreements = [pair_agreement(row["log_p"], row["similarity"]) for row in scored]
        return scored, {
            "counts": {
                "sources": len(scored),
                "candidates": sum(len(row["similarity"]) for row in scored),
                "sources_without_a_pair": sum(len(set(row["similarity"])) < 2 for row in scored),
                "targets_cut": cut,
                "agreeing": sum(agree for agree, _ in agreements),
                "pairs": sum(compared for _, compared in agreements),
            },
            "notes": [],
        }


def similarities(
    tuned: Seq2Seq,
    function: Callable[[Outputs, Outputs], Tensor],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[str]],
    rows: Sequence[dict[str, Any]],
    advance: Callable[..., None],
    *,
    max_target_length: int,
    batch_size: int,
) -> list[list[float]]:
    """s(candidate, target) of every candidate of every row, the best over its references."""
    import torch

    from calibeam.engine.packing import Source
    from calibeam.seq2seq import batches_by_length

    scores: dict[int, list[float]] = {}
    for batch in batches_by_length(sources, batch_size):
        with torch.no_grad():
            input_ids, mask = tuned.batch([sources[index] for index in batch])
            source = Source(tuned.model, input_ids, mask)
            texts = square([rows[index]["texts"] for index in batch])
            candidates = outputs(tuned, source, texts, square([rows[index]["token_ids"] for index in batch]))
            best: Tensor | None = None
            for reference in range(max(len(targets[index]) for index in batch)):
                # A row with fewer references repeats its last one, which changes no maximum.
                wanted = [targets[index][min(reference, len(targets[index]) - 1)] for index in batch]
                ids, _ = tuned.encode_targets(wanted, max_target_length)
                target = outputs(tuned, source, [[text] for text in wanted], [[row] for row in ids])
                found = function(candidates, target)
                best = found if best is None else best.maximum(found)
        assert best is not None
        for index, values in zip(batch, best.tolist(), strict=True):
            scores[index] = values[: len(rows[index]["log_p"])]
            if not all(map(math.isfinite, scores[index])):
                raise CalibeamError(f"the similarity of a candidate of {rows[index]['id']} is not finite: {scores[index]}")
        advance(len(batch))
    return [scores[index] for index in range(len(rows))]


def outputs(tuned: Seq2Seq, source: Source, texts: list[list[str]], token_ids: list[list[list[int]]]) -> Outputs:
    """Sequences as a similarity sees them; every source must have as many."""
    from calibeam.engine.packing import Forced, plant

    ids, mask = tuned.batch([row for sequences in token_ids for row in sequences])
    shape = (len(token_ids), len(token_ids[0]), -1)
    ids, mask = ids.view(shape), mask.view(shape)
    return Outputs(
        texts,
        mask,
        lambda: Forced(source, plant(tuned.model, ids, mask)).states(),
        lambda: tuned.model.get_input_embeddings()(ids),
    )


def square(rows: list[list[Any]]) -> list[list[Any]]:
    """Rows of equal number, the shorter ones filled up with their last."""
    most = max(map(len, rows))
    return [row + row[-1:] * (most - len(row)) for row in rows]

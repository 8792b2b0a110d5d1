"""Decode held-out sources and measure: quality, repetition, length, perplexity, and calibration itself.

Reads:   the folder written by prepare, a model, and the model whose states similarity is measured in
Writes:  results.json: every figure with its signature; outputs.parquet and candidates.parquet behind them
Example: calibeam evaluate output=out/test data=out/data model=out/calibrate num_candidates=[1,5,10]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import calibeam
from calibeam import display, store
from calibeam.paper import metrics
from calibeam.paper.decoding import DECODERS
from calibeam.paper.likelihood import perplexity
from calibeam.paper.rouge import NEWLINE_MARK, ROUGE_KINDS, rouge
from calibeam.paper.similarity import SIMILARITIES
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example
from calibeam.stages.decode import check_output_length, check_search

if TYPE_CHECKING:
    from calibeam.seq2seq import Seq2Seq
    from calibeam.training import TrainingConfig

OUTPUTS = pa.schema([
    ("setting", pa.string()), ("id", pa.string()), ("output", pa.string()), ("log_p", pa.float32()),
    ("rouge1", pa.float64()), ("rouge2", pa.float64()), ("rougeLsum", pa.float64()), ("words", pa.int32()),
    ("repeats", pa.bool_()),
])  # fmt: skip
CANDIDATES = pa.schema([pa.field("setting", pa.string()), *store.SCORED, pa.field("rouge", pa.list_(pa.float32()))])


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    data: str = option(help="the folder written by prepare", identity=False)
    model: str = option(help="the model to evaluate: a folder or a Hub id", identity=False)
    reference: str = option("", "the model whose states similarity is measured in; the model itself if empty", identity=False)
    split: str = option("test", "the split to decode", choices=lambda: ("train", "validation", "test"))
    methods: tuple[str, ...] = option(("beam",), "how to search; every combination of the lists is run", choices=lambda: DECODERS)
    num_candidates: tuple[int, ...] = option((1, 5, 10), "candidates per source; the best is the output", at_least=1)
    length_alphas: tuple[float, ...] = option((0.0,), "rank by log P / length^alpha", at_least=0)
    groups: int | None = option(None, "for diverse_beam", at_least=1)
    diversity: float = option(0.5, "for diverse_beam", at_least=0)
    top_p: float = option(0.9, "for nucleus", above=0, at_most=1)
    max_new_tokens: int = option(128, "the longest output", at_least=1)
    min_new_tokens: int = option(0, "the shortest output", at_least=0)
    max_source_length: int = option(512, "source tokens; longer sources are cut", at_least=1)
    max_target_length: int = option(128, "target tokens; longer targets are cut", at_least=1)
    max_examples: int = option(0, "evaluate at most so many; 0 for all", at_least=0)
    similarity: str = option("decoder", "what likelihood should follow", choices=lambda: SIMILARITIES)
    seed: int = option(0, "for nucleus", at_least=0)
    batch_size: int = option(0, "sources decoded together; 0 to choose by device", at_least=0, identity=False)
    device: str = option("auto", "auto, cpu or cuda", identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output_length(self.min_new_tokens, self.max_new_tokens)
        for name in ("methods", "num_candidates", "length_alphas"):
            if not getattr(self, name):
                raise CalibeamError(f"{name} must not be empty")
        for method, number in itertools.product(self.methods, self.num_candidates):
            options = self.search_options(method)
            check_search(method, number, options.get("groups"), options.get("diversity", 0.0), options.get("top_p", 1.0))

    def search_options(self, method: str) -> dict[str, Any]:
        """The settings that belong to one method alone."""
        own = {"diverse_beam": ("groups", "diversity"), "nucleus": ("top_p",)}
        return {name: getattr(self, name) for name in own.get(method, ())}


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq
    from calibeam.stages.decode import check_lengths, load_for_inference

    data = store.read(config.data, "prepare")
    model = store.read_model(seq2seq.locate(config.model))
    reference = store.read_model(seq2seq.locate(config.reference)) if config.reference else model
    output = store.Output("evaluate", config, {"data": data, "model": model, "reference": reference}, force=force)
    if output.done:
        return output.path
    examples = data.examples(config.split)[: config.max_examples or None]
    evaluated = load_for_inference(model.path, config.device)
    judge = load_for_inference(reference.path, config.device) if config.reference else evaluated
    check_lengths(evaluated, config.max_source_length, max(config.max_new_tokens, config.max_target_length))
    sources, cut = evaluated.encode_sources([example.source for example in examples], config.max_source_length)
    with output.writing():
        results = [
            _evaluate(evaluated, judge, examples, sources, config, output, method, num_candidates, alpha)
            for method, num_candidates, alpha in itertools.product(config.methods, config.num_candidates, config.length_alphas)
        ]
        output.write_rows("outputs", (row for _, rows, _ in results for row in rows), OUTPUTS)
        output.write_rows("candidates", (row for _, _, rows in results for row in rows), CANDIDATES)
        figures = {
            "split": config.split,
            "examples": len(examples),
            "perplexity": mean_perplexity(evaluated, examples, config.max_source_length, config.max_target_length),
            "perplexity_signature": f"perplexity|per token, end token included|references:all|calibeam:{calibeam.__version__}",
            "reference_repetition_rate": metrics.repetition_rate([t for e in examples for t in e.targets]),
            "reference_words": _mean([len(target.split()) for e in examples for target in e.targets]),
            "settings": [result for result, _, _ in results],
        }
        output.write_json("results.json", figures)
        output.counts |= {"examples": len(examples), "sources_cut": cut}
    show(f"{config.model} on {config.split}", figures)
    return output.path


def show(title: str, figures: dict[str, Any]) -> None:
    display.table(
        f"{title}: perplexity {figures['perplexity']:.3f}",
        ("decoder", "R1", "R2", "RLsum", "R_m", "rep%", "words", "agreement"),
        [
            (
                result["setting"],
                *(f"{100 * result[kind]:.2f}" for kind in (*ROUGE_KINDS, "r_m", "repetition_rate")),
                f"{result['words']:.1f}",
                "" if result["similarity_agreement"] is None else f"{result['similarity_agreement']:.1%}",
            )
            for result in figures["settings"]
        ],
    )


class Validation:
    """The validation split as a training loop uses it: perplexity, and R_m of beam search outputs."""

    def __init__(self, model: Seq2Seq, examples: Sequence[Example], config: TrainingConfig) -> None:
        self._model, self._config = model, config
        self._examples = examples[: config.select_examples or None]
        self._sources, _ = model.encode_sources([example.source for example in self._examples], config.max_source_length)

    def measure(self, *wanted: str) -> dict[str, float]:
        measures = {"perplexity": self._perplexity, "rouge": self._rouge}
        return {name: measures[name]() for name in dict.fromkeys(("perplexity", *wanted))}

    def _perplexity(self) -> float:
        return mean_perplexity(self._model, self._examples, self._config.max_source_length, self._config.max_target_length)

    def _rouge(self) -> float:
        """100 R_m"""
        from calibeam.stages.decode import decode_all
        from calibeam.training import autocast

        settings = {"num_candidates": self._config.select_num_beams, "max_new_tokens": self._config.max_target_length}
        with autocast(self._model.device):
            rows = decode_all(
                self._model, [e.id for e in self._examples], self._sources, settings, seed=0, description="  validate"
            )
        outputs, targets = [row["texts"][0] for row in rows], [example.targets for example in self._examples]
        scores = rouge(outputs, targets, sentence_separator=NEWLINE_MARK)
        return 100 * metrics.geometric_mean(*(float(scores[kind][:, 2].mean()) for kind in ROUGE_KINDS))


def mean_perplexity(model: Seq2Seq, examples: Sequence[Example], max_source_length: int, max_target_length: int) -> float:
    """Per token of every reference, end tokens included."""
    import torch

    from calibeam import seq2seq
    from calibeam.engine.logprob import sequence_log_p
    from calibeam.training import autocast

    pairs = [(example.source, target) for example in examples for target in example.targets]
    sources, _ = model.encode_sources([source for source, _ in pairs], max_source_length)
    targets, _ = model.encode_targets([target for _, target in pairs], max_target_length)
    total, tokens = 0.0, 0
    for batch in seq2seq.batches_by_length(sources, 32):
        with torch.no_grad(), autocast(model.device):
            input_ids, mask = model.batch([sources[index] for index in batch])
            target, target_mask = model.batch([targets[index] for index in batch])
            total += sequence_log_p(model.model, input_ids, mask, target[:, None], target_mask[:, None]).sum().item()
        tokens += int(target_mask.sum())
    return perplexity(total, tokens)


def _evaluate(
    model: Seq2Seq,
    judge: Seq2Seq,
    examples: Sequence[Example],
    sources: Sequence[Sequence[int]],
    config: Config,
    output: store.Output,
    method: str,
    num_candidates: int,
    alpha: float,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """One way of decoding: its figures, its outputs, its candidates."""
    from calibeam.stages.decode import decode_all
    from calibeam.stages.score import similarities

    name = f"{method} {num_candidates}" + (f" alpha {alpha:g}" if alpha else "")
    settings = {
        "method": method, "num_candidates": num_candidates, "length_alpha": alpha,
        "max_new_tokens": config.max_new_tokens, "min_new_tokens": config.min_new_tokens,
        **config.search_options(method),
    }  # fmt: skip
    rows = decode_all(
        model,
        [e.id for e in examples],
        sources,
        settings,
        seed=config.seed,
        batch_size=config.batch_size,
        description=f"  {name}",
    )
    targets = [example.targets for example in examples]
    texts = [row["texts"][0] for row in rows]
    scores = rouge(texts, targets, sentence_separator=NEWLINE_MARK)
    outputs = [
        {
            "setting": name, "id": row["id"], "output": text, "log_p": row["log_p"][0],
            **{kind: scores[kind][place, 2] for kind in ROUGE_KINDS},
            "words": len(text.split()), "repeats": metrics.has_repetition(text),
        }
        for place, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]  # fmt: skip
    similarity = similarities(
        judge, SIMILARITIES[config.similarity], sources, targets, rows,
        max_target_length=config.max_target_length, batch_size=32, description=f"  {name}: similarity",
    )  # fmt: skip
    candidate_rouge = _candidate_rouge(rows, targets)
    means = {kind: float(scores[kind][:, 2].mean()) for kind in ROUGE_KINDS}
    signature = (
        f"decoder:{method}|candidates:{num_candidates}|alpha:{alpha:g}|tokens:{config.min_new_tokens}-{config.max_new_tokens}|"
        f"split:{config.split}|rouge:as rouge-score 0.1.2,F,stemmed,sentences by newline or {NEWLINE_MARK},best reference|"
        f"similarity:{config.similarity}|seed:{config.seed}|calibeam:{calibeam.__version__}"
    )
    result = {
        "setting": name,
        "method": method,
        "num_candidates": num_candidates,
        "length_alpha": alpha,
        **means,
        "r_m": metrics.geometric_mean(*means.values()),
        "repetition_rate": metrics.repetition_rate(texts),
        "words": _mean([row["words"] for row in outputs]),
        **_agreement("similarity", rows, similarity),
        **_agreement("rouge", rows, candidate_rouge),
        "signature": signature,
    }
    scored = zip(rows, similarity, candidate_rouge, strict=True)
    how = {"setting": name, "method": method, "seed": config.seed}
    return result, outputs, [{**how, **row, "similarity": s, "rouge": r} for row, s, r in scored]


def _candidate_rouge(rows: Sequence[dict[str, Any]], targets: Sequence[Sequence[str]]) -> list[list[float]]:
    """The mean ROUGE F of every candidate."""
    import numpy as np

    flat = [(text, target) for row, target in zip(rows, targets, strict=True) for text in row["texts"]]
    scores = rouge([text for text, _ in flat], [target for _, target in flat], sentence_separator=NEWLINE_MARK)
    mean = iter(np.mean([values[:, 2] for values in scores.values()], axis=0).tolist())
    return [list(itertools.islice(mean, len(row["texts"]))) for row in rows]


def _agreement(kind: str, rows: Sequence[dict[str, Any]], quality: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """How the order by likelihood agrees with the order by quality: share of pairs, and mean Kendall tau."""
    counts = [metrics.pair_agreement(row["log_p"], q) for row, q in zip(rows, quality, strict=True)]
    taus = [metrics.kendall_tau(row["log_p"], q) for row, q in zip(rows, quality, strict=True)]
    pairs = sum(count for _, count in counts)
    return {
        f"{kind}_agreement": sum(agreeing for agreeing, _ in counts) / pairs if pairs else None,
        f"{kind}_kendall_tau": _mean([tau for tau in taus if tau is not None]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

"""Decode held-out sources and measure: quality, repetition, length, perplexity, and calibration itself.

Reads:   the folder written by prepare, a model, and the model whose states similarity is measured in
Writes:  results.json: every figure with its interval and signature; outputs, candidates and statistics.parquet behind them
Example: calibeam evaluate output=out/test data=out/data model=out/calibrate num_candidates=[1,5] 'metrics=["squad_qg"]'
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import calibeam
from calibeam import display, distributed, functions, significance, store
from calibeam.paper import metrics, official
from calibeam.paper.decoding import DECODERS
from calibeam.paper.likelihood import perplexity
from calibeam.paper.rouge import NEWLINE_MARK, ROUGE_KINDS, rouge
from calibeam.recipe import option, plain
from calibeam.records import CalibeamError, Example, Outputs
from calibeam.stages.decode import check_output_length, check_search
from calibeam.stages.score import BERTSCORE, SimilarityConfig
from calibeam.tasks import TASKS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from calibeam.bertscore import BertScore
    from calibeam.seq2seq import Seq2Seq
    from calibeam.training import ExamplesConfig

OUTPUTS = pa.schema([
    ("setting", pa.string()), ("id", pa.string()), ("output", pa.string()), ("log_p", pa.float32()),
    ("rouge1", pa.float64()), ("rouge2", pa.float64()), ("rougeLsum", pa.float64()), ("words", pa.int32()),
    ("repeats", pa.bool_()),
])  # fmt: skip
CANDIDATES = pa.schema([
    pa.field("setting", pa.string()), *store.SCORED, pa.field("rouge", pa.list_(pa.float32())),
    pa.field("pieces", pa.list_(pa.list_(pa.string()))), pa.field("token_log_p", pa.list_(pa.list_(pa.float32()))),
])  # fmt: skip
ALWAYS = ("rouge", "repetition")
STATISTICS = pa.schema([
    ("setting", pa.string()), ("metric", pa.string()), ("id", pa.string()), ("statistics", pa.list_(pa.float64())),
])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(SimilarityConfig):
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
    metrics: tuple[str | Callable[..., Any], ...] = option(
        (),
        "what to measure besides rouge and repetition; not given: the task's own",
        choices=lambda: (*official.METRICS, BERTSCORE),
    )
    newline: str = option(NEWLINE_MARK, "what separates sentences for ROUGE-Lsum besides newlines: PEGASUS writes <n>")
    seed: int = option(0, "for nucleus", at_least=0)
    batch_size: int = option(0, "sources decoded together; 0 to choose by device", at_least=0, identity=False)
    device: str = option("auto", "auto, cpu or cuda", identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output_length(self.min_new_tokens, self.max_new_tokens)
        for name in ("methods", "num_candidates", "length_alphas", "newline"):
            if not getattr(self, name):
                raise CalibeamError(f"{name} must not be empty")
        for method, number in itertools.product(self.methods, self.num_candidates):
            options = self.search_options(method)
            check_search(method, number, options.get("groups"), options.get("diversity", 0.0), options.get("top_p", 1.0))

    @property
    def uses_bertscore(self) -> bool:
        return super().uses_bertscore or BERTSCORE in self.metrics

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
    encoder = config.encoder()
    inputs = {"data": data, "model": model, "reference": reference, **encoder}
    output = store.Output("evaluate", config, inputs, force=force)
    if output.done:
        return output.path
    task = data.manifest["settings"].get("task", "")
    examples = data.examples(config.split)[: config.max_examples or None]
    evaluated = load_for_inference(model.path, config.device)
    judge = load_for_inference(reference.path, config.device) if config.reference else evaluated
    check_lengths(evaluated, config.max_source_length, max(config.max_new_tokens, config.max_target_length))
    sources, cut = evaluated.encode_sources([example.source for example in examples], config.max_source_length)
    _, targets_cut = evaluated.encode_targets([t for e in examples for t in e.targets], config.max_target_length)
    with output.writing():
        bertscore = config.load_bertscore(encoder, [example.targets for example in examples], config.device)
        compares_by, measured_by = config.compares_by(bertscore), _metrics(config, task, encoder, bertscore)
        results = [
            _evaluate(evaluated, judge, examples, sources, config, compares_by, measured_by, method, num_candidates, alpha)
            for method, num_candidates, alpha in itertools.product(config.methods, config.num_candidates, config.length_alphas)
        ]
        output.write_rows("outputs", (row for _, rows, _, _ in results for row in rows), OUTPUTS)
        output.write_rows("candidates", with_tokens(evaluated, sources, [rows for _, _, rows, _ in results]), CANDIDATES)
        output.write_rows("statistics", (row for _, _, _, rows in results for row in rows), STATISTICS)
        figures = {
            "split": config.split,
            "examples": len(examples),
            "perplexity": mean_perplexity(evaluated, examples, config.max_source_length, config.max_target_length),
            "perplexity_signature": f"perplexity|per token, end token included|references:all|calibeam:{calibeam.__version__}",
            "reference_repetition_rate": metrics.repetition_rate([t for e in examples for t in e.targets]),
            "reference_words": _mean([len(target.split()) for e in examples for target in e.targets]),
            "settings": [result for result, *_ in results],
        }
        output.write_json("results.json", figures)
        output.counts |= {"examples": len(examples), "sources_cut": cut, "targets_cut": targets_cut}
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
    others = [
        (result["setting"], f"{metric} {name}", f"{figure['value']:.2f}", f"{figure['low']:.2f} … {figure['high']:.2f}")
        for result in figures["settings"]
        for metric, measured in result["metrics"].items()
        for name, figure in measured["figures"].items()
        if metric not in ALWAYS
    ]
    if others:
        display.table("", ("decoder", "figure", "value", "95%"), others)


class Validation:
    """The validation split as a training loop uses it: perplexity, and R_m of beam search outputs."""

    def __init__(self, model: Seq2Seq, examples: Sequence[Example], config: ExamplesConfig) -> None:
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

        def outputs(some: Sequence[int]) -> list[str]:
            ids, sources = [self._examples[i].id for i in some], [self._sources[i] for i in some]
            with autocast(self._model.device):
                rows = decode_all(self._model, ids, sources, settings, seed=0, description="  validate")
            return [row["texts"][0] for row in rows]

        by_length = sorted(range(len(self._sources)), key=lambda index: len(self._sources[index]))
        found = dict(zip(by_length, distributed.spread(outputs, by_length), strict=True))
        targets = [example.targets for example in self._examples]
        scores = rouge([found[i] for i in range(len(found))], targets, newline=NEWLINE_MARK)
        return 100 * metrics.geometric_mean(*(float(scores[kind][:, 2].mean()) for kind in ROUGE_KINDS))


def mean_perplexity(model: Seq2Seq, examples: Sequence[Example], max_source_length: int, max_target_length: int) -> float:
    """Per token of every reference, end tokens included."""
    pairs = [(example.source, target) for example in examples for target in example.targets]
    sources, _ = model.encode_sources([source for source, _ in pairs], max_source_length)
    targets, _ = model.encode_targets([target for _, target in pairs], max_target_length)
    return perplexity_of(model, sources, targets)


def perplexity_of(model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> float:
    """The same of token ids."""
    import torch

    from calibeam import seq2seq
    from calibeam.engine.logprob import sequence_log_p
    from calibeam.training import autocast

    def log_p(batch: Sequence[int]) -> float:
        input_ids, mask = model.batch([sources[index] for index in batch])
        target, target_mask = model.batch([targets[index] for index in batch])
        with torch.no_grad(), autocast(model.device):
            return sequence_log_p(model.model, input_ids, mask, target[:, None], target_mask[:, None]).sum().item()

    found = distributed.spread(lambda batches: [log_p(batch) for batch in batches], seq2seq.batches_by_length(sources, 32))
    return perplexity(sum(found), sum(map(len, targets)))


def _evaluate(
    model: Seq2Seq,
    judge: Seq2Seq,
    examples: Sequence[Example],
    sources: Sequence[Sequence[int]],
    config: Config,
    compares_by: Callable[[Outputs, Outputs], Tensor],
    measured_by: dict[str, official.Metric],
    method: str,
    num_candidates: int,
    alpha: float,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """One way of decoding: its figures, its outputs, its candidates, and every metric's statistics of the outputs."""
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
    statistics = {name: metric.statistics(texts, targets) for name, metric in measured_by.items()}
    scores = statistics["rouge"]
    outputs = [
        {
            "setting": name, "id": row["id"], "output": text, "log_p": row["log_p"][0],
            **dict(zip(ROUGE_KINDS, scores[place].tolist(), strict=True)),
            "words": len(text.split()), "repeats": metrics.has_repetition(text),
        }
        for place, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]  # fmt: skip
    similarity = similarities(
        judge, compares_by, sources, targets, rows,
        max_target_length=config.max_target_length, batch_size=32, description=f"  {name}: similarity",
    )  # fmt: skip
    candidate_rouge = _candidate_rouge(rows, targets, config.newline)
    means = dict(zip(ROUGE_KINDS, scores.mean(0).tolist(), strict=True))
    signature = (
        f"decoder:{method}|candidates:{num_candidates}|alpha:{alpha:g}|tokens:{config.min_new_tokens}-{config.max_new_tokens}|"
        f"split:{config.split}|rouge:as rouge-score 0.1.2,F,stemmed,sentences by newline or {config.newline!r},best reference|"
        f"similarity:{plain(config.similarity)}|seed:{config.seed}|calibeam:{calibeam.__version__}"
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
        "metrics": {name: _figures(metric, statistics[name]) for name, metric in measured_by.items()},
        "signature": signature,
    }
    scored = zip(rows, similarity, candidate_rouge, strict=True)
    how = {"setting": name, "method": method, "seed": config.seed}
    candidates = [{**how, **row, "similarity": s, "rouge": r} for row, s, r in scored]
    return result, outputs, candidates, [
        {"setting": name, "metric": metric, "id": row["id"], "statistics": values}
        for metric, table in statistics.items()
        for row, values in zip(rows, table.tolist(), strict=True)
    ]  # fmt: skip


def with_tokens(
    model: Seq2Seq, sources: Sequence[Sequence[int]], settings: Sequence[Sequence[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The candidates of every setting, each with its tokens and their log-probs.

    Settings find many of the same candidates, so those of a source are computed at once, each of them once.
    """
    distinct = [[*dict.fromkeys(tuple(ids) for row in rows for ids in row["token_ids"])] for rows in zip(*settings, strict=True)]
    log_p = token_log_p(model, sources, distinct)
    found = [dict(zip(ids, values, strict=True)) for ids, values in zip(distinct, log_p, strict=True)]
    for rows in settings:
        for row, values in zip(rows, found, strict=True):
            yield {
                **row,
                "pieces": [model.pieces(token_ids) for token_ids in row["token_ids"]],
                "token_log_p": [values[tuple(token_ids)] for token_ids in row["token_ids"]],
            }


def token_log_p(
    model: Seq2Seq, sources: Sequence[Sequence[int]], candidates: Sequence[Sequence[Sequence[int]]], *, together: int = 320
) -> list[list[list[float]]]:
    """log P of every token of every candidate, some sources with at most so many candidates together."""
    import torch

    from calibeam.engine.packing import Forced, Source, plant
    from calibeam.seq2seq import batches_by_length
    from calibeam.stages.score import square

    found: dict[int, list[list[float]]] = {}
    at_once = max(1, together // max(map(len, candidates), default=1))
    for batch in display.track(batches_by_length(sources, at_once), "  tokens' log-probs"):
        token_ids = square([[*candidates[index]] for index in batch])
        with torch.no_grad():
            ids, mask = (part.view(len(batch), len(token_ids[0]), -1) for part in model.batch([*itertools.chain(*token_ids)]))
            source = Source(model.model, *model.batch([sources[index] for index in batch]))
            values = Forced(source, plant(model.model, ids, mask)).token_log_p().tolist()
        for index, of_source in zip(batch, values, strict=True):
            found[index] = [row[: len(tokens)] for row, tokens in zip(of_source, candidates[index], strict=False)]
    return [found[index] for index in range(len(candidates))]


def _metrics(
    config: Config, task: str, encoder: dict[str, store.Folder], bertscore: BertScore | None
) -> dict[str, official.Metric]:
    """What the outputs are measured by, known to be installed."""
    chosen: dict[str, official.Metric] = {}
    for metric in dict.fromkeys((*ALWAYS, *(config.metrics or ([TASKS[task].metric] if task else ())))):
        name = functions.name_of(metric) if callable(metric) else metric
        if name in chosen:
            raise CalibeamError(f"metrics holds two functions called {name}")
        if callable(metric):
            chosen[name] = official.own(metric)
        elif name == "rouge":
            chosen[name] = official.rouge_metric(config.newline)
        elif bertscore and name == BERTSCORE:
            signature = (
                f"bertscore:best reference|model:{encoder[name].digest[:16]}|layer:{config.bertscore_layer or 'last'}|"
                f"idf:{'yes' if config.bertscore_idf else 'no'}|baseline:{list(config.bertscore_baseline) or 'none'}"
            )
            figures = official.means("precision", "recall", "f1")
            chosen[name] = official.Metric(bertscore.statistics, figures, signature, ("transformers",))
        else:
            chosen[name] = official.METRICS[name]
        chosen[name].signed()  # an error now, not after hours of decoding
    return chosen


def _figures(metric: official.Metric, statistics: np.ndarray) -> dict[str, Any]:
    found = significance.intervals(statistics, metric.figures)
    return {"signature": metric.signed(), "figures": {name: figure._asdict() for name, figure in found.items()}}


def _candidate_rouge(rows: Sequence[dict[str, Any]], targets: Sequence[Sequence[str]], newline: str) -> list[list[float]]:
    """The mean ROUGE F of every candidate."""
    import numpy as np

    flat = [(text, target) for row, target in zip(rows, targets, strict=True) for text in row["texts"]]
    scores = rouge([text for text, _ in flat], [target for _, target in flat], newline=newline)
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

"""Decode held-out sources and measure: quality, repetition, length, perplexity, and calibration itself.

Reads:   the folder written by prepare, a model, and the model whose states similarity is measured in
Writes:  results.json: every figure with its interval and signature; behind them outputs, candidates and statistics, in shards
         such as outputs-00000.parquet. An interrupted run resumes where it stopped
Example: calibeam evaluate output=out/test data=out/data model=out/calibrate num_candidates=[1,5] 'metrics=["squad_qg"]'
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

import calibeam
from calibeam import display, distributed, functions, shards, significance, store
from calibeam.paper import metrics, official
from calibeam.paper.decoding import DECODERS
from calibeam.paper.likelihood import perplexity
from calibeam.paper.rouge import NEWLINE_MARK, ROUGE_KINDS, rouge
from calibeam.paper.similarity import SIMILARITIES
from calibeam.recipe import option, plain
from calibeam.records import CalibeamError, Example, some_of
from calibeam.stages.decode import check_lengths, check_output_length, check_search, decode_sources, load_for_inference
from calibeam.stages.score import BERTSCORE, SimilarityConfig, similarities
from calibeam.tasks import TASKS
from calibeam.training import ExamplesConfig, autocast

if TYPE_CHECKING:
    import numpy as np

    from calibeam.bertscore import BertScore
    from calibeam.seq2seq import Seq2Seq

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


class Way(NamedTuple):
    """A way of decoding."""

    method: str
    num_candidates: int
    alpha: float

    @property
    def name(self) -> str:
        return f"{self.method} {self.num_candidates}" + (f" alpha {self.alpha:g}" if self.alpha else "")


@dataclass(frozen=True, kw_only=True)
class Config(SimilarityConfig, shards.EngineConfig):
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
    max_examples: int = option(0, "evaluate at most this many, chosen by a hash of their id; 0 for all", at_least=0)
    metrics: tuple[str | Callable[..., Any], ...] = option(
        (),
        "what to measure besides rouge and repetition; the task's own if not given",
        choices=lambda: (*official.METRICS, BERTSCORE),
    )
    newline: str = option(NEWLINE_MARK, "what separates sentences for ROUGE-Lsum besides newlines: PEGASUS writes <n>")
    seed: int = option(0, "for nucleus", at_least=0)
    batch_size: int = option(0, "sources decoded together; 0 to choose by device", at_least=0, identity=False)

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

    def ways(self) -> list[Way]:
        """Each of them once."""
        return [*dict.fromkeys(itertools.starmap(Way, itertools.product(self.methods, self.num_candidates, self.length_alphas)))]

    def search_options(self, method: str) -> dict[str, Any]:
        """The settings that belong to one method alone."""
        own = {"diverse_beam": ("groups", "diversity"), "nucleus": ("top_p",)}
        return {name: getattr(self, name) for name in own.get(method, ())}


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq

    data = store.read(config.data, "prepare")
    model = store.read_model(seq2seq.locate(config.model))
    reference = store.read_model(seq2seq.locate(config.reference)) if config.reference else model
    encoder = config.encoder()
    inputs = {"data": data, "model": model, "reference": reference, **encoder}
    output = store.Output("evaluate", config, inputs, force=force)
    if output.done:
        return output.path
    check_lengths("evaluate", config, seq2seq.max_positions(seq2seq.load_config(model.path)))
    maker = Evaluator(config, data, model.path, reference.path, encoder)
    if config.engine == "local":
        maker.load()
    with output.writing(resume=True):
        bertscore = maker.here().bertscore if BERTSCORE in config.metrics else None
        measured_by = _metrics(config, data.manifest["settings"].get("task", ""), encoder, bertscore)
        table = output.shards("candidates", CANDIDATES)
        counts, left_out = shards.fill(table, maker, maker.count, f"evaluate {config.split}")
        figures = {
            "split": config.split,
            "examples": maker.count,
            "perplexity": perplexity(counts.pop("target_log_p"), counts.pop("target_tokens")),
            "perplexity_signature": f"perplexity|per token, end token included|references:all|calibeam:{calibeam.__version__}",
            **_of_references(maker.examples()),
            "heuristics_left_out": left_out,
            "settings": distributed.by_first(lambda: _measure(output, table, maker, measured_by)),
        }
        if distributed.is_first():
            output.write_json("results.json", figures)
        output.counts |= {"examples": counts.pop("sources"), **counts}
    show(f"{config.model} on {config.split}", figures)
    return output.path


def _measure(
    output: store.Output, table: store.Shards, maker: Evaluator, measured_by: dict[str, official.Metric]
) -> list[dict[str, Any]]:
    """What every way of decoding came to, by all the candidates that were made."""
    made = ((table.rows(number), [*maker.inputs(number).values()]) for number in maker.numbers())
    with display.Bar(f"measure {maker.config.split}", maker.count) as bar:
        found = record(output, made, measured_by, bar.advance)
    return [_result(maker.config, way, found[way.name]) for way in maker.config.ways()]


@dataclass
class Evaluator:
    """Makes the candidates of a shard, by every way of decoding one after another."""

    config: Config
    data: store.Folder
    model: Path
    reference: Path
    encoder: dict[str, store.Folder]
    size: int = field(default_factory=lambda: shards.SIZE)

    def __post_init__(self) -> None:
        self.table = self.data.example_table(self.config.split)
        self.places = self.data.places_of_some(self.config.split, self.config.max_examples)

    @property
    def count(self) -> int:
        return len(self.places)

    def numbers(self) -> range:
        """Of the shards."""
        return shards.numbers(self.count, self.size)

    def examples(self) -> Iterator[Example]:
        return self.data.stream_examples(self.config.split, self.config.max_examples)

    @cached_property
    def evaluated(self) -> Seq2Seq:
        return load_for_inference(self.model, self.config)

    @cached_property
    def judge(self) -> Seq2Seq:
        return self.evaluated if self.reference == self.model else load_for_inference(self.reference, self.config)

    @cached_property
    def bertscore(self) -> BertScore | None:
        targets = [example.targets for example in self.examples()] if self.config.bertscore_idf else []
        return self.config.load_bertscore(self.encoder, targets, self.config.device)

    def load(self) -> object:
        return self.evaluated, self.judge, self.bertscore

    def here(self) -> Evaluator:
        """As the process works that asks others: on what it has itself, which may be no GPU."""
        return self if self.config.engine == "local" else replace(self, config=replace(self.config, device="auto"))

    def inputs(self, number: int) -> dict[str, Example]:
        places = self.places[number * self.size : (number + 1) * self.size]
        rows = self.table.between(places[0], places[-1] + 1)
        return {rows[place - places[0]]["id"]: store.example_of(rows[place - places[0]]) for place in places}

    def make(self, inputs: dict[str, Example], advance: Callable[..., None]) -> tuple[list[dict[str, Any]], shards.Facts]:
        from calibeam import seq2seq

        config, examples, ways = self.config, [*inputs.values()], self.config.ways()
        sources, sources_cut = self.evaluated.encode_sources([example.source for example in examples], config.max_source_length)
        targets, targets_cut = self.evaluated.encode_targets([t for e in examples for t in e.targets], config.max_target_length)
        of_targets = [ids for ids, example in zip(sources, examples, strict=True) for _ in example.targets]

        def advance_part(done: int = 1) -> None:
            """Of each source, a way is two parts and the tokens' log-probs are one."""
            advance(done / (2 * len(ways) + 1))

        found = [self._candidates(way, examples, sources, advance_part) for way in ways]
        rows = [*with_tokens(self.evaluated, sources, found, advance_part)]
        log_p, tokens = _log_p(self.evaluated, of_targets, targets)
        cut = {"sources_cut": sources_cut, "targets_cut": targets_cut}
        return rows, {
            "counts": {"sources": len(examples), **cut, "target_log_p": log_p, "target_tokens": tokens},
            "notes": seq2seq.ignored_heuristics(self.evaluated.model),
        }

    def _candidates(
        self, way: Way, examples: Sequence[Example], sources: Sequence[Sequence[int]], advance: Callable[..., None]
    ) -> list[dict[str, Any]]:
        """What one way of decoding gives for some sources, compared with their references."""
        from calibeam.engine.graphs import room

        config, targets = self.config, [example.targets for example in examples]
        rows = decode_sources(
            self.evaluated,
            [*zip([example.id for example in examples], sources, strict=True)],
            {
                "method": way.method, "num_candidates": way.num_candidates, "length_alpha": way.alpha,
                "max_new_tokens": config.max_new_tokens, "min_new_tokens": config.min_new_tokens,
                **config.search_options(way.method),
            },
            advance,
            source_length=room(max(map(len, sources)), self.evaluated.device, most=config.max_source_length),
            seed=config.seed,
            batch_size=config.batch_size,
        )  # fmt: skip
        similarity = similarities(
            self.judge, config.compares_by(self.bertscore), sources, targets, rows, advance,
            max_target_length=config.max_target_length, batch_size=32,
        )  # fmt: skip
        how = {"setting": way.name, "method": way.method, "seed": config.seed}
        scored = zip(rows, similarity, _candidate_rouge(rows, targets, config.newline), strict=True)
        return [{**how, **row, "similarity": s, "rouge": r} for row, s, r in scored]


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
    """The validation split as a training loop uses it: perplexity, R_m of beam search outputs, and how similar these are to the
    targets by the decoder states of a judge, a model in a folder."""

    def __init__(self, model: Seq2Seq, examples: Sequence[Example], config: ExamplesConfig, judge: Path | None = None) -> None:
        self._model, self._config = model, config
        self._judge = load_for_inference(judge, config) if judge else model
        self._examples = some_of(examples, config.select_examples)
        self._sources, _ = model.encode_sources([example.source for example in self._examples], config.max_source_length)

    def measure(self, *wanted: str) -> dict[str, float]:
        found = self._search() if {"rouge", "similarity"} & {*wanted} else []
        measures: dict[str, Callable[[], float]] = {
            "perplexity": self._perplexity, "rouge": lambda: self._rouge(found), "similarity": lambda: self._similarity(found),
        }  # fmt: skip
        return {name: measures[name]() for name in dict.fromkeys(("perplexity", *wanted))}

    def _perplexity(self) -> float:
        config = self._config
        with autocast(self._model.device, config):
            return mean_perplexity(self._model, self._examples, config.max_source_length, config.max_target_length)

    def _search(self) -> list[tuple[str, list[int]]]:
        """The best output for every source: its text, and its token ids."""
        from calibeam.stages.decode import decode_all

        settings = {"num_candidates": self._config.select_num_beams, "max_new_tokens": self._config.max_target_length}

        def outputs(some: Sequence[int]) -> list[tuple[str, list[int]]]:
            ids, sources = [self._examples[i].id for i in some], [self._sources[i] for i in some]
            with autocast(self._model.device, self._config):
                rows = decode_all(self._model, ids, sources, settings, seed=0, description="  validate")
            return [(row["texts"][0], row["token_ids"][0]) for row in rows]

        by_length = sorted(range(len(self._sources)), key=lambda index: len(self._sources[index]))
        found = dict(zip(by_length, distributed.spread(outputs, by_length), strict=True))
        return [found[i] for i in range(len(found))]

    def _similarity(self, found: Sequence[tuple[str, list[int]]]) -> float:
        def of(some: Sequence[int]) -> list[list[float]]:
            examples, outputs = [self._examples[i] for i in some], [found[i] for i in some]
            return similarities(
                self._judge,
                SIMILARITIES["decoder"],
                [self._sources[i] for i in some],
                [example.targets for example in examples],
                [
                    {"id": example.id, "texts": [text], "token_ids": [token_ids], "log_p": [0.0]}
                    for example, (text, token_ids) in zip(examples, outputs, strict=True)
                ],
                lambda *_: None,
                max_target_length=self._config.max_target_length,
                batch_size=32,
            )

        every = distributed.spread(of, range(len(found)))
        return math.fsum(value for (value,) in every) / len(every)

    def _rouge(self, found: Sequence[tuple[str, list[int]]]) -> float:
        """100 R_m"""
        scores = rouge([text for text, _ in found], [example.targets for example in self._examples], newline=NEWLINE_MARK)
        return 100 * metrics.geometric_mean(*(float(scores[kind][:, 2].mean()) for kind in ROUGE_KINDS))


def mean_perplexity(model: Seq2Seq, examples: Iterable[Example], max_source_length: int, max_target_length: int) -> float:
    """Per token of every reference, end tokens included."""
    pairs = ((example.source, target) for example in examples for target in example.targets)
    total, count = 0.0, 0
    while some := [*itertools.islice(pairs, shards.SIZE)]:
        sources, _ = model.encode_sources([source for source, _ in some], max_source_length)
        targets, _ = model.encode_targets([target for _, target in some], max_target_length)
        log_p, tokens = _log_p(model, sources, targets)
        total, count = total + log_p, count + tokens
    return perplexity(total, count)


def perplexity_of(model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> float:
    """The same of token ids."""
    return perplexity(*_log_p(model, sources, targets))


def _log_p(model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> tuple[float, int]:
    """log P of all targets together, and their tokens."""
    import torch

    from calibeam import seq2seq
    from calibeam.engine.logprob import sequence_log_p

    def log_p(batch: Sequence[int]) -> float:
        input_ids, mask = model.batch([sources[index] for index in batch])
        target, target_mask = model.batch([targets[index] for index in batch])
        with torch.no_grad():
            return sequence_log_p(model.model, input_ids, mask, target[:, None], target_mask[:, None]).sum().item()

    found = distributed.spread(lambda batches: [log_p(batch) for batch in batches], seq2seq.batches_by_length(sources, 32))
    return sum(found), sum(map(len, targets))


def with_tokens(
    model: Seq2Seq, sources: Sequence[Sequence[int]], settings: Sequence[Sequence[dict[str, Any]]], advance: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """The candidates of every setting, each with its tokens and their log-probs.

    Settings find many of the same candidates, so those of a source are computed at once, each of them once.
    """
    distinct = [[*dict.fromkeys(tuple(ids) for row in rows for ids in row["token_ids"])] for rows in zip(*settings, strict=True)]
    log_p = token_log_p(model, sources, distinct, advance)
    found = [dict(zip(ids, values, strict=True)) for ids, values in zip(distinct, log_p, strict=True)]
    for rows in settings:
        for row, values in zip(rows, found, strict=True):
            yield {
                **row,
                "pieces": [model.pieces(token_ids) for token_ids in row["token_ids"]],
                "token_log_p": [values[tuple(token_ids)] for token_ids in row["token_ids"]],
            }


def token_log_p(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    advance: Callable[..., None],
    *,
    together: int = 320,
) -> list[list[list[float]]]:
    """log P of every token of every candidate, some sources with at most so many candidates together."""
    import torch

    from calibeam.engine.packing import Forced, Source, plant
    from calibeam.seq2seq import batches_by_length
    from calibeam.stages.score import square

    found: dict[int, list[list[float]]] = {}
    at_once = max(1, together // max(map(len, candidates), default=1))
    for batch in batches_by_length(sources, at_once):
        token_ids = square([[*candidates[index]] for index in batch])
        with torch.no_grad():
            ids, mask = (part.view(len(batch), len(token_ids[0]), -1) for part in model.batch([*itertools.chain(*token_ids)]))
            source = Source(model.model, *model.batch([sources[index] for index in batch]))
            values = Forced(source, plant(model.model, ids, mask)).token_log_p().tolist()
        for index, of_source in zip(batch, values, strict=True):
            found[index] = [row[: len(tokens)] for row, tokens in zip(of_source, candidates[index], strict=False)]
        advance(len(batch))
    return [found[index] for index in range(len(candidates))]


class Agreement:
    """How the order by likelihood agrees with the order by quality: share of pairs, and mean Kendall tau."""

    def __init__(self) -> None:
        self._agreeing, self._pairs, self._taus = 0.0, 0, array("d")

    def take(self, log_p: Sequence[float], quality: Sequence[float]) -> None:
        agreeing, pairs = metrics.pair_agreement(log_p, quality)
        self._agreeing, self._pairs = self._agreeing + agreeing, self._pairs + pairs
        if (tau := metrics.kendall_tau(log_p, quality)) is not None:
            self._taus.append(tau)

    def figures(self, kind: str) -> dict[str, float | None]:
        return {
            f"{kind}_agreement": self._agreeing / self._pairs if self._pairs else None,
            f"{kind}_kendall_tau": math.fsum(self._taus) / len(self._taus) if self._taus else None,
        }


class Measured:
    """What one way of decoding came to: of every example, only its statistics are held, 8 bytes each."""

    def __init__(self, measured_by: dict[str, official.Metric]) -> None:
        self._measured_by, self._words = measured_by, 0
        self._statistics: dict[str, list[np.ndarray]] = {name: [] for name in measured_by}
        self._agreements = {kind: Agreement() for kind in ("similarity", "rouge")}

    def take(self, rows: Sequence[dict[str, Any]], targets: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        """The statistics of some outputs by every metric."""
        texts = [row["texts"][0] for row in rows]
        found = {name: metric.statistics(texts, targets) for name, metric in self._measured_by.items()}
        for name, table in found.items():
            self._statistics[name].append(table)
        for kind, agreement in self._agreements.items():
            for row in rows:
                agreement.take(row["log_p"], row[kind])
        self._words += sum(len(text.split()) for text in texts)
        return found

    def figures(self) -> dict[str, Any]:
        import numpy as np

        statistics = {name: np.concatenate(tables) for name, tables in self._statistics.items()}
        examples = len(statistics["rouge"])
        means = dict(zip(ROUGE_KINDS, statistics["rouge"].mean(0).tolist(), strict=True))
        return {
            **means,
            "r_m": metrics.geometric_mean(*means.values()),
            "repetition_rate": float(statistics["repetition"].sum()) / 100 / examples,
            "words": self._words / examples,
            **self._agreements["similarity"].figures("similarity"),
            **self._agreements["rouge"].figures("rouge"),
            "metrics": {name: _figures(metric, statistics[name]) for name, metric in self._measured_by.items()},
        }


def record(
    output: store.Output,
    made: Iterable[tuple[Sequence[dict[str, Any]], Sequence[Example]]],
    measured_by: dict[str, official.Metric],
    advance: Callable[..., None],
) -> dict[str, Measured]:
    """Write the outputs and their statistics beside each shard of candidates; what every way of decoding came to."""
    found: dict[str, Measured] = {}
    for number, (shard, examples) in enumerate(made):
        outputs: list[dict[str, Any]] = []
        statistics: list[dict[str, Any]] = []
        for name, some in itertools.groupby(shard, key=lambda row: row["setting"]):
            rows = [*some]
            tables = found.setdefault(name, Measured(measured_by)).take(rows, [example.targets for example in examples])
            outputs += [
                {
                    "setting": name, "id": row["id"], "output": row["texts"][0], "log_p": row["log_p"][0],
                    **dict(zip(ROUGE_KINDS, scores, strict=True)),
                    "words": len(row["texts"][0].split()), "repeats": bool(repeats),
                }
                for row, scores, (repeats,) in zip(
                    rows, tables["rouge"].tolist(), tables["repetition"].tolist(), strict=True
                )
            ]  # fmt: skip
            statistics += [
                {"setting": name, "metric": metric, "id": row["id"], "statistics": values}
                for metric, table in tables.items()
                for row, values in zip(rows, table.tolist(), strict=True)
            ]
        output.write_rows(f"outputs-{number:05}", outputs, OUTPUTS)
        output.write_rows(f"statistics-{number:05}", statistics, STATISTICS)
        advance(len(examples))
    return found


def _result(config: Config, way: Way, measured: Measured) -> dict[str, Any]:
    options = "".join(f"|{name}:{value}" for name, value in config.search_options(way.method).items())
    signature = (
        f"decoder:{way.method}{options}|candidates:{way.num_candidates}|alpha:{way.alpha:g}|"
        f"tokens:{config.min_new_tokens}-{config.max_new_tokens}|source:{config.max_source_length}|dtype:{config.dtype}|"
        f"split:{config.split}|"
        f"rouge:as rouge-score 0.1.2,F,stemmed,sentences by newline or {config.newline!r},best reference|"
        f"similarity:{plain(config.similarity)}|seed:{config.seed}|calibeam:{calibeam.__version__}"
    )
    return {
        "setting": way.name,
        "method": way.method,
        "num_candidates": way.num_candidates,
        "length_alpha": way.alpha,
        **measured.figures(),
        "signature": signature,
    }


def _of_references(examples: Iterable[Example]) -> dict[str, Any]:
    count = repeating = words = 0
    for target in (target for example in examples for target in example.targets):
        count, repeating, words = count + 1, repeating + metrics.has_repetition(target), words + len(target.split())
    return {"reference_repetition_rate": repeating / count, "reference_words": words / count}


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

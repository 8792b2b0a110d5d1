"""Write candidates for every source of a split, by beam search, diverse beam search or nucleus sampling.

Reads:   the folder written by prepare, and a fine-tuned model
Writes:  candidates-00000.parquet and so on: token ids, texts and log P of every candidate, best first.
         An interrupted run resumes where it stopped
Example: calibeam decode out/data.toml method=nucleus num_candidates=15 top_p=0.9
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, shards, store
from calibeam.paper.decoding import DECODERS
from calibeam.recipe import LENGTHS, ModelStageConfig, StageConfig, option
from calibeam.records import CalibeamError, DivergedError

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.seq2seq import Seq2Seq

Source = tuple[str, Sequence[int]]
"""An example's id, and the token ids of its source."""
LOOKED_AT = 200
"""Sources, by which it is judged whether a model and a dataset fit each other."""


@dataclass(frozen=True, kw_only=True)
class Config(shards.EngineConfig):
    data: str = option(help="the folder written by prepare", identity=False)
    model: str = option(help="the fine-tuned model: a folder or a Hub id", identity=False)
    split: str = option("train", "the split to decode", choices=lambda: ("train", "validation", "test"))
    method: str = option("beam", "how to search", choices=lambda: DECODERS)
    num_candidates: int = option(15, "candidates per source", at_least=1)
    groups: int | None = option(None, "for diverse_beam: groups of beams; one beam each if not given", at_least=1)
    diversity: float = option(0.0, "for diverse_beam: the penalty for another group's token", at_least=0)
    top_p: float = option(1.0, "for nucleus: the probability mass to draw from", above=0, at_most=1)
    max_new_tokens: int = option(128, "the longest output", at_least=1)
    min_new_tokens: int = option(0, "the shortest output", at_least=0)
    max_source_length: int = option(512, "source tokens; longer sources are cut", at_least=1)
    seed: int = option(0, "for nucleus", at_least=0)
    batch_size: int = option(0, "sources decoded together; 0 to choose by device", at_least=0, identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_search(self.method, self.num_candidates, self.groups, self.diversity, self.top_p)
        check_output_length(self.min_new_tokens, self.max_new_tokens)


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq

    data = store.read(config.data, "prepare")
    model = store.read_model(seq2seq.locate(config.model))
    output = store.Output("decode", config, {"data": data, "model": model}, force=force)
    if output.done:
        return output.path
    check_lengths("decode", config, seq2seq.max_positions(seq2seq.load_config(model.path)))
    notes = look_at_sources("decode", model.path, data, config.split)
    total, maker = data.count(config.split), Decoder(config, data.example_table(config.split), model.path)
    if config.engine == "local":
        maker.load()  # what is wrong with it is told before anything is written
    with output.writing(resume=True):
        table = output.shards("candidates", store.CANDIDATES)
        counts, left_out = shards.fill(table, maker, total, f"decode {config.method} {config.num_candidates}")
        output.notes += [*notes, *(f"the model's generation config asks for {it}; not applied" for it in left_out)]
        output.counts |= counts
    display.say(
        f"decode: {counts['candidates']:,} candidates of {total:,} sources; "
        f"{counts['sources_cut']:,} sources cut, {counts['merged_duplicates']:,} duplicates merged"
    )
    return output.path


@dataclass
class Decoder:
    """Makes the candidates of a shard."""

    config: Config
    examples: store.Table
    model: Path
    size: int = field(default_factory=lambda: shards.SIZE)

    @cached_property
    def tuned(self) -> Seq2Seq:
        return load_for_inference(self.model, self.config)

    def load(self) -> Seq2Seq:
        return self.tuned

    def inputs(self, number: int) -> dict[str, str]:
        rows = self.examples.between(number * self.size, (number + 1) * self.size)
        return {row["id"]: row["source"] for row in rows}

    def make(self, inputs: dict[str, str], advance: Callable[..., None]) -> tuple[list[dict[str, Any]], shards.Facts]:
        from calibeam import seq2seq

        config = self.config
        tokens, cut = self.tuned.encode_sources([*inputs.values()], config.max_source_length)
        found = decode_sources(
            self.tuned, [*zip(inputs, tokens, strict=True)], search_settings(config), advance,
            source_length=config.max_source_length, seed=config.seed, batch_size=config.batch_size,
        )  # fmt: skip
        rows = [{**row, "method": config.method, "seed": config.seed} for row in found]
        kept, drawn = sum(len(row["log_p"]) for row in rows), sum(sum(row["times_drawn"]) for row in rows)
        return rows, {
            "counts": {"sources": len(rows), "sources_cut": cut, "candidates": kept, "merged_duplicates": drawn - kept},
            "notes": seq2seq.ignored_heuristics(self.tuned.model),
        }


def check_search(method: str, *options: Any) -> None:
    try:
        DECODERS[method](*options)
    except ValueError as error:
        raise CalibeamError(str(error)) from None


def check_output_length(min_new_tokens: int, max_new_tokens: int) -> None:
    if min_new_tokens > max_new_tokens:
        raise CalibeamError(f"min_new_tokens is {min_new_tokens}, above max_new_tokens, which is {max_new_tokens}")


def search_settings(config: Any) -> dict[str, Any]:
    """The arguments of `calibeam.decode` that a stage's Config holds."""
    names = ("method", "num_candidates", "groups", "diversity", "top_p", "max_new_tokens", "min_new_tokens")
    return {name: getattr(config, name) for name in names}


def load_for_inference(folder: Path, config: ModelStageConfig) -> Seq2Seq:
    from calibeam import seq2seq

    dtype = seq2seq.dtype_named(config.dtype, seq2seq.best_device(config.device))
    return seq2seq.load(folder, device=config.device, dtype=dtype)


def check_lengths(stage: str, config: StageConfig, positions: int | None) -> None:
    """Before any work: the model must have a position for every token. Only `score` cuts targets to as many as there are."""
    if positions is None or stage == "score":
        return
    for key, names in LENGTHS.items():
        for name in names:
            if (length := getattr(config, name, 0)) > positions:
                raise CalibeamError(
                    f"{stage}.{name} is {length}, but the model has {positions} positions: lower it there, or {key} at the top "
                    f"of the recipe (calibrate-model: --{key.replace('_', '-')})"
                )


def look_at_sources(stage: str, model: Path, data: store.Folder, split: str) -> list[str]:
    """Before any work: an error if the tokenizer knows next to nothing of the first sources; notes of what else seems wrong."""
    from calibeam import seq2seq

    sources = [row["source"] for row in data.example_table(split).between(0, LOOKED_AT)]
    tokenizer, notes = seq2seq.load_tokenizer(model), []
    tokens = [token for ids in tokenizer(sources, add_special_tokens=False, verbose=False)["input_ids"] for token in ids]
    unknown = tokens.count(tokenizer.unk_token_id) / max(len(tokens), 1)
    if unknown > 0.9:
        raise CalibeamError(
            f"the tokenizer in {model} does not know {unknown:.0%} of the tokens of the sources, such as {sources[0][:60]!r}: "
            "is it the model's own, and are these the right data?"
        )
    if unknown > 0.1:
        notes.append(f"the model's tokenizer does not know {unknown:.0%} of the tokens of the sources and reads <unk> there")
    prefixes = seq2seq.task_prefixes(seq2seq.load_config(model))
    if prefixes and not data.manifest["settings"].get("source_prefix") and not any(s.startswith(prefixes) for s in sources):
        listed = ", ".join(repr(prefix[:40]) for prefix in prefixes[:3])
        notes.append(
            f"the model's config names task prefixes ({listed}), and no source begins with one. If the model was fine-tuned "
            "with a prefix, give it: prepare.source_prefix (calibrate-model: --source-prefix)"
        )
    for note in notes:
        display.say(f"{stage}: {note}", style="yellow")
    return notes


def decode_all(
    tuned: Seq2Seq,
    ids: Sequence[str],
    sources: Sequence[Sequence[int]],
    settings: dict[str, Any],
    *,
    seed: int,
    batch_size: int = 0,
    description: str,
) -> list[dict[str, Any]]:
    """The candidates of every source, in the order of the sources."""
    longest = max(map(len, sources), default=1)
    with display.Bar(description, len(sources)) as bar:
        some = [*zip(ids, sources, strict=True)]
        return decode_sources(tuned, some, settings, bar.advance, source_length=longest, seed=seed, batch_size=batch_size)


def decode_sources(
    tuned: Seq2Seq,
    sources: Sequence[Source],
    settings: dict[str, Any],
    advance: Callable[..., None],
    *,
    source_length: int,
    seed: int,
    batch_size: int,
) -> list[dict[str, Any]]:
    """The same, telling each that is done; the longest sources go first."""
    import torch

    from calibeam.engine import search
    from calibeam.seq2seq import sequence_mask

    task = search.Task.of(tuned.model, **settings)
    alike = _alike(sources, sampled=task.search.top_p is not None)
    order = sorted(alike, key=lambda number: -len(sources[number][1]))
    rows: dict[int, dict[str, Any]] = {}

    def noise(number: int) -> Tensor:
        return task.uniform(torch.Generator().manual_seed(_seed_of(seed, sources[number][0])))

    def batch(some: Sequence[int]) -> tuple[Tensor, Tensor]:
        return tuned.batch([sources[number][1] for number in some])

    for number, tokens, log_p in search.stream(task, order, len(order), source_length, batch, noise, batch_size):
        lengths = sequence_mask(tokens, task.ids.eos).sum(-1).tolist()
        outputs = [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths, strict=True)]
        if not outputs:
            raise DivergedError(
                f"the search finds no output for {sources[number][0]}: what the model computes is no number. "
                "If it is in training, a lower learning rate may help"
            )
        found = _merge(tuned, outputs, log_p.tolist())
        for same in alike[number]:
            rows[same] = {"id": sources[same][0], **found}
            advance()
    return [rows[number] for number in range(len(sources))]


def _alike(sources: Sequence[Source], *, sampled: bool) -> dict[int, list[int]]:
    """The sources to search, each with those that are the same, which have the same outputs unless these are drawn for each."""
    found: dict[Any, list[int]] = {}
    for number, (_, tokens) in enumerate(sources):
        found.setdefault(number if sampled else tuple(tokens), []).append(number)
    return {numbers[0]: numbers for numbers in found.values()}


def _merge(tuned: Seq2Seq, outputs: list[tuple[int, ...]], log_p: list[float]) -> dict[str, Any]:
    """Distinct outputs in their order, with the number of times each was drawn."""
    first: dict[tuple[int, ...], float] = {}
    times: dict[tuple[int, ...], int] = {}
    for token_ids, value in zip(outputs, log_p, strict=True):
        first.setdefault(token_ids, value)
        times[token_ids] = times.get(token_ids, 0) + 1
    return {
        "token_ids": [list(token_ids) for token_ids in first],
        "texts": [tuned.text(token_ids) for token_ids in first],
        "log_p": list(first.values()),
        "times_drawn": list(times.values()),
    }


def _seed_of(seed: int, example: str) -> int:
    """An example's own random numbers, whatever it is decoded with."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:7])

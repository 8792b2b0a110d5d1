"""Write candidates for every source of a split, by beam search, diverse beam search or nucleus sampling.

Reads:   the folder written by prepare, and a fine-tuned model
Writes:  candidates-00000.parquet and so on: token ids, texts and log P of every candidate, best first.
         A run that was interrupted goes on where it stopped
Example: calibeam decode out/data.toml method=nucleus num_candidates=15 top_p=0.9
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, store
from calibeam.paper.decoding import DECODERS
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.seq2seq import Seq2Seq


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
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
    device: str = option("auto", "auto, cpu or cuda", identity=False)

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
    tuned = load_for_inference(model.path, config.device)
    check_lengths(tuned, config.max_source_length, config.max_new_tokens)
    total = data.count(config.split)
    with output.writing(resume=True):
        output.notes += [
            f"the model's generation config asks for {it}; not applied" for it in seq2seq.ignored_heuristics(tuned.model)
        ]
        shards = Shards(output, tuned, config.max_source_length, method=config.method, seed=config.seed)
        with display.Bar(f"decode {config.method} {config.num_candidates}", total) as bar:
            found = decode_stream(
                tuned, shards.sources(data.stream_examples(config.split), bar), search_settings(config), count=total,
                source_length=config.max_source_length, seed=config.seed, batch_size=config.batch_size,
            )  # fmt: skip
            for number, row in found:
                shards.add(number, row)
                bar.advance()
        output.counts |= shards.counts
    display.say(
        "decode: {candidates:,} candidates of {sources:,} sources; "
        "{sources_cut:,} sources cut, {merged_duplicates:,} duplicates merged".format(**shards.counts)
    )
    return output.path


class Shards:
    """Candidates on their way to disk: a shard is written when all its sources are done, and never made again."""

    SIZE = 1024

    def __init__(self, output: store.Output, tuned: Seq2Seq, max_source_length: int, **columns: Any) -> None:
        self._output, self._tuned, self._max_source_length, self._columns = output, tuned, max_source_length, columns
        self._open: dict[int, dict[int, dict[str, Any] | None]] = {}
        self.counts = {"sources": 0, "sources_cut": 0, "candidates": 0, "merged_duplicates": 0}

    def sources(self, examples: Iterator[Example], bar: display.Bar) -> Iterator[tuple[int, str, list[int]]]:
        """Number, id and token ids of what is still to decode; within a shard the longest first."""
        for shard in itertools.count():
            some = [*itertools.islice(examples, self.SIZE)]
            if not some:
                self._output.drop(name for name in self._output.tables() if name >= self._name(shard))
                return
            tokens, cut = self._tuned.encode_sources([example.source for example in some], self._max_source_length)
            self.counts["sources"] += len(some)
            self.counts["sources_cut"] += cut
            written = self._output.written(self._name(shard), [example.id for example in some], store.CANDIDATES)
            if written is not None:
                self._count(written)
                bar.advance(len(some))
                continue
            first = shard * self.SIZE
            self._open[shard] = dict.fromkeys(range(first, first + len(some)))
            for place in sorted(range(len(some)), key=lambda place: -len(tokens[place])):
                yield first + place, some[place].id, tokens[place]

    def add(self, number: int, row: dict[str, Any]) -> None:
        rows = self._open[number // self.SIZE]
        rows[number] = {**row, **self._columns}
        if all(rows.values()):
            whole = [row for row in rows.values() if row is not None]
            self._output.write_rows(self._name(number // self.SIZE), whole, store.CANDIDATES)
            self._count(whole)
            del self._open[number // self.SIZE]

    def _count(self, rows: Sequence[dict[str, Any]]) -> None:
        kept, drawn = sum(len(row["log_p"]) for row in rows), sum(sum(row["times_drawn"]) for row in rows)
        self.counts["candidates"] += kept
        self.counts["merged_duplicates"] += drawn - kept

    def _name(self, shard: int) -> str:
        return f"candidates-{shard:05}"


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


def load_for_inference(folder: Path, device: str) -> Seq2Seq:
    from calibeam import seq2seq

    return seq2seq.load(folder, device=device, dtype=seq2seq.fast_dtype(seq2seq.best_device(device)))


def check_lengths(tuned: Seq2Seq, max_source_length: int, max_target_length: int) -> None:
    """Before any work: the model must have a position for every token."""
    from calibeam.seq2seq import max_positions

    positions = max_positions(tuned.model)
    for name, length in (("max_source_length", max_source_length), ("the longest target", max_target_length)):
        if positions is not None and length > positions:
            raise CalibeamError(f"{name} is {length}, but the model has {positions} positions")


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
    rows: dict[int, dict[str, Any]] = {}
    with display.Bar(description, len(sources)) as bar:
        order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
        for number, row in decode_stream(
            tuned, ((number, ids[number], sources[number]) for number in order), settings, count=len(sources),
            source_length=max(map(len, sources), default=1), seed=seed, batch_size=batch_size,
        ):  # fmt: skip
            rows[number] = row
            bar.advance()
    return [rows[number] for number in range(len(sources))]


def decode_stream(
    tuned: Seq2Seq,
    sources: Iterable[tuple[int, str, Sequence[int]]],
    settings: dict[str, Any],
    *,
    count: int,
    source_length: int,
    seed: int,
    batch_size: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and candidates of every source (a number, an id, token ids), each as soon as it is done."""
    import torch

    from calibeam.engine import search
    from calibeam.seq2seq import sequence_mask

    under_way: dict[int, tuple[str, Sequence[int]]] = {}
    task = search.Task.of(tuned.model, **settings)

    def numbers() -> Iterator[int]:
        for number, example, tokens in sources:
            under_way[number] = (example, tokens)
            yield number

    def noise(number: int) -> Tensor:
        return task.uniform(torch.Generator().manual_seed(_seed_of(seed, under_way[number][0])))

    def batch(some: Sequence[int]) -> tuple[Tensor, Tensor]:
        return tuned.batch([under_way[number][1] for number in some])

    for number, tokens, log_p in search.stream(task, numbers(), count, source_length, batch, noise, batch_size):
        example, _ = under_way.pop(number)
        lengths = sequence_mask(tokens, task.ids.eos).sum(-1).tolist()
        outputs = [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths, strict=True)]
        yield number, {"id": example, **_merge(tuned, outputs, log_p.tolist())}


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

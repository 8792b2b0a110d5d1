"""Write candidates for every source of a split, by beam search, diverse beam search or nucleus sampling.

Reads:   the folder written by prepare, and a fine-tuned model
Writes:  candidates.parquet: token ids, texts and log P of every candidate, best first
Example: calibeam decode out/data.toml method=nucleus num_candidates=15 top_p=0.9
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, store
from calibeam.paper.decoding import DECODERS
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError

if TYPE_CHECKING:
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
    examples = data.examples(config.split)
    with output.writing():
        output.notes += [
            f"the model's generation config asks for {it}; not applied" for it in seq2seq.ignored_heuristics(tuned.model)
        ]
        sources, cut = tuned.encode_sources([example.source for example in examples], config.max_source_length)
        settings = search_settings(config)
        found = decode_all(
            tuned, [example.id for example in examples], sources, settings, seed=config.seed,
            batch_size=config.batch_size, description=f"decode {config.method} {config.num_candidates}",
        )  # fmt: skip
        output.write_rows("candidates", found, store.CANDIDATES)
        count, drawn = sum(len(row["log_p"]) for row in found), sum(sum(row["times_drawn"]) for row in found)
        output.counts |= {"sources": len(examples), "sources_cut": cut, "candidates": count, "merged_duplicates": drawn - count}
    display.say(
        f"decode: {count:,} candidates of {len(examples):,} sources; {cut:,} sources cut, {drawn - count:,} duplicates merged"
    )
    return output.path


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
    """The candidates of every source as rows of `store.CANDIDATES`, in the order of the sources."""
    import torch

    from calibeam.engine.search import decode
    from calibeam.seq2seq import batches_by_length, sequence_mask

    batch_size = batch_size or max(1, (256 if tuned.device.type == "cpu" else 1024) // settings["num_candidates"])
    rows: dict[int, dict[str, Any]] = {}
    for batch in display.track(batches_by_length(sources, batch_size), description):
        input_ids, mask = tuned.batch([sources[index] for index in batch])
        generators = [torch.Generator().manual_seed(_seed_of(seed, ids[index])) for index in batch]
        found = decode(tuned.model, input_ids, mask, **settings, generator=generators)
        lengths = sequence_mask(found.token_ids, tuned.ids.eos).sum(-1).tolist()
        token_ids, log_p = found.token_ids.tolist(), found.log_p.tolist()
        for place, index in enumerate(batch):
            outputs = [tuple(t[:n]) for t, n in zip(token_ids[place], lengths[place], strict=True)]
            rows[index] = {"id": ids[index], **_merge(tuned, outputs, log_p[place])}
    return [rows[index] for index in range(len(sources))]


def _merge(tuned: Seq2Seq, outputs: list[tuple[int, ...]], log_p: list[float]) -> dict[str, Any]:
    """Distinct outputs in their order, with the number of times each was drawn; places left empty are dropped."""
    first: dict[tuple[int, ...], float] = {}
    times: dict[tuple[int, ...], int] = {}
    for token_ids, value in zip(outputs, log_p, strict=True):
        if value != float("-inf"):
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

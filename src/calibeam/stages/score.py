"""Measure how similar every candidate is to the target, in the model's own latent space by default.

Reads:   the folders written by prepare and decode, and the fine-tuned model
Writes:  scored.parquet: the candidates with their similarity; of several references the best counts
Example: calibeam score out/data.toml similarity=rouge
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, store
from calibeam.paper.metrics import pair_agreement
from calibeam.paper.similarity import SIMILARITIES
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Outputs

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.seq2seq import Seq2Seq


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    data: str = option(help="the folder written by prepare", identity=False)
    candidates: str = option(help="the folder written by decode", identity=False)
    model: str = option(help="the fine-tuned model, whose decoder states are compared", identity=False)
    similarity: str | Callable[..., Any] = option("decoder", "what to compare", choices=lambda: SIMILARITIES)
    max_target_length: int = option(128, "target tokens, or the model's positions; longer targets are cut", at_least=1)
    batch_size: int = option(32, "sources scored together", at_least=1, identity=False)
    device: str = option("auto", "auto, cpu or cuda", identity=False)


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq
    from calibeam.stages.decode import load_for_inference

    data = store.read(config.data, "prepare")
    candidates = store.read(config.candidates, "decode")
    model = store.read_model(seq2seq.locate(config.model))
    candidates.must_come_from(data=data, model=model)
    output = store.Output("score", config, {"data": data, "candidates": candidates, "model": model}, force=force)
    if output.done:
        return output.path
    decoding = candidates.manifest["settings"]
    tuned = load_for_inference(model.path, config.device)
    longest = min(config.max_target_length, seq2seq.max_positions(tuned.model) or config.max_target_length)
    examples = data.examples(decoding["split"])
    rows = candidates.rows("candidates", store.CANDIDATES)
    if [row["id"] for row in rows] != [example.id for example in examples]:
        raise CalibeamError(f"{candidates.path} does not hold the examples of {data.path} in their order")
    with output.writing():
        sources, _ = tuned.encode_sources([example.source for example in examples], decoding["max_source_length"])
        _, cut = tuned.encode_targets([target for example in examples for target in example.targets], longest)
        function = config.similarity if callable(config.similarity) else SIMILARITIES[config.similarity]
        scores = similarities(
            tuned, function, sources, [example.targets for example in examples], rows,
            max_target_length=longest, batch_size=config.batch_size, description=f"score {config.similarity}",
        )  # fmt: skip
        output.write_rows("scored", ({**row, "similarity": s} for row, s in zip(rows, scores, strict=True)), store.SCORED)
        agreeing, pairs = map(sum, zip(*(pair_agreement(r["log_p"], s) for r, s in zip(rows, scores, strict=True)), strict=True))
        output.counts |= {
            "split": decoding["split"],
            "sources": len(rows),
            "targets_cut": cut,
            "candidates": sum(map(len, scores)),
            "sources_without_a_pair": sum(len(set(s)) < 2 for s in scores),
            "likelihood_agrees": agreeing / pairs if pairs else None,
        }
    if pairs:
        display.say(f"score: the order by likelihood agrees with similarity in {agreeing / pairs:.1%} of {pairs:,} pairs")
    return output.path


def similarities(
    tuned: Seq2Seq,
    function: Callable[[Outputs, Outputs], Tensor],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[str]],
    rows: Sequence[dict[str, Any]],
    *,
    max_target_length: int,
    batch_size: int,
    description: str,
) -> list[list[float]]:
    """s(candidate, target) of every candidate of every row, the best over its references."""
    import torch

    from calibeam.seq2seq import batches_by_length, encode

    scores: dict[int, list[float]] = {}
    for batch in display.track(batches_by_length(sources, batch_size), description):
        with torch.no_grad():
            input_ids, mask = tuned.batch([sources[index] for index in batch])
            states = encode(tuned.model, input_ids, mask)
            texts = _square([rows[index]["texts"] for index in batch])
            candidates = outputs(tuned, states, mask, texts, _square([rows[index]["token_ids"] for index in batch]))
            best: Tensor | None = None
            for reference in range(max(len(targets[index]) for index in batch)):
                # A row with fewer references repeats its last one, which changes no maximum.
                wanted = [targets[index][min(reference, len(targets[index]) - 1)] for index in batch]
                ids, _ = tuned.encode_targets(wanted, max_target_length)
                target = outputs(tuned, states, mask, [[text] for text in wanted], [[row] for row in ids])
                found = function(candidates, target)
                best = found if best is None else best.maximum(found)
        assert best is not None
        for index, values in zip(batch, best.tolist(), strict=True):
            scores[index] = values[: len(rows[index]["log_p"])]
    return [scores[index] for index in range(len(rows))]


def outputs(
    tuned: Seq2Seq, states: Tensor, source_mask: Tensor, texts: list[list[str]], token_ids: list[list[list[int]]]
) -> Outputs:
    """Sequences as a similarity sees them; every source must have as many."""
    from calibeam.engine.packing import Forced

    ids, mask = tuned.batch([row for sequences in token_ids for row in sequences])
    shape = (len(token_ids), len(token_ids[0]), -1)
    ids, mask = ids.view(shape), mask.view(shape)
    return Outputs(
        texts,
        mask,
        lambda: Forced(tuned.model, states, source_mask, ids, mask).states(),
        lambda: tuned.model.get_input_embeddings()(ids),
    )


def _square(rows: list[list[Any]]) -> list[list[Any]]:
    """Rows of equal number, the shorter ones filled up with their last."""
    most = max(map(len, rows))
    return [row + row[-1:] * (most - len(row)) for row in rows]

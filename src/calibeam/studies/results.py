"""What a study found, as flat records: one for every row of the plan, and one over all tasks where there are several."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import significance, store
from calibeam.paper.official import rouge_figures
from calibeam.stages.evaluate import CANDIDATES, STATISTICS
from calibeam.studies import cost
from calibeam.studies.plan import Point, Row
from calibeam.studies.published import Scores

if TYPE_CHECKING:
    import numpy as np

ALL = "all tasks"
Record = dict[str, Any]
Paper = Mapping[tuple[object, ...], Mapping[str, Scores]]
OFFICIAL = {
    "rouge": ("rouge1", "rouge2", "rougeLsum"),
    "gem": ("rouge1", "rouge2", "rougeL"),
    "squad_qg": (None, None, "coco_rouge_l"),
    "msmarco": (None, None, "coco_rouge_l"),
}
"""What of each evaluation script the paper's table of final results prints as R1/R2/RL."""


@dataclass(frozen=True)
class Found:
    """A row, how it was made, and what was measured."""

    row: Row
    point: Point
    folder: store.Folder
    results: dict[str, Any]
    rouge: np.ndarray
    """ROUGE-1, -2 and -Lsum of every output. [examples, 3]"""


def find(row: Row, point: Point) -> Found:
    import numpy as np

    folder = store.read(point.measured.config.output, "evaluate")
    results = json.loads((folder.path / "results.json").read_text(encoding="utf-8"))
    rouge = [line["statistics"] for line in folder.stream("statistics", STATISTICS) if line["metric"] == "rouge"]
    return Found(row, point, folder, results, np.array(rouge))


def validation_r_m(point: Point) -> float:
    """What a point is chosen by."""
    read = (json.loads((Path(step.config.output) / "results.json").read_text(encoding="utf-8")) for step in point.trials)
    return sum(float(results["settings"][0]["r_m"]) for results in read)


def best(row: Row) -> Point:
    """The first of the best."""
    return max(row.points, key=validation_r_m) if row.is_open else row.points[0]


def is_decided(row: Row) -> bool:
    """Whether everything is there that a choice depends on."""
    return all(map(cost.is_there, row.trials))


def likely(row: Row) -> Point:
    """The point that will be measured; the first, where that is not known yet."""
    return best(row) if is_decided(row) else row.points[0]


def records(found: Sequence[Found], paper: Paper, published_tasks: Mapping[str, str]) -> list[Record]:
    """Of every row, in the order of the plan, and then, where there are several tasks, of every row over all of them.

    paper: its own figures by labels and task; published_tasks: the name under which the paper has each task.
    """
    rows = {each.row.of(each.row.task): each for each in found}
    tasks = list(dict.fromkeys(each.row.task for each in found))
    made: dict[tuple[Any, ...], Record] = {}
    for key, each in rows.items():
        published_task = published_tasks[each.row.task]
        printed = paper.get(tuple(each.row.labels.values()), {}).get(published_task)
        made[key] = {"published_task": published_task, **_record(each, _baseline(each, rows)), **_paper(printed)}
    for each in found if len(tasks) > 1 else ():
        keys = [each.row.of(task) for task in tasks]
        if all(key in rows for key in keys):
            made[each.row.of(ALL)] = _over_all([rows[key] for key in keys], rows, [made[key]["paper_r_m"] for key in keys])
    for each in found:
        for task in (each.row.task, ALL):
            record, baseline = made.get(each.row.of(task), {}), made.get((task, *(each.row.against or {}).values()), {})
            if record.get("paper_r_m") and baseline.get("paper_r_m"):
                record["paper_delta"] = 100 * (record["paper_r_m"] / baseline["paper_r_m"] - 1)
    return [{key: _finite(value) for key, value in record.items()} for record in made.values()]


def _over_all(some: Sequence[Found], rows: Mapping[tuple[Any, ...], Found], printed: Sequence[float | None]) -> Record:
    """One row of every task, as one: R_m is the mean."""
    known = [value for value in printed if value is not None]
    return {
        "task": ALL,
        **some[0].row.labels,
        "r_m": sum(_r_m(each)["value"] for each in some) / len(some),
        **_change(some, [_baseline(each, rows) for each in some]),
        "paper_r_m": sum(known) / len(known) if len(known) == len(printed) else None,
    }


def _baseline(found: Found, rows: Mapping[tuple[Any, ...], Found]) -> Found | None:
    against = found.row.against
    return None if against is None else rows[(found.row.task, *against.values())]


def _r_m(found: Found) -> dict[str, float]:
    """With its interval."""
    return found.results["settings"][0]["metrics"]["rouge"]["figures"]["r_m"]


def _record(found: Found, baseline: Found | None) -> Record:
    results, result = found.results, found.results["settings"][0]
    measured = {name: metric["figures"] for name, metric in result["metrics"].items()}
    rouge, repetition = measured["rouge"], measured["repetition"]["rate"]
    metric = next((name for name in measured if name in OFFICIAL and name != "rouge"), "rouge")
    official: Record = {}
    for ours, theirs in zip(("official_rouge1", "official_rouge2", "official_rouge_l"), OFFICIAL[metric], strict=True):
        figure = measured[metric][theirs] if theirs else {"value": None, "low": None, "high": None}
        official |= {ours: figure["value"], f"{ours}_low": figure["low"], f"{ours}_high": figure["high"]}
    return {
        "task": found.row.task,
        **found.row.labels,
        **{name: figure["value"] for name, figure in rouge.items()},
        "r_m_low": _r_m(found)["low"],
        "r_m_high": _r_m(found)["high"],
        **_change([found], [baseline]),
        "repetition": repetition["value"],
        "repetition_low": repetition["low"],
        "repetition_high": repetition["high"],
        "reference_repetition": 100 * results["reference_repetition_rate"],
        "words": result["words"],
        "perplexity": results["perplexity"],
        "agreement": None if result["similarity_agreement"] is None else 100 * result["similarity_agreement"],
        "gflops": _gflops(found),
        "parameters": getattr(cost.size_at(found.folder.manifest["input_places"]["model"]), "parameters", None),
        "official_metric": metric,
        **official,
        "tried": ", ".join(f"{name}={value:g}" for name, value in _chosen(found).items()),
        "setting": result["setting"],
        "split": results["split"],
        "examples": results["examples"],
        "step": found.folder.path.name,
        "signature": result["signature"],
    }


def _chosen(found: Found) -> dict[str, float]:
    """Of what several were tried: by the study, or by the calibration itself, of learning rates that the row was to hold."""
    chosen = dict(found.point.tried)
    for step in (each for each in cost.in_line(found.point.measured) if each.stage == "calibrate"):
        counts = json.loads((Path(step.config.output) / store.MANIFEST).read_text(encoding="utf-8"))["counts"]
        if "learning_rate" in counts:
            chosen["learning_rate"] = counts["learning_rate"]
    return chosen


def _change(found: Sequence[Found], baselines: Sequence[Found | None]) -> Record:
    """Delta, the relative change of R_m against the baselines, in percent, with its interval and p-value."""
    names = ("delta", "delta_low", "delta_high", "p", "verdict")
    before = [each.rouge for each in baselines if each is not None]
    if len(before) < len(found):
        return dict.fromkeys(names)
    change = significance.relative(before, [each.rouge for each in found], rouge_figures, "r_m")
    return dict(zip(names, (100 * change.difference, 100 * change.low, 100 * change.high, change.p, change.verdict), strict=True))


def _paper(scores: Scores | None) -> Record:
    figures = scores._asdict() if scores else dict.fromkeys(Scores._fields)
    return {**{f"paper_{name}": value for name, value in figures.items()}, "paper_r_m": scores.r_m if scores else None}


def _gflops(found: Found) -> float | None:
    """Of one source: total_C with the tokens that were read and written."""
    config = found.point.measured.config
    size = cost.size_at(found.folder.manifest["input_places"]["model"])
    if size is None:
        return None
    outputs = [len(ids) for row in found.folder.stream("candidates", CANDIDATES) for ids in row["token_ids"]]
    source = _mean_source_tokens(
        found.folder.manifest["input_places"]["model"], config.data, config.split, config.max_source_length, config.max_examples
    )
    return size.flops(source, sum(outputs) / len(outputs), config.num_candidates[0]) / 1e9


@cache
def _mean_source_tokens(model: str, data: str, split: str, most: int, examples: int) -> float:
    from transformers import AutoTokenizer

    sources = [example.source for example in store.read(data, "prepare").stream_examples(split, examples)]
    rows = AutoTokenizer.from_pretrained(model)(sources, truncation=True, max_length=most)["input_ids"]
    return sum(map(len, rows)) / len(rows)


def _finite(value: Any) -> Any:
    """JSON has no word for what a division by 0 gives."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

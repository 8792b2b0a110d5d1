"""Finished runs side by side: what each gained, whether one is better than the first, and what was done differently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import calibeam
from calibeam import display, figures, page, significance, store
from calibeam.paper import official
from calibeam.records import CalibeamError
from calibeam.stages import report
from calibeam.tasks.task import SPLITS


class Run(NamedTuple):
    name: str
    folder: store.Folder
    """Of its report."""
    found: dict[str, Any]
    evaluated: store.Folder
    """The calibrated model's evaluation."""
    data: dict[str, str]
    """The digest of every split; nothing where the data are not there any more."""


def run(places: Sequence[Path], out: Path | None = None) -> None:
    """Print the table, and write the page if it is asked for."""
    if len(places) < 2:
        raise CalibeamError("compare needs the folders of two runs or more")
    if out is not None and out.is_dir():
        raise CalibeamError(f"{out} is a folder: --out names the page to write")
    runs = [*map(read, _names(places), places)]
    rows, differing = table(runs), differences(runs)
    show(rows, differing, [each.name for each in runs])
    if out is not None:
        text = page.page(
            "compare.html", drawn=draw(runs, rows), title="Runs side by side", version=calibeam.__version__,
            runs=runs, rows=rows, differing=differing,
        )  # fmt: skip
        store.write_page(out, text)
        display.say(f"page: {out}", style="bold green")


def read(name: str, place: Path) -> Run:
    """A finished run. Its folder or its report's may be given."""
    if not place.is_dir():
        raise CalibeamError(f"{place} is not the folder of a run: {'it is a file' if place.exists() else 'it does not exist'}")
    own, inner = (store.kind(folder) for folder in (place, place / "report"))
    if "report" not in (own, inner):
        stages = sorted({kind for file in place.glob(f"**/{store.MANIFEST}") if (kind := store.kind(file.parent))})
        if own:
            work = place.with_name(f"{place.name}-work")  # as calibrate-model calls it
            given = f"{work}, the folder of the whole run" if work.is_dir() else "the folder of the whole run"
            raise CalibeamError(f"{place} is one stage of a run, `{own}`: give {given}")
        if stages:
            raise CalibeamError(f"{place} is not finished: it has {', '.join(stages)} but no report. Run its recipe again")
        raise CalibeamError(f"{place} is not the folder of a run: no stage of calibeam wrote anything there")
    folder = store.read(place if own == "report" else place / "report", "report")
    found = json.loads((folder.path / "figures.json").read_text(encoding="utf-8"))
    if "stages" not in found:
        raise CalibeamError(f"{folder.path} was written by another version of calibeam: run `report` again with --force")
    evaluated = folder.input("after", "evaluate")
    try:
        files = evaluated.input("data", "prepare").manifest["files"]
    except CalibeamError:
        files = {}
    data = {split: files[f"{split}.parquet"]["sha256"] for split in SPLITS if files}
    return Run(name, folder, found, evaluated, data)


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for every run and way of decoding, compared with the first run's; or why that cannot be."""
    statistics, examples = [report.statistics(each.evaluated) for each in runs], [*map(_examples, runs)]
    rouge = official.METRICS["rouge"].figures
    by_setting = {row["setting"]: row for row in runs[0].found["rows"]}
    found = []
    for number, each in enumerate(runs):
        for row in each.found["rows"]:
            other, key = by_setting.get(row["setting"]), (row["setting"], "rouge")
            why = ""
            if examples[number] != examples[0]:
                why = f"other {each.found['split']} examples"
            elif other is None:
                why = "not decoded this way"
            elif other["after"]["signature"] != row["after"]["signature"]:
                why = "measured differently"
            is_compared = number > 0 and not why
            against = significance.paired(statistics[0][key], statistics[number][key], rouge)["r_m"] if is_compared else None
            found.append({
                "run": each.name, **row, "why_not": why if number else "",
                "against": against and {**against._asdict(), "verdict": against.verdict},
            })  # fmt: skip
    return found


def _examples(run: Run) -> tuple[str, int, str]:
    """What a run was evaluated on: the split, how many examples of it, and what they are."""
    split = run.found["split"]
    return split, run.found["examples"], run.data.get(split) or run.evaluated.manifest["origin"]["inputs"]["data"]


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every setting that two runs have differently, as stage.key, and every split of the data, with each run's value."""
    settings = [
        {f"{stage['name']}.{key}": value for stage in each.found["stages"] for key, value in stage["settings"].items()}
        for each in runs
    ]
    for own, each in zip(settings, runs, strict=True):
        own |= {f"{split} examples": f"sha256 {digest[:12]}" for split, digest in each.data.items()}
    names = dict.fromkeys(name for own in settings for name in own)
    values = {name: [str(own.get(name, page.NONE)) for own in settings] for name in names}
    return [{"name": name, "values": found} for name, found in values.items() if len(set(found)) > 1]


def show(rows: Sequence[dict[str, Any]], differing: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    def with_interval(found: dict[str, Any], scale: int = 1) -> str:
        difference, low, high = (scale * found[key] for key in ("difference", "low", "high"))
        return f"{difference:+.2f} ({low:+.1f} … {high:+.1f})"

    display.table(
        "",
        ("run", "decoder", "R_m", "change (95%)", "p", "rep%", "agree%", "vs first (95%)", "p"),
        [
            (
                row["run"],
                row["setting"],
                report.from_to(row, "r_m", ".2f"),
                with_interval(row, 100),
                f"{row['p']:.3f}",
                report.from_to(row, "repetition_rate", ".1f"),
                report.from_to(row, "similarity_agreement", ".1f"),
                with_interval(row["against"]) if row["against"] else row["why_not"],
                f"{row['against']['p']:.3f}" if row["against"] else "",
            )
            for row in rows
        ],
        labels=2,
    )
    if differing:
        display.table("", ("what differs", *names), [(each["name"], *each["values"]) for each in differing], figures=False)


def draw(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> dict[str, figures.Spec]:
    ends = ("low", "high")
    changes = [
        {"decoder": row["setting"], "run": row["run"], **{key: 100 * row[key] for key in ("difference", *ends)}} for row in rows
    ]
    drawn = {
        "change": figures.intervals(changes, "decoder", "difference", "run", interval=ends, title="change in R_m", baseline=False)
    }
    if len({row["before"]["num_candidates"] for row in rows}) > 1:
        points = [point for each in runs for point in _named(each, runs, report.quality(each.found["rows"]))]
        drawn["candidates"] = figures.line(
            points, "candidates", "r_m", "model",
            dash="method", interval=ends, x_title="number of candidates", y_title="R_m", log_x=True,
        )  # fmt: skip
    for kind in ("similarity", "rouge"):
        found = [
            point
            for each in runs
            for point in _named(each, runs, (point for point in each.found["reliability"] if point["kind"] == kind))
        ]
        if found:
            drawn[f"reliability-{kind}"] = figures.line(
                found, "quantile", "quality", "model", interval=ends,
                x_title="candidates of a source, from least to most likely", y_title=f"{kind} above its mean",
            )  # fmt: skip
    costs = [
        {"stage": stage["name"], "run": each.name, "minutes": stage["seconds"] / 60}
        for each in runs
        for stage in each.found["stages"]
    ]
    drawn["cost"] = figures.bars(costs, "stage", "minutes", "run", baseline=False)
    return drawn


def _named(each: Run, runs: Sequence[Run], points: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The calibrated models by their runs' names, and each fine-tuned model once."""
    origin = each.folder.manifest["origin"]["inputs"]["before"]
    sharing = [run.name for run in runs if run.folder.manifest["origin"]["inputs"]["before"] == origin]
    for point in points:
        if point["model"] == report.AFTER:
            yield {**point, "model": each.name}
        elif each.name == sharing[0]:
            yield {**point, "model": report.BEFORE if len(sharing) == len(runs) else f"{report.BEFORE} ({', '.join(sharing)})"}


def _names(places: Sequence[Path]) -> list[str]:
    """Their last parts, or as many as tell them apart."""
    parts = [place.resolve().parts for place in places]
    if len(set(parts)) < len(parts):
        raise CalibeamError("compare was given the same run twice")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            break
    return names

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

PLACES = frozenset({"output", "data", "model", "candidates", "scored", "reference", "train", "validation", "test"})
"""Settings that say where things lie and nothing of what was done."""


class Run(NamedTuple):
    name: str
    folder: store.Folder
    """Of its report."""
    found: dict[str, Any]


def run(places: Sequence[Path], out: Path | None = None) -> None:
    """Print the table, and write the page if it is asked for."""
    if len(places) < 2:
        raise CalibeamError("compare needs the folders of two runs or more")
    if out is not None and out.is_dir():
        raise CalibeamError(f"{out} is a folder: --out names the page to write")
    runs = [Run(name, *read(place)) for name, place in zip(_names(places), places, strict=True)]
    rows, differing = table(runs), differences(runs)
    show(rows, differing, [each.name for each in runs])
    if out is not None:
        text = page.page(
            "compare.html", drawn=draw(runs, rows), title="Runs side by side", version=calibeam.__version__,
            runs=runs, rows=rows, differing=differing,
        )  # fmt: skip
        store.write_file(out, text)
        display.say(f"page: {out}", style="bold green")


def read(place: Path) -> tuple[store.Folder, dict[str, Any]]:
    """The report of a finished run, and what it found. The run's folder or its report's may be given."""
    if not place.is_dir():
        raise CalibeamError(f"{place} is not the folder of a run: {'it is a file' if place.exists() else 'it does not exist'}")
    own, inner = (store.kind(folder) for folder in (place, place / "report"))
    if "report" not in (own, inner):
        stages = sorted({kind for file in place.glob(f"**/{store.MANIFEST}") if (kind := store.kind(file.parent))})
        if own:
            raise CalibeamError(f"{place} is one stage of a run, `{own}`: give the folder of the whole run")
        if stages:
            raise CalibeamError(f"{place} is not finished: it has {', '.join(stages)} but no report. Run its recipe again")
        raise CalibeamError(f"{place} is not the folder of a run: no stage of calibeam wrote anything there")
    folder = store.read(place if own == "report" else place / "report", "report")
    found = json.loads((folder.path / "figures.json").read_text(encoding="utf-8"))
    if "stages" not in found:
        raise CalibeamError(f"{folder.path} was written by another version of calibeam: run `report` again with --force")
    return folder, found


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for every run and way of decoding; where both have the same examples, beside the first run's."""
    evaluated = [each.folder.input("after", "evaluate") for each in runs]
    first, statistics = evaluated[0], [report.statistics(folder) for folder in evaluated]
    rouge = official.METRICS["rouge"].figures
    by_setting = {row["setting"]: row for row in runs[0].found["rows"]}
    found = []
    for each, folder, of_run in zip(runs, evaluated, statistics, strict=True):
        same_data = folder.manifest["origin"]["inputs"]["data"] == first.manifest["origin"]["inputs"]["data"]
        for row in each.found["rows"]:
            other, key = by_setting.get(row["setting"]), (row["setting"], "rouge")
            alike = each is not runs[0] and same_data and other and other["after"]["signature"] == row["after"]["signature"]
            beside = significance.paired(statistics[0][key], of_run[key], rouge)["r_m"] if alike else None
            found.append({
                "run": each.name, **row,
                "beside": beside and {**beside._asdict(), "verdict": beside.verdict},
            })  # fmt: skip
    return found


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every setting that two runs have differently, as stage.key, with each run's value."""
    settings = [
        {
            f"{stage['name']}.{key}": value
            for stage in each.found["stages"]
            for key, value in stage["settings"].items()
            if key not in PLACES
        }
        for each in runs
    ]
    names = dict.fromkeys(name for own in settings for name in own)
    values = {name: [str(own.get(name, page.NONE)) for own in settings] for name in names}
    return [{"name": name, "values": found} for name, found in values.items() if len(set(found)) > 1]


def show(rows: Sequence[dict[str, Any]], differing: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    def beside(found: dict[str, Any] | None) -> str:
        return (
            ""
            if found is None
            else f"{found['difference']:+.2f} ({found['low']:+.1f} … {found['high']:+.1f}), p {found['p']:.3f}"
        )

    display.table(
        "",
        ("run", "decoder", "R_m", "change (95%)", "p", "rep%", "agreement %", f"beside {names[0]}"),
        [
            (
                row["run"],
                row["setting"],
                report.from_to(row, "r_m", ".2f"),
                f"{100 * row['difference']:+.2f} ({100 * row['low']:+.1f} … {100 * row['high']:+.1f})",
                f"{row['p']:.3f}",
                report.from_to(row, "repetition_rate", ".1f"),
                report.from_to(row, "similarity_agreement", ".1f"),
                beside(row["beside"]),
            )
            for row in rows
        ],
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

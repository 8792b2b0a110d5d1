"""The paper's five studies. Each is a module of pure functions: `rows` makes a plan of recipe and settings, `make_table` and
`make_figure` make a table and a figure of what was measured; `SPLIT` is what the paper reported on, and `PAPER` its figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from calibeam import display, distributed, figures, pipeline, recipe, store
from calibeam.pipeline import STUDY
from calibeam.records import CalibeamError
from calibeam.studies import preview
from calibeam.studies.plan import Config, Point, Row, Subject, subjects
from calibeam.studies.results import Found, Record, find, records
from calibeam.studies.table import as_csv
from calibeam.studies.walk import walk

STUDIES: dict[str, str] = {
    "ablation": "one choice of the method at a time",
    "decoding": "quality against the number of candidates, by beam search and nucleus sampling",
    "length": "with and without length normalisation, and repetitions",
    "scaling": "quality against inference FLOPs, over model sizes",
    "final": "the recommended recipe, against the fine-tuned model and published figures",
}


def load(name: str) -> Any:
    if name not in STUDIES:
        raise CalibeamError(f"unknown study {name}{recipe.nearest(name, STUDIES)}")
    return import_module(f"calibeam.studies.{name}")


def plan(name: str, tables: dict[str, Any]) -> tuple[Config, list[Subject], list[Row]]:
    """A study's settings, datasets and rows, everything resolved and checked, nothing run or written."""
    study = load(name)
    pipeline.check_tables(tables)
    if "output" not in tables:
        raise CalibeamError("the recipe needs output, the folder of the run")
    config: Config = recipe.build(Config, STUDY, {"output": str(Path(tables["output"]) / name), **_settings(name, tables)})
    found = subjects(tables, config, config.split or study.SPLIT)
    rows = study.rows(found, config)
    if not rows:
        raise CalibeamError(f"{name} has no rows with these settings")
    return config, found, rows


def _settings(name: str, tables: dict[str, Any]) -> dict[str, Any]:
    """What the recipe's [study] table says for this study: its own table in there, [study.NAME], over what is for all."""
    shared = {key: value for key, value in tables.get(STUDY, {}).items() if key not in STUDIES}
    own = tables.get(STUDY, {}).get(name, {})
    if not isinstance(own, dict):
        raise CalibeamError(f"study.{name} must be a table of settings for this study, got {own!r}")
    known = shared.get("tasks")
    if isinstance(known, dict) and isinstance(own.get("tasks"), list):  # some of those that are described there
        own = {**own, "tasks": {task: known.get(task, {}) for task in own["tasks"]}}
    return {**shared, **own}


def run(names: str, tables: dict[str, Any], *, jobs: int = 1, force: bool = False) -> list[Path]:
    """Run what is not there yet, so many steps at once, choose on validation what is to be chosen, measure, and write the tables
    and the figures. names: a study's, or those of several with commas between, which share their steps."""
    plans = {name: plan(name, tables) for name in _split(names)}
    if len({config.output for config, _, _ in plans.values()}) < len(plans):
        raise CalibeamError("study.output is one folder for several studies: leave it out, and each has its own")
    for config, _, _ in plans.values():
        store.is_free(Path(config.output))  # refuse a folder in use now, not after hours of work
    every, places = [rows for _, _, rows in plans.values()], dict[str, Path]()
    pipeline.check_models(preview.expected([row for rows in every for row in rows]))

    def measured(number: int, points: Sequence[Point]) -> None:
        name, (config, tasks, rows) = [*plans.items()][number]
        found = [find(row, point) for row, point in zip(rows, points, strict=True)]
        places[name] = Path(distributed.by_first(lambda: str(_tabulate(name, load(name), config, tasks, found))))

    errors = walk(every, measured, jobs=jobs, force=force)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CalibeamError))  # a mistake of ours before one of the settings
    return [places[name] for name in plans]


def _split(names: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in names.split(",")))


def _tabulate(name: str, study: Any, config: Config, tasks: Sequence[Subject], found: Sequence[Found]) -> Path:
    inputs = {each.folder.path.name: each.folder for each in found}
    output = store.Output(STUDY, config, inputs, force=True)  # a table is cheap: make it again whenever something changed
    if not output.done:
        with output.writing():
            _write(study, name, records(found, study.PAPER, {task.task: task.published_task for task in tasks}), config, output)
    table = study.make_table(read(output.path))
    display.table(table.title, table.columns, table.rows, figures=False)
    display.say("\n".join(table.notes), style="dim")
    display.say(f"{name}: {output.path}/table.md, .csv, .json and figure.svg, .png", style="bold green")
    return output.path


def read(place: Path) -> list[Record]:
    """What a study found."""
    found = store.read(place, STUDY)
    return json.loads((found.path / "table.json").read_text(encoding="utf-8"))["records"]


def show(names: str, tables: dict[str, Any]) -> None:
    """The plan and its cost. Writes nothing."""
    preview.show(names, [row for name in _split(names) for row in plan(name, tables)[-1]])


def _write(study: Any, name: str, made: Sequence[Record], config: Config, output: store.Output) -> None:
    table = study.make_table(made)
    (output.folder / "table.md").write_text(table.markdown(), encoding="utf-8")
    (output.folder / "table.csv").write_text(as_csv(made), encoding="utf-8")
    output.write_json("table.json", {"study": name, "settings": recipe.plain(config.identity()), "records": made})
    figures.save(study.make_figure(made), output.folder / "figure")
    output.counts |= {"rows": len(made)}

"""A whole run: which stages a recipe asks for, and which folder each reads.

The top of a recipe has `output`, the folder of the run, and `model`, the model it begins with. A
`[finetune]` table asks for fine-tuning; without one, `model` is taken as fine-tuned already. A
`[create]` table makes the model to begin with, a `[tokenizer]` table its vocabulary, and a `[pretrain]`
table trains it on text first. All other stages always run. `preset` names settings to lay under the
recipe's own (`presets.py`), and a `[study]` table is for `calibeam study` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import display, distributed, presets, recipe, stages, store
from calibeam.records import CalibeamError

TOP = {"output": str, "model": str, "preset": str}
STUDY = "study"


@dataclass(frozen=True)
class Step:
    stage: str
    config: Any
    needs: tuple[Step, ...] = ()
    """The steps whose folders this one reads, where that is known."""

    def run(self, *, force: bool = False) -> Path:
        stage = stages.load(self.stage)
        if self.stage in stages.TOGETHER:
            return stage.run(self.config, force=force)
        return Path(distributed.by_first(lambda: str(stage.run(self.config, force=force))))


def plan(tables: dict[str, Any], only: str | None = None) -> list[Step]:
    """The steps of a run, or of one stage, every setting resolved and checked before any of them starts."""
    check_tables(tables)
    tables = presets.lay_under(tables)
    if "output" not in tables:
        raise CalibeamError("the recipe needs output, the folder of the run")
    if only is None and "output" in tables.get("evaluate", {}):
        raise CalibeamError("evaluate.output: a whole run evaluates two models, so it chooses their folders itself")
    steps = [
        Step(name, recipe.build(stages.load(name).Config, name, {**inputs, **tables.get(name, {})}))
        for name, inputs in _steps(tables)
        if only in (None, name)
    ]
    writers: dict[str, str] = {}
    for step in steps:
        if step.config.output in writers:
            raise CalibeamError(f"{writers[step.config.output]} and {step.stage} both write {step.config.output}")
        writers[step.config.output] = step.stage
    if not steps:
        raise CalibeamError(f"the recipe has no [{only}] table")
    return steps


def run(tables: dict[str, Any], *, only: str | None = None, force: bool = False) -> None:
    """Run the steps in order, or those of one stage; what is done and verified is skipped."""
    steps = plan(tables, only)
    for step in steps:
        store.is_free(Path(step.config.output))  # refuse a folder in use now, not after hours of work
    for number, step in enumerate(steps, start=1):
        display.say(f"[{number}/{len(steps)}] {step.stage} -> {step.config.output}", style="bold")
        step.run(force=force)


def check_tables(tables: dict[str, Any]) -> None:
    for key, value in tables.items():
        if key in TOP:
            if not isinstance(value, TOP[key]):
                raise CalibeamError(f"{key} must be a string, got {value!r}")
        elif key not in stages.STAGES and key != STUDY:
            raise CalibeamError(f"unknown key {key}{recipe.nearest(key, {*TOP, STUDY, *stages.STAGES})}")
        elif not isinstance(value, dict):
            raise CalibeamError(f"{key} is a {STUDY if key == STUDY else 'stage'}: write its settings in a table [{key}]")


def _steps(tables: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Every stage's name, with the folders it reads and writes."""
    root = Path(tables["output"])

    def at(name: str, folder: str = "") -> str:
        return str(tables.get(name, {}).get("output", root / (folder or name)))

    data = {"data": at("prepare")}
    start: str = at("create") if "create" in tables else tables.get("model", "")
    trained = at("pretrain") if "pretrain" in tables else start
    tuned = at("finetune") if "finetune" in tables else trained
    if not start:
        raise CalibeamError("the recipe needs model: a folder or a Hugging Face Hub id (or a [create] table)")
    before, after = at("evaluate", "evaluate/finetuned"), at("evaluate", "evaluate/calibrated")
    comparison = {"before": before, "after": after, "calibrated": at("calibrate")}

    yield "prepare", {"output": at("prepare")}
    if "tokenizer" in tables:
        yield "tokenizer", {"output": at("tokenizer")}
    if "create" in tables:
        vocabulary = {"tokenizer": at("tokenizer")} if "tokenizer" in tables else data
        yield "create", {**({} if "tokenizer" in tables["create"] else vocabulary), "output": at("create")}
    if "pretrain" in tables:
        yield "pretrain", {"model": start, "output": at("pretrain")}
    if "finetune" in tables:
        yield "finetune", {**data, "model": trained, "output": at("finetune")}
    yield "decode", {**data, "model": tuned, "output": at("decode")}
    yield "score", {**data, "model": tuned, "candidates": at("decode"), "output": at("score")}
    yield "calibrate", {**data, "model": tuned, "scored": at("score"), "output": at("calibrate")}
    yield "evaluate", {**data, "model": tuned, "output": before}
    if after != before:  # a table that names its own folder asks for one evaluation
        yield "evaluate", {**data, "model": at("calibrate"), "reference": tuned, "output": after}
    yield "report", {**comparison, "output": at("report")}
    yield "export", {**comparison, "output": at("export", "model")}


def finish(tables: dict[str, Any]) -> None:
    """Put the report where a person looks for it, and say where things are."""
    report, export = (next(step.config for step in plan(tables) if step.stage == name) for name in ("report", "export"))
    page = Path(tables["output"]) / "report.html"
    distributed.by_first(lambda: store.write_file(page, (Path(report.output) / "report.html").read_text(encoding="utf-8")))
    display.say(f"checkpoint: {export.output}", style="bold green")
    display.say(f"report:     {page}", style="bold green")

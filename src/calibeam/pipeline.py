"""A whole run: which stages a recipe asks for, and which folder each reads.

The top of a recipe has `output`, the folder of the run, and `model`, the model it begins with; it may have
`max_source_length` and `max_target_length`, for every stage that reads the examples and does not say otherwise. A
`[finetune]` table asks for fine-tuning; without one, `model` is taken as fine-tuned already. A
`[create]` table makes the model to begin with, a `[tokenizer]` table its vocabulary, and a `[pretrain]`
table trains it on text first. All other stages always run. `preset` names settings to lay under the
recipe's own (`presets.py`), and a `[study]` table is for `calibeam study` alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import display, distributed, presets, recipe, stages, store
from calibeam.records import CalibeamError

TOP = {**dict.fromkeys(("output", "model", "preset", *recipe.HARDWARE), str), **dict.fromkeys(recipe.LENGTHS, int)}
STUDY = "study"


@dataclass(frozen=True)
class Step:
    stage: str
    config: Any
    needs: tuple[Step, ...] = ()
    """The steps whose folders this one reads, where that is known."""

    def run(self, *, force: bool = False) -> Path:
        stage = stages.load(self.stage)
        try:
            if self.stage in stages.TOGETHER and getattr(self.config, "engine", "local") == "local":
                return stage.run(self.config, force=force)
            return Path(distributed.by_first(lambda: str(stage.run(self.config, force=force))))
        except RuntimeError as error:
            if distributed.size() > 1 and _is_lost_touch(error):
                raise distributed.LostTouchError(
                    f"{self.stage}: process {distributed.rank()} of {distributed.size()} has lost touch with another one, which "
                    f"has died or cannot be reached ({str(error).partition('. ')[0]}).\n"
                    "What was saved is kept. Start all of them again with the same command"
                ) from error
            raise


def _is_lost_touch(error: RuntimeError) -> bool:
    """gloo has no errors of its own; it names its source in their text."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo/transport" in str(error)


def plan(tables: dict[str, Any], only: str | None = None) -> list[Step]:
    """The steps of a run, or of one stage, every setting resolved and checked before any of them starts."""
    check_tables(tables)
    tables = presets.lay_under(tables)
    if "output" not in tables:
        raise CalibeamError("the recipe needs output, the folder of the run")
    if only is None and "output" in tables.get("evaluate", {}):
        raise CalibeamError("evaluate.output: a whole run evaluates two models, so it chooses their folders itself")
    steps = [
        Step(name, recipe.build(kind, name, {**inputs, **_from_top(tables, name, kind), **tables.get(name, {})}))
        for name, inputs in _steps(tables)
        if only in (None, name)
        for kind in (stages.load(name).Config,)
    ]
    writers: dict[Path, str] = {}
    for step in steps:
        place = Path(step.config.output)
        for other, stage in writers.items():
            if other == place:
                raise CalibeamError(f"{stage} and {step.stage} both write {place}")
            if other in place.parents or place in other.parents:
                raise CalibeamError(f"{stage} writes {other}, and {step.stage} writes {place}: none can be inside the other")
        writers[place] = step.stage
    if not steps:
        raise CalibeamError(f"the recipe has no [{only}] table")
    if only is None:
        _check_candidates({step.stage: step.config for step in steps})
    return steps


def _from_top(tables: dict[str, Any], stage: str, kind: Any) -> dict[str, Any]:
    """The settings of a stage that stand there. What `pretrain` reads are not the examples, but text of its own length."""
    lengths = recipe.LENGTHS if stage != "pretrain" else {}
    shared = {name: key for key, names in lengths.items() for name in names} | {name: name for name in recipe.HARDWARE}
    known = {field.name for field in dataclasses.fields(kind)}
    return {name: tables[key] for name, key in shared.items() if key in tables and name in known}


def _check_candidates(configs: dict[str, Any]) -> None:
    if configs["decode"].num_candidates == 1 and not callable(configs["calibrate"].loss):
        raise CalibeamError(
            "decode.num_candidates is 1, but calibrate compares the candidates of a source with each other: "
            "set it to 2 or more (calibrate-model: --num-candidates)"
        )


def run(tables: dict[str, Any], *, only: str | None = None, force: bool = False, reused: Sequence[str] = ()) -> None:
    """Run the steps in order, or those of one stage; what is done and verified is skipped.

    reused: stages of another run, which are taken as they are, or not at all.
    """
    steps = plan(tables, only)
    for step in steps:
        store.is_free(Path(step.config.output))  # refuse a folder in use now, not after hours of work
    common = {f"{number}. {step.stage}": step.config.common() for number, step in enumerate(steps, start=1)}
    store.must_agree("the recipe", {**common, "versions": store.deciding_versions()})
    if only is None:
        check_models(steps)
        _mention_lengths(steps)
    for number, step in enumerate(steps, start=1):
        display.say(f"[{number}/{len(steps)}] {step.stage} -> {step.config.output}", style="bold")
        try:
            step.run(force=force and step.stage not in reused)
        except store.MadeOtherwiseError as error:
            if step.stage not in reused:
                raise
            raise CalibeamError(f"{error.found}\nGive the settings of that run, or leave --reuse out") from error


def check_models(steps: Sequence[Step]) -> None:
    """Before any stage runs: its device is there, and the models that the steps begin with, which have a position for every
    token."""
    from calibeam import seq2seq
    from calibeam.stages.decode import check_lengths

    positions: dict[str, int | None] = {}
    for step in steps:
        config, model = step.config, getattr(step.config, "model", "")
        if isinstance(config, recipe.ModelStageConfig) and getattr(config, "engine", "") != "ray":  # whose workers have their own
            seq2seq.best_device(config.device)
        if step.stage == "create":
            positions[config.output] = config.max_position_embeddings
        if getattr(config, "uses_bertscore", False):
            seq2seq.locate(config.bertscore_model)
        if model:
            if model not in positions:
                positions[model] = seq2seq.max_positions(seq2seq.examine(model))
            check_lengths(step.stage, config, positions[model])
            positions[config.output] = positions[model]


def _mention_lengths(steps: Sequence[Step]) -> None:
    """Lengths that differ are most often one that was forgotten."""
    for key, names in recipe.LENGTHS.items():
        found = {
            f"{step.stage}.{name}": getattr(step.config, name)
            for step in steps
            for name in names
            if step.stage != "pretrain" and hasattr(step.config, name)
        }
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} is {value}" for name, value in found.items())
            display.say(f"lengths differ: {listed}. {key} at the top of the recipe sets all of them", style="yellow")


def check_tables(tables: dict[str, Any]) -> None:
    for key, value in tables.items():
        if key in TOP:
            if not recipe.fits(value, TOP[key]):
                raise CalibeamError(f"{key} must be {recipe.describe(TOP[key])}, got {value!r}")
            if key in recipe.HARDWARE:
                recipe.ModelStageConfig(output="", **{key: value})
        elif key not in stages.STAGES and key != STUDY:
            raise CalibeamError(f"unknown key {key}{_nearest(key, tables)}")
        elif not isinstance(value, dict):
            raise CalibeamError(f"{key} is a {STUDY if key == STUDY else 'stage'}: write its settings in a table [{key}]")


def _nearest(key: str, tables: dict[str, Any]) -> str:
    """The stages that have such a setting, or else the nearest name."""
    running = [name for name in stages.STAGES if name in tables or name not in stages.ASKED_FOR]
    fields = {name: dataclasses.fields(stages.load(name).Config) for name in running}
    found = [f"{name}.{key}" for name, of_stage in fields.items() if key in {field.name for field in of_stage}]
    return f"; did you mean {' or '.join(found)}?" if found else recipe.nearest(key, {*TOP, STUDY, *stages.STAGES})


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
    """Put the report where a person looks for it, and say where things are, and what should not be missed."""
    report, export = (next(step.config for step in plan(tables) if step.stage == name) for name in ("report", "export"))
    page = Path(tables["output"]) / "report.html"
    distributed.by_first(lambda: store.write_page(page, (Path(report.output) / "report.html").read_text(encoding="utf-8")))
    display.say(f"checkpoint: {export.output}", style="bold green")
    display.say(f"report:     {page}", style="bold green")
    for remark in json.loads((Path(report.output) / "figures.json").read_text(encoding="utf-8")).get("remarks", ()):
        display.say(remark, style="bold")

"""A study as data: rows, each measured by steps of the pipeline that a recipe with some settings overridden asks for.

A step's folder is named after everything that determines what is in it. So rows that have a step in common, of one study or
of several, have its folder in common, and the store does the rest: what is there is verified and kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import pipeline, presets
from calibeam.paper.decoding import DECODERS
from calibeam.pipeline import Step
from calibeam.recipe import LENGTHS, PLACES, StageConfig, option
from calibeam.records import CalibeamError
from calibeam.stages.calibrate import Config as Calibrate
from calibeam.stages.evaluate import Config as Evaluate
from calibeam.tasks import TASKS

Tables = Mapping[str, Any]
FINE_TUNED, CALIBRATED = "evaluate/finetuned", "evaluate/calibrated"
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
"""Those of the paper's final results, by its appendix."""
BETAS = (0.1, 1.0, 10.0)
FACTORS = ("similarity", "loss", "regularizer", "decoding", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """The [study] table of a recipe."""

    output: str = option("", "the folder of the tables; NAME in the recipe's output if not given", identity=False)
    tasks: dict[str, Any] | tuple[str, ...] | None = option(
        None, "the datasets: names, or tables [study.tasks.NAME] of what differs from the recipe; the recipe's own if not given"
    )
    models: dict[str, Any] | None = option(None, "scaling: tables [study.models.NAME] of what differs from the recipe")
    split: str = option("", "what is reported on; the paper's if not given", choices=lambda: ("", "validation", "test"))
    around: str = option(
        "paper", "hold the settings of the paper's appendix, or the recipe's own", choices=lambda: ("paper", "recipe")
    )
    factors: tuple[str, ...] = option(FACTORS, "ablation: which of its groups", choices=lambda: FACTORS)
    learning_rates: tuple[float, ...] = option(
        (), "those tried where the paper took the best; the recipe's own if not given, or else the paper's", above=0
    )
    betas: tuple[float, ...] = option(
        (), f"likewise; with around=recipe its own for its own loss, or else {', '.join(map(str, BETAS))}", at_least=0
    )
    alphas: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0, 1.25), "tried with the fine-tuned model", at_least=0)
    calibrated_on: tuple[str, ...] = option(
        ("beam", "nucleus"), "decoding: by what candidates are made", choices=lambda: DECODERS
    )
    num_candidates: tuple[int, ...] = option((1, 2, 5, 10, 20), "decoding and scaling: candidates per source", at_least=1)
    num_beams: int = option(5, "beams elsewhere, and to choose by on validation", at_least=1)
    calibrated_num_beams: int = option(10, "final: beams of the calibrated model", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("factors", "alphas", "calibrated_on", "num_candidates"):
            if not getattr(self, name):
                raise CalibeamError(f"{name} must not be empty")


@dataclass(frozen=True)
class Point:
    """One way to make a row."""

    tried: dict[str, float]
    """What tells it from the row's other points."""
    trials: tuple[Step, ...]
    """Evaluations on the validation split. The point with the largest sum of R_m is the row's."""
    measured: Step


@dataclass(frozen=True)
class Row:
    task: str
    """As it is called in the study."""
    labels: dict[str, Any]
    """What tells it from the other rows of its task."""
    points: tuple[Point, ...]
    against: dict[str, Any] | None = None
    """The labels of the row that it is compared with."""

    def of(self, task: str) -> tuple[Any, ...]:
        """What it is known by, or would be for another task."""
        return (task, *self.labels.values())

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.points) > 1

    @property
    def trials(self) -> list[Step]:
        return [step for point in self.points for step in point.trials] if self.is_open else []


@dataclass(frozen=True)
class Subject:
    """A dataset of the study, with the recipe for it."""

    task: str
    tables: Tables
    config: Config
    split: str
    """That is reported on."""
    _runs: dict[str, dict[str, Step]] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def published_task(self) -> str:
        """The name under which the paper has it, if it has."""
        return str(self.tables.get("prepare", {}).get("task", ""))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Those to try. A recipe that names some means them."""
        own = self.tables.get("calibrate", {}).get("learning_rate", LEARNING_RATES)
        return self.config.learning_rates or (tuple(own) if isinstance(own, list | tuple) else (own,))

    @property
    def loss(self) -> str:
        """The recipe's own."""
        return self.tables.get("calibrate", {}).get("loss", Calibrate.loss)

    def betas(self, loss: str) -> tuple[float, ...]:
        """Those to try with a loss; none where there is nothing to try."""
        is_own = self.config.around == "recipe" and loss == self.loss
        return () if loss == "reward" else self.config.betas or (() if is_own else BETAS)

    def points(
        self,
        model: str,
        patch: Tables | None = None,
        *,
        learning_rates: Sequence[float] = (),
        betas: Sequence[float] = (),
        alphas: Sequence[float] = (0.0,),
        method: str = "beam",
        num_candidates: int = 0,
    ) -> tuple[Point, ...]:
        """A model of the patched recipe, decoded in one way; with several settings to try, a point for each.

        Learning rate and beta are chosen by the calibrated model's own R_m, alpha by the fine-tuned model's, as in the
        paper. Both trials count where both are open: as they are independent, the best sum has the best of each.
        """
        number, found = num_candidates or self.config.num_beams, []
        for rate, beta, alpha in itertools.product(learning_rates or (None,), betas or (None,), alphas):
            tuned = {"learning_rate": rate, "beta": beta}
            own = overlay(patch or {}, {"calibrate": {key: value for key, value in tuned.items() if value is not None}})
            trials = []
            if len(learning_rates) > 1 or len(betas) > 1:
                trials.append(self._evaluate(CALIBRATED, own, "validation", "beam", self.config.num_beams, 0.0))
            if len(alphas) > 1:
                trials.append(self._evaluate(FINE_TUNED, own, "validation", "beam", self.config.num_beams, alpha))
            open_to_choice = {
                "learning_rate": (rate, learning_rates), "beta": (beta, betas), "alpha": (alpha, alphas),
            }  # fmt: skip
            tried = {name: value for name, (value, values) in open_to_choice.items() if value is not None and len(values) > 1}
            found.append(Point(tried, tuple(trials), self._evaluate(model, own, self.split, method, number, alpha)))
        return tuple(found)

    def _evaluate(self, model: str, patch: Tables, split: str, method: str, number: int, alpha: float) -> Step:
        """The step that decodes in one way and measures."""
        if repr(patch) not in self._runs:
            self._runs[repr(patch)] = self._run(patch)
        step, how = self._runs[repr(patch)][model], {"methods": (method,), "num_candidates": (number,), "length_alphas": (alpha,)}
        return placed(Step(step.stage, dataclasses.replace(step.config, split=split, **how), step.needs), self.tables["output"])

    def _run(self, patch: Tables) -> dict[str, Step]:
        """The steps of the patched recipe. A stage that the recipe does not ask for stays so."""
        tables = settled(overlay(self.tables, presets.asked_for(self.tables, patch)))
        run = located(pipeline.plan(tables), tables["output"])
        return {model: run[str(Path(tables["output"]) / model)] for model in (FINE_TUNED, CALIBRATED)}


def subjects(tables: Tables, config: Config, split: str) -> list[Subject]:
    """The datasets that the study is about."""
    tables = {name: value for name, value in presets.lay_under(dict(tables)).items() if name != pipeline.STUDY}
    stages = [name for name, value in tables.items() if isinstance(value, dict)]
    tables = settled(overlay(tables, {name: {"output": None} for name in stages}))  # a study has its own folders
    if not config.tasks:
        name = tables.get("prepare", {}).get("task", "") or Path(tables.get("output", "")).name
        return [Subject(name, tables, config, split)]
    patches = config.tasks if isinstance(config.tasks, dict) else {name: {} for name in config.tasks}
    return [Subject(name, _for_task(tables, name, patch), config, split) for name, patch in patches.items()]


def _for_task(tables: Tables, name: str, patch: Any) -> dict[str, Any]:
    """The recipe for a dataset of the study: a task by its name, with its lengths, wherever nothing else is said."""
    if not isinstance(patch, dict):
        raise CalibeamError(f"study.tasks.{name} must be a table of what differs from the recipe, got {patch!r}")
    shared, own = tables.get("prepare", {}), patch.get("prepare", {})
    if name in TASKS and not own.keys() & {"task", "train"}:
        if "{task}" not in str(shared.get("path", "{task}")) and shared.get("task") != name and "path" not in own:
            raise CalibeamError(
                f"prepare.path is {shared['path']} for every task: write {{task}} for its name, as in data/{{task}}"
            )
        patch = {**patch, "prepare": {"train": None, "validation": None, "test": None, **own, "task": name}}
    found = settled(overlay(tables, patch))
    prepare = found.setdefault("prepare", {})
    if not prepare.keys() & {"task", "train"}:
        raise CalibeamError(f"study.tasks.{name} is not a task known by name, and has no prepare.train: see `calibeam tasks`")
    if "path" in prepare:
        found["prepare"] = {**prepare, "path": str(prepare["path"]).replace("{task}", name)}
    task = TASKS.get(prepare.get("task", ""))
    return {**({key: getattr(task, key) for key in LENGTHS} if task else {}), **found}


def overlay(tables: Tables, *patches: Tables) -> dict[str, Any]:
    """The tables with those of the patches over them."""
    result: dict[str, Any] = dict(tables)
    for patch in patches:
        for key, value in patch.items():
            result[key] = {**result.get(key, {}), **value} if isinstance(value, Mapping) else value
    return result


def settled(tables: Tables) -> dict[str, Any]:
    """Without the settings that a patch took back: those that are None."""
    return {
        key: {name: setting for name, setting in value.items() if setting is not None} if isinstance(value, Mapping) else value
        for key, value in tables.items()
    }


def decoder(tables: Tables, method: str) -> dict[str, Any]:
    """What makes `decode` use a method. Its options are those of the evaluation, so that both mean the same by its name."""
    options = {"groups": None, "diversity": Evaluate.diversity, "top_p": Evaluate.top_p, **tables.get("evaluate", {})}
    own = {"diverse_beam": ("groups", "diversity"), "nucleus": ("top_p",)}.get(method, ())
    return {"decode": {"method": method, "groups": None, "diversity": None, "top_p": None} | {key: options[key] for key in own}}


def located(steps: Sequence[Step], root: str) -> dict[str, Step]:
    """The steps of a run in folders named after what they make, each by the folder it would have in that run."""
    moved: dict[Any, Step] = {}
    for step in steps:
        inputs = {name: moved[value] for name, value in places(step.config).items() if value in moved}
        config = dataclasses.replace(step.config, **{name: source.config.output for name, source in inputs.items()})
        moved[step.config.output] = placed(Step(step.stage, config, tuple(inputs.values())), root)
    return moved


def placed(step: Step, root: str) -> Step:
    """The step in a folder named after all that determines what will be in it, wherever the root is."""
    made = {need.config.output: Path(need.config.output).name for need in step.needs}
    read = {name: made.get(value, value) for name, value in places(step.config).items()}
    making = json.dumps(_canonical([step.stage, step.config.identity(), read]), sort_keys=True)
    place = Path(root) / "steps" / f"{step.stage}-{hashlib.sha256(making.encode()).hexdigest()[:12]}"
    return Step(step.stage, dataclasses.replace(step.config, output=str(place)), step.needs)


def _canonical(value: Any) -> Any:
    """With 1.0 as 1: a recipe may have either."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def places(config: Any) -> dict[str, Any]:
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name in PLACES}
    return {name: place for name, place in found.items() if place}


def in_order(steps: Iterable[Step]) -> list[Step]:
    """The distinct steps among these and all that they need, needs first."""
    found: dict[str, Step] = {}

    def visit(step: Step) -> None:
        if step.config.output not in found:
            for need in step.needs:
                visit(need)
            found[step.config.output] = step

    for step in steps:
        visit(step)
    return [*found.values()]

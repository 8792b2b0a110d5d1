"""A plan and its cost, for a person to look at before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from calibeam import display, recipe
from calibeam.pipeline import Step
from calibeam.studies import cost
from calibeam.studies.plan import Row, in_order
from calibeam.studies.results import is_decided, likely


def expected(rows: Iterable[Row]) -> list[Step]:
    """The distinct steps of a plan. Which point of a row will be measured makes no difference to their number."""
    return in_order([step for row in rows for step in (*row.trials, likely(row).measured)])


def show(name: str, rows: Sequence[Row]) -> None:
    """Rows, distinct steps, which of them are there, and what the others cost."""
    display.table(
        f"{name}: {len(rows)} rows",
        ("task", "row", "to choose from", "measured in"),
        [
            (
                row.task,
                ", ".join(str(label) for label in row.labels.values() if label != ""),
                f"{len(row.points)} points" if row.is_open else "",
                _name(likely(row).measured) if is_decided(row) else "the best point's",
            )
            for row in rows
        ],
        figures=False,
    )
    steps = expected(rows)
    needed = [{step.config.output for step in expected([row])} for row in rows]
    flops, seconds = {step.config.output: cost.flops(step) for step in steps}, cost.seconds(steps)
    display.table(
        f"{len(steps)} distinct steps",
        ("step", "what", "rows", "FLOPs", "time", ""),
        [
            (
                _name(step),
                _described(step, steps),
                sum(step.config.output in places for places in needed),
                _total([flops[step.config.output]], _flops),
                _total([seconds.get(step.config.output)], _time),
                "done" if cost.is_there(step) else "",
            )
            for step in steps
        ],
        figures=False,
    )
    missing = [step for step in steps if not cost.is_there(step)]
    times, operations = ([of.get(step.config.output) for step in missing] for of in (seconds, flops))
    left = f"FLOPs: {_total(operations, _flops)}; time, by steps of the same kinds that were measured: {_total(times, _time)}"
    display.say(
        f"{len(steps) - len(missing)} of {len(steps)} steps are done." + (f" To do: {len(missing)}; {left}" if missing else ""),
        style="bold",
    )


def _name(step: Step) -> str:
    return Path(step.config.output).name


def _described(step: Step, steps: Sequence[Step]) -> str:
    """The settings that tell it from the other steps of its stage."""
    others = [recipe.plain(each.config.identity()) for each in steps if each.stage == step.stage]
    own = step.config.identity()
    return " ".join(f"{name}={value}" for name, value in own.items() if any(other[name] != value for other in others))


def _total(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    unknown = len(values) - len(known)
    return ", ".join(
        [form(sum(known))] * bool(known) + [f"unknown of {unknown}" if len(values) > 1 else "unknown"] * bool(unknown)
    )


def _flops(value: float) -> str:
    return f"{value:.2g}"


def _time(value: float) -> str:
    minutes, rest = divmod(round(value), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{value:.1f} s"

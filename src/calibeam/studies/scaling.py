"""Quality against what it costs to decode, over model sizes and numbers of candidates (section 3.5, figure 3).

Reads:   a recipe, and in [study.models.NAME] what differs from it for each model: its `model`, or its `[create]`
Writes:  R1/R2/RL and R_m of every model, fine-tuned and calibrated, with the FLOPs of one source by the appendix
Example: calibeam study scaling samsum.toml study.models.small.model=out/small study.models.base.model=out/base
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from calibeam import figures
from calibeam.records import CalibeamError
from calibeam.studies import published, table
from calibeam.studies.ablation import REWARD, SHARED
from calibeam.studies.plan import CALIBRATED, FINE_TUNED, Config, Row, Subject, decoder, overlay
from calibeam.studies.results import Record

SPLIT = "validation"
PAPER = published.SCALING


def rows(subjects: Sequence[Subject], config: Config) -> list[Row]:
    return [row for subject in subjects for name, own in _models(subject, config) for row in _rows(name, own, config)]


def _models(subject: Subject, config: Config) -> Iterator[tuple[str, Subject]]:
    """The subject with each of the models."""
    models: dict[str, Any] = config.models or {Path(subject.tables.get("model", "model")).name: {}}
    for name, patch in models.items():
        if not isinstance(patch, dict):
            raise CalibeamError(f"study.models.{name} must be a table of what differs from the recipe, got {patch!r}")
        yield name, dataclasses.replace(subject, tables=overlay(subject.tables, patch), _runs={})


def _rows(name: str, subject: Subject, config: Config) -> Iterator[Row]:
    """Each number of candidates of the calibrated model is compared with the same of the fine-tuned one."""
    held = overlay(SHARED, REWARD, decoder(subject.tables, "beam")) if config.around == "paper" else {}
    for number in config.num_candidates:
        tuned, calibrated = ({"model": name, "slic": slic, "candidates": number} for slic in ("fine-tuned", "calibrated"))
        yield Row(subject.task, tuned, subject.points(FINE_TUNED, held, alphas=config.alphas, num_candidates=number))
        points = subject.points(CALIBRATED, held, learning_rates=subject.learning_rates, num_candidates=number)
        yield Row(subject.task, calibrated, points, tuned)


def make_table(records: Sequence[Record]) -> table.Table:
    order = {"fine-tuned": 0, "calibrated": 1}
    return table.pivot(
        "Scaling",
        sorted(records, key=lambda record: order[record["slic"]]),
        {"slic": "", "model": "model", "candidates": "candidates"},
        {
            "parameters": lambda record: f"{record['parameters'] / 1e6:.1f}M" if record.get("parameters") else "",
            "GFLOPs": lambda record: table.figure(record.get("gflops"), ".3g"),
            "R1/R2/RL": table.rouge,
            "R_m (95%)": table.r_m,
            "paper": table.paper_rouge,
        },
        {"Δ R_m against fine-tuned (95%)": table.delta, "p": table.p_value, "paper's Δ": table.paper_delta},
        [
            "GFLOPs: of one source, by the paper's formula, with the mean lengths that were read and written. Parameters are "
            "without embeddings. Name a model 50M, 200M, 500M or 2B to see the paper's figures for that size next to it."
        ],
    )


def make_figure(records: Sequence[Record]) -> figures.Spec:
    panels: dict[str, list[Record]] = {}
    for record in records:
        if record.get("gflops"):
            panels.setdefault(record["task"], []).append({**record, "gflops": float(f"{record['gflops']:.3g}")})
    return table.beside({task: _curves(some) for task, some in panels.items()})


def _curves(some: Sequence[Record]) -> figures.Spec:
    ends, x_title = ("r_m_low", "r_m_high"), "GFLOPs per source"
    return figures.line(some, "gflops", "r_m", "model", interval=ends, dash="slic", x_title=x_title, y_title="R_m", log_x=True)

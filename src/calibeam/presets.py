"""Points of the space of recipes that have a name: the paper's recommendation, and its neighbours.

`preset = "brio"` at the top of a recipe, or `preset=brio` on the command line, lays the settings below under those of the
recipe, which win. What differs from the systems they are named after is said in `docs/studies.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibeam import recipe, stages
from calibeam.records import CalibeamError

Tables = dict[str, Any]

# Zhao et al. 2023, sections 3.3 and 3.6: "a simple recipe"
SLIC: dict[str, Tables] = {
    "finetune": {"select": "perplexity"},
    "decode": {"method": "beam", "num_candidates": 15},
    "score": {"similarity": "decoder"},
    "calibrate": {"loss": "rank", "beta": 10.0, "regularizer": "kl", "batch_size": 64},
}
PRESETS: dict[str, dict[str, Tables]] = {
    "slic": SLIC,
    # The same with what docs/results.md found to help a small model, and the paper's own rate for a large one.
    "all-pairs": {
        **SLIC,
        "calibrate": {**SLIC["calibrate"], "pairs": "all", "learning_rate": [1e-5, 1e-4], "lr_scheduler_type": "linear"},
    },
    # Liu et al. 2022, in the settings that its authors published for CNN/DailyMail
    "brio": {
        "decode": {"method": "diverse_beam", "num_candidates": 16, "diversity": 1.0},
        "score": {"similarity": "rouge"},
        "calibrate": {
            "loss": "list_rank_mean", "beta": 0.001, "length_alpha": 2.0, "regularizer": "cross_entropy",
            "reg_weight": 2e-4,  # 0.1 / 10, and the mean over some 50 tokens where cross entropy here is their sum
            "learning_rate": 2e-5,
        },
    },
    # Edunov et al. 2018: expected risk and token likelihood, in equal parts
    "expected-risk": {
        "decode": {"method": "beam", "num_candidates": 16},
        "score": {"similarity": "rouge"},
        "calibrate": {"loss": "reward", "regularizer": "cross_entropy", "reg_weight": 1.0},
    },
}  # fmt: skip


def lay_under(tables: Tables) -> Tables:
    """The tables with the settings of their preset, if they name one, wherever they have none of their own."""
    name = tables.get("preset", "")
    if not name:
        return tables
    if name not in PRESETS:
        raise CalibeamError(f"unknown preset {name}{recipe.nearest(name, PRESETS)}")
    return under({key: value for key, value in tables.items() if key != "preset"}, PRESETS[name])


def under(tables: Tables, settings: Mapping[str, Any]) -> Tables:
    """The tables with these settings where they have none of their own."""
    return {**tables, **{stage: {**values, **tables.get(stage, {})} for stage, values in asked_for(tables, settings).items()}}


def asked_for(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> Tables:
    """Of the settings, those of stages that run: what the tables do not ask for stays so."""
    return {stage: values for stage, values in settings.items() if stage in tables or stage not in stages.ASKED_FOR}

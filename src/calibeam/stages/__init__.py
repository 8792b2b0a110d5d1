"""The stages, in the order the data walks. Each is a module with a `Config` and `run(config) -> folder`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

STAGES: dict[str, str] = {
    "prepare": "read and check the rows of a dataset",
    "tokenizer": "train a vocabulary on files of documents",
    "create": "make a new model with random weights",
    "pretrain": "train on text, by generating masked sentences",
    "finetune": "train by maximum likelihood",
    "decode": "write candidates for the training sources",
    "score": "measure how similar each candidate is to the target",
    "calibrate": "train further, so that likelihood follows similarity",
    "evaluate": "decode held-out sources and measure the outputs",
    "report": "write one page that says what changed",
    "export": "write an ordinary checkpoint with a model card",
}

ASKED_FOR = frozenset({"tokenizer", "create", "pretrain", "finetune"})
"""Those that run only where a recipe has a table for them."""

TOGETHER = frozenset({"pretrain", "finetune", "decode", "score", "calibrate", "evaluate"})
"""Those that the processes of torchrun work on together. The others are the first one's, while the rest wait."""


def load(name: str) -> Any:
    return import_module(f"calibeam.stages.{name}")


def __getattr__(name: str) -> Any:
    """A stage's module is loaded when it is first used."""
    if name not in STAGES:
        raise AttributeError(f"module 'calibeam.stages' has no attribute {name!r}")
    return load(name)


def __dir__() -> list[str]:
    return [*STAGES, "STAGES", "load"]

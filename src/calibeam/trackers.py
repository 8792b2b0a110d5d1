"""Where the figures of training also go: TensorBoard, Weights & Biases or trackio, by accelerate.

All of them stand in the stage's log.jsonl too, whether anything else is told or not. So a tracker that fails is told no more, and
training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from calibeam import display
from calibeam.records import CalibeamError

NEEDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""The packages of which each needs one."""


def check_installed(names: Sequence[str]) -> None:
    for name in names:
        if find_spec("accelerate") is None or not any(map(find_spec, NEEDS[name])):
            raise CalibeamError(f"report_to={name} needs accelerate and {' or '.join(NEEDS[name])}: pip install them")


class Trackers:
    """What is told; of a tracker that fails, a line says so."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def open(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run = f"{folder.parent.name}-{folder.name}" if folder.parent.name else folder.name
        project = os.environ.get(f"{name.upper()}_PROJECT", "calibeam")
        made = LOGGER_TYPE_TO_CLASS[name]
        with self._or_without(name):
            tracker = made(folder.name, logging_dir=folder.parent / "runs") if name == "tensorboard" else made(project, name=run)
            tracker.start()
            if name != "tensorboard":  # whose table of settings wants a metric for each, and writes a folder of its own
                tracker.store_init_configuration(dict(settings))
            self._told[name] = tracker

    def log(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        for name, tracker in [*self._told.items()]:
            with self._or_without(name):
                tracker.log({f"{kind}/{figure}": value for figure, value in figures.items()}, step=step)

    def finish(self) -> None:
        for name, tracker in [*self._told.items()]:
            with self._or_without(name):
                tracker.finish()

    @contextmanager
    def _or_without(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._told.pop(name, None)
            display.say(f"{name} failed and gets no more figures; log.jsonl has all of them. {error!r}", style="yellow")


@contextmanager
def opened(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[Trackers]:
    """For the stage that writes `folder`; TensorBoard's files go to `runs` beside it, as a stage's folder is sealed.

    The project is WANDB_PROJECT's or TRACKIO_PROJECT's, as in transformers, or else calibeam.
    """
    told = Trackers()
    if names:
        from accelerate import PartialState

        PartialState()  # which trackers ask whether this is the process that tells
    for name in names:
        told.open(name, folder, settings)
    try:
        yield told
    finally:
        told.finish()

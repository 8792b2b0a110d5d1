"""Where the figures of training also go: TensorBoard, Weights & Biases or trackio, by accelerate.

All of them stand in the stage's log.jsonl too, whether anything else is told or not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from calibeam.records import CalibeamError

NEEDS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}
"""The packages of which each needs one."""


def check_installed(names: Sequence[str]) -> None:
    for name in names:
        if find_spec("accelerate") is None or not any(map(find_spec, NEEDS[name])):
            raise CalibeamError(f"report_to={name} needs accelerate and {' or '.join(NEEDS[name])}: pip install them")


class Trackers:
    def __init__(self, trackers: Sequence[Any]) -> None:
        self._trackers = trackers

    def log(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log({f"{kind}/{name}": value for name, value in figures.items()}, step=step)


@contextmanager
def opened(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> Iterator[Trackers]:
    """For the stage that writes `folder`; TensorBoard's files go to `runs` beside it, as a stage's folder is sealed.

    The project is WANDB_PROJECT's or TRACKIO_PROJECT's, as in transformers, or else calibeam.
    """
    if not names:
        yield Trackers(())
        return
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # which trackers ask whether this is the process that tells
    run = f"{folder.parent.name}-{folder.name}" if folder.parent.name else folder.name
    trackers = []
    for name in names:
        project = os.environ.get(f"{name.upper()}_PROJECT", "calibeam")
        made = LOGGER_TYPE_TO_CLASS[name]
        tracker = made(folder.name, logging_dir=folder.parent / "runs") if name == "tensorboard" else made(project, name=run)
        tracker.start()
        if name != "tensorboard":  # whose table of settings wants a metric for each, and writes a folder of its own
            tracker.store_init_configuration(dict(settings))
        trackers.append(tracker)
    try:
        yield Trackers(trackers)
    finally:
        for tracker in trackers:
            tracker.finish()

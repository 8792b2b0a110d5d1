"""Datasets known by name: `TASKS[name](packages, fresh)` gives the splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from calibeam.records import Example
from calibeam.tasks import docstrings

TASKS: dict[str, Callable[[Sequence[str], bool], dict[str, list[Example]]]] = {"docstrings": docstrings.load}

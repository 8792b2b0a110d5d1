"""The paper, as pure functions of tensors and strings: no I/O, no settings, no models.

Nothing in here imports torch: the functions use their tensors' own methods, so the command line can
list the choices of a stage at once. `docs/paper.md` says which equation is where.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = [
    "calibration", "decoding", "flops", "gap_sentences", "likelihood", "metrics", "official", "regularization", "rouge",
    "similarity",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    """A module is loaded when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'calibeam.paper' has no attribute {name!r}")
    return import_module(f"calibeam.paper.{name}")


def __dir__() -> list[str]:
    return __all__

"""A user's own functions: how one is named on the command line, and how a stage's settings know it again.

Importing a module runs it. So a recipe cannot name one: `module:function` counts only where the user typed it, beside
`--allow-code`, on the command line that runs (see `recipe.Typed`).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam.records import CalibeamError

if TYPE_CHECKING:
    from torch import Tensor

FLAG = "--allow-code"


def load(name: str) -> Callable[..., Any]:
    """The function called `module:function`; the module may lie in the current folder."""
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the module does when it runs
        raise CalibeamError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise CalibeamError(f"{name} is not a function, but {type(found).__name__}")
    return found


def name_of(function: Callable[..., Any]) -> str:
    """module:function; of an object that can be called, its class."""
    if isinstance(function, partial):
        return name_of(function.func)
    named = _definition(function)
    return f"{named.__module__}:{named.__qualname__}"


def identity(function: Callable[..., Any]) -> str:
    """The name, and a digest of the source file and the function's place in it: so a stage knows changed code from the same.

    What the file imports, and the values that a closure or an object holds, are not seen.
    """
    if isinstance(function, partial):
        return f"{identity(function.func)} {function.args} {function.keywords}"
    named = _definition(function)
    try:
        file = Path(inspect.getsourcefile(named) or "")
        source = file.read_bytes() if file.is_file() else inspect.getsource(named).encode()
    except (TypeError, OSError):
        raise CalibeamError(f"the source of {name_of(function)} cannot be read: write the function in a file") from None
    line = named.__code__.co_firstlineno if hasattr(named, "__code__") else 0  # two lambdas may have one name
    return f"{name_of(function)} sha256:{hashlib.sha256(b'%d %b' % (line, source)).hexdigest()[:16]}"


def looked_at(function: Callable[..., Tensor], what: str, wanted: Callable[..., Sequence[int]]) -> Callable[..., Tensor]:
    """The function, whose errors are told as its own, and whose tensor must have the shape that is wanted of what it is given."""

    def checked(*given: Any) -> Tensor:
        try:
            found = function(*given)
        except Exception as error:
            raise CalibeamError(f"{what} {name_of(function)}: {type(error).__name__}: {error}") from error
        shape, there = [*wanted(*given)], getattr(found, "shape", None)
        if there is None or [*there] != shape:
            told = f"one of shape {[*there]}" if there is not None else type(found).__name__
            raise CalibeamError(f"{what} {name_of(function)} must give a tensor of shape {shape}, and gave {told}")
        return found

    return checked


def _definition(function: Callable[..., Any]) -> Any:
    return function if hasattr(function, "__qualname__") else type(function)

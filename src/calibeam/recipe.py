"""Recipes: a TOML file with one table per stage, and `key=value` overrides.

Defaults come from the stages' `Config` classes, the recipe's tables override them, and `key=value`
overrides both. An unknown key, a wrong type or a value out of range is an error that names the
nearest right one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import functions
from calibeam.records import CalibeamError

LONGEST = 100_000
"""Characters of a recipe."""
MOST_DOTS = 2000
"""In one line of it: the time that a dotted key takes grows with the square of its parts."""
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
HARDWARE = ("device", "dtype")
"""What a recipe may say at its top of every stage that runs a model."""
LENGTHS = {"max_source_length": ("max_source_length",), "max_target_length": ("max_target_length", "max_new_tokens")}
"""The lengths that a recipe may give once, at its top, and the settings of stages that they are for."""
PLACES = frozenset({
    "data", "model", "candidates", "scored", "reference", "tokenizer", "train", "validation", "test", "path", "files",
    "validation_files", "bertscore_model",
})  # fmt: skip
"""Settings that say where something is read. They are not part of a stage's identity, but what is there is."""


class Typed(str):
    """Text that the user typed on this command line beside --allow-code. No file can hold one."""

    __slots__ = ()


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Callable[[], Iterable[str]] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    identity: bool = True,
) -> Any:
    """A field of a Config. `identity=False` for what does not change a stage's result: places, devices, batch sizes."""
    limits = {"choices": choices, "at_least": at_least, "at_most": at_most, "above": above}
    return dataclasses.field(default=default, metadata={"help": help, "identity": identity, **limits})


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """What every stage has: a place to write to. Checked when made, from a recipe or from Python."""

    output: str = option(help="the folder to write", identity=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):  # from Python
                object.__setattr__(self, field.name, tuple(value))
            _check(field, self.types()[field.name], getattr(self, field.name))

    @classmethod
    @functools.cache
    def types(cls) -> dict[str, Any]:
        """Of the fields."""
        return typing.get_type_hints(cls)

    def identity(self) -> dict[str, Any]:
        """The settings that determine the stage's result, as plain data."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.metadata["identity"]}

    def common(self) -> dict[str, Any]:
        """Those that several processes must have in common to work together: all but the places and devices of each."""
        known = self.identity()
        return {name: value for name, value in self.resolved().items() if name in known or not isinstance(value, str | list)}

    def resolved(self) -> dict[str, Any]:
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class ModelStageConfig(StageConfig):
    """What every stage has that runs a model."""

    device: str = option("auto", "auto: a GPU if there is one", choices=lambda: DEVICES, identity=False)
    dtype: str = option(
        "auto", "of matrix products; auto: bfloat16 on a GPU that has it, float32 on a CPU", choices=lambda: DTYPES
    )


def plain(value: Any) -> Any:
    """As JSON and TOML would have it; a function by its name and a digest of its source."""
    if callable(value):
        return functions.identity(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def read(path: Path) -> dict[str, Any]:
    """A recipe's tables, unchecked."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise CalibeamError(f"no recipe at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CalibeamError(f"recipe {path} cannot be read: {error}") from error
    if len(text) > LONGEST or any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise CalibeamError(f"recipe {path} is not a recipe: it is longer than {LONGEST:,} characters, or a line is full of dots")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        hint = " (text needs quotes)" if str(error).startswith("Invalid value") else ""
        raise CalibeamError(f"recipe {path} is not valid TOML: {error}{hint}") from error


def override(
    tables: dict[str, Any], assignments: Sequence[str], table: str | None = None, *, allow_code: bool = False
) -> dict[str, Any]:
    """The tables with `key=value` or `stage.key=value` put in; a bare key belongs to `table`, or to the top.

    With `allow_code`, a value here (not one in the tables) may name a function as `module:function`.
    """
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in tables.items()}
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator or not path.strip():
            raise CalibeamError(f"{assignment!r} is not key=value")
        *parents, key = path.strip().split(".")
        if not parents and table is not None:
            parents = [table]
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise CalibeamError(f"{path.strip()}: {parent} is not a table")
        value = _value(text.lstrip())  # what ends in a space, such as a prefix, keeps it
        place[key] = _typed(value) if allow_code else value
    return result


def build(config_class: type[StageConfig], table: str, values: dict[str, Any]) -> Any:
    """A stage's Config from a recipe table, with errors that name the table."""
    known = {field.name for field in dataclasses.fields(config_class)}
    for key in values:
        if key not in known:
            raise CalibeamError(f"unknown key {table}.{key}{nearest(key, known)}")
    missing = [
        field.name
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise CalibeamError(f"{table} needs {' and '.join(missing)}")
    try:
        return config_class(**{key: _ready(value, config_class.types()[key]) for key, value in values.items()})
    except CalibeamError as error:
        raise CalibeamError(f"{table}.{error}") from None


def nearest(key: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none: paths and names need no quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return Typed(value) if isinstance(value, str) else value


def _ready(value: Any, wanted: Any) -> Any:
    """Lists as tuples, one item where a list is wanted as a list of one, and the functions that the user typed the names of."""
    if isinstance(value, list):
        return tuple(_loaded(item, wanted) for item in value)
    value = _loaded(value, wanted)
    return (value,) if fits((value,), wanted) and not fits(value, wanted) else value


def _loaded(value: Any, wanted: Any) -> Any:
    is_function = isinstance(value, Typed) and ":" in value and _takes_function(wanted)
    return functions.load(value) if is_function else value


def _takes_function(wanted: Any) -> bool:
    return wanted is Callable or typing.get_origin(wanted) is Callable or any(map(_takes_function, typing.get_args(wanted)))


def _check(field: dataclasses.Field[Any], wanted: Any, value: Any) -> None:
    name, rules = field.name, field.metadata
    if not fits(value, wanted):
        is_list = typing.get_origin(wanted) is tuple and isinstance(value, str) and "," in value
        hint = f"; write it as [{value}]" if is_list else ""
        raise CalibeamError(f"{name} must be {describe(wanted)}, got {value!r}{hint}")
    if rules["choices"] is not None:
        allowed = list(rules["choices"]())
        for item in value if isinstance(value, tuple) else (value,):
            if not callable(item) and item not in allowed:
                own = _takes_function(wanted) and ":" in item
                hint = f"; module:function works only on the command line, with {functions.FLAG}" if own else _hint(item, allowed)
                raise CalibeamError(f"{name} must be one of {', '.join(filter(None, allowed))}, got {item!r}{hint}")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise CalibeamError(f"{name} must be a finite number, got {number}")
        if rules["at_least"] is not None and not number >= rules["at_least"]:
            raise CalibeamError(f"{name} must be at least {rules['at_least']}, got {number}")
        if rules["above"] is not None and not number > rules["above"]:
            raise CalibeamError(f"{name} must be above {rules['above']}, got {number}")
        if rules["at_most"] is not None and not number <= rules["at_most"]:
            raise CalibeamError(f"{name} must be at most {rules['at_most']}, got {number}")


def _hint(item: Any, allowed: list[str]) -> str:
    several = [part.strip() for part in str(item).split(",")]
    if len(several) > 1 and set(several) <= set(allowed):
        return f"; write several as {json.dumps(several)}"
    close = difflib.get_close_matches(str(item), allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def fits(value: Any, wanted: Any) -> bool:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted is types.NoneType:
        return value is None
    return callable(value) if origin is Callable or wanted is Callable else isinstance(value, wanted)


def describe(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", types.NoneType: "nothing"}
    if wanted in names:
        return names[wanted]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(one) for one in arguments)
    if origin is tuple:
        return f"a list, each {describe(arguments[0])}"
    return "a table" if origin is dict else "a function"

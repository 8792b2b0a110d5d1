from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from calibeam import functions
from calibeam.records import CalibeamError


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a module into the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(name: str, text: str) -> Path:
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        (tmp_path / f"{name}.py").write_text(text)
        return tmp_path / f"{name}.py"

    return write


def test_a_function_is_found_in_the_current_folder_and_in_packages(module: Callable[[str, str], Path]) -> None:
    module("own_one", "class Some:\n    @staticmethod\n    def thing(): return 7\n")
    assert functions.load("own_one:Some.thing")() == 7
    assert functions.load("os.path:basename")("a/b") == "b"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "no_such_module:f cannot be loaded: ModuleNotFoundError"),
        ("os.path:no_such", "os.path:no_such cannot be loaded: AttributeError"),
        ("os.path:sep", "os.path:sep is not a function, but str"),
        (":f", "cannot be loaded: ValueError"),
        ("own_bad:f", "own_bad:f cannot be loaded: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_named(name: str, message: str, module: Callable[[str, str], Path]) -> None:
    module("own_bad", "1 / 0")
    with pytest.raises(CalibeamError, match=message):
        functions.load(name)


def test_changed_code_has_another_identity_and_the_same_code_the_same(module: Callable[[str, str], Path]) -> None:
    module("own_two", "def f(): return 1\n")
    first = functions.identity(functions.load("own_two:f"))
    assert first.startswith("own_two:f sha256:")
    module("own_two", "def f(): return 1\n")
    assert functions.identity(functions.load("own_two:f")) == first
    module("own_two", "LEAST = 2\ndef f(): return LEAST\n")
    assert functions.identity(functions.load("own_two:f")) != first


def test_two_lambdas_are_two_functions() -> None:
    one = lambda: 1  # noqa: E731
    two = lambda: 2  # noqa: E731
    assert functions.identity(one) == functions.identity(one) != functions.identity(two)
    assert functions.name_of(one) == functions.name_of(two)


def multiply(value: int, by: int) -> int:
    return value * by


class Length:
    def __call__(self, text: str) -> int:
        return len(text)

    def twice(self, text: str) -> int:
        return 2 * len(text)


def test_what_is_bound_to_a_function_counts_and_an_object_has_its_class() -> None:
    twice, thrice = partial(multiply, by=2), partial(multiply, by=3)
    assert functions.identity(twice) == functions.identity(partial(multiply, by=2)) != functions.identity(thrice)
    assert functions.name_of(twice) == f"{__name__}:multiply"
    assert functions.identity(Length()).startswith(f"{__name__}:Length sha256:")
    assert functions.identity(Length().twice).startswith(f"{__name__}:Length.twice sha256:")


def test_a_function_without_source_is_refused() -> None:
    with pytest.raises(CalibeamError, match="the source of builtins:len cannot be read"):
        functions.identity(len)

"""The embedded task: what is taken from a package, and that nothing gives the answer away."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from calibeam.records import CalibeamError
from calibeam.tasks import docstrings


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A package on the path, of the files given."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(files: dict[str, str], name: str = "madeup_package") -> str:
        for file, text in {"__init__.py": "", **files}.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")
        return name

    return make


def found(name: str) -> dict[str, tuple[str, str]]:
    """Source and line by name, without the package's."""
    return {full.removeprefix(f"{name}."): (source, line) for full, source, line in docstrings.pairs(name)}


def names_in(split: str) -> Iterator[str]:
    """Names of functions that belong to a split."""
    return (name for i in itertools.count() if docstrings.split_of(name := f"name{i}") == split)


EVERYTHING = '''
    """The docstring of the module itself."""

    def function(x: int) -> int:
        """Add one to a number.

        And a second paragraph with details.
        """
        return x + 1

    async def wait(seconds):
        """Wait for some seconds."""
        await sleep(seconds)

    @decorator
    class Shape:
        """A shape with a size."""

        size = 3

        def area(self):
            """Give the area of it."""
            return self.size**2

        class Corner:
            """One corner of a shape."""

            angle = 90

        def silent(self):
            """Only a docstring, no code."""

    def outer():
        """Make an inner function."""

        def inner():
            """Return the answer given."""
            return 42

        return inner

    def undocumented():
        return 1
'''


def test_functions_methods_classes_coroutines_and_nested_ones_are_found(package: Any) -> None:
    assert {name: line for name, (_, line) in found(package({"m.py": EVERYTHING})).items()} == {
        "m.function": "Add one to a number.",
        "m.wait": "Wait for some seconds.",
        "m.Shape": "A shape with a size.",
        "m.Shape.area": "Give the area of it.",
        "m.Shape.Corner": "One corner of a shape.",
        "m.outer": "Make an inner function.",
        "m.outer.inner": "Return the answer given.",
    }


def test_sources_are_the_code_without_any_docstring(package: Any) -> None:
    sources = {name: source for name, (source, _) in found(package({"m.py": EVERYTHING})).items()}
    assert sources["m.function"] == "def function(x: int) -> int:\n    return x + 1"
    assert sources["m.wait"] == "async def wait(seconds):\n    await sleep(seconds)"
    assert sources["m.outer"] == "def outer():\n\n    def inner():\n        return 42\n    return inner"
    assert "def area(self)" in sources["m.Shape"]
    assert "silent" not in sources["m.Shape"]
    texts = [node.value for node in ast.walk(ast.parse(dedent(EVERYTHING))) if isinstance(node, ast.Constant)]
    for text, source in itertools.product(filter(lambda text: isinstance(text, str), texts), sources.values()):
        assert text not in source
        assert text.strip().split("\n")[0] not in source


CONDITIONAL = '''
    class Shape:
        """A shape with a size."""

        if fast:
            def area(self):
                """Give the area quickly."""
                return 1
        else:
            def area(self):
                """Give the area slowly."""
                return 2

    def outer():
        """Make an inner function."""
        with lock:
            def inner():
                """Return the answer given."""
                return 42
        return inner
'''


def test_a_docstring_of_a_conditional_definition_is_in_no_source_either(package: Any) -> None:
    pairs = found(package({"m.py": CONDITIONAL}))
    assert {"m.Shape", "m.outer"} <= set(pairs)
    for source, _ in pairs.values():
        assert "Give the area" not in source
        assert "Return the answer" not in source


def test_conditional_definitions_are_found_and_numbered(package: Any) -> None:
    splits = docstrings.load([package({"m.py": CONDITIONAL})])
    lines = {example.id.split(".m.")[1]: example.targets for split in splits.values() for example in split}
    assert lines["Shape.area"] == ("Give the area quickly.",)
    assert lines["Shape.area#2"] == ("Give the area slowly.",)


@pytest.mark.parametrize(
    ("docstring", "line"),
    [
        ("Return the ``name`` of :class:`~a.Thing` here.", "Return the name of a.Thing here."),
        ("\n        Begin on the second line.\n", "Begin on the second line."),
        ("Too short.", None),
        ("x = 1 + 2 == 3", None),
        ("Éncode the name of it.", None),
        ("The following are known:", None),
        ("word " * 25 + "word", None),
        ("", None),
    ],
)
def test_only_a_first_line_that_reads_as_a_sentence_is_a_target(package: Any, docstring: str, line: str | None) -> None:
    name = package({"m.py": f'def f():\n    """{docstring}"""\n    return 1\n'})
    assert found(name) == ({"m.f": ("def f():\n    return 1", line)} if line else {})


def test_a_long_source_is_cut(package: Any) -> None:
    name = package({"m.py": 'def f():\n    """Return a long text."""\n    return "' + "x" * 5000 + '"\n'})
    source, _ = found(name)["m.f"]
    assert len(source) == docstrings.LONGEST_SOURCE


# The split


def test_the_split_depends_on_the_bare_name_only() -> None:
    for name in ("flush", "name1", "name2", "name17", "name40"):
        others = [f"a.b.{name}", f"other.Class.{name}", f"_{name}", f"__{name}__", name.upper(), f"x.y.z.{name}"]
        assert {docstrings.split_of(other) for other in others} == {docstrings.split_of(name)}


def test_about_six_in_a_hundred_names_are_in_each_held_out_split() -> None:
    splits = [docstrings.split_of(f"name{i}") for i in range(10_000)]
    assert 0.05 < splits.count("validation") / 10_000 < 0.07
    assert 0.05 < splits.count("test") / 10_000 < 0.07


def test_every_example_is_in_the_split_of_its_name(package: Any) -> None:
    names = [next(names_in(split)) for split in ("train", "validation", "test")]
    code = "".join(f'def {name}():\n    """Give the number {name} back."""\n    return "{name}"\n' for name in names)
    splits = docstrings.load([package({"m.py": code})])
    assert {split: [example.id for example in rows] for split, rows in splits.items()} == {
        "train": [f"madeup_package.m.{names[0]}"],
        "validation": [f"madeup_package.m.{names[1]}"],
        "test": [f"madeup_package.m.{names[2]}"],
    }


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_twin_of_a_training_example_is_not_held_out(package: Any, split: str) -> None:
    train, (same_line, own) = next(names_in("train")), itertools.islice(names_in(split), 2)
    code = f'''
        class {train}:
            """Hold the number three."""

            number = 3

        def {same_line}():
            """Hold the number - THREE."""
            return 4

        def {own}():
            """Give something else back."""
            return 5
    '''
    splits = docstrings.load([package({"m.py": code})])
    assert [example.id for example in splits["train"]] == [f"madeup_package.m.{train}"]
    assert [example.id for example in splits[split]] == [f"madeup_package.m.{own}"]


def test_the_same_code_with_the_same_line_is_taken_once(package: Any) -> None:
    text = f'def {next(names_in("train"))}():\n    """Give the number one back."""\n    return 1\n'
    splits = docstrings.load([package({"a.py": text, "b.py": text, "c.py": text.replace("one", "two")})])
    assert [example.id.split(".")[1] for example in splits["train"]] == ["a", "c"]


def test_definitions_of_one_name_have_ids_of_their_own(package: Any) -> None:
    name = next(names_in("train"))
    text = "".join(
        f'def {name}():\n    """Give the {word} number back."""\n    return "{word}"\n' for word in ("first", "second")
    )
    splits = docstrings.load([package({"m.py": text})])
    assert [example.id for example in splits["train"]] == [f"madeup_package.m.{name}", f"madeup_package.m.{name}#2"]


def test_the_splits_are_the_same_every_time(package: Any) -> None:
    name = package({"m.py": EVERYTHING, "sub/n.py": CONDITIONAL})
    assert docstrings.load([name]) == docstrings.load([name])


# Files


def documented(name: str) -> str:
    return f'def {name}():\n    """Give the number {name} back."""\n    return "{name}"\n'


def test_nothing_is_imported(package: Any, tmp_path: Path) -> None:
    bomb = f'open({str(tmp_path / "ran")!r}, "w")\nraise SystemExit("imported")\n'
    name = package({"__init__.py": bomb + documented("top"), "m.py": bomb + documented("deep")}, "madeup_bomb")
    assert set(found(name)) == {"__init__.top", "m.deep"}
    assert not (tmp_path / "ran").exists()
    assert name not in sys.modules


def test_tests_and_vendored_copies_are_left_out(package: Any) -> None:
    left_out = ("tests/a.py", "test/a.py", "testing/a.py", "_vendor/a.py", "sub/tests/a.py", "test_b.py")
    name = package({**{file: documented("f") for file in left_out}, "sub/c.py": documented("g")})
    assert set(found(name)) == {"sub.c.g"}


def test_files_that_are_not_python_are_skipped(package: Any, tmp_path: Path) -> None:
    name = package({"good.py": documented("f"), "python2.py": "print 'hello'\n", "empty.py": ""})
    (tmp_path / name / "latin.py").write_bytes(b"# caf\xe9\n" + documented("g").encode())
    (tmp_path / name / "nul.py").write_bytes(b"\0\0" + documented("g").encode())
    assert set(found(name)) == {"good.f"}


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")], ids=["folder", "broken link"])
def test_what_only_looks_like_a_file_is_skipped(package: Any, tmp_path: Path, make: Any) -> None:
    name = package({"good.py": documented("f")})
    make(tmp_path / name / "odd.py")
    assert set(found(name)) == {"good.f"}


def test_code_nested_too_deep_to_be_written_out_is_skipped(package: Any) -> None:
    deep = f'def sum_of_many():\n    """Add very many numbers up."""\n    return {" + ".join(["x"] * 1500)}\n'
    name = package({"a.py": documented("f"), "b.py": deep, "c.py": documented("g")})
    assert {"a.f", "c.g"} <= set(found(name))


@pytest.mark.parametrize("name", ["no_such_package_at_all", "../etc", "a b", "", "json.decoder", "antigravity"])
def test_what_is_not_an_installed_package_is_an_error_with_its_name(name: str) -> None:
    with pytest.raises(CalibeamError, match=rf"^prepare\.packages: {name} is not an installed package$"):
        docstrings.load([name])
    assert "antigravity" not in sys.modules


def test_the_standard_library_is_a_dataset_that_gives_nothing_away() -> None:
    stdlib = docstrings.load([docstrings.STDLIB])
    assert len(stdlib["train"]) > 3000
    assert len(stdlib["validation"]) > 100
    assert len(stdlib["test"]) > 100
    ids = [example.id for examples in stdlib.values() for example in examples]
    assert len(set(ids)) == len(ids)
    for split, examples in stdlib.items():
        assert all(docstrings.split_of(example.id.split("#")[0]) == split for example in examples)
    known = {text for example in stdlib["train"] for text in (example.source, *example.targets)}
    for example in (*stdlib["validation"], *stdlib["test"]):
        assert example.source not in known
        assert example.targets[0] not in known
    whole = [example.source for split in stdlib.values() for example in split if len(example.source) < docstrings.LONGEST_SOURCE]
    assert len(whole) > 3000
    for source in whole:
        for node in ast.walk(ast.parse(source + "\n    pass" if source.endswith(":") else source)):
            assert not isinstance(node, docstrings.Definition) or ast.get_docstring(node) is None, source

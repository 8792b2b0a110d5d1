"""The embedded task: say in one line what a piece of Python does.

The docstrings of installed packages are a real dataset that every machine with calibeam has: the
source is a function's or class's code without its docstring, the target the docstring's first line.
Files are parsed, never imported.

The split goes by a hash of the bare name: everything called `flush`, in whatever class or package, is
on one side. Copies of a function keep its name, so they stay on one side too, and the split is the
same on every machine whatever else is installed there. What still has a twin in the training split
(the same code, or the same line) is left out of the other two.

The demo's model was trained on the training split. `fresh` takes all three splits from the names that
it has never seen, which is what the demo calibrates on: `docs/decisions.md` says why.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
import re
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from calibeam import signals
from calibeam.records import CalibeamError, Example
from calibeam.tasks.task import Task

STDLIB = "stdlib"
SKIPPED_FOLDERS = frozenset({"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "__pycache__", "_vendor"})
LONGEST_SOURCE = 1200
FILES_AT_ONCE = 32  # read by one process
SPLITS = {"test": range(6), "validation": range(6, 12), "train": range(12, 100)}
FRESH = {"test": range(20), "validation": range(20, 30), "train": range(30, 100)}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def load(packages: Sequence[str], fresh: bool = False) -> dict[str, list[Example]]:
    """The splits, in a fixed order, without twins."""
    splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    for package in packages:
        for name, source, target in pairs(package):
            key = _normal(source + target)
            if key not in seen:
                seen.add(key)
                splits[split_of(name)].append(Example(name, source, (target,)))
    known = {_normal(text) for example in splits["train"] for text in (example.source, *example.targets)}
    for split in ("validation", "test"):
        splits[split] = [
            example for example in splits[split] if not known & {_normal(text) for text in (example.source, *example.targets)}
        ]
    if fresh:
        held_out = [*splits["validation"], *splits["test"]]
        splits = {split: [e for e in held_out if _place(e.id, "fresh") in part] for split, part in FRESH.items()}
    return {split: _with_unique_ids(examples) for split, examples in splits.items()}


def pairs(package: str) -> Iterator[tuple[str, str, str]]:
    """(qualified name, code, first line of the docstring) of everything in a package that has all three."""
    root = _root(package)
    files = [file for file in sorted(root.rglob("*.py")) if not _is_skipped(file.relative_to(root).parts)]
    read = partial(_pairs_of_file, package, root)
    if len(files) <= FILES_AT_ONCE:
        yield from itertools.chain.from_iterable(map(read, files))
        return
    with ProcessPoolExecutor(initializer=signals.leave_to_parent) as pool:
        yield from itertools.chain.from_iterable(pool.map(read, files, chunksize=FILES_AT_ONCE))


def _is_skipped(parts: tuple[str, ...]) -> bool:
    return bool(SKIPPED_FOLDERS & set(parts[:-1])) or parts[-1].startswith("test_")


def _pairs_of_file(package: str, root: Path, file: Path) -> list[tuple[str, str, str]]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, RecursionError, ValueError):
        return []
    module = ".".join([package, *file.relative_to(root).with_suffix("").parts])
    found = [(name, node, _first_line(ast.get_docstring(node))) for name, node in _definitions(tree, module)]
    for _, node, _ in found:  # all of them before any is written: a class must not give away its methods' lines
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    lines = [(name, _code(node), line) for name, node, line in found if line and node.body]
    return [(name, code, line) for name, code, line in lines if code]


def split_of(name: str) -> str:
    return next(split for split, part in SPLITS.items() if _place(name) in part)


def _place(name: str, salt: str = "") -> int:
    """Of a bare name among the hundredths that the splits share out."""
    bare = name.rsplit(".", 1)[-1].strip("_").lower()
    return int.from_bytes(hashlib.sha256((salt + bare).encode()).digest()[:8]) * 100 >> 64


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _definitions(child, name)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child, prefix)


def _code(node: Definition) -> str | None:
    beginning = copy.copy(node)
    beginning.body = [part for part in node.body[:20] if not isinstance(part, Definition) or part.body]
    try:
        return ast.unparse(beginning)[:LONGEST_SOURCE]
    except RecursionError:
        return None


def _first_line(docstring: str | None) -> str | None:
    """The first line, if it reads as a sentence of English."""
    line = (docstring or "").strip().split("\n", 1)[0].strip()
    line = re.sub(r":\w+:`~?([^`]*)`", r"\1", line).replace("``", "").replace("`", "")
    words = line.split()
    plain = sum(word.strip(".,()").isalpha() for word in words)
    whole = line.isascii() and line[:1].isalpha() and (line[-1].isalnum() or line[-1] == ".")
    return line if whole and 3 <= len(words) <= 25 and plain >= 0.6 * len(words) else None


def _root(package: str) -> Path:
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise CalibeamError(f"prepare.packages: {package} is not an installed package")
    return Path(next(iter(spec.submodule_search_locations)))


def _normal(text: str) -> str:
    return hashlib.sha256(re.sub(r"\W+", " ", text.lower()).strip().encode()).hexdigest()


def _with_unique_ids(examples: list[Example]) -> list[Example]:
    """Overloads and conditional definitions share a qualified name: number them."""
    times: dict[str, int] = {}
    unique = []
    for example in examples:
        times[example.id] = times.get(example.id, 0) + 1
        suffix = "" if times[example.id] == 1 else f"#{times[example.id]}"
        unique.append(Example(example.id + suffix, example.source, example.targets))
    return unique


TASK = Task(
    name="docstrings",
    about="the embedded one: Python code and the first line of its docstring, from installed packages",
    fields="code, docstring",
    source="the code without its docstring",
    max_source_length=160,
    max_target_length=24,
    metric="rouge",
    generate=load,
)

"""What a task is, and which published file belongs to which split."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibeam.paper.metrics import Properties
from calibeam.records import CalibeamError, Example
from calibeam.rows import Complaint, is_readable, kind

SPLITS = ("train", "validation", "test")
UNSPLIT = "all"
NAMES = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test"}
WRONG_FORM = (KeyError, TypeError, AttributeError, IndexError)

Row = dict[str, Any]
Scores = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What the paper says of a dataset: a row of its table of datasets, and of its table of final results."""

    examples: str
    """train / validation / test"""
    properties: Properties
    finetuned: Scores
    """R1, R2, RL of the 2B model."""
    calibrated: Scores
    learning_rate: float
    reported_on: str = "test"
    """With "validation", references of the test split were not public."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A dataset known by name."""

    name: str
    about: str
    fields: str
    """Of a published row: those that are read."""
    source: str
    """What the model reads: the prompt."""
    max_source_length: int
    max_target_length: int
    metric: str
    """The official evaluation."""
    hub: str = ""
    """The address of its files on the Hub, at a commit."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By split, or UNSPLIT, a pattern under that address."""
    documents: Callable[[Row], Iterator[Row]] = lambda row: iter([row])
    """The published rows in an object of a file: itself, unless it is a document that holds many."""
    rows: Callable[[Row, str], Iterator[Row]] | None = None
    """A published row of a split as rows of id, source and target: none, one, or several."""
    split_lists: str = ""
    """The pattern of files that say which split a row belongs to, by its `group`."""
    paper: Paper | None = None
    generate: Callable[[Sequence[str], bool], dict[str, list[Example]]] | None = None
    """For the embedded task: its splits, from installed packages."""

    def hides(self, split: str) -> bool:
        """Whether the references of a split were not published with it."""
        return split == "test" and self.paper is not None and self.paper.reported_on != "test"

    def unpack(self, found: Iterator[Any], place: str) -> Iterator[Any]:
        """The published rows of a file, whatever documents they are in; or a Complaint."""
        for row in found:
            try:
                yield from self.documents(row) if isinstance(row, dict) and "source" not in row else [row]
            except WRONG_FORM as error:
                raise CalibeamError(f"{place} is not of a form that {self.name} is published in: {error!r}") from error

    def plain(self, row: Any, split: str) -> Iterator[Any]:
        """A published row as rows of id, source and target, which it may be already; or a Complaint."""
        assert self.rows is not None
        if not isinstance(row, dict) or "source" in row:
            yield {**row, "target": row["targets"]} if isinstance(row, dict) and "targets" in row else row
            return
        try:
            yield from self.rows(row, split)
        except KeyError as error:
            yield Complaint(f"no field {error}; it has {', '.join(map(repr, row)) or 'none'}")
        except WRONG_FORM as error:
            yield Complaint(f"not a row of {self.name} as published: {error}")

    def find(self, path: Path) -> dict[str, list[str]]:
        """The files of every split in a folder; or one file, of a dataset that is published without a split."""
        if not path.exists():
            raise CalibeamError(f"no folder or file at {path}")
        found = {UNSPLIT: [path]} if path.is_file() else self._sort(path)
        if UNSPLIT in self.files and len(found) == 1:
            found = {UNSPLIT: next(iter(found.values()))}
        elif missing := [split for split in SPLITS if split not in found and not (split == "test" and self._spares_test(path))]:
            names = f"files of {' and '.join(missing)}" if path.is_dir() else "a folder"
            raise CalibeamError(f"{path}: task={self.name} needs {names}")
        for split, some in sorted(found.items()):
            if len(set(map(kind, some))) > 1:
                raise CalibeamError(f"{path} has the {split} split in several forms: {', '.join(file.name for file in some)}")
        return {split: [str(file) for file in found[split]] for split in (*SPLITS, UNSPLIT) if split in found}

    def _spares_test(self, path: Path) -> bool:
        return self.hides("test") or bool(self.lists(path))

    def _sort(self, folder: Path) -> dict[str, list[Path]]:
        """By the split that the name of a file, or else of its folder, names."""
        found: dict[str, list[Path]] = {}
        for file in sorted(folder.rglob("*")):
            parts = file.relative_to(folder).parts
            hidden = any(part.startswith(".") or "challenge" in part for part in parts)
            is_list = self.split_lists and file.match(self.split_lists)
            if file.is_file() and is_readable(file) and not hidden and not is_list:
                split = next(filter(None, map(split_of_name, reversed(parts))), UNSPLIT)
                found.setdefault(split, []).append(file)
        if found.keys() & set(SPLITS):
            found.pop(UNSPLIT, None)
        return found

    def lists(self, path: Path) -> dict[str, str]:
        """The split of every group of rows, where files beside the rows say it."""
        folder = path if path.is_dir() else path.parent
        splits: dict[str, str] = {}
        for file in sorted(folder.rglob(self.split_lists)) if self.split_lists else ():
            try:
                text = file.read_text(encoding="utf-8-sig")
                groups = json.loads(text) if file.suffix == ".json" else {split_of_name(file.name): text.split()}
                splits |= {group: split for split in SPLITS for group in groups.get(split, ())}
            except (OSError, ValueError, *WRONG_FORM) as error:
                raise CalibeamError(f"{file} is not a list of what belongs to a split: {error}") from error
        return splits


def split_by_hash(group: str) -> str:
    """Eight of ten to train, one each to validation and test, the same on every machine and in every order."""
    tenth = int.from_bytes(hashlib.sha256(group.encode(errors="replace")).digest()[:8]) * 10 >> 64
    return {0: "test", 1: "validation"}.get(tenth, "train")


def split_of_name(name: str) -> str | None:
    """The split that a file's or folder's name names."""
    return next((split for split, words in NAMES.items() if re.search(rf"(?<![a-z])({words})(?![a-z])", name.lower())), None)

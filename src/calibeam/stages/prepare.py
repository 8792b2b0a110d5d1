"""Read rows of source and target, check every one, and write the splits.

Reads:   JSONL, JSON, CSV, TSV or Parquet files (all but Parquet also as .gz, .xz or .zst), splits of Hub datasets
         (hub:NAME:SPLIT or hub:NAME@REVISION:SPLIT, with the extra calibeam[datasets]), or a task by name:
         from the Hub, or with path=FOLDER from the files it is published as (`calibeam tasks` lists them)
Writes:  train.parquet, validation.parquet and test.parquet with id, source and targets; for a published task
         also properties.json, measured as in the paper's table of datasets
Example: calibeam prepare output=out/data train=train.jsonl validation=val.jsonl source_column=article
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from calibeam import display, rows, store
from calibeam.paper.metrics import Properties, properties
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example
from calibeam.rows import LONGEST_FIELD, Complaint
from calibeam.tasks import TASKS
from calibeam.tasks.task import SPLITS, UNSPLIT, Task, split_by_hash

SHOWN = 5
TOLERATED = 100  # a published dataset may have one row in so many that cannot be used
SPECIAL_TOKENS = re.compile(r"</?s>|<pad>|<unk>|<mask>|<extra_id_\d+>|\[(?:PAD|CLS|SEP|UNK|MASK)\]")


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    train: str = option("", "file of training rows, or hub:NAME:SPLIT", identity=False)
    validation: str = option("", "file of validation rows", identity=False)
    test: str = option("", "file of test rows; without one, half of the validation rows are set aside", identity=False)
    task: str = option("", "a dataset known by name, instead of files", choices=lambda: ("", *TASKS))
    path: str = option("", "for a task: the folder or file of what is published, instead of the Hub", identity=False)
    packages: tuple[str, ...] = option(("stdlib",), "for task=docstrings: the installed packages to read")
    fresh: bool = option(False, "for task=docstrings: only names that the demo's model was not trained on")
    source_column: str = option("source", "the column of the source text")
    target_columns: tuple[str, ...] = option(("target",), "the columns of the references; each a string or a list")
    id_column: str = option("id", "the column of the row's id; rows are numbered where there is none")
    bad_rows: str = option(
        "error", "what to do with rows that cannot be used; a task may have 1 in 100", choices=lambda: ("error", "skip")
    )
    max_train: int = option(0, "keep at most so many rows, chosen by a hash of their id; 0 for all", at_least=0)
    max_validation: int = option(0, "likewise", at_least=0)
    max_test: int = option(0, "likewise", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_columns:
            raise CalibeamError("target_columns must name at least one column")


class Names(NamedTuple):
    """The columns of a row."""

    source: str = "source"
    targets: tuple[str, ...] = ("target",)
    id: str = "id"


class Read:
    """What was read, by split: the rows that can be used, and of every row the source and first reference, to be measured."""

    def __init__(self) -> None:
        self.examples: dict[str, list[Example]] = {split: [] for split in SPLITS}
        self.pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
        self._numbers: dict[str, dict[str, int]] = {split: {} for split in SPLITS}

    def take(self, example: Example, split: str, number: int, names: Names) -> str:
        """Keep the example of a row, or say why not."""
        numbers = self._numbers[split]
        if example.id in numbers:
            return f"field {names.id!r} repeats the id {example.id!r} of row {numbers[example.id]}"
        numbers[example.id] = number
        self.examples[split].append(example)
        return ""


def run(config: Config, *, force: bool = False) -> Path:
    task = TASKS[config.task] if config.task else None
    places = _places(config, task)
    lists = task.lists(Path(config.path)) if task and config.path else {}
    inputs = {split: store.read_files(some) for split, some in places.items()}
    if lists:
        inputs["lists"] = store.Folder(Path(config.path), hashlib.sha256(repr(sorted(lists.items())).encode()).hexdigest(), {})
    output = store.Output("prepare", config, inputs, force=force)
    if output.done:
        return output.path
    with output.writing():
        read = _read(places, lists, config, task, output)
        generate = task.generate if task else None
        splits = generate(config.packages, config.fresh) if generate else _with_test(read, places, task, output)
        for split in SPLITS:
            if not splits[split]:
                raise CalibeamError(f"the {split} split is empty" + "".join(f": {place}" for place in places.get(split, [])[:1]))
        if task and not generate:
            _show(task, read.pairs, output)
        splits = {split: _limit(splits[split], getattr(config, f"max_{split}")) for split in SPLITS}
        for split, examples in splits.items():
            output.write_rows(split, ({"id": e.id, "source": e.source, "targets": e.targets} for e in examples), store.EXAMPLES)
            output.counts[split] = len(examples)
        _note_oddities(splits, output)
    for note in output.notes:
        display.say(f"prepare: {note}", style="yellow")
    display.say("prepare: " + ", ".join(f"{len(examples):,} {split}" for split, examples in splits.items()) + " rows")
    return output.path


def _places(config: Config, task: Task | None) -> dict[str, list[str]]:
    """Where the rows of each split are."""
    files = {split: [name] for split in SPLITS if (name := getattr(config, split))}
    if bool(task) == bool(files):
        raise CalibeamError("prepare needs either a task or files: train, validation and, if there is one, test")
    if config.path and (task is None or task.generate):
        raise CalibeamError("path belongs to a task that is published as files")
    if task is None:
        for split in ("train", "validation"):
            if split not in files:
                raise CalibeamError(f"prepare needs a {split} file")
        return files
    if config.path:
        return task.find(Path(config.path))
    return {split: [f"{task.hub}/{pattern}"] for split, pattern in task.files.items()}


def _read(
    places: Mapping[str, Sequence[str]], lists: Mapping[str, str], config: Config, task: Task | None, output: store.Output
) -> Read:
    names = Names() if task else Names(config.source_column, config.target_columns, config.id_column)
    read = Read()
    for part, some in places.items():
        numbers = itertools.count(1)  # for rows without an id
        for place in some:
            problems: list[tuple[int, str]] = []
            taken = 0
            for number, row in _plain_rows(place, part, task):
                split = _split(row, part, lists)
                if split is None:
                    output.counts["rows_in_no_split"] = output.counts.get("rows_in_no_split", 0) + 1
                    continue
                if task and isinstance(row, dict):
                    read.pairs[split].append(_pair(row))
                    if task.hides(split) and row.get("target") == []:
                        continue
                example, problem = _example(row, next(numbers), names)
                problem = read.take(example, split, number, names) if example else problem
                if problem:
                    problems.append((number, problem))
                taken += not problem
            tolerated = config.bad_rows == "skip" or (task is not None and len(problems) * TOLERATED <= taken)
            _report(problems, place, part, tolerated, output)
    return read


def _plain_rows(place: str, part: str, task: Task | None) -> Iterator[tuple[int, Any]]:
    """Rows of id, source and target, or a Complaint, with the number of the row that each stands in."""
    published = task.unpack(rows.read(place), place) if task else rows.read(place)
    for number, row in enumerate(published, start=1):
        for plain in task.plain(row, part) if task else (row,):
            yield number, plain


def _split(row: Any, part: str, lists: Mapping[str, str]) -> str | None:
    """The split of a row: what the lists say of its group, or else that of its file; a hash decides where there is neither."""
    group = row.get("group") if isinstance(row, dict) else None
    if lists and group is not None:
        return lists.get(group)
    return split_by_hash(str(group or row)) if part == UNSPLIT else part


def _pair(row: dict[str, Any]) -> tuple[str, str]:
    target = row.get("target") or ""
    return str(row.get("source") or ""), str(target[0] if isinstance(target, list) else target)


def _report(problems: Sequence[tuple[int, str]], place: str, split: str, tolerated: bool, output: store.Output) -> None:
    """What is wrong with the rows of a file: an error or a note."""
    if not problems:
        return
    listed = "\n  ".join(f"row {number}: {problem}" for number, problem in problems[:SHOWN])
    more = f"\n  and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
    message = f"has {len(problems):,} rows that cannot be used:\n  {listed}{more}"
    if not tolerated:
        raise CalibeamError(f"{place} {message}\nMend them, or pass bad_rows=skip to leave them out")
    output.notes.append(f"skipped: {Path(place).name} {message}")
    output.counts[f"{split}_skipped"] = output.counts.get(f"{split}_skipped", 0) + len(problems)


def _example(row: Any, number: int, names: Names) -> tuple[Example | None, str]:
    """The row as an Example, or what is wrong with it."""
    if isinstance(row, Complaint):
        return None, row
    if not isinstance(row, dict):
        return None, "not an object with fields"
    texts: dict[str, list[str]] = {}
    for column in (names.source, *names.targets):
        if column not in row:
            return None, f"no field {column!r}; it has {', '.join(map(repr, row)) or 'none'}"
        value = row[column]
        values = value if isinstance(value, list) and column != names.source else [value]
        for text in values:
            if not isinstance(text, str):
                return None, f"field {column!r} is {'missing' if text is None else f'a {type(text).__name__}, not text'}"
            if not text.strip():
                return None, f"field {column!r} is empty"
            if len(text) > LONGEST_FIELD:
                return None, f"field {column!r} is over-long: {len(text):,} characters, at most {LONGEST_FIELD:,} are taken"
            if not rows.is_unicode(text):
                return None, f"field {column!r} is not valid Unicode"
        texts[column] = values
    targets = tuple(text for column in names.targets for text in texts[column])
    if not targets:
        return None, f"field {names.targets[0]!r} is empty"
    given = row.get(names.id)
    if given is not None and not isinstance(given, str | int):
        return None, f"field {names.id!r} is a {type(given).__name__}, not text or a whole number"
    if not rows.is_unicode(str(given)):
        return None, f"field {names.id!r} is not valid Unicode"
    return Example(str(number if given is None else given), texts[names.source][0], targets), ""


def _with_test(read: Read, places: Mapping[str, Any], task: Task | None, output: store.Output) -> dict[str, list[Example]]:
    """The splits; where there are no references to test on, validation has to serve."""
    splits = dict(read.examples)
    if task and task.hides("test") and not splits["test"]:
        splits["test"] = splits["validation"]
        output.notes.append("the test split is published without references: as in the paper, validation stands in for it")
    if task is None and "test" not in places:
        splits["validation"], splits["test"] = _halves(splits["validation"])
        output.notes.append("no test file: half of the validation rows, by a hash of their id, became the test split")
    return splits


def _show(task: Task, pairs: Mapping[str, Sequence[tuple[str, str]]], output: store.Output) -> None:
    """The dataset's properties beside the paper's. References that were not published then count as empty, as they did there."""
    assert task.paper is not None
    measured = properties([(s, "" if task.hides(split) else t) for split, some in pairs.items() for s, t in some])
    counts = {split: len(some) for split, some in pairs.items()}
    output.write_json("properties.json", {"examples": counts, **measured._asdict()})

    def line(name: str, examples: str, found: Properties) -> tuple[str, ...]:
        words = f"{found.source_words:.2f}", f"{found.target_words:.2f}"
        return name, examples, *words, f"{found.coverage:.1%}", f"{found.density:.2f}"

    display.table(
        f"{task.name}: examples of train / validation / test, mean words, extractiveness",
        ("", "examples", "source", "target", "coverage", "density"),
        [
            line("here", " / ".join(f"{count:,}" for count in counts.values()), measured),
            line("paper", task.paper.examples, task.paper.properties),
        ],
    )


def _by_hash(example: Example) -> bytes:
    return hashlib.sha256(example.id.encode()).digest()


def _limit(examples: list[Example], most: int) -> list[Example]:
    """The `most` examples of smallest hash, in their own order."""
    if not most or len(examples) <= most:
        return examples
    kept = {example.id for example in sorted(examples, key=_by_hash)[:most]}
    return [example for example in examples if example.id in kept]


def _halves(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    order = sorted(examples, key=_by_hash)
    test = {example.id for example in order[: len(order) // 2]}
    return [e for e in examples if e.id not in test], [e for e in examples if e.id in test]


def _note_oddities(splits: Mapping[str, Sequence[Example]], output: store.Output) -> None:
    """What is no error, and worth knowing."""
    train = {example.source for example in splits["train"]}
    for split in ("validation", "test"):
        leaked = sum(example.source in train for example in splits[split])
        _note(f"{split}_sources_in_train", leaked, f"sources of the {split} split are also in the training split", output)
    every = [example for examples in splits.values() for example in examples]
    twice = sum(len(set(example.targets)) < len(example.targets) for example in every)
    _note("rows_with_a_reference_twice", twice, "rows have the same reference twice", output)
    special = sum(any(map(SPECIAL_TOKENS.search, (example.source, *example.targets))) for example in every)
    what = "a tokenizer that knows them takes them for its own, and a target ends at an end token"
    _note("rows_with_special_tokens", special, f"rows hold special tokens such as </s> as text: {what}", output)


def _note(name: str, count: int, what: str, output: store.Output) -> None:
    if count:
        output.counts[name] = count
        output.notes.append(f"{count:,} {what}")

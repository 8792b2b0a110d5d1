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
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibeam import display, rows, store
from calibeam.paper.metrics import Properties, properties
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example, hash_of, kind_of
from calibeam.rows import LONGEST_FIELD, Complaint
from calibeam.tasks import TASKS
from calibeam.tasks.task import SPLITS, UNSPLIT, Task, split_by_hash

if TYPE_CHECKING:
    import numpy as np

SHOWN = 5
TOLERATED = 100  # a published dataset may have one row in so many that cannot be used
SKIPPED = "skipped: "
SPECIAL_TOKENS = re.compile(r"</?s>|<pad>|<unk>|<mask>|<extra_id_\d+>|\[(?:PAD|CLS|SEP|UNK|MASK)\]")

LETTERS, FOREIGN = re.compile(r"[^\W\d_]"), re.compile(r"[^\W\d_a-zA-Z]")


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    train: str = option("", "file of training rows, or hub:NAME:SPLIT", identity=False)
    validation: str = option("", "file of validation rows", identity=False)
    test: str = option("", "file of test rows; without one, half of the validation rows are set aside", identity=False)
    task: str = option("", "a dataset known by name, instead of files", choices=lambda: ("", *TASKS))
    path: str = option("", "for a task: the folder or file with its published data, instead of the Hub", identity=False)
    packages: tuple[str, ...] = option(("stdlib",), "for task=docstrings: the installed packages to read")
    fresh: bool = option(False, "for task=docstrings: only names that the demo's model was not trained on")
    source_column: str = option("source", "the column of the source text")
    source_prefix: str = option("", "text to put before every source, such as 'summarize: '; mind the space at its end")
    target_columns: tuple[str, ...] = option(("target",), "the columns of the references; each a string or a list")
    id_column: str = option("id", "the column of the row's id; rows are numbered where there is none")
    bad_rows: str = option(
        "error", "what to do with rows that cannot be used; a task may have 1 in 100", choices=lambda: ("error", "skip")
    )
    merge_sources: bool = option(False, "consecutive rows with the same source become one example with all their targets")
    max_train: int = option(0, "keep at most this many rows, chosen by a hash of their id; 0 for all", at_least=0)
    max_validation: int = option(0, "likewise", at_least=0)
    max_test: int = option(0, "likewise", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_columns:
            raise CalibeamError("target_columns must name at least one column")
        if not rows.is_unicode(self.source_prefix):
            raise CalibeamError("source_prefix is not valid Unicode")


class Names(NamedTuple):
    """The columns of a row."""

    source: str = "source"
    targets: tuple[str, ...] = ("target",)
    id: str = "id"


class Split:
    """The rows of a split on their way: in a table on disk, and in memory only a hash of every id.

    With `merges`, as every reference in a row of its own is published: neighbours with one source are one example with all
    their references, under the first one's id.
    """

    def __init__(self, output: store.Output, name: str, *, merges: bool = False) -> None:
        self._output, self._name, self._merges = output, f"{name}-as-read", merges
        self._rows: list[dict[str, Any]] = []
        self._tables = 0
        self._numbers: dict[int, int] = {}
        self._merged = set[int]()
        self.measured: list[array[float]] = [array("d") for _ in Properties._fields]
        """Of every row, whether it can be used or not."""

    def __len__(self) -> int:
        return len(self._numbers) - len(self._merged)

    def take(self, example: Example, number: int, names: Names) -> str:
        """Keep the example of a row, or say why not."""
        key = hash_of(example.id)
        if key in self._numbers:
            return f"field {names.id!r} repeats the id {example.id!r} of row {self._numbers[key]}"
        self._numbers[key] = number
        targets = dict.fromkeys(example.targets) if self._merges else example.targets
        if self._merges and self._rows and self._rows[-1]["source"] == example.source:
            self._merged.add(key)
            self._rows[-1]["targets"] |= targets
            return ""
        if len(self._rows) == store.ROW_GROUP:
            self._write()
        self._rows.append({"id": example.id, "source": example.source, "targets": targets})
        return ""

    def hashes(self) -> np.ndarray:
        import numpy as np

        return np.fromiter((key for key in self._numbers if key not in self._merged), np.uint64, len(self))

    def examples(self) -> Iterator[Example]:
        self._write()
        for table in range(self._tables):
            for row in self._output.read_rows(f"{self._name}-{table}", store.EXAMPLES):
                yield Example(row["id"], row["source"], tuple(row["targets"]))

    def drop(self) -> None:
        for table in range(self._tables):
            self._output.drop(f"{self._name}-{table}")

    def _write(self) -> None:
        if self._rows:
            rows = ({**row, "targets": [*row["targets"]]} for row in self._rows)
            self._output.write_rows(f"{self._name}-{self._tables}", rows, store.EXAMPLES)
            self._rows, self._tables = [], self._tables + 1


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
        read = {name: Split(output, name, merges=config.merge_sources) for name in SPLITS}
        if task and task.generate:
            for name, examples in task.generate(config.packages, config.fresh).items():
                for number, example in enumerate(examples, start=1):
                    read[name].take(example, number, Names())
        else:
            _read(read, places, lists, config, task, output)
        chosen = _chosen(read, places, config, task, output)
        for name, (split, wanted) in chosen.items():
            if not (len(split) if wanted is None else wanted):
                raise CalibeamError(f"the {name} split is empty{_why_empty(name, places, read, output)}")
        if task and not task.generate:
            _show(task, read, output)
        oddities = Oddities()
        for name, (split, wanted) in chosen.items():
            kept: Iterable[Example] = (e for e in split.examples() if wanted is None or hash_of(e.id) in wanted)
            found = oddities.watch(name, kept)
            made = ({"id": e.id, "source": config.source_prefix + e.source, "targets": e.targets} for e in found)
            output.write_rows(name, made, store.EXAMPLES)
        for split in read.values():
            split.drop()
        output.counts |= oddities.rows
        oddities.note(output)
    for note in output.notes:
        display.say(f"prepare: {note}", style="yellow")
    display.say("prepare: " + ", ".join(f"{output.counts[split]:,} {split}" for split in SPLITS) + " rows")
    return output.path


def _why_empty(split: str, places: Mapping[str, Sequence[str]], read: Mapping[str, Split], output: store.Output) -> str:
    if split in places:
        skipped = [note.removeprefix(SKIPPED) for note in output.notes if note.startswith(SKIPPED)]
        why = next((f", as all rows were skipped: {note}" for note in skipped if note.startswith(_name(places[split][0]))), "")
        return why or f": {places[split][0]} has no rows"
    if split == "test" and "validation" in places:
        return (
            ": without a test file, half of the validation rows become the test split, and there is only "
            f"{len(read['validation'])}. Give a test file, or more validation rows"
        )
    return ""


def _places(config: Config, task: Task | None) -> dict[str, list[str]]:
    """Where the rows of each split are."""
    files = {split: [name] for split in SPLITS if (name := getattr(config, split))}
    if bool(task) == bool(files):
        raise CalibeamError("prepare needs either a task or files: train, validation and, if there is one, test")
    if config.path and (task is None or task.generate):
        raise CalibeamError("path is only for a task that is published as files")
    if task is None:
        for split in ("train", "validation"):
            if split not in files:
                raise CalibeamError(f"prepare needs a {split} file")
        return files
    if config.path:
        return task.find(Path(config.path))
    return {split: [f"{task.hub}/{pattern}"] for split, pattern in task.files.items()}


def _read(
    read: Mapping[str, Split],
    places: Mapping[str, Sequence[str]],
    lists: Mapping[str, str],
    config: Config,
    task: Task | None,
    output: store.Output,
) -> None:
    names = Names() if task else Names(config.source_column, config.target_columns, config.id_column)
    for part, some in places.items():
        numbers = itertools.count(1)  # for rows without an id
        for place in some:
            problems: list[tuple[int, str]] = []
            bad = taken = 0
            there: list[str] | None = None  # the columns of the first row
            missing = set[str]() if task else {names.source, *names.targets, *({names.id} - {Names().id})}
            for number, row in _plain_rows(place, part, task):
                split = _split(row, part, lists)
                if split is None:
                    output.counts["rows_in_no_split"] = output.counts.get("rows_in_no_split", 0) + 1
                    continue
                if task and isinstance(row, dict):
                    _measure(row, read[split].measured, task.hides(split))
                    if task.hides(split) and row.get("target") == []:
                        continue
                if missing and isinstance(row, dict):
                    there, missing = there or [*row], missing - row.keys()
                example, problem = _example(row, next(numbers), names)
                problem = read[split].take(example, number, names) if example else problem
                if problem and len(problems) < SHOWN:
                    problems.append((number, problem))
                bad, taken = bad + bool(problem), taken + (not problem)
            if missing and there is not None:
                raise _no_column(min(missing), names, place, there)
            tolerated = config.bad_rows == "skip" or (task is not None and bad * TOLERATED <= taken)
            _report(bad, problems, place, part, tolerated, output)


def _no_column(column: str, names: Names, place: str, there: Sequence[str]) -> CalibeamError:
    """Of which no row has any: it goes by another name."""
    options = {names.id: ("id_column", "--id-column"), names.source: ("source_column", "--source-column")}
    key, option = options.get(column, ("target_columns", "--target-column"))
    several = [part.strip() for part in column.split(",")] if key == "target_columns" else []
    hint = f"; several are written prepare.{key}={json.dumps(several)}" if len(several) > 1 else ""
    return CalibeamError(
        f"no row of {place} has a column {column!r}; it has {', '.join(map(repr, there)) or 'none'}. "
        f"Name the column with prepare.{key} (calibrate-model: {option}){hint}"
    )


def _plain_rows(place: str, part: str, task: Task | None) -> Iterator[tuple[int, Any]]:
    """Rows of id, source and target, or a Complaint, with the number of the row that each stands in."""
    published = task.unpack(rows.read(place), place) if task else rows.read(place)
    try:
        for number, row in enumerate(published, start=1):
            for plain in task.plain(row, part) if task else (row,):
                yield number, plain
    except CalibeamError as error:
        if not place.startswith(rows.HOSTED):
            raise
        raise CalibeamError(f"{error}\nprepare.path=FOLDER reads the published files from a disk instead") from error


def _split(row: Any, part: str, lists: Mapping[str, str]) -> str | None:
    """The split of a row: what the lists say of its group, or else that of its file; a hash decides where there is neither."""
    group = row.get("group") if isinstance(row, dict) else None
    if lists and group is not None:
        return lists.get(group)
    return split_by_hash(str(group or row)) if part == UNSPLIT else part


def _measure(row: dict[str, Any], measured: Sequence[array[float]], hidden: bool) -> None:
    """References that were not published when the paper was written count as empty, as they did there."""
    target = "" if hidden else row.get("target") or ""
    pair = str(row.get("source") or ""), str(target[0] if isinstance(target, list) else target)
    for column, value in zip(measured, properties([pair]), strict=True):
        column.append(value)


def _report(bad: int, problems: Sequence[tuple[int, str]], place: str, split: str, tolerated: bool, output: store.Output) -> None:
    """What is wrong with the rows of a file, some of them by name: an error or a note."""
    if not bad:
        return
    listed = "\n  ".join(f"row {number}: {problem}" for number, problem in problems)
    more = f"\n  and {bad - len(problems):,} more" if bad > len(problems) else ""
    message = f"has {bad:,} {'row' if bad == 1 else 'rows'} that cannot be used:\n  {listed}{more}"
    if not tolerated:
        advice = "Fix them, or leave them out with prepare.bad_rows=skip (calibrate-model: --bad-rows skip)"
        raise CalibeamError(f"{place} {message}\n{advice}")
    output.notes.append(f"{SKIPPED}{_name(place)} {message}")
    output.counts[f"{split}_skipped"] = output.counts.get(f"{split}_skipped", 0) + bad


def _name(place: str) -> str:
    """Without where it lies: notes are for others to read, too."""
    return Path(place).name


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
                return None, f"field {column!r} is {'missing' if text is None else f'{kind_of(text)}, not text'}"
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
        return None, f"field {names.id!r} is {kind_of(given)}, not text or a whole number"
    if not rows.is_unicode(str(given)):
        return None, f"field {names.id!r} is not valid Unicode"
    return Example(str(number if given is None else given), texts[names.source][0], targets), ""


def _chosen(
    read: Mapping[str, Split], places: Mapping[str, Any], config: Config, task: Task | None, output: store.Output
) -> dict[str, tuple[Split, set[int] | None]]:
    """Which rows become each split, by a hash of their ids; None for all. Where none are there to test on, validation serves."""
    validation, test = read["validation"], read["test"]
    kept: dict[str, tuple[Split, np.ndarray]] = {name: (split, split.hashes()) for name, split in read.items()}
    if task and task.hides("test") and not len(test):
        kept["test"] = kept["validation"]
        output.notes.append("the test split is published without references: as in the paper, validation stands in for it")
    if task is None and "test" not in places:
        hashes = validation.hashes()
        hashes.sort()
        kept["validation"], kept["test"] = (validation, hashes[len(hashes) // 2 :]), (validation, hashes[: len(hashes) // 2])
        output.notes.append("no test file: half of the validation rows, by a hash of their id, became the test split")
    chosen: dict[str, tuple[Split, set[int] | None]] = {}
    for name, (split, hashes) in kept.items():
        most = getattr(config, f"max_{name}") or len(hashes)
        hashes.sort()
        chosen[name] = split, None if min(most, len(hashes)) == len(split) else set(hashes[:most].tolist())
    return chosen


def _show(task: Task, read: Mapping[str, Split], output: store.Output) -> None:
    """The dataset's properties beside the paper's."""
    assert task.paper is not None
    counts = {name: len(split.measured[0]) for name, split in read.items()}
    columns = zip(*(split.measured for split in read.values()), strict=True)
    measured = Properties(*(sum(map(sum, parts)) / sum(counts.values()) for parts in columns))
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


class Oddities:
    """What is no error, and worth knowing, counted as the rows go by: those of the training split first."""

    def __init__(self) -> None:
        self.rows = dict.fromkeys(SPLITS, 0)
        self._train: set[int] = set()
        self._leaked, self._twice, self._special, self._unknown = dict.fromkeys(SPLITS, 0), 0, 0, 0

    def watch(self, split: str, examples: Iterable[Example]) -> Iterator[Example]:
        for example in examples:
            self.rows[split] += 1
            source = hash_of(example.source)
            if split == "train":
                self._train.add(source)
            else:
                self._leaked[split] += source in self._train
            self._twice += len(set(example.targets)) < len(example.targets)
            self._special += any(map(SPECIAL_TOKENS.search, (example.source, *example.targets)))
            self._unknown += any(map(_is_unknown_to_rouge, example.targets))
            yield example

    def note(self, output: store.Output) -> None:
        for split in ("validation", "test"):
            what = f"sources of the {split} split are also in the training split"
            _note(f"{split}_sources_in_train", self._leaked[split], what, output)
        _note("rows_with_a_reference_twice", self._twice, "rows have the same reference twice", output)
        what = "a tokenizer that knows them does not treat them as text, and a target ends at an end token"
        _note("rows_with_special_tokens", self._special, f"rows hold special tokens such as </s> as text: {what}", output)
        what = (
            "rows have references mostly in letters that ROUGE does not know (it knows a to z and 0 to 9): ROUGE says nothing "
            "of them. Choose the checkpoint by calibrate.select=similarity, and evaluate by another metric (docs/metrics.md)"
        )
        _note("rows_unknown_to_rouge", self._unknown, what, output)


def _is_unknown_to_rouge(text: str) -> bool:
    return not text.isascii() and 2 * len(FOREIGN.findall(text)) > len(LETTERS.findall(text))


def _note(name: str, count: int, what: str, output: store.Output) -> None:
    if count:
        output.counts[name] = count
        output.notes.append(f"{count:,} {what}")

"""Read rows of source and target, check every one, and write the splits.

Reads:   JSONL, CSV, TSV or Parquet files (JSONL and CSV also as .gz or .xz), splits of Hub datasets
         (hub:NAME:SPLIT or hub:NAME@REVISION:SPLIT, with the extra calibeam[datasets]), or a task by name
Writes:  train.parquet, validation.parquet and test.parquet with id, source and targets
Example: calibeam prepare output=out/data train=train.jsonl validation=val.jsonl source_column=article
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from calibeam import display, store
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example
from calibeam.tasks import TASKS

SPLITS = ("train", "validation", "test")
HUB = "hub:"
LONGEST_FIELD = 1_000_000
SHOWN = 5


class Complaint(str):
    """What a reader has to say of a row that it cannot give."""


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    train: str = option("", "file of training rows, or hub:NAME:SPLIT", identity=False)
    validation: str = option("", "file of validation rows", identity=False)
    test: str = option("", "file of test rows; without one, half of the validation rows are set aside", identity=False)
    task: str = option("", "a dataset known by name, instead of files", choices=lambda: ("", *TASKS))
    packages: tuple[str, ...] = option(("stdlib",), "for task=docstrings: the installed packages to read")
    fresh: bool = option(False, "for task=docstrings: only names that the demo's model was not trained on")
    source_column: str = option("source", "the column of the source text")
    target_columns: tuple[str, ...] = option(("target",), "the columns of the references; each a string or a list")
    id_column: str = option("id", "the column of the row's id; rows are numbered where there is none")
    bad_rows: str = option("error", "what to do with rows that cannot be used", choices=lambda: ("error", "skip"))
    max_train: int = option(0, "keep at most so many rows, chosen by a hash of their id; 0 for all", at_least=0)
    max_validation: int = option(0, "likewise", at_least=0)
    max_test: int = option(0, "likewise", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_columns:
            raise CalibeamError("target_columns must name at least one column")


def run(config: Config, *, force: bool = False) -> Path:
    files = {split: name for split in SPLITS if (name := getattr(config, split))}
    if bool(config.task) == bool(files):
        raise CalibeamError("prepare needs either a task or files: train, validation and, if there is one, test")
    for split in ("train", "validation"):
        if files and split not in files:
            raise CalibeamError(f"prepare needs a {split} file")
    inputs = {split: _as_input(place) for split, place in files.items()}
    output = store.Output("prepare", config, inputs, force=force)
    if output.done:
        return output.path
    with output.writing():
        if config.task:
            splits = TASKS[config.task](config.packages, config.fresh)
        else:
            splits = {split: _read_split(split, place, config, output) for split, place in files.items()}
            if "test" not in splits:
                splits["validation"], splits["test"] = _halves(splits["validation"])
                output.notes.append("no test file: half of the validation rows, by a hash of their id, became the test split")
        splits = {split: _limit(rows, getattr(config, f"max_{split}")) for split, rows in splits.items()}
        for split, rows in splits.items():
            if not rows:
                raise CalibeamError(f"the {split} split is empty" + (f": {files[split]}" if split in files else ""))
            output.write_rows(split, ({"id": r.id, "source": r.source, "targets": r.targets} for r in rows), store.EXAMPLES)
            output.counts[split] = len(rows)
        _note_leaks(splits, output)
    for note in output.notes:
        display.say(f"prepare: {note}", style="yellow")
    display.say("prepare: " + ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items()) + " rows")
    return output.path


def _as_input(place: str) -> store.Folder:
    if place.startswith(HUB):
        digest = hashlib.sha256()
        for row in _hub(place):
            digest.update(json.dumps(row, default=str).encode())
        return store.Folder(Path(place), digest.hexdigest(), {})
    if not Path(place).is_file():
        raise CalibeamError(f"no file at {place}")
    with Path(place).open("rb") as stream:
        return store.Folder(Path(place), hashlib.file_digest(stream, "sha256").hexdigest(), {})


def _read_split(split: str, place: str, config: Config, output: store.Output) -> list[Example]:
    """The usable rows of a file; what is wrong with the others is an error or a count, as the recipe says."""
    path = Path(place)
    every_row = _hub(place) if place.startswith(HUB) else _reader(path)(path)
    rows: list[Example] = []
    problems: list[tuple[int, str]] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(every_row, start=1):
        example, problem = _example(row, number, config)
        if example is not None and example.id in seen:
            problem = f"field {config.id_column!r} repeats the id {example.id!r} of row {seen[example.id]}"
        if problem or example is None:
            problems.append((number, problem))
            continue
        seen[example.id] = number
        rows.append(example)
    if problems:
        listed = "\n  ".join(f"row {number}: {problem}" for number, problem in problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        message = f"has {len(problems):,} rows that cannot be used:\n  {listed}{more}"
        if config.bad_rows == "error":
            raise CalibeamError(f"{place} {message}\nMend them, or pass bad_rows=skip to leave them out")
        output.notes.append(f"skipped: {path.name} {message}")
        output.counts[f"{split}_skipped"] = len(problems)
    return rows


def _example(row: Any, number: int, config: Config) -> tuple[Example | None, str]:
    """The row as an Example, or what is wrong with it."""
    if isinstance(row, Complaint):
        return None, row
    if not isinstance(row, dict):
        return None, "not an object with fields"
    texts: dict[str, list[str]] = {}
    for column in (config.source_column, *config.target_columns):
        if column not in row:
            return None, f"no field {column!r}; it has {', '.join(map(repr, row)) or 'none'}"
        value = row[column]
        values = value if isinstance(value, list) and column != config.source_column else [value]
        for text in values:
            if not isinstance(text, str):
                return None, f"field {column!r} is {'missing' if text is None else f'a {type(text).__name__}, not text'}"
            if not text.strip():
                return None, f"field {column!r} is empty"
            if len(text) > LONGEST_FIELD:
                return None, f"field {column!r} is over-long: {len(text):,} characters, at most {LONGEST_FIELD:,} are taken"
            if _not_unicode(text):
                return None, f"field {column!r} is not valid Unicode"
        texts[column] = values
    targets = tuple(text for column in config.target_columns for text in texts[column])
    if not targets:
        return None, f"field {config.target_columns[0]!r} is empty"
    given = row.get(config.id_column)
    if given is not None and not isinstance(given, str | int):
        return None, f"field {config.id_column!r} is a {type(given).__name__}, not text or a whole number"
    if _not_unicode(str(given)):
        return None, f"field {config.id_column!r} is not valid Unicode"
    return Example(str(number if given is None else given), texts[config.source_column][0], targets), ""


def _not_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _reader(path: Path) -> Callable[[Path], Iterator[Any]]:
    """By the file's ending. A reader yields what is in each row, or a Complaint."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    ending = Path(name).suffix.lower()
    if ending == ".parquet" and name == path.name:
        return _parquet
    readers = {".jsonl": _jsonl, ".json": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".tsv": _csv}
    if ending not in readers:
        raise CalibeamError(f"{path}: unknown kind of file; known are .jsonl, .csv, .tsv and .parquet")
    return readers[ending]


@contextmanager
def _bytes_of(path: Path) -> Iterator[IO[bytes]]:
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CalibeamError(f"{path} cannot be read: {error}") from error


def _jsonl(path: Path) -> Iterator[Any]:
    with _bytes_of(path) as stream:
        for line in stream:
            try:
                text = line.decode("utf-8-sig").strip()
                if text:
                    yield json.loads(text)
            except UnicodeDecodeError:
                yield Complaint("not valid UTF-8")
            except (ValueError, RecursionError) as error:
                yield Complaint(f"not valid JSON: {error}")


def _csv(path: Path) -> Iterator[Any]:
    tab = ".tsv" in path.name.lower()
    csv.field_size_limit(2 * LONGEST_FIELD)
    with _bytes_of(path) as stream:
        rows = csv.reader(
            io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=""),
            delimiter="\t" if tab else ",",
            strict=True,
        )
        try:
            header = next(rows, [])
            for row in rows:
                if len(row) == len(header):
                    yield dict(zip(header, row, strict=True))
                elif row:
                    yield Complaint(f"{len(row)} fields where the header has {len(header)}")
        except csv.Error as error:
            raise CalibeamError(f"{path}, line {rows.line_num}: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise CalibeamError(f"{path} cannot be read: {error}") from error


def _hub(place: str) -> Iterator[Any]:
    """The rows of a dataset's split, from the Hugging Face Hub or a local folder. No loading script is ever run."""
    name, _, split = place.removeprefix(HUB).rpartition(":")
    name, _, revision = name.partition("@")
    if not name or not split:
        raise CalibeamError(f"{place} is not of the form {HUB}NAME:SPLIT or {HUB}NAME@REVISION:SPLIT")
    try:
        from datasets import load_dataset
    except ImportError:
        raise CalibeamError(f"{place} needs the datasets package: pip install 'calibeam[datasets]'") from None
    try:
        yield from load_dataset(name, split=split, revision=revision or None)
    except Exception as error:
        raise CalibeamError(f"{place} cannot be loaded: {str(error).strip().splitlines()[0]}") from error


def _by_hash(example: Example) -> bytes:
    return hashlib.sha256(example.id.encode()).digest()


def _limit(rows: list[Example], most: int) -> list[Example]:
    """The `most` rows of smallest hash, in their own order."""
    if not most or len(rows) <= most:
        return rows
    kept = {row.id for row in sorted(rows, key=_by_hash)[:most]}
    return [row for row in rows if row.id in kept]


def _halves(rows: list[Example]) -> tuple[list[Example], list[Example]]:
    order = sorted(rows, key=_by_hash)
    test = {row.id for row in order[: len(order) // 2]}
    return [row for row in rows if row.id not in test], [row for row in rows if row.id in test]


def _note_leaks(splits: dict[str, list[Example]], output: store.Output) -> None:
    """Sources that stand in the training split and in another."""
    train = {row.source for row in splits["train"]}
    leaks = Counter({split: sum(row.source in train for row in splits[split]) for split in ("validation", "test")})
    for split, count in leaks.items():
        if count:
            output.counts[f"{split}_sources_in_train"] = count
            output.notes.append(f"{count:,} sources of the {split} split are also in the training split")

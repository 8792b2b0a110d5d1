"""Stage folders: what a stage wrote, from what, and proof that it is whole.

A stage writes into `.NAME.partial` beside its output folder and renames it when everything is there;
`manifest.json`, written last, holds the stage's resolved settings, the digests of its inputs,
versions, timings, counts, and the size and SHA-256 of every file. Reading verifies all of it.
What a stage that was interrupted left is gone on with where settings, inputs and versions are the same, and else refused.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import calibeam
from calibeam import display, distributed, parquet, rows, signals
from calibeam.recipe import StageConfig
from calibeam.records import CalibeamError, Example, places_of_some

log = logging.getLogger("calibeam")

FORMAT = 1
MANIFEST = "manifest.json"
ELAPSED = ".seconds"  # of the attempts before, in the same place
ORIGIN = "origin.json"  # in the folder of a stage under way that can be resumed
DECIDING = ("calibeam", "torch", "transformers", "tokenizers")
"""The packages of which one half of a stage must not be made by one version and the other by another, in whichever process."""
PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "nltk", "sacrebleu", "sentencepiece", "peft",
)  # fmt: skip

REMEDY = "--force makes its stage again"
FACTS = b"calibeam"  # under which a shard holds what is to be known of it as a whole
LONGEST_NAME = 255  # bytes
LONGEST_MANIFEST = 1 << 26  # bytes, and more for every file that is there: a billion sources have a million shards
MANIFEST_OF_A_FILE = 512  # bytes; a shard's has 150
ROW_GROUP = 4096  # rows that are written together
SEEN_WITHIN = 60.0  # seconds after which one machine sees what another wrote; NFS may take half as long
SHARED = Path("/dev/shm")
DISK_PROBLEMS = tuple(
    getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "EMFILE", "ENFILE")
)

EXAMPLES = pa.schema([("id", pa.string()), ("source", pa.string()), ("targets", pa.list_(pa.string()))])
CANDIDATES = pa.schema([
    ("id", pa.string()),
    ("method", pa.string()),
    ("seed", pa.int64()),
    ("token_ids", pa.list_(pa.list_(pa.int32()))),
    ("texts", pa.list_(pa.string())),
    ("log_p", pa.list_(pa.float32())),
    ("times_drawn", pa.list_(pa.int32())),
])  # fmt: skip
SCORED = CANDIDATES.append(pa.field("similarity", pa.list_(pa.float32())))


@dataclass(frozen=True)
class Folder:
    """A verified input: a finished stage, or a model's folder."""

    path: Path
    digest: str
    """Of its contents."""
    manifest: dict[str, Any]

    def rows(self, name: str, schema: pa.Schema) -> list[dict[str, Any]]:
        """A table, checked against the schema it should have."""
        return [*self.stream(name, schema)]

    def stream(
        self, name: str, schema: pa.Schema, *, columns: Sequence[str] | None = None, where: tuple[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The same row by row, from one file or from shards in their order; of some columns, and where one has a value."""
        for file in self._files(name):
            yield from _rows(file, schema, columns, where)

    def table(self, name: str, schema: pa.Schema) -> Table:
        """The same, for who reads here and there."""
        return Table(self.path, name, len(self._shards(name)), schema)

    def _files(self, name: str) -> list[Path]:
        """Of a table: one, or shards in their order."""
        return [_file(self.path, name, number) for number in self._shards(name)] or [_file(self.path, name)]

    def _shards(self, name: str) -> list[int]:
        """The numbers of a table's shards, if it is in shards."""
        found = (re.fullmatch(rf"{name}-(\d+)\.parquet", file) for file in self.manifest["files"])
        return sorted(int(match[1]) for match in found if match)

    def examples(self, split: str) -> list[Example]:
        return [*self.stream_examples(split)]

    def stream_examples(self, split: str, most: int = 0) -> Iterator[Example]:
        """All, or at most so many: those whose places are `places_of_some`."""
        self.must_have(split)
        found = map(example_of, self.stream(split, EXAMPLES))
        if not 0 < most < self.count(split):
            return found
        wanted = frozenset(self.places_of_some(split, most))
        return (example for place, example in enumerate(found) if place in wanted)

    def places_of_some(self, split: str, most: int) -> Sequence[int]:
        """In a split, of at most so many examples, or of all for 0."""
        there = self.count(split)
        ids = (row["id"] for row in self.stream(split, EXAMPLES, columns=["id"]))
        return places_of_some(ids, most) if 0 < most < there else range(there)

    def example_table(self, split: str) -> Table:
        self.must_have(split)
        return self.table(split, EXAMPLES)

    def count(self, split: str) -> int:
        self.must_have(split)
        return _count(self.path / f"{split}.parquet")

    def must_have(self, split: str) -> None:
        if split not in self.splits:
            raise CalibeamError(f"{self.path} has no {split} split; it has {', '.join(self.splits)}")

    def must_come_from(self, **inputs: Folder) -> None:
        """Refuse a stage that was made from other inputs than these."""
        for name, folder in inputs.items():
            if self.manifest["origin"]["inputs"].get(name) != folder.digest:
                raise CalibeamError(f"{self.path} was made with a different {name} than {folder.path}")

    def input(self, name: str, kind: str = "") -> Folder:
        """What this stage was made from, a model's folder if no kind is named: beside it, if the whole run was moved, or else
        where it was."""
        place = Path(self.manifest["input_places"][name])
        moved = self.path / os.path.relpath(place, self.manifest["settings"]["output"])
        there = moved if (moved / (MANIFEST if kind else "config.json")).is_file() else place
        folder = read(there, kind) if kind else read_model(there)
        self.must_come_from(**{name: folder})
        return folder

    @property
    def splits(self) -> list[str]:
        return [name.removesuffix(".parquet") for name in self.manifest["files"] if name.endswith(".parquet")]


def example_of(row: dict[str, Any]) -> Example:
    return Example(row["id"], row["source"], tuple(row["targets"]))


def _file(folder: Path, name: str, shard: int | None = None) -> Path:
    """Of a table, or of one of its shards."""
    return folder / (f"{name}.parquet" if shard is None else f"{name}-{shard:05}.parquet")


class Table:
    """The rows of a table by their place. The last file stays open: its footer may take longer to read than some rows."""

    def __init__(self, folder: Path, name: str, shards: int, schema: pa.Schema) -> None:
        """shards: how many there are, 0 for one file. It is sent to workers, so it does not list a million of them."""
        self.folder, self._name, self._shards, self._schema = folder, name, shards, schema
        self._opened: tuple[int, parquet.File] | None = None

    def between(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Shards but the last have as many rows as the first."""
        each = max(_count(self._file(0)), 1) if self._shards > 1 else stop
        return [
            row
            for number in range(start // each, min(-(-stop // each), self._shards or 1))
            for row in _rows_between(self._open(number), start - number * each, stop - number * each)
        ]

    def _open(self, number: int) -> parquet.File:
        if self._opened is None or self._opened[0] != number:
            self._opened = number, _open(self._file(number), self._schema)
        return self._opened[1]

    def _file(self, number: int) -> Path:
        return _file(self.folder, self._name, number if self._shards else None)


def _rows_between(file: parquet.File, start: int, stop: int) -> Iterator[dict[str, Any]]:
    begin = 0
    for number, group in enumerate(file.groups):
        if begin < stop and start < begin + group.rows:
            place = begin
            for batch in _batches(file, number):
                yield from _plain(file, batch[max(start - place, 0) : max(stop - place, 0)])
                place += len(batch)
        begin += group.rows


def _rows(
    file: Path, schema: pa.Schema, columns: Sequence[str] | None = None, where: tuple[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    opened = _open(file, schema)
    wanted = columns and [*columns, *(where or ())[:1]]
    for number in range(len(opened.groups)):
        for batch in _batches(opened, number, wanted):
            yield from _plain(opened, batch.filter(pc.equal(batch[where[0]], where[1])) if where else batch)


def _open(file: Path, schema: pa.Schema) -> parquet.File:
    with _named(file):
        found = parquet.File(file)
    if not found.schema.equals(schema):
        raise CalibeamError(
            f"{file} has columns {found.schema.names}, not {schema.names}: another version of calibeam wrote it. "
            f"Remove {file.parent} and run its stage again"
        )
    return found


def _batches(file: parquet.File, group: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    with _named(file.path):
        yield from file.batches(group, columns)


def _plain(file: parquet.File, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Whether texts are Unicode, and nothing is missing, shows only here."""
    with _named(file.path):
        if missing := [name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _has_gap(column)]:
            raise ValueError(f"a row has no {missing[0]}, or only a part of it")
        return batch.to_pylist()


def _has_gap(column: pa.Array) -> bool:
    return column.null_count > 0 or (pa.types.is_list(column.type) and _has_gap(column.flatten()))


def _count(file: Path) -> int:
    with _named(file), file.open("rb") as stream:
        return sum(group.rows for group in parquet.groups(stream))


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """A manifest that fits proves that a file is the one that was written, not that it was written by us."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, RecursionError, OverflowError) as error:
        raise CalibeamError(f"{file} cannot be read: {error}") from error


def read(path: str | Path, kind: str) -> Folder:
    """Open a finished stage folder of the given kind, verifying every file in it."""
    path = Path(path)
    manifest = _manifest(path)
    if manifest["kind"] != kind:
        raise CalibeamError(f"{path} was written by `{manifest['kind']}`, but `{kind}` output is needed here")
    verify(path, manifest)
    return Folder(path, manifest["digest"], manifest)


def read_model(path: Path) -> Folder:
    """A model's folder as an input: verified against the manifest of the stage that wrote or exported it, if one did."""
    for place in (path, path.parent):
        if (place / MANIFEST).is_file():
            manifest = _manifest(place)
            verify(place, {**manifest, "files": _without_cards(manifest["files"])})
    return Folder(path, _digest(_without_cards(_inventory(path))), {})


def _without_cards(files: dict[str, Any]) -> dict[str, Any]:
    """A model is the same whatever is written about it."""
    return {name: facts for name, facts in files.items() if not name.endswith(".md")}


def read_files(places: Sequence[str]) -> Folder:
    """Files of rows as one input."""
    digests = [rows.digest(place) for place in places]
    together = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return Folder(Path(places[0]), together, {})


def kind(path: Path) -> str:
    """Which stage wrote a folder; nothing where none did."""
    return _manifest(path)["kind"] if (path / MANIFEST).is_file() else ""


def verify(path: Path, manifest: dict[str, Any]) -> None:
    for name, facts in manifest["files"].items():
        file = path / name
        if path.resolve() not in file.resolve().parents or file.is_symlink():
            raise CalibeamError(f"{path / MANIFEST} names a file outside its folder: {name}")
        if not file.is_file():
            raise CalibeamError(f"{file} is missing, though {path / MANIFEST} lists it. {REMEDY}")
        if file.stat().st_size != facts["bytes"] or _sha256(file) != facts["sha256"]:
            raise CalibeamError(f"{file} is damaged: it does not match the size and SHA-256 in {path / MANIFEST}. {REMEDY}")


def _is_whole(path: Path, manifest: dict[str, Any]) -> bool:
    try:
        verify(path, manifest)
    except CalibeamError:
        return False
    return True


def _whole_manifest(path: Path) -> dict[str, Any] | None:
    """If all of the folder is as it says."""
    try:
        manifest = _manifest(path)
    except CalibeamError:
        return None
    return manifest if _is_whole(path, manifest) else None


class MadeOtherwiseError(CalibeamError):
    """What is there was made, or begun, with other settings, inputs or versions."""

    def __init__(self, what: str, changes: Sequence[str]) -> None:
        self.found = what + ":" + "".join(f"\n  {change}" for change in changes)
        super().__init__(
            f"{self.found}\n--force makes this stage again, and in a run those that follow; what it reads is kept. "
            "Or choose another output"
        )


def problem_of_disk(error: BaseException, path: Path) -> CalibeamError | None:
    """A disk that is full, read-only, out of quota or failing, as something a user can mend."""
    if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":  # which has no number, only a text
        return None
    given = getattr(error, "errno", None)
    found = next((number for number in DISK_PROBLEMS if number == given or os.strerror(number) in str(error)), None)
    if found is None:
        return None
    where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    if found == errno.ENOSPC and SHARED.is_dir() and shutil.disk_usage(SHARED).free < 1 << 20:
        where += f", and {SHARED}, which worker processes need a little of, is full"
    return CalibeamError(
        f"{path} cannot be written: {os.strerror(found)} ({shutil.disk_usage(path.parent).free:,} bytes are free there){where}. "
        f"What was finished before is kept; run the same command again when this is fixed"
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What is wrong with the disk that something is written to."""
    try:
        yield
    except BaseException as error:
        if problem := problem_of_disk(error, path):
            raise problem from error
        raise


@dataclass(frozen=True)
class Shards:
    """A table in pieces, each whole or not at all. Whoever has one of these may write them, on whatever machine.

    What is to be known of a piece as a whole, its facts, is written with it: nobody need read it again to add them up. Beside it,
    until the stage is finished, is its digest: a changed bit is noticed wherever it is.
    """

    folder: Path
    name: str
    schema: pa.Schema

    def write(self, number: int, rows: Iterable[dict[str, Any]], facts: dict[str, Any]) -> None:
        file, seal = self._file(number), self._seal(number)
        partial = _write_beside(file, rows, self.schema.with_metadata({FACTS: json.dumps(facts)}))
        seal.write_text(_sha256(partial))
        sync(seal)
        os.replace(partial, file)

    def facts(self, number: int, ids: list[str]) -> dict[str, Any] | None:
        """Of a piece that is there, whole, and has these ids, once or several times over."""
        try:
            if self._seal(number).read_text() != _sha256(self._file(number)):
                return None
            schema = pq.read_schema(self._file(number))
            known = json.loads(schema.metadata[FACTS])
            found = [row["id"] for row in _rows(self._file(number), self.schema, ["id"])] if schema.equals(self.schema) else []
        except (pa.ArrowException, CalibeamError, OSError, TypeError, KeyError, ValueError):
            return None
        return known if found and found == ids * (len(found) // len(ids)) else None

    def rows(self, number: int) -> list[dict[str, Any]]:
        return [*_rows(self._file(number), self.schema)]

    def drop_from(self, number: int) -> None:
        """Those that are too many, of a version that wrote smaller ones."""
        for file in self.folder.glob(f"{self.name}-*.parquet"):
            if int(file.stem.removeprefix(f"{self.name}-")) >= number:
                file.unlink()

    def _file(self, number: int) -> Path:
        return _file(self.folder, self.name, number)

    def _seal(self, number: int) -> Path:
        return self.folder / f".{self.name}-{number:05}.sha256"

    @property
    def seals(self) -> str:
        """As a pattern."""
        return f".{self.name}-*.sha256"


def _write_rows(file: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> None:
    os.replace(_write_beside(file, rows, schema), file)


def _write_beside(file: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> Path:
    """A table that is to be put in the file's place."""
    partial, left = file.with_name(f".{file.stem}.{uuid4().hex}.partial"), iter(rows)  # another machine may be at it too
    # Without dictionaries, of which texts have no use, rows come to what the file says.
    with pq.ParquetWriter(partial, schema, write_page_checksum=True, use_dictionary=False) as writer:
        while some := [*itertools.islice(left, ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
    sync(partial)
    return partial


class Output:
    """A stage folder to be: already `done`, or written inside `with output.writing():`.

    Of several processes the first looks after the folder, and the others only know its place.
    """

    def __init__(
        self, kind: str, config: StageConfig, inputs: dict[str, Folder], *, force: bool = False, is_public: bool = False
    ) -> None:
        """is_public: it is made to be given to others, whom it does not tell where things lie on this disk."""
        self.kind, self.config, self._is_public, place = kind, config, is_public, Path(config.output)
        if not place.name or place.name == "..":
            raise CalibeamError(f"output must name a folder to make, got {config.output!r}")
        if len(os.fsencode(f".{place.name}.partial")) > LONGEST_NAME:
            raise CalibeamError(f"File name too long: {place.name[:40]}...; choose a shorter output")
        self.path = place.resolve() if place.is_symlink() else place  # folders are renamed, which a link is no place for
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        """Where the stage writes its files."""
        self._old = self.path.with_name(f".{self.path.name}.old")
        self.counts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.temporary: tuple[str, ...] = ()
        """Patterns of files that an interrupted run goes on from: they are kept until nothing more can be lost."""
        self._origin = {
            "kind": kind,
            "format": FORMAT,
            "settings": config.identity(),
            "inputs": {name: folder.digest for name, folder in inputs.items()},
        }
        self._places = {name: str(folder.path) for name, folder in inputs.items()}
        self._force = force
        must_agree(str(self.path), {**self._beginning(), "settings": config.common()})
        self.done = distributed.by_first(self._look)
        if self.done:
            display.say(f"{kind}: done already, verified")

    def _look(self) -> bool:
        """Whether it is done; if not, it can be made."""
        self._refuse_links()
        self._adopt()
        if self._is_done():
            return True
        self._check_partial()
        return False

    def _refuse_links(self) -> None:
        """What an interrupted run left may have come from anyone, and writing to a link writes elsewhere."""
        if link := next((file for file in (self.folder, *self.folder.rglob("*")) if file.is_symlink()), None):
            raise CalibeamError(f"{link} is a link, and no stage makes one: remove it")

    def _adopt(self) -> None:
        """Put a folder in its place that a run finished and was stopped before renaming, or back the one it was to replace."""
        if (self.folder / MANIFEST).is_file() and (self._force or is_free(self.path)):
            with _lock(self.path):
                manifest = _whole_manifest(self.folder)
                if manifest and manifest["origin"] == self._origin:
                    self._put_in_place(manifest)
        if not self.path.exists() and self._old.is_dir() and not self._old.is_symlink():
            with _lock(self.path):
                os.replace(self._old, self.path)

    def _is_done(self) -> bool:
        """Whether the folder is there, whole, and made from the same settings and inputs."""
        if is_free(self.path):
            return False
        manifest = _manifest(self.path)  # also with --force, which must not remove what is not ours
        changes = self._changes_since(manifest["origin"], self._origin)
        if self._force:
            return not changes and _is_whole(self.path, manifest)
        if changes:
            raise MadeOtherwiseError(f"{self.path} was made with other settings or inputs", changes)
        verify(self.path, manifest)
        if others := _differences(_releases(manifest["versions"]), _releases(versions())):
            log.warning("%s was made by other versions, and is used as it is: %s", self.path, "; ".join(others))
        return True

    def _check_partial(self) -> None:
        """Refuse to throw away what an interrupted run of other settings, inputs or versions did."""
        if changes := [] if self._force else self._changes():
            began = "was begun, by a run that was interrupted, with other settings, inputs or versions"
            raise MadeOtherwiseError(f"{self.path} {began}", changes)

    def _changes(self) -> list[str]:
        """Between what an interrupted run began and what is to be made now."""
        try:
            left = json.loads((self.folder / ORIGIN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            return [f"{self.folder / ORIGIN} cannot be read: {error}"]
        return self._changes_since(left, self._beginning())

    def _changes_since(self, old: Any, new: dict[str, Any]) -> list[str]:
        """Line by line; an input by its place, as digests say nothing to anybody."""
        told = _differences({**old, "inputs": {}} if isinstance(old, dict) else old, {**new, "inputs": {}})
        inputs = old.get("inputs") if isinstance(old, dict) else None
        before, now = inputs if isinstance(inputs, dict) else {}, new["inputs"]
        told += [f"{name}: no longer given" for name in before if name not in now]
        for name, place in self._places.items():
            if name not in before:
                told.append(f"{name}: {place} now, nothing before")
            elif before[name] != now[name]:
                told.append(f"{place}: other contents")
        return told

    def _beginning(self) -> dict[str, Any]:
        return {**self._origin, "versions": deciding_versions()}

    @contextmanager
    def writing(self, *, resume: bool = False) -> Iterator[Output]:
        """Everything written to `self.folder` appears at `self.path` when the block ends well; nothing otherwise.

        With `resume`, what an interrupted run left in `self.folder` is kept and gone on with.
        """
        if not distributed.is_first():
            self._must_be_seen()  # when the first has made it
            with _explained(self.path):
                yield self
            _wait_for_first()  # to finish it
            self.done = True
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibeamError(f"{self.path} cannot be created: {error}") from error
        with _explained(self.path), _lock(self.path):
            origin, clock = self.folder / ORIGIN, None
            try:
                self._check_partial()  # again: another process may have begun meanwhile
                if not (resume and origin.is_file()) or self._changes():
                    shutil.rmtree(self.folder, ignore_errors=True)
                    self.folder.mkdir()
                started, clock = time.time(), time.monotonic() - _elapsed(self.folder)
                if resume:
                    write_file(origin, json.dumps(self._beginning()))
                self._must_be_seen()
                yield self
                with signals.postponed():
                    self._finish(started, time.monotonic() - clock)
            except BaseException as error:
                if isinstance(error, FileNotFoundError) and not self.folder.is_dir():
                    raise CalibeamError(
                        f"{self.folder} was removed while {self.kind} was writing to it: run the same command again"
                    ) from error
                if not any((self.folder / name).is_file() for name in (ORIGIN, MANIFEST)):
                    shutil.rmtree(self.folder, ignore_errors=True)
                elif clock is not None:
                    with suppress(OSError):
                        write_file(self.folder / ELAPSED, str(time.monotonic() - clock))
                raise
        self.done = True
        _wait_for_first()

    def _must_be_seen(self) -> None:
        """By all processes: what the first writes into the folder, others may have to read, and the other way round."""
        if distributed.size() == 1:
            return
        file, text = self.folder / ".seen", uuid4().hex

        def write() -> str:
            file.write_text(text)
            return text

        written, deadline = distributed.by_first(write), time.monotonic() + SEEN_WITHIN
        while not (seen := _holds(file, written)) and time.monotonic() < deadline:
            time.sleep(0.1)
        all_see = distributed.tell_first(seen)

        def judge() -> None:
            file.unlink()
            if blind := [number for number, sees in enumerate(all_see) if not sees]:
                raise CalibeamError(
                    f"{self.folder} is not on a disk that all machines share: process {blind[0]} of {len(all_see)} does not see "
                    "what the first writes there"
                )

        distributed.by_first(judge)

    def write_rows(self, name: str, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> None:
        """One table, whole or not at all, and never all of it in memory."""
        _write_rows(self.folder / f"{name}.parquet", rows, schema)

    def read_rows(self, name: str, schema: pa.Schema) -> Iterator[dict[str, Any]]:
        """What `write_rows` wrote, while the stage is under way."""
        return _rows(self.folder / f"{name}.parquet", schema)

    def drop(self, name: str) -> None:
        """Remove a table that is of no more use."""
        (self.folder / f"{name}.parquet").unlink()

    def shards(self, name: str, schema: pa.Schema) -> Shards:
        """A table that is written in pieces, of which an interrupted run may have left some."""
        found = Shards(self.folder, name, schema)
        self.temporary += (found.seals,)
        return found

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, _json(value))

    def write_text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def append_log(self, record: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def keep_log(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Leave out what an interrupted run logged after the point that this one goes on from."""
        file = self.folder / "log.jsonl"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            write_file(file, "".join(line for line in whole if wanted(json.loads(line))))

    def _finish(self, started: float, seconds: float) -> None:
        kept = {file for pattern in self.temporary for file in self.folder.glob(pattern)}
        for unfinished in {*self.folder.rglob(".*")} - kept:  # what writers, ours and others', were at when a run was killed
            _remove(unfinished)
        files = _inventory(self.folder, (ORIGIN, *self.temporary))
        manifest = {
            "kind": self.kind,
            "calibeam": calibeam.__version__,
            "origin": self._origin,
            "settings": self.config.identity() if self._is_public else self.config.resolved(),
            "input_places": {} if self._is_public else self._places,
            "versions": versions(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(seconds, 3),
            "counts": self.counts,
            "notes": self.notes,
            "digest": _digest(files),
            "files": files,
        }
        for name in files:
            sync(self.folder / name)
        for folder in {(self.folder / name).parent for name in files}:
            sync(folder)
        write_file(self.folder / MANIFEST, _json({**manifest, "seal": _seal(manifest)}))
        self._put_in_place(manifest)

    def _put_in_place(self, manifest: dict[str, Any]) -> None:
        """Stopped anywhere in here, the next run adopts the folder: it has a manifest. What that does not list is temporary."""
        listed = {MANIFEST, *manifest["files"]}
        for file in _files(self.folder):
            if file.relative_to(self.folder).as_posix() not in listed:
                file.unlink()
        _remove(self._old)
        if self.path.exists():
            os.replace(self.path, self._old)
        os.replace(self.folder, self.path)
        sync(self.path.parent)
        _remove(self._old)


def discard(place: Path) -> None:
    """What a stage left that did not come to its end there."""
    _remove(place.with_name(f".{place.name}.partial"))


def _remove(path: Path) -> None:
    """A file, a folder with all that is in it, a link and not where it leads; or nothing, where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _wait_for_first() -> None:
    distributed.by_first(lambda: None)


def _elapsed(folder: Path) -> float:
    """Seconds that earlier attempts took which ended by themselves: a kill leaves no time to write them down."""
    try:
        return max(0.0, min(float((folder / ELAPSED).read_text()), time.time()))
    except (OSError, ValueError):
        return 0.0


def _holds(file: Path, text: str) -> bool:
    try:
        return file.read_text() == text
    except OSError:
        return False


def must_agree(what: str, own: dict[str, Any]) -> None:
    """Refuse, in all processes that work together, to go on where one of them is about to do something else."""
    told = distributed.tell_first(own)

    def compare() -> None:
        for number, theirs in enumerate(told):
            if changes := _differences(told[0], theirs, ("in the first", f"in process {number}")):
                raise CalibeamError(
                    f"{what}: processes that work together are about to do different things:\n  " + "\n  ".join(changes)
                )

    distributed.by_first(compare)


def is_free(path: Path) -> bool:
    """Whether nothing is at an output's place yet. What is there and is not a stage is refused."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return True
    if not (path / MANIFEST).is_file():
        raise CalibeamError(f"{path} is in use: it exists and is not a calibeam stage. Choose another output")
    return False


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def write_file(path: Path, content: str | bytes) -> None:
    """One file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def write_page(path: Path, text: str) -> None:
    """The same outside of a stage, where nobody else explains what is wrong with the disk."""
    try:
        with _explained(path):
            write_file(path, text)
    except (CalibeamError, OSError):
        path.with_name(f".{path.name}.partial").unlink(missing_ok=True)
        raise


def _releases(found: dict[str, str]) -> dict[str, str]:
    """Of the packages that decide, without what distinguishes two versions under development."""
    return {name: found.get(name, "").partition("+")[0] for name in DECIDING}


@functools.cache
def _code() -> str:
    """A digest of this package's sources: a version under development is a different one with every change."""
    sources = sorted(Path(calibeam.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sources)).hexdigest()[:12]


def versions() -> dict[str, str]:
    found = {"calibeam": f"{calibeam.__version__}+{_code()}", "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def deciding_versions() -> dict[str, str]:
    return {name: one for name, one in versions().items() if name in DECIDING}


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.exists():
        raise CalibeamError(f"{path} does not exist: run the stage that writes it first")
    if not file.is_file():
        raise CalibeamError(f"{path} is not a finished calibeam stage: it has no {MANIFEST}")
    try:
        size = file.stat().st_size
        if size > LONGEST_MANIFEST and size > LONGEST_MANIFEST + MANIFEST_OF_A_FILE * len(_files(path)):
            raise ValueError(f"its {size >> 20} MiB are more than the files of its folder need")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        shape = {
            "kind": str, "origin": dict, "settings": dict, "input_places": dict, "versions": dict, "counts": dict, "notes": list,
            "digest": str, "files": dict,
        }  # fmt: skip
        if not all(isinstance(manifest[key], wanted) for key, wanted in shape.items()):
            raise ValueError("a field has the wrong type")
        if not all(set(facts) == {"bytes", "sha256"} for facts in manifest["files"].values()):
            raise ValueError("a file lacks its size or SHA-256")
        if manifest.pop("seal") != _seal(manifest):
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CalibeamError(f"{file} is damaged: {error!r}. Remove {path} and run its stage again") from error
    if manifest["origin"].get("format") != FORMAT:
        raise CalibeamError(f"{path} was written in format {manifest['origin'].get('format')}; this is format {FORMAT}")
    return manifest


def _inventory(folder: Path, without: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Of all files, but for those of the folder itself that match a pattern."""
    left_out = {file for pattern in without for file in folder.glob(pattern)}
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in _files(folder)
        if file not in left_out
    }


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def _digest(files: dict[str, dict[str, Any]]) -> str:
    lines = "".join(f"{name}\0{facts['sha256']}\n" for name, facts in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _differences(old: Any, new: Any, where: tuple[str, str] = ("before", "now"), path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted({*old, *new})
            for line in _differences(old.get(key), new.get(key), where, f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [f"{path}: {old!r} {where[0]}, {new!r} {where[1]}"]


def sync(path: Path) -> None:
    """On the disk, not only on its way there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One writer at a time. The system releases the lock when the process ends, however it ends."""
    try:
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise CalibeamError(f"{path} cannot be written: {error}") from error
    with open(handle, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CalibeamError(f"{path} is in use: another process is writing it") from None
        yield
    # The file stays: removing it would let two later writers lock two different files.

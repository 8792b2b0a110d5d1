"""Stage folders: what a stage wrote, from what, and proof that it is whole.

A stage writes into `.NAME.partial` beside its output folder and renames it when everything is there;
`manifest.json`, written last, holds the stage's resolved settings, the digests of its inputs,
versions, timings, counts, and the size and SHA-256 of every file. Reading verifies all of it.
What a stage that was interrupted left is gone on with where settings, inputs and versions are the same, and else refused.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import calibeam
from calibeam import distributed, rows, signals
from calibeam.recipe import StageConfig
from calibeam.records import CalibeamError, Example

FORMAT = 1
MANIFEST = "manifest.json"
ORIGIN = "origin.json"  # in the folder of a stage under way that can be resumed
DECIDING = ("calibeam", "torch", "transformers", "tokenizers")
"""The packages of which one half of a stage must not be made by one version and the other by another."""
PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "nltk", "sacrebleu", "sentencepiece", "peft",
)  # fmt: skip

FACTS = b"calibeam"  # under which a shard holds what is to be known of it as a whole
LONGEST_NAME = 255  # bytes
LONGEST_MANIFEST = 1 << 26  # bytes; that of 2 million rows in shards has one million
ROW_GROUP = 4096  # rows that are written together
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
        return Table(self._files(name), schema)

    def _files(self, name: str) -> list[Path]:
        """Of a table: one, or shards in their order."""
        found = (re.fullmatch(rf"{name}-(\d+)\.parquet", file) for file in self.manifest["files"])
        shards = {int(match[1]): self.path / match[0] for match in found if match}
        return [shards[number] for number in sorted(shards)] or [self.path / f"{name}.parquet"]

    def examples(self, split: str) -> list[Example]:
        return [*self.stream_examples(split)]

    def stream_examples(self, split: str) -> Iterator[Example]:
        self.must_have(split)
        return map(example_of, self.stream(split, EXAMPLES))

    def example_table(self, split: str) -> Table:
        self.must_have(split)
        return self.table(split, EXAMPLES)

    def count(self, split: str) -> int:
        self.must_have(split)
        return pq.read_metadata(self.path / f"{split}.parquet").num_rows

    def must_have(self, split: str) -> None:
        if split not in self.splits:
            raise CalibeamError(f"{self.path} has no {split} split; it has {', '.join(self.splits)}")

    def must_come_from(self, **inputs: Folder) -> None:
        """Refuse a stage that was made from other inputs than these."""
        for name, folder in inputs.items():
            if self.manifest["origin"]["inputs"].get(name) != folder.digest:
                raise CalibeamError(f"{self.path} was made with another {name} than {folder.path}")

    def input(self, name: str, kind: str) -> Folder:
        """What this stage was made from: beside it, if the whole run was moved, or else where it was."""
        place = self.manifest["input_places"][name]
        moved = self.path / os.path.relpath(place, self.manifest["settings"]["output"])
        folder = read(moved if (moved / MANIFEST).is_file() else place, kind)
        self.must_come_from(**{name: folder})
        return folder

    @property
    def splits(self) -> list[str]:
        return [name.removesuffix(".parquet") for name in self.manifest["files"] if name.endswith(".parquet")]


def example_of(row: dict[str, Any]) -> Example:
    return Example(row["id"], row["source"], tuple(row["targets"]))


class Table:
    """The rows of a table by their place. The last file stays open: its footer may take longer to read than some rows."""

    def __init__(self, files: list[Path], schema: pa.Schema) -> None:
        self._files, self._schema = files, schema
        self._opened: tuple[int, pq.ParquetFile] | None = None

    def between(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Shards but the last have as many rows as the first."""
        each = max(pq.read_metadata(self._files[0]).num_rows, 1) if len(self._files) > 1 else stop
        return [
            row
            for number in range(start // each, min(-(-stop // each), len(self._files)))
            for row in _rows_between(self._open(number), start - number * each, stop - number * each)
        ]

    def _open(self, number: int) -> pq.ParquetFile:
        if self._opened is None or self._opened[0] != number:
            parquet = pq.ParquetFile(self._files[number])
            _check_schema(self._files[number], parquet, self._schema)
            self._opened = number, parquet
        return self._opened[1]


def _rows_between(parquet: pq.ParquetFile, start: int, stop: int) -> Iterator[dict[str, Any]]:
    begin = 0
    for group in range(parquet.num_row_groups):
        end = begin + parquet.metadata.row_group(group).num_rows
        if begin < stop and start < end:
            yield from parquet.read_row_group(group)[max(start - begin, 0) : stop - begin].to_pylist()
        begin = end


def _check_schema(file: Path, parquet: pq.ParquetFile, schema: pa.Schema) -> None:
    if not parquet.schema_arrow.equals(schema):
        raise CalibeamError(
            f"{file} has columns {parquet.schema_arrow.names}, not {schema.names}: another version of calibeam wrote it. "
            f"Remove {file.parent} and run its stage again"
        )


def _rows(
    file: Path, schema: pa.Schema, columns: Sequence[str] | None = None, where: tuple[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    with file.open("rb") as opened, pq.ParquetFile(opened) as parquet:
        _check_schema(file, parquet, schema)
        wanted = columns and [*columns, *(where or ())[:1]]
        for group in range(parquet.num_row_groups):  # one by one: a reader of all keeps what it has read
            for batch in parquet.iter_batches(1024, row_groups=[group], columns=wanted):
                yield from (batch.filter(pc.equal(batch[where[0]], where[1])) if where else batch).to_pylist()


def read(path: str | Path, kind: str) -> Folder:
    """Open a finished stage folder of the given kind, verifying every file in it."""
    path = Path(path)
    manifest = _manifest(path)
    if manifest["kind"] != kind:
        raise CalibeamError(f"{path} was written by `{manifest['kind']}`, but `{kind}` output is needed here")
    verify(path, manifest)
    return Folder(path, manifest["digest"], manifest)


def read_model(path: Path) -> Folder:
    """A model's folder as an input: verified against the manifest of the stage that wrote it, if one did."""
    if (path.parent / MANIFEST).is_file():
        verify(path.parent, _manifest(path.parent))
    files = {name: facts for name, facts in _inventory(path).items() if not name.endswith(".md")}
    return Folder(path, _digest(files), {})


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
            raise CalibeamError(f"{file} is missing, though {path / MANIFEST} lists it")
        if file.stat().st_size != facts["bytes"] or _sha256(file) != facts["sha256"]:
            raise CalibeamError(f"{file} is damaged: it does not match the size and SHA-256 in {path / MANIFEST}")


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


def _other_making(what: str, changes: Sequence[str]) -> CalibeamError:
    listed = "".join(f"\n  {change}" for change in changes)
    return CalibeamError(f"{what} of another making:{listed}\nPass --force to make it again, or choose another output")


def problem_of_disk(error: BaseException, path: Path) -> CalibeamError | None:
    """A disk that is full, read-only, out of quota or failing, as something a user can mend."""
    if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":  # which has no number, only a text
        return None
    given = getattr(error, "errno", None)
    found = next((number for number in DISK_PROBLEMS if number == given or os.strerror(number) in str(error)), None)
    if found is None:
        return None
    where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return CalibeamError(
        f"{path} cannot be written: {os.strerror(found)} ({shutil.disk_usage(path.parent).free:,} bytes are free there){where}. "
        f"What was finished before is kept; run the same command again when this is mended"
    )


@dataclass(frozen=True)
class Shards:
    """A table in pieces, each whole or not at all. Whoever has one of these may write them, on whatever machine.

    What is to be known of a piece as a whole, its facts, is written with it: nobody need read it again to add them up.
    """

    folder: Path
    name: str
    schema: pa.Schema

    def write(self, number: int, rows: Iterable[dict[str, Any]], facts: dict[str, Any]) -> None:
        _write_rows(self._file(number), rows, self.schema.with_metadata({FACTS: json.dumps(facts)}))

    def facts(self, number: int, ids: list[str]) -> dict[str, Any] | None:
        """Of a piece that is there, whole, and has these ids, once or several times over."""
        try:
            table = pq.read_table(self._file(number), page_checksum_verification=True)
            known = json.loads(table.schema.metadata[FACTS])
        except (pa.ArrowException, OSError, TypeError, KeyError, ValueError):
            return None
        found = table["id"].to_pylist() if table.schema.equals(self.schema) else []
        return known if found and found == ids * (len(found) // len(ids)) else None

    def rows(self, number: int) -> list[dict[str, Any]]:
        return [*_rows(self._file(number), self.schema)]

    def drop_from(self, number: int) -> None:
        """Those that are too many, of a version that wrote smaller ones."""
        for file in self.folder.glob(f"{self.name}-*.parquet"):
            if int(file.stem.removeprefix(f"{self.name}-")) >= number:
                file.unlink()

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05}.parquet"


def _write_rows(file: Path, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> None:
    partial, left = file.with_name(f".{file.stem}.{uuid4().hex}.partial"), iter(rows)  # another machine may be at it too
    with pq.ParquetWriter(partial, schema, write_page_checksum=True) as writer:
        while some := [*itertools.islice(left, ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
    sync(partial)
    os.replace(partial, file)


class Output:
    """A stage folder to be: already `done`, or written inside `with output.writing():`.

    Of several processes the first looks after the folder, and the others only know its place.
    """

    def __init__(self, kind: str, config: StageConfig, inputs: dict[str, Folder], *, force: bool = False) -> None:
        self.kind, self.config, self.path = kind, config, Path(config.output)
        if not self.path.name or self.path.name == "..":
            raise CalibeamError(f"output must name a folder to make, got {config.output!r}")
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        """Where the stage writes its files."""
        if len(os.fsencode(self.folder.name)) > LONGEST_NAME:
            raise CalibeamError(f"File name too long: {self.path.name[:40]}...; choose a shorter output")
        self.counts: dict[str, Any] = {}
        self.notes: list[str] = []
        self._origin = {
            "kind": kind,
            "format": FORMAT,
            "settings": config.identity(),
            "inputs": {name: folder.digest for name, folder in inputs.items()},
        }
        self._places = {name: str(folder.path) for name, folder in inputs.items()}
        self._force = force
        self.done = distributed.by_first(self._look)
        theirs = distributed.by_first(lambda: self._origin)
        if changes := _differences(theirs, self._origin):
            raise CalibeamError(f"{self.path}: this process and the first make different things:\n  " + "\n  ".join(changes))

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
        """Put a folder in its place that a run finished and was stopped before renaming."""
        if (self.folder / MANIFEST).is_file() and (self._force or is_free(self.path)):
            with _lock(self.path):
                manifest = _whole_manifest(self.folder)
                if manifest and manifest["origin"] == self._origin:
                    self._put_in_place()

    def _is_done(self) -> bool:
        """Whether the folder is there, whole, and made from the same settings and inputs."""
        if is_free(self.path):
            return False
        manifest = _manifest(self.path)  # also with --force, which must not remove what is not ours
        changes = _differences(manifest["origin"], self._origin)
        if self._force:
            return not changes and _is_whole(self.path, manifest)
        if changes:
            raise _other_making(f"{self.path} holds a result", changes)
        verify(self.path, manifest)
        return True

    def _check_partial(self) -> None:
        """Refuse to throw away what an interrupted run of other settings, inputs or versions did."""
        if changes := [] if self._force else self._changes():
            raise _other_making(f"{self.path} was begun by a run that was interrupted,", changes)

    def _changes(self) -> list[str]:
        """Between what an interrupted run began and what is to be made now."""
        try:
            left = json.loads((self.folder / ORIGIN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            return [f"{self.folder / ORIGIN} cannot be read: {error}"]
        return _differences(left, self._beginning())

    def _beginning(self) -> dict[str, Any]:
        return {**self._origin, "versions": {name: one for name, one in versions().items() if name in DECIDING}}

    @contextmanager
    def writing(self, *, resume: bool = False) -> Iterator[Output]:
        """Everything written to `self.folder` appears at `self.path` when the block ends well; nothing otherwise.

        With `resume`, what an interrupted run left in `self.folder` is kept and gone on with.
        """
        if not distributed.is_first():
            _wait_for_first()  # to make the folder
            yield self
            _wait_for_first()  # to finish it
            self.done = True
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibeamError(f"{self.path} cannot be made: {error}") from error
        with _lock(self.path):
            origin = self.folder / ORIGIN
            try:
                self._check_partial()  # again: another process may have begun meanwhile
                if not (resume and origin.is_file()) or self._changes():
                    shutil.rmtree(self.folder, ignore_errors=True)
                    self.folder.mkdir()
                started, clock = time.time(), time.monotonic()
                if resume:
                    write_file(origin, json.dumps(self._beginning()))
                _wait_for_first()
                yield self
                with signals.postponed():
                    self._finish(started, time.monotonic() - clock)
            except BaseException as error:
                if not any((self.folder / name).is_file() for name in (ORIGIN, MANIFEST)):
                    shutil.rmtree(self.folder, ignore_errors=True)
                if problem := problem_of_disk(error, self.path):
                    raise problem from error
                raise
        self.done = True
        _wait_for_first()

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
        return Shards(self.folder, name, schema)

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
        for unfinished in self.folder.rglob(".*"):  # what writers, ours and others', were at when a run was killed
            unfinished.unlink()
        files = {name: facts for name, facts in _inventory(self.folder).items() if name != ORIGIN}
        manifest = {
            "kind": self.kind,
            "calibeam": calibeam.__version__,
            "origin": self._origin,
            "settings": self.config.resolved(),
            "input_places": self._places,
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
        self._put_in_place()

    def _put_in_place(self) -> None:
        """Stopped anywhere in here, the next run adopts the folder: it has a manifest."""
        (self.folder / ORIGIN).unlink(missing_ok=True)
        old = self.path.with_name(f".{self.path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.replace(self.path, old)
        os.replace(self.folder, self.path)
        sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _wait_for_first() -> None:
    distributed.by_first(lambda: None)


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


def versions() -> dict[str, str]:
    found = {"calibeam": calibeam.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.exists():
        raise CalibeamError(f"{path} does not exist: run the stage that writes it first")
    if not file.is_file():
        raise CalibeamError(f"{path} is not a finished calibeam stage: it has no {MANIFEST}")
    try:
        if file.stat().st_size > LONGEST_MANIFEST:
            raise ValueError(f"it has more than {LONGEST_MANIFEST >> 20} MiB")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        shape = {"kind": str, "origin": dict, "settings": dict, "counts": dict, "notes": list, "digest": str, "files": dict}
        if not all(isinstance(manifest[key], wanted) for key, wanted in shape.items()):
            raise ValueError("a field has the wrong type")
        if not all(set(facts) == {"bytes", "sha256"} for facts in manifest["files"].values()):
            raise ValueError("a file lacks its size or SHA-256")
        if manifest.pop("seal") != _seal(manifest):
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CalibeamError(f"{file} is damaged: {error!r}") from error
    if manifest["origin"].get("format") != FORMAT:
        raise CalibeamError(f"{path} was written in format {manifest['origin'].get('format')}; this is format {FORMAT}")
    return manifest


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _digest(files: dict[str, dict[str, Any]]) -> str:
    lines = "".join(f"{name}\0{facts['sha256']}\n" for name, facts in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted({*old, *new})
            for line in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [f"{path}: {old!r} there, {new!r} now"]


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

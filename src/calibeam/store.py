"""Stage folders: what a stage wrote, from what, and proof that it is whole.

A stage writes into `.NAME.partial` beside its output folder and renames it when everything is there;
`manifest.json`, written last, holds the stage's resolved settings, the digests of its inputs,
versions, timings, counts, and the size and SHA-256 of every file. Reading verifies all of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import calibeam
from calibeam.recipe import StageConfig
from calibeam.records import CalibeamError, Example

FORMAT = 1
MANIFEST = "manifest.json"
ORIGIN = "origin.json"  # in the folder of a stage under way that can be resumed
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy", "nltk", "sacrebleu", "peft")

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

    def stream(self, name: str, schema: pa.Schema) -> Iterator[dict[str, Any]]:
        """The same row by row, from one file or from shards in their order."""
        shards = sorted(file for file in self.manifest["files"] if re.fullmatch(rf"{name}-\d+\.parquet", file))
        for file in shards or [f"{name}.parquet"]:
            with pq.ParquetFile(self.path / file) as parquet:
                if not parquet.schema_arrow.equals(schema):
                    raise CalibeamError(f"{self.path / file} has columns {parquet.schema_arrow.names}, not {schema.names}")
                for batch in parquet.iter_batches(1024):
                    yield from batch.to_pylist()

    def examples(self, split: str) -> list[Example]:
        return [*self.stream_examples(split)]

    def stream_examples(self, split: str) -> Iterator[Example]:
        self.must_have(split)
        return (Example(row["id"], row["source"], tuple(row["targets"])) for row in self.stream(split, EXAMPLES))

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

    @property
    def splits(self) -> list[str]:
        return [name.removesuffix(".parquet") for name in self.manifest["files"] if name.endswith(".parquet")]


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


class Output:
    """A stage folder to be: already `done`, or written inside `with output.writing():`."""

    def __init__(self, kind: str, config: StageConfig, inputs: dict[str, Folder], *, force: bool = False) -> None:
        self.kind, self.config, self.path = kind, config, Path(config.output)
        if not self.path.name or self.path.name == "..":
            raise CalibeamError(f"output must name a folder to make, got {config.output!r}")
        self.folder = self.path.with_name(f".{self.path.name}.partial")
        """Where the stage writes its files."""
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
        self.done = self._is_done()

    def _is_done(self) -> bool:
        """Whether the folder is there, whole, and made from the same settings and inputs."""
        if is_free(self.path):
            return False
        manifest = _manifest(self.path)  # also with --force, which must not remove what is not ours
        changes = _differences(manifest["origin"], self._origin)
        if self._force:
            return not changes and _is_whole(self.path, manifest)
        if changes:
            raise CalibeamError(
                f"{self.path} holds a result of another making:\n  "
                + "\n  ".join(changes)
                + "\nPass --force to make it again, or choose another output"
            )
        verify(self.path, manifest)
        return True

    @contextmanager
    def writing(self, *, resume: bool = False) -> Iterator[Output]:
        """Everything written to `self.folder` appears at `self.path` when the block ends well; nothing otherwise.

        With `resume`, what an interrupted run of the same origin left in `self.folder` is kept and gone on with.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CalibeamError(f"{self.path} cannot be made: {error}") from error
        with _lock(self.path):
            origin = self.folder / ORIGIN
            if not (resume and origin.is_file() and origin.read_text(encoding="utf-8") == json.dumps(self._origin)):
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
            started, clock = time.time(), time.monotonic()
            try:
                if resume:
                    write_file(origin, json.dumps(self._origin))
                yield self
                self._finish(started, time.monotonic() - clock)
            except BaseException:
                if not origin.is_file():
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise
        self.done = True

    def write_rows(self, name: str, rows: Iterable[dict[str, Any]], schema: pa.Schema) -> None:
        """One table, whole or not at all."""
        partial = self.folder / f".{name}.partial"
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), partial, write_page_checksum=True)
        _sync(partial)
        os.replace(partial, self.folder / f"{name}.parquet")

    def drop(self, names: Iterable[str]) -> None:
        """Remove tables that an interrupted run wrote and this one does not want."""
        for name in names:
            (self.folder / f"{name}.parquet").unlink()

    def tables(self) -> list[str]:
        """The tables written so far, by this run or one that was interrupted."""
        return sorted(file.stem for file in self.folder.glob("*.parquet"))

    def written(self, name: str, ids: list[str], schema: pa.Schema) -> list[dict[str, Any]] | None:
        """The rows of a table that an interrupted run wrote, if it is whole and has these ids."""
        file = self.folder / f"{name}.parquet"
        try:
            rows = pq.read_table(file, schema=schema, page_checksum_verification=True).to_pylist()
        except (pa.ArrowException, OSError):
            return None
        return rows if [row["id"] for row in rows] == ids else None

    def write_json(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def append_log(self, record: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _finish(self, started: float, seconds: float) -> None:
        for partial in self.folder.glob(".*.partial"):
            partial.unlink()  # of a table that an interrupted run did not finish
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
        self.write_json(MANIFEST, {**manifest, "seal": _seal(manifest)})
        for name in (*files, MANIFEST):
            _sync(self.folder / name)
        for folder in {(self.folder / name).parent for name in files} | {self.folder}:
            _sync(folder)
        if self.path.exists():
            shutil.rmtree(self.path)
        (self.folder / ORIGIN).unlink(missing_ok=True)
        os.replace(self.folder, self.path)
        _sync(self.path.parent)


def is_free(path: Path) -> bool:
    """Whether nothing is at an output's place yet. What is there and is not a stage is refused."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return True
    if not (path / MANIFEST).is_file():
        raise CalibeamError(f"{path} is in use: it exists and is not a calibeam stage. Choose another output")
    return False


def write_file(path: Path, content: str | bytes) -> None:
    """One file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


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
        manifest = json.loads(file.read_text(encoding="utf-8"))
        shape = {"kind": str, "origin": dict, "settings": dict, "counts": dict, "notes": list, "digest": str, "files": dict}
        if not all(isinstance(manifest[key], wanted) for key, wanted in shape.items()):
            raise ValueError("a field has the wrong type")
        if not all(set(facts) == {"bytes", "sha256"} for facts in manifest["files"].values()):
            raise ValueError("a file lacks its size or SHA-256")
        if manifest.pop("seal") != _seal(manifest):
            raise ValueError("it was changed after it was written")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One writer at a time. The system releases the lock when the process ends, however it ends."""
    try:
        file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise CalibeamError(f"{path} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CalibeamError(f"{path} is in use: another process is writing it") from None
        yield
    # The file stays: removing it would let two later writers lock two different files.

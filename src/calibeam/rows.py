"""Rows of files and of Hub datasets, one at a time. What a row holds is not looked at here.

Reading takes no more memory than the longest line allowed, whatever a compressed file expands to. Only a
JSON document (an array, or one object over several lines) is read whole, and a compressed one up to a limit.
What expands to very many times its size is refused, so that time has an end too.
"""

from __future__ import annotations

import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from calibeam.records import CalibeamError

HUB = "hub:"
LOCAL = "file://"
HOSTED = "hf://"
ADDRESS = re.compile(
    rf"{HOSTED}datasets/(?P<name>[^@/]+(?:/[^@/]+)?)@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+)/(?P<pattern>.+)"
)
PINNED = re.compile(r"hf://datasets/[^@]+@[0-9a-f]{40}/")
LONGEST_FIELD = 1_000_000
LONGEST_LINE = 1 << 25
MOST_EXPANSION = 100  # times its size, for a file that expands to more than this:
LEAST_EXPANSION = 1 << 28
SHORTEST_ROW = 32  # bytes that a row counts for at least: a few bytes of Parquet can say "a billion rows of nothing"


class Complaint(str):
    """What a reader has to say of a row that it cannot give."""


def read(place: str) -> Iterator[Any]:
    """What is in each row of a file, of hub:NAME@REVISION:SPLIT, or of files at an address; or a Complaint."""
    for file in map(Path, _files(place)):
        yield from _reader(file)(file)


def digest(place: str) -> str:
    """Of what `read` would give. A commit of the Hub stands for its contents."""
    if PINNED.match(place):
        return hashlib.sha256(place.encode()).hexdigest()
    digests = [_sha256(Path(file)) for file in _files(place)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _sha256(file: Path) -> str:
    if not file.is_file():
        raise CalibeamError(f"no file at {file}")
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CalibeamError(f"{file} cannot be read: {error}") from error


def _files(place: str) -> list[str]:
    """On this disk. What is on the Hub is fetched, and read as any file is: no loading script is ever run."""
    if place.startswith(HUB):
        return [file for address in _files_of_split(place) for file in _files(address)]
    if place.startswith(LOCAL):
        return matching(place.removeprefix(LOCAL))
    if match := ADDRESS.fullmatch(place):
        return _fetch(place, **match.groupdict())
    if place.startswith(HOSTED):
        raise CalibeamError(f"{place} is not of the form {HOSTED}datasets/NAME@REVISION/FILES")
    return [place]


def _files_of_split(place: str) -> list[str]:
    """The addresses of the files of a split of a dataset, as the datasets package finds them."""
    name, _, split = place.removeprefix(HUB).rpartition(":")
    name, _, revision = name.partition("@")
    if not name or not split:
        raise CalibeamError(f"{place} is not of the form {HUB}NAME:SPLIT or {HUB}NAME@REVISION:SPLIT")
    try:
        from datasets import load_dataset_builder
    except ImportError:
        raise CalibeamError(f"{place} needs the datasets package: pip install 'calibeam[datasets]'") from None
    with _named(place):
        files = load_dataset_builder(name, revision=revision or None).config.data_files or {}
    if split not in files:
        raise CalibeamError(f"{place}: there is no such split; there are {', '.join(map(str, files)) or 'none'}")
    return [str(file) for file in files[split]]


def _fetch(place: str, name: str, revision: str, pattern: str) -> list[str]:
    from huggingface_hub import snapshot_download

    with _named(place):
        folder = snapshot_download(
            name, repo_type="dataset", revision=unquote(revision), allow_patterns=[pattern, pattern.replace("**/", "")]
        )
    return matching(str(Path(glob.escape(folder)) / pattern))


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Whatever the Hub's packages raise, as an error that says of what."""
    try:
        yield
    except Exception as error:
        raise CalibeamError(f"{place} cannot be loaded: {(str(error).strip() or repr(error)).splitlines()[0]}") from error


def matching(pattern: str) -> list[str]:
    """The files that a pattern names, in order, ** for folders in folders; or the one file that is called so."""
    is_name = not glob.has_magic(pattern) or Path(pattern).is_file()
    if found := [pattern] if is_name else sorted(glob.glob(pattern, recursive=True)):
        return found
    raise CalibeamError(f"no file matches {pattern}")


def is_readable(path: Path) -> bool:
    """Whether the name is that of a kind of file known here, of rows with fields."""
    return kind(path) in READERS and kind(path) != ".txt"


def is_unicode(text: str) -> bool:
    """Whether the text can be written down: JSON can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(path: Path) -> str:
    """The file's ending without that of its compression; a Parquet file has its own."""
    name = path.name
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    ending = Path(name).suffix.lower()
    return "" if ending == ".parquet" and name != path.name else ending


def _reader(path: Path) -> Callable[[Path], Iterator[Any]]:
    if kind(path) not in READERS:
        raise CalibeamError(f"{path}: unknown kind of file; known are .jsonl, .json, .csv, .tsv, .parquet and .txt")
    return READERS[kind(path)]


def _zstd(path: Path, mode: str) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _zstd}


class _Expansion:
    """Counts what comes out of a file, and stops where no honest one would have that much in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._left = path, max(LEAST_EXPANSION, MOST_EXPANSION * path.stat().st_size)

    def count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise CalibeamError(f"{self._path} expands to more than {MOST_EXPANSION} times its size: decompress it first")


class _Expanding(io.RawIOBase):
    """A decompressing stream, counted."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._expansion = stream, _Expansion(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._stream.readinto(buffer)
        self._expansion.count(size)
        return size


@contextmanager
def _bytes_of(path: Path) -> Iterator[IO[bytes]]:
    try:
        with COMPRESSIONS.get(path.suffix, open)(path, "rb") as stream:
            yield io.BufferedReader(_Expanding(stream, path)) if path.suffix in COMPRESSIONS else stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CalibeamError(f"{path} cannot be read: {error}") from error


def _jsonl(path: Path) -> Iterator[Any]:
    with _bytes_of(path) as stream:
        yield from _json_lines(_lines(stream))


def _json(path: Path) -> Iterator[Any]:
    """Lines, as in a .jsonl file, if the first line is an object; otherwise a document: the items of an array, or one object."""
    with _bytes_of(path) as stream:
        first = stream.readline(LONGEST_LINE)
        row = next(_json_lines([first]), None)
        if isinstance(row, dict):
            yield from itertools.chain([row], _json_lines(_lines(stream)))
            return
        most = max(LONGEST_LINE, path.stat().st_size)  # Python makes up to some 30 times as much of it
        content = first + stream.read(most)
        if len(content) > most:
            raise CalibeamError(
                f"{path} expands to a JSON document of more than {most >> 20} MiB, which would have to be read whole: "
                "decompress it first, or use JSON lines or Parquet"
            )
    document: Any = next(_json_lines([content]), [])
    if isinstance(document, Complaint):
        raise CalibeamError(f"{path} is {document}")
    yield from document if isinstance(document, list) else [document]


def _lines(stream: IO[bytes]) -> Iterator[bytes | Complaint]:
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_LINE)
            yield Complaint(f"over-long: a line of more than {LONGEST_LINE >> 20} MiB")
        else:
            yield line


def _json_lines(lines: Any) -> Iterator[Any]:
    for line in lines:
        if isinstance(line, Complaint):
            yield line
            continue
        try:
            text = line.decode("utf-8-sig").strip()
            if text:
                yield json.loads(text)
        except UnicodeDecodeError:
            yield Complaint("not valid UTF-8")
        except (ValueError, RecursionError) as error:
            yield Complaint(f"not valid JSON: {error}")


def _csv(path: Path) -> Iterator[Any]:
    csv.field_size_limit(2 * LONGEST_FIELD)
    with _bytes_of(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(
            iter(lambda: text.readline(LONGEST_LINE), ""), delimiter="\t" if kind(path) == ".tsv" else ",", strict=True
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
    from pyarrow import ArrowException

    from calibeam import parquet

    try:
        file, expansion = parquet.File(path), _Expansion(path)
        for number in range(len(file.groups)):
            for batch in file.batches(number):
                expansion.count(SHORTEST_ROW * len(batch) + parquet.size_of(batch))
                yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CalibeamError(f"{path} cannot be read: {error}") from error


def _text(path: Path) -> Iterator[Any]:
    """Documents, with blank lines between them."""
    with _bytes_of(path) as stream:
        lines: list[str] = []
        size = 0
        for line in itertools.chain(_lines(stream), [b""]):
            problem = line if isinstance(line, Complaint) else None
            try:
                text = "" if isinstance(line, Complaint) else line.decode("utf-8-sig")
            except UnicodeDecodeError:
                problem = Complaint("not valid UTF-8")
            size += len(line)
            if size > LONGEST_LINE:
                problem = Complaint(f"over-long: a document of more than {LONGEST_LINE >> 20} MiB")
            if problem:
                lines, size = [], 0
                yield problem
            elif text.strip():
                lines.append(text)
            elif lines:
                yield {"text": "".join(lines).strip()}
                lines, size = [], 0


READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _text,
}  # fmt: skip

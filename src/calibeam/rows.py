"""Rows of files and of Hub datasets, one at a time. What a row holds is not looked at here.

Reading takes no more memory than the longest line allowed, whatever a compressed file expands to. Only a
JSON document (an array, or one object over several lines) is read whole, and a compressed one up to a limit.
What expands to very many times its size is refused, so that time has an end too.
"""

from __future__ import annotations

import csv
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

from calibeam import parquet
from calibeam.records import CalibeamError

HUB = "hub:"
ADDRESSES = ("hf://", "file://")  # of files that the datasets package reads
PINNED = re.compile(r"hf://datasets/[^@]+@[0-9a-f]{40}/")
LONGEST_FIELD = 1_000_000
LONGEST_LINE = 1 << 25
LONGEST_DOCUMENT = 1 << 28  # out of a compressed file
MOST_EXPANSION = 100  # times its size, for a file that expands to more than a document may
PARQUET_BATCH = 1 << 26  # bytes of rows, as the file tells of itself, that are decoded together; the largest small page
SHORTEST_ROW = 32  # bytes that a row counts for at least: a few bytes of Parquet can say "a billion rows of nothing"


class Complaint(str):
    """What a reader has to say of a row that it cannot give."""


def read(place: str) -> Iterator[Any]:
    """What is in each row of a file, of hub:NAME@REVISION:SPLIT, or of files at an address; or a Complaint."""
    if place.startswith(HUB):
        name, _, split = place.removeprefix(HUB).rpartition(":")
        name, _, revision = name.partition("@")
        if not name or not split:
            raise CalibeamError(f"{place} is not of the form {HUB}NAME:SPLIT or {HUB}NAME@REVISION:SPLIT")
        return _dataset(place, name, split=split, revision=revision or None)
    if place.startswith(ADDRESSES):
        return _dataset(place, "parquet" if place.endswith(".parquet") else "json", split="train", data_files=place)
    return _reader(Path(place))(Path(place))


def digest(place: str) -> str:
    """Of what `read` would give. A commit of the Hub stands for its contents."""
    if PINNED.match(place):
        return hashlib.sha256(place.encode()).hexdigest()
    if place.startswith((HUB, *ADDRESSES)):
        found = hashlib.sha256()
        for row in read(place):
            found.update(json.dumps(row, default=str).encode())
        return found.hexdigest()
    if not Path(place).is_file():
        raise CalibeamError(f"no file at {place}")
    try:
        with Path(place).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CalibeamError(f"{place} cannot be read: {error}") from error


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
        self._path, self._left = path, max(LONGEST_DOCUMENT, MOST_EXPANSION * path.stat().st_size)

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
        most = max(LONGEST_DOCUMENT, path.stat().st_size)
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
    """Fewer rows at once where they are long. A small file can say "a gigabyte, a thousand times": it names the text once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        expansion = _Expansion(path)
        with (
            path.open("rb") as stream,
            pq.ParquetFile(path) as file,
            pq.ParquetFile(path, read_dictionary=_texts(file.schema)) as sharing,
        ):
            for number in range(file.num_row_groups):
                group, left = file.metadata.row_group(number), file.metadata.row_group(number).num_rows
                _check_pages(stream, group, path)
                widest = max(group.total_byte_size // max(group.num_rows, 1), _longest_shared(sharing, number), 1)
                size = max(1, min(1024, PARQUET_BATCH // widest))
                for batch in file.iter_batches(size, row_groups=[number]):
                    left -= len(batch)
                    for row in batch.to_pylist():
                        expansion.count(SHORTEST_ROW + sum(len(value) for value in row.values() if isinstance(value, str)))
                        yield row
                if left:
                    raise CalibeamError(f"{path} claims {group.num_rows:,} rows in group {number} and has {left:,} fewer")
    except (pa.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CalibeamError(f"{path} cannot be read: {error}") from error


def _check_pages(stream: IO[bytes], group: Any, path: Path) -> None:
    """Refuse what no honest page says of itself, before anything takes it at its word."""
    for column in map(group.column, range(group.num_columns)):
        for page in parquet.pages(stream, column):
            if page.size > max(PARQUET_BATCH, MOST_EXPANSION * page.compressed) or page.values > page.size:
                raise CalibeamError(
                    f"{path} has a page of {page.compressed:,} bytes that claims to be {page.size:,}"
                    + (f", of {page.values:,} values" if page.values else "")
                )


def _texts(schema: Any) -> list[str]:
    columns = (schema.column(place) for place in range(len(schema)))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY" and column.logical_type.type == "STRING"]


def _longest_shared(file: Any, group: int) -> int:
    """Bytes of the longest text that rows of a group may share."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [column for batch in itertools.islice(file.iter_batches(8, row_groups=[group]), 1) for column in batch.columns]
    longest = 0
    for column in columns:
        while pa.types.is_list(column.type):
            column = column.values
        if pa.types.is_dictionary(column.type):
            longest = max(longest, pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
    return longest


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


def _dataset(place: str, *arguments: str, **options: Any) -> Iterator[Any]:
    """From the Hugging Face Hub, or from local files. No loading script is ever run."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise CalibeamError(f"{place} needs the datasets package: pip install 'calibeam[datasets]'") from None
    try:
        yield from load_dataset(*arguments, **options)
    except Exception as error:
        raise CalibeamError(f"{place} cannot be loaded: {(str(error).strip() or repr(error)).splitlines()[0]}") from error

"""Parquet files, some rows at a time, in bounded memory whatever a file says of itself.

A page names the size it expands to and, if it is a dictionary, how many values it holds; readers take that much memory on its
word. A few bytes can say "a gigabyte, a thousand times": rows name a text of a dictionary, or begin as the row before does. So
the headers of all pages are read first, and texts stay in their dictionary until it is known how much they come to.

Where pages are is in the file's footer; asked for that, pyarrow ends the process where a column's statistics are damaged. Footer
and headers are structs in Thrift's compact form.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Kind = TypeVar("Kind")
BATCH = 1 << 26  # bytes of rows that are held together; also the largest page that may be small in the file
MOST_EXPANSION = 100  # times what a page takes in the file, if it is larger than that
MOST_VALUES = 1 << 24  # in a column of a group, of fewer rows: those of lists
MOST_ITEMS = 1 << 20  # in a list of a footer, such as that of groups
DATA, DICTIONARY, DATA_AGAIN = 0, 2, 3  # kinds of pages, the last a second form of the first
OWN_HEADERS = {DATA: (5, 2), DICTIONARY: (7, 2), DATA_AGAIN: (8, 4)}
"""Of these: the field that holds what is of this kind alone, and in it the one of the encoding."""
DELTA_LENGTHS, DELTA_TEXTS = 6, 7  # encodings of texts; the second says what each has in common with the one before


class Group(NamedTuple):
    """Rows that are stored together."""

    rows: int
    columns: list[tuple[int, int]]
    """Where the pages of each begin and end."""


class Page(NamedTuple):
    size: int
    """Decompressed, as it says."""
    compressed: int
    values: int
    encoding: int
    is_dictionary: bool


class Column(NamedTuple):
    """What the pages of a column in a group say of themselves."""

    size: int
    largest: int
    values: int
    has_dictionary: bool
    encodings: frozenset[int]

    @property
    def is_shared(self) -> bool:
        """Whether texts can be left in a dictionary, which pyarrow cannot do beside encodings by deltas."""
        return self.has_dictionary and not self.encodings & {DELTA_LENGTHS, DELTA_TEXTS}

    @property
    def repeats(self) -> bool:
        """Whether texts may come to more than the pages do, and cannot be left in a dictionary."""
        return DELTA_TEXTS in self.encodings or (self.has_dictionary and not self.is_shared)


class File:
    """Rows by their groups. Whatever is wrong with the file is a ValueError, an OSError or an error of Arrow's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            self.groups = groups(stream)
        self._readers: dict[tuple[str, ...], pq.ParquetFile] = {(): pq.ParquetFile(path.open("rb"))}  # a name may be no Unicode
        self.schema = pa.schema(map(_without_views, self._readers[()].schema_arrow))
        if twice := [name for name, times in Counter(self.schema.names).items() if times > 1]:
            raise ValueError(f"it has two columns called {twice[0]!r}")
        self._leaves = [self._readers[()].schema.column(place) for place in range(len(self._readers[()].schema))]

    def batches(self, number: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Of a group, each of rows that fit in memory together. A group must have as many rows as it claims."""
        group = self.groups[number]
        if len(group.columns) != len(self._leaves):
            raise ValueError(f"group {number} has {len(group.columns)} columns, and the file {len(self._leaves)}")
        found = self._look(group, columns)
        texts = {place: each for place, each in found.items() if self._leaves[place].physical_type == "BYTE_ARRAY"}
        shared = tuple(self._leaves[place].path for place, each in texts.items() if each.is_shared)
        by_row = [(self._leaves[place], each) for place, each in texts.items() if each.repeats]
        for leaf, each in by_row:
            if leaf.max_repetition_level and each.largest * each.values > 4 * BATCH:
                raise ValueError(f"column {leaf.path} may expand without end: write it without encoding texts by deltas")
        widest = sum(each.size for each in found.values()) // max(group.rows, 1)
        size = 1 if by_row else max(1, min(1024, BATCH // max(widest, 1)))
        left = group.rows
        for batch in self._reader(shared).iter_batches(size, row_groups=[number], columns=columns):
            left -= len(batch)
            for part in _parts(batch):
                schema = pa.schema([self.schema.field(name) for name in part.schema.names])
                yield part.cast(schema) if shared else part
        if left:
            raise ValueError(f"group {number} claims {group.rows:,} rows and has {left:,} fewer")

    def _reader(self, shared: tuple[str, ...]) -> pq.ParquetFile:
        """One that leaves these texts in their dictionaries."""
        if shared not in self._readers:
            self._readers[shared] = pq.ParquetFile(self.path.open("rb"), read_dictionary=list(shared))
        return self._readers[shared]

    def _look(self, group: Group, columns: Sequence[str] | None) -> dict[int, Column]:
        """At the pages of columns, by the places of these."""
        with self.path.open("rb") as stream:
            return {
                place: _column(group, pages(stream, *group.columns[place]))
                for place, leaf in enumerate(self._leaves)
                if columns is None or leaf.path.partition(".")[0] in columns
            }


def _without_views(field: pa.Field) -> pa.Field:
    """Texts that were written as views come out as texts, to which dictionaries can be cast."""
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([*map(_without_views, kind)])
    elif pa.types.is_list(kind):
        kind = pa.list_(_without_views(kind.value_field))
    return field.with_type({pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind))


def _column(group: Group, found: Iterable[Page]) -> Column:
    """Refuse what no honest page says of itself, before anything takes it at its word."""
    size, compressed, largest, values, has_dictionary, encodings = 0, 0, 0, 0, False, set[int]()
    for page in found:
        if page.size > max(BATCH, MOST_EXPANSION * page.compressed) or (page.is_dictionary and page.values > page.size):
            raise ValueError(f"a page of {page.compressed:,} bytes claims to be {page.size:,}, of {page.values:,} values")
        size, compressed, largest = size + page.size, compressed + page.compressed, max(largest, page.size)
        values += 0 if page.is_dictionary else page.values
        has_dictionary |= page.is_dictionary
        encodings.add(page.encoding)
    if values > max(group.rows, MOST_VALUES, MOST_EXPANSION * compressed):
        raise ValueError(f"{group.rows:,} rows claim to have {values:,} values in a column")
    return Column(size, largest, values, has_dictionary, frozenset(encodings))


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """All of it, or halves of halves where it comes to more than is held together."""
    if size_of(batch) <= BATCH:
        yield batch
    elif len(batch) == 1:
        raise ValueError(f"a row is more than {BATCH >> 20} MiB")
    else:
        half = len(batch) // 2
        yield from _parts(batch[:half])
        yield from _parts(batch[half:])


def size_of(batch: pa.RecordBatch) -> int:
    """Bytes that its values come to when every one has its own."""
    return sum(map(_expanded, batch.columns))


def _expanded(array: pa.Array) -> int:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.sum(pc.binary_length(array.dictionary).take(array.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(map(_expanded, array.flatten()))
    if pa.types.is_map(kind):
        own = pa.concat_arrays([array])  # without what lies before and after
        return _expanded(own.keys) + _expanded(own.items)
    if pa.types.is_nested(kind):
        return _expanded(array.flatten())
    return array.nbytes


def groups(stream: IO[bytes]) -> list[Group]:
    """By the footer; a ValueError where it is none."""
    stream.seek(-8, 2)
    (length,) = struct.unpack("<I", stream.read(4))
    stream.seek(-8 - length, 2)
    footer = _struct(BytesIO(stream.read(length)))
    return [Group(_field(group, 3, int), [_span(chunk) for chunk in _field(group, 1, list)]) for group in _field(footer, 4, list)]


def _span(chunk: Any) -> tuple[int, int]:
    column = _field(chunk, 3, dict)
    starts = [_field(column, number, int) for number in (9, 11) if number in column]  # of data, and a dictionary before them
    place = min((start for start in starts if start), default=0)
    return place, place + _field(column, 7, int)


def _field(found: Any, number: int, kind: type[Kind]) -> Kind:
    value = found.get(number) if isinstance(found, dict) else None
    if not isinstance(value, kind):
        raise ValueError("the footer, or the header of a page, lacks what every one has")
    return value


def pages(stream: IO[bytes], place: int, end: int) -> Iterator[Page]:
    """Those between two places; a ValueError where there is no header."""
    while place < end:
        stream.seek(place)
        header = _struct(stream)
        kind, size, compressed = (_field(header, number, int) for number in (1, 2, 3))
        if min(size, compressed) < 0:
            raise ValueError(f"no page begins at byte {place}")
        values, encoding = 0, 0
        if kind in OWN_HEADERS:
            own, by = OWN_HEADERS[kind]
            values, encoding = (_field(_field(header, own, dict), number, int) for number in (1, by))
        yield Page(size, compressed, values, encoding, kind == DICTIONARY)
        place = stream.tell() + compressed


def _struct(stream: IO[bytes]) -> dict[int, Any]:
    """Fields by their numbers: whole numbers, structs, lists, and None for what is passed over."""
    found: dict[int, Any] = {}
    number = 0
    while kind := _byte(stream):
        number = number + (kind >> 4) if kind >> 4 else _whole(stream)
        if number in found:
            raise ValueError("a header says one thing twice")
        found[number] = _value(stream, kind & 15)
    return found


def _value(stream: IO[bytes], kind: int) -> Any:
    if kind in (1, 2):  # true, false
        return None
    if kind in (4, 5, 6):
        return _whole(stream)
    if kind in (3, 7, 8):  # a byte, a float, bytes
        length = {3: 1, 7: 8}.get(kind) or _unsigned(stream)
        if length > BATCH or len(stream.read(length)) < length:
            raise ValueError("a header is cut off")
        return None
    if kind == 9:
        return _list(stream)
    if kind == 12:
        return _struct(stream)
    raise ValueError("a header holds what none does")


def _list(stream: IO[bytes]) -> list[Any]:
    head = _byte(stream)
    size, kind = head >> 4, head & 15
    if kind in (1, 2):
        kind = 3  # in a list they take a byte
    size = size if size < 15 else _unsigned(stream)
    if size > MOST_ITEMS:
        raise ValueError("a header holds too long a list")
    return [_value(stream, kind) for _ in range(size)]


def _whole(stream: IO[bytes]) -> int:
    number = _unsigned(stream)
    return number >> 1 ^ -(number & 1)


def _unsigned(stream: IO[bytes]) -> int:
    number = 0
    for shift in range(0, 64, 7):
        byte = _byte(stream)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
    raise ValueError("a header holds too large a number")


def _byte(stream: IO[bytes]) -> int:
    if not (read := stream.read(1)):
        raise ValueError("a header is cut off")
    return read[0]

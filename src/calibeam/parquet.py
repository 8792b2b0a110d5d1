"""What the pages of a Parquet file say of themselves, read before any is decompressed.

A page names the size it expands to and, if it is a dictionary, how many values it holds; readers take that much memory on its
word. Its header is a struct in Thrift's compact form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

DICTIONARY = 2


class Page(NamedTuple):
    size: int
    """Decompressed, as it says."""
    compressed: int
    values: int
    """Of a dictionary; of other pages 0."""


def pages(stream: IO[bytes], column: Any) -> Iterator[Page]:
    """Those of one column of a row group, by its metadata; a ValueError where there is no header."""
    starts = column.data_page_offset, column.dictionary_page_offset
    place = min(start for start in starts if start)
    end = place + column.total_compressed_size
    while place < end:
        stream.seek(place)
        header = _struct(stream)
        size, compressed = header.get(2), header.get(3)
        if not isinstance(size, int) or not isinstance(compressed, int) or min(size, compressed) < 0:
            raise ValueError(f"no page begins at byte {place}")
        yield Page(size, compressed, header.get(7, {}).get(1, 0) if header.get(1) == DICTIONARY else 0)
        place = stream.tell() + compressed


def _struct(stream: IO[bytes]) -> dict[int, Any]:
    """Fields by their numbers: whole numbers, structs, and None for what is passed over."""
    found: dict[int, Any] = {}
    number = 0
    while kind := _byte(stream):
        number = number + (kind >> 4) if kind >> 4 else _whole(stream)
        found[number] = _value(stream, kind & 15)
    return found


def _value(stream: IO[bytes], kind: int) -> Any:
    if kind in (1, 2):  # true, false
        return None
    if kind in (4, 5, 6):
        return _whole(stream)
    if kind == 8:  # bytes
        stream.seek(_unsigned(stream), 1)
        return None
    if kind == 12:
        return _struct(stream)
    raise ValueError("a page's header holds what none does")


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
    raise ValueError("a page's header holds too large a number")


def _byte(stream: IO[bytes]) -> int:
    if not (read := stream.read(1)):
        raise ValueError("a page's header is cut off")
    return read[0]

"""Bytes that find their way, by what they make the code do, into what reads a Parquet file's footer and the headers of its pages.

    python tests/coverage_fuzz.py FOLDER [-runs=1000000]

Of what calibeam reads, this alone is read byte by byte in Python, where atheris can watch. FOLDER is for what it finds.
"""

from __future__ import annotations

import struct
import sys
from io import BytesIO
from pathlib import Path

import atheris  # type: ignore[import-not-found]
import pyarrow as pa
import pyarrow.parquet as pq

with atheris.instrument_imports(include=["calibeam.parquet"]):
    from calibeam import parquet

LARGEST = 1 << 14


def seeds(folder: Path) -> None:
    """Right files, to begin with."""
    table = pa.table({"source": ["one", "two", "two"], "targets": [["a"], [], ["b", "c"]], "number": [1.5, None, 2.5]})
    for number, how in enumerate(({}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"})):
        pq.write_table(table, folder / f"{number}.parquet", **how)


def examine(content: bytes) -> None:
    """A footer, and pages wherever it says that there are any: found, or refused, whatever the bytes are."""
    stream = BytesIO(content)
    try:
        for group in parquet.groups(stream):
            for start, end in group.columns:
                parquet._column(group, parquet.pages(stream, start, end))
    except (ValueError, OSError, struct.error, RecursionError):
        pass


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    seeds(place)
    atheris.Setup([*sys.argv, f"-max_len={LARGEST}"], examine)
    atheris.Fuzz()

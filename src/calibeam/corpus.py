"""A corpus: files of documents, read one at a time and never held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from calibeam import rows
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, kind_of


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(StageConfig):
    files: tuple[str, ...] = option(
        help='files of documents, or patterns such as "corpus/*.jsonl.gz": JSONL, JSON, CSV, TSV, Parquet, or text '
        "with blank lines between documents",
        identity=False,
    )
    text_column: str = option("text", "the column of the document")
    bad_rows: str = option("error", "what to do with rows that cannot be used", choices=lambda: ("error", "skip"))


def find(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns name, in order."""
    files = [file for pattern in patterns for file in rows.matching(pattern)]
    if not files:
        raise CalibeamError("files must name at least one file of documents")
    return files


def read(file: str, config: CorpusConfig) -> Iterator[str | None]:
    """Every document of a file; None for a row that cannot be used, where such rows are to be skipped."""
    for number, row in enumerate(rows.read(file), start=1):
        problem = _problem(row, config.text_column)
        if problem and config.bad_rows == "error":
            stage = type(config).__module__.rpartition(".")[2]
            raise CalibeamError(f"{file}, row {number}: {problem}\nFix it, or leave such rows out with {stage}.bad_rows=skip")
        yield None if problem else row[config.text_column]


def _problem(row: Any, column: str) -> str:
    if isinstance(row, rows.Complaint):
        return row
    if not isinstance(row, dict):
        return "not an object with fields"
    if column not in row:
        return f"no field {column!r}; it has {', '.join(map(repr, row)) or 'none'}"
    text = row[column]
    if not isinstance(text, str):
        return f"field {column!r} is {'missing' if text is None else f'{kind_of(text)}, not text'}"
    return "" if rows.is_unicode(text) else f"field {column!r} is not valid Unicode"

"""Tables in the paper's form, from records: Markdown to read, CSV and JSON to go on with."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibeam.figures import Spec
from calibeam.studies.results import ALL, Record

Cell = Callable[[Record], str]


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def without_empty_columns(self, kept: int) -> Table:
        """Less the columns, after the first so many, that have nothing in any line: the paper's, where it has none."""
        full = [place for place in range(len(self.columns)) if place < kept or any(row[place] for row in self.rows)]
        return Table(self.title, [self.columns[i] for i in full], [[row[i] for i in full] for row in self.rows], self.notes)

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        grid = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
        return "\n\n".join([f"# {_escaped(self.title)}", grid, *map(_escaped, self.notes)]) + "\n"


def pivot(
    title: str,
    records: Sequence[Record],
    labels: Mapping[str, str],
    cells: Mapping[str, Cell],
    overall: Mapping[str, Cell] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """A line for every set of labels (by their columns' names), some columns for every task, and some over all of them."""
    tasks = list(dict.fromkeys(record["task"] for record in records if record["task"] != ALL))
    lines: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        lines.setdefault(tuple(record[label] for label in labels), {})[record["task"]] = record
    over = ALL if len(tasks) > 1 else tasks[0]
    columns = [*labels.values(), *(f"{task}: {name}" for task in tasks for name in cells), *(overall or {})]
    rows = [
        [
            *map(_word, line),
            *(cell(by_task[task]) if task in by_task else "" for task in tasks for cell in cells.values()),
            *(cell(by_task[over]) if over in by_task else "" for cell in (overall or {}).values()),
        ]
        for line, by_task in lines.items()
    ]
    return Table(title, columns, rows, list(notes)).without_empty_columns(len(labels))


def scores(record: Record, *names: str, form: str = ".2f") -> str:
    """R1/R2/RL as the paper prints them, a dash for what is not known."""
    values = [record.get(name) for name in names]
    return "" if all(value is None for value in values) else "/".join(figure(value, form) for value in values)


def rouge(record: Record) -> str:
    return scores(record, "rouge1", "rouge2", "rougeLsum")


def paper_rouge(record: Record) -> str:
    return scores(record, "paper_rouge1", "paper_rouge2", "paper_rouge_l")


def r_m(record: Record) -> str:
    return between(record, "r_m")


def delta(record: Record) -> str:
    if record.get("delta") is None:
        return ""
    return f"{record['delta']:+.2f}% ({figure(record['delta_low'], '+.2f')} … {figure(record['delta_high'], '+.2f')})"


def paper_delta(record: Record) -> str:
    return "" if record.get("paper_delta") is None else f"{record['paper_delta']:+.2f}%"


def between(record: Record, name: str) -> str:
    """A figure with its interval, if it has one."""
    ends = [record.get(f"{name}_{end}") for end in ("low", "high")]
    return figure(record[name]) + ("" if None in ends else f" ({figure(ends[0])} … {figure(ends[1])})")


def p_value(record: Record) -> str:
    return "" if record.get("p") is None else f"{record['p']:.4f}"


def figure(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def as_csv(records: Sequence[Record]) -> str:
    """Every figure of every record. A text that a spreadsheet would take for a formula is quoted."""
    names = list(dict.fromkeys(name for record in records for name in record))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _defused(value) for name, value in record.items()} for record in records)
    return stream.getvalue()


def _defused(value: Any) -> Any:
    return "'" + value if isinstance(value, str) and re.match(r"\s*[=+\-@\t\r]", value) else value


def _escaped(text: str) -> str:
    """On one line, and neither a column nor a tag."""
    return html.escape(_on_one_line(text), quote=False).replace("|", "\\|")


def _on_one_line(text: str) -> str:
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text)


def _word(value: Any) -> str:
    return "" if value is None else str(value)


def beside(specs: Mapping[str, Spec]) -> Spec:
    """Figures with their titles, two in a row."""
    titled = [{**spec, "title": _on_one_line(title)} for title, spec in specs.items()]
    return titled[0] if len(titled) == 1 else {"$schema": titled[0]["$schema"], "concat": titled, "columns": 2}

"""What a person sees in the terminal: progress, tables, notes. Text from data is never taken as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)


def printable(text: str) -> str:
    """Without control characters, which could move the cursor or worse."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "", text)


def clean(text: object) -> str:
    """The same, and without markup."""
    return escape(printable(str(text)))


def number(value: float) -> str:
    """As one reads it: 62,500, 13.52, 0.0717; what is nearly 0 is 0."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if abs(value) < 1e-4 else f"{value:.4g}"


def say(text: str, style: str = "") -> None:
    console.print(clean(text), style=style, highlight=False)


def complain(text: str) -> None:
    errors.print(f"[bold red]error:[/] {clean(text)}", highlight=False, soft_wrap=True)


class Speed(ProgressColumn):
    """Done per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{number(speed)}/s" if speed else "")


class _Lines(Progress):
    """The bar, and below it the figures, for which a line has no room."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"  {task.fields['figures']}") for task in self.tasks if task.fields["figures"])


class Bar:
    """A progress bar: examples or steps done, speed, time left, and the figures that matter."""

    def __init__(self, description: str, total: int) -> None:
        self._progress = _Lines(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20 if console.width >= 100 else 10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            Speed(),
            console=console,
        )
        self._task = self._progress.add_task(clean(description), total=total, figures="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, done: float = 1, figures: str = "") -> None:
        self._progress.advance(self._task, done)
        if figures:
            self._progress.update(self._task, figures=printable(figures))

    def reach(self, done: int) -> None:
        """So many in all, some of them perhaps by a run before this one."""
        self._progress.update(self._task, completed=done)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, figures: bool = True, labels: int = 1) -> None:
    """Figures, right below each other, in as many parts as the terminal needs; or text, which is wrapped.

    The first columns, `labels`, say what a row is about, and stand in every part. Columns without anything in them are left out.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    shown = [place for place in range(len(columns)) if place < labels or any(row[place] for row in cells)]
    widest = max(8, console.width * 2 // 5 // labels)  # of a label
    width = {place: max(map(cell_len, (columns[place], *(row[place] for row in cells)))) for place in shown}
    width |= {place: min(width[place], widest) for place in range(labels)}
    for part in _parts(shown, width, labels) if figures else [shown]:
        grid = Table(title=clean(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
        for place in part:
            is_figure = figures and place >= labels
            limit = widest if figures and place < labels else None
            justify: JustifyMethod = "right" if is_figure else "left"
            grid.add_column(clean(columns[place]), no_wrap=is_figure, justify=justify, overflow="fold", max_width=limit)
        for row in cells:
            grid.add_row(*(escape(row[place]) for place in part))
        console.print(grid)
        title = ""


def _parts(shown: Sequence[int], width: dict[int, int], labels: int) -> list[list[int]]:
    """The columns that fit beside each other, each part with the labels; a column takes three places more than its text."""
    first, parts = [*shown[:labels]], [list[int]()]
    for place in shown[labels:]:
        taken = 1 + sum(width[each] + 3 for each in (*first, *parts[-1], place))
        if parts[-1] and taken > console.width:
            parts.append([])
        parts[-1].append(place)
    return [[*first, *part] for part in parts]

"""What a person sees in the terminal: progress, tables, notes. Text from data is never taken as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
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


def say(text: str, style: str = "") -> None:
    console.print(clean(text), style=style, highlight=False)


def complain(text: str) -> None:
    errors.print(f"[bold red]error:[/] {clean(text)}", highlight=False, soft_wrap=True)


class Speed(ProgressColumn):
    """Done per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.3g}/s" if speed else "")


class Bar:
    """A progress bar: examples or steps done, speed, time left, and the figures that matter."""

    def __init__(self, description: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            Speed(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task(clean(description), total=total, figures="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, done: int = 1, figures: str = "") -> None:
        self._progress.advance(self._task, done)
        if figures:
            self._progress.update(self._task, figures=clean(figures))

    def reach(self, done: int) -> None:
        """So many in all, some of them perhaps by a run before this one."""
        self._progress.update(self._task, completed=done)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, figures: bool = True) -> None:
    grid = Table(title=clean(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1))
    for index, column in enumerate(columns):
        grid.add_column(clean(column), no_wrap=figures, justify="right" if index and figures else "left")
    for row in rows:
        grid.add_row(*(clean(cell) for cell in row))
    console.print(grid)

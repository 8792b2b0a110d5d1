"""Text from data reaches the terminal as text."""

from __future__ import annotations

import re
import time

import pytest
from rich.text import Text

from calibeam import display


@pytest.mark.parametrize(
    "character",
    [
        *"\x00\x07\x08\x0b\x0c\r\x1b\x1f\x7f\x80\x9b\x9f",
        "\u061c", "\u200e", "\u200f", "\u202a", "\u202b", "\u202c", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068", "\u2069",
    ],
    ids=lambda character: f"U+{ord(character):04X}",
)  # fmt: skip
def test_clean_strips_control_and_bidi_characters(character: str) -> None:
    assert display.clean(f"a{character}b") == "ab"


@pytest.mark.parametrize("text", ["plain", "two\nlines", "a\ttab", "naïve café", "日本語 🦊", "שלום", "👩\u200d🔬"])
def test_clean_leaves_other_text_alone(text: str) -> None:
    assert display.clean(text) == text


@pytest.mark.parametrize(
    "text", ["[bold]x[/bold]", "[red]", "a [link=http://x]y[/link]", "[/]", "ends in \\", "\\[bold]", "[1, 2]", "list[int]"]
)
def test_clean_escapes_markup(text: str) -> None:
    assert Text.from_markup(f"[bold]{display.clean(text)}[/bold]").plain == text


def test_clean_takes_any_object() -> None:
    assert display.clean(1.5) == "1.5"


def test_say_prints_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    display.say("[bold]not bold[/] \x1b[31mnot red :dog:", style="yellow")
    assert capsys.readouterr().out == "[bold]not bold[/] [31mnot red :dog:\n"


def test_complain_prints_the_text_as_it_is_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    display.complain("[bold]not bold[/] \x1b[31mnot red :dog: " + "long " * 50)
    captured = capsys.readouterr()
    assert captured.err == "error: [bold]not bold[/] [31mnot red :dog: " + "long " * 50 + "\n"
    assert captured.out == ""


def test_a_table_prints_its_cells_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    display.table("[b]T", ["[c]name", "value"], [["[red]x\x1b[0m", 3], ["row :dog:", 4]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for text in ("[b]T", "[c]name", "[red]x[0m", "3", "row :dog:"):
        assert text in out


def test_a_bar_says_how_much_is_done_in_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    with display.Bar("work", 30) as bar:
        for _ in range(3):
            time.sleep(0.05)
            bar.advance(10)
    assert re.search(r"30/30 .* \d{2,3}/s", capsys.readouterr().out)

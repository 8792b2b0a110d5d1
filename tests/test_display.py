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
    assert re.search(r"30/30 .* \d{2,3}(\.\d+)?/s", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("value", "text"),
    [(62_500.0, "62,500"), (1234.5, "1,234"), (13.5234, "13.52"), (0.0717, "0.0717"), (-3.944e-08, "0"), (0, "0")],
)  # fmt: skip
def test_numbers_are_written_as_they_are_read(value: float, text: str) -> None:
    assert display.number(value) == text


def test_a_bar_has_its_figures_on_a_line_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = "1,234 examples/s  loss -2.659  agreement 0.4795  kl 0.0717 [red]"
    monkeypatch.setattr(display.console, "_width", 80)
    with display.Bar("calibrate", 1_000_000) as bar:
        bar.advance(1_000_000, figures)
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert re.search(r"^calibrate .* 1000000/1000000 .* left .*", first)
    assert second.strip() == figures


def test_a_table_that_is_too_wide_comes_in_parts_without_what_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["run", "decoder", *(f"figure {i}" for i in range(9)), "empty"]
    rows = [
        ["a name that is longer than any other, by far", "beam 1", *range(100_000, 100_009), ""],
        ["b", "beam 2", *range(9), ""],
    ]
    monkeypatch.setattr(display.console, "_width", 80)
    display.table("title", columns, rows, labels=2)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "empty" not in out
    assert "…" not in out
    for place in range(9):
        assert out.count(f"figure {place}") == out.count(f"10000{place}") == 1
    assert out.count("title") == 1
    assert out.count("beam 2") == out.count("decoder") > 1

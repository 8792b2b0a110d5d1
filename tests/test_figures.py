"""Figures as pictures: what is drawn is read back from the SVG."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from matplotlib import image

from calibeam import figures

HOSTILE = "</script><script>alert(1)</script>{{7*7}}${x}\u2028\u202e\x1b[31m\x00\n\ufffe\udc80"
ELEMENTS = {"svg", "g", "path", "line", "text", "rect", "defs", "clipPath"}
ROWS = [
    {"beams": beams, "r_m": r_m, "from": r_m - 1, "to": r_m + 1, "model": model}
    for model, found in (("fine-tuned", (19.0, 18.0, 17.0)), ("calibrated", (20.0, 21.0, 22.0)))
    for beams, r_m in zip((1, 5, 10), found, strict=True)
]


def drawn(spec: figures.Spec, folder: Path) -> ElementTree.Element:
    svg, png = figures.save(spec, folder / "figure")
    assert (svg.name, png.name) == ("figure.svg", "figure.png")
    height, width = image.imread(png).shape[:2]
    assert width > 900
    assert height > 150
    return ElementTree.fromstring(svg.read_text(encoding="utf-8"))  # noqa: S314


def texts(svg: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text")]


def marks(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """The elements of a kind of mark that are not axes or legends."""
    groups = [group for group in svg.iter() if f"mark-{kind} role-mark" in group.get("class", "")]
    return [element for group in groups for element in group if element.tag.endswith(("path", "line"))]


def heights(path: str) -> list[float]:
    return [float(point.split(",")[1]) for point in path.replace("L", "M").split("M")[1:]]


def test_a_line_for_each_series_in_its_band(tmp_path: Path) -> None:
    spec = figures.line(ROWS, "beams", "r_m", "model", interval=("from", "to"), x_title="candidates", y_title="R_m")
    svg = drawn(spec, tmp_path)
    assert {"candidates", "R_m", "fine-tuned", "calibrated", "1", "5", "10"} <= set(texts(svg))
    first, second = marks(svg, "line")
    assert (first.get("stroke"), second.get("stroke")) == figures.SERIES[:2]
    falls, rises = heights(first.get("d", "")), heights(second.get("d", ""))
    assert falls == sorted(falls)  # in an SVG, down is more
    assert rises == sorted(rises, reverse=True)
    assert len(marks(svg, "area")) == 2


def test_counts_are_written_without_a_point(tmp_path: Path) -> None:
    """Whether every step has its mark or only some have."""
    for steps, wanted in ((3, {"0", "1", "2"}), (2000, {"0", "500", "1,000"})):
        rows = [{"step": step, "loss": step / 7} for step in range(steps)]
        found = texts(drawn(figures.line(rows, "step", "loss", y_title=None), tmp_path))
        assert wanted <= set(found[: found.index("step")])
        assert not any("." in text for text in found[: found.index("step")])


def test_upright_bars_stand_beside_each_other_on_their_labels(tmp_path: Path) -> None:
    rows = [{"words": words, "share": share, "of": of} for of in "ab" for words, share in (("1-2", 30.0), ("3-4", 10.0))]
    svg = drawn(figures.bars(rows, "words", "share", "of", title="%", upright="words"), tmp_path)
    assert {"1-2", "3-4", "words", "%", "a", "b"} <= set(texts(svg))
    places = [bar.get("d", "") for bar in marks(svg, "rect")]
    tall, short = (float(place.split("v")[1].split("h")[0]) for place in places[:2])
    assert math.isclose(tall / short, 3)
    assert len({place.split(",")[0] for place in places}) == 4


def test_bars_have_lengths_in_proportion_and_whiskers(tmp_path: Path) -> None:
    rows = [{"stage": "decode", "s": 30.0, "lo": 20.0, "hi": 40.0}, {"stage": "score", "s": 10.0, "lo": 9.0, "hi": 11.0}]
    svg = drawn(figures.bars(rows, "stage", "s", interval=("lo", "hi"), title="seconds"), tmp_path)
    assert {"decode", "score", "seconds"} <= set(texts(svg))
    long, short = (float(bar.get("d", "").split("h")[1].split("v")[0]) for bar in marks(svg, "rect"))
    assert math.isclose(long / short, 3)
    wide, narrow = (abs(float(whisker.get("x2", 0)) - float(whisker.get("x1", 0))) for whisker in marks(svg, "rule"))
    assert math.isclose(wide / narrow, 10)


def test_intervals_beside_a_line_at_zero(tmp_path: Path) -> None:
    rows = [{"decoder": f"beam {n}", "change": n / 10, "lo": n / 10 - 0.3, "hi": n / 10 + 0.3} for n in (1, 5, 10)]
    spec = figures.intervals(rows, "decoder", "change", interval=("lo", "hi"))
    assert len(marks(drawn(spec, tmp_path), "rule")) == 4
    spec = figures.intervals(rows, "decoder", "change", interval=("lo", "hi"), rule=None)
    assert len(marks(drawn(spec, tmp_path), "rule")) == 3


def test_fault_44_hostile_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    def named(row: dict[str, Any]) -> dict[str, Any]:
        return {key + HOSTILE: value + HOSTILE if isinstance(value, str) else value for key, value in row.items()}

    beams, r_m, model = (name + HOSTILE for name in ("beams", "r_m", "model"))
    ends = ("from" + HOSTILE, "to" + HOSTILE)
    for spec in (
        figures.line(map(named, ROWS), beams, r_m, model, interval=ends, dash=model),
        figures.bars(map(named, ROWS), model, r_m, beams, interval=ends),
        figures.intervals(map(named, ROWS), model, r_m, interval=ends),
    ):
        svg = drawn(spec, tmp_path)
        assert {element.tag.split("}")[1] for element in svg.iter()} <= ELEMENTS
        assert any("</script>" in text for text in texts(svg))


def test_a_very_long_name_is_cut(tmp_path: Path) -> None:
    rows = [{"name": "W" * 1_000_000, "value": 1.0}]
    assert rows[0]["name"][: figures.LONGEST - 1] + "…" == figures.bars(rows, "name", "value")["data"]["values"][0]["x"]
    drawn(figures.bars(rows, "name", "value", title="W" * 1_000_000), tmp_path)


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    rows = [*ROWS, {"beams": 20, "r_m": math.nan, "from": None, "to": math.inf, "model": "fine-tuned \udc80"}]
    spec = figures.line(rows, "beams", "r_m", "model", interval=("from", "to"))
    json.dumps(spec, allow_nan=False).encode()
    assert len(heights(marks(drawn(spec, tmp_path), "line")[0].get("d", ""))) == 3


def test_a_page_gives_the_width(tmp_path: Path) -> None:
    spec = figures.line(ROWS, "beams", "r_m")
    assert figures.for_page(spec) == {**spec, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}

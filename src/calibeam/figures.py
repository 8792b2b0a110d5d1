"""Figures, each described once: a Vega-Lite specification, made by a pure function from plain rows.

    rows = [{"beams": 1, "r_m": 19.6, "low": 18.9, "high": 20.2, "model": "fine-tuned"}, ...]
    figure = line(rows, "beams", "r_m", "model", interval=("low", "high"), x_title="candidates", y_title="R_m")
    save(figure, Path("out/quality"))  # quality.svg and quality.png, for papers

`bars` draws values of named things, `intervals` points with their intervals beside a line at 0. Series take their
colours in the order in which they first appear, and the first is grey: give the baseline first, or say
`baseline=False` where there is none. A report draws the same specification in the browser (`for_page`), where colours
follow light and dark.

Rows are copied under names of our own (x, y, low, high, series, dash), so that no text of a user is ever read as the
name of a field or as an expression: it is data, or a title.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibeam import store

Spec = dict[str, Any]
Row = Mapping[str, Any]
Interval = tuple[str, str]

SIZE = {"width": 420, "height": 240}
LONGEST = 120
"""So many characters of a name are shown."""
STROKES = {"symbolType": "stroke", "symbolSize": 220}
FEW = 12
"""So many different x are marked one by one."""
SERIES = ("#7d838c", "#12805c", "#3b6fb6", "#c2662d", "#8a5fb0", "#b0446b", "#7a7a1f", "#2a8a98")
"""Grey for the baseline, then colours that eyes of all kinds tell apart."""


def line(
    rows: Iterable[Row],
    x: str,
    y: str,
    series: str = "",
    *,
    interval: Interval | None = None,
    dash: str = "",
    x_title: str = "",
    y_title: str | None = "",
    log_x: bool = False,
    zero: bool = False,
    points: bool = True,
) -> Spec:
    """y against x, a line for each of `series`, dashed by `dash`, in a band from low to high if `interval` names them.

    Axes are titled by their columns unless given another title; y_title=None leaves the axis bare.
    """
    values = _copied(rows, {"x": x, "y": y, "series": series, "dash": dash}, interval)
    y_title = y if y_title == "" else y_title
    places = sorted({row["x"] for row in values if row["x"] is not None})
    ticks: Spec = {"values": places} if len(places) <= FEW else {}
    if all(place.is_integer() for place in places):
        ticks |= {"format": ",d", "tickMinStep": 1}  # counts, not 1.0
    shared = {
        "x": {
            "field": "x", "type": "quantitative", "title": _text(x_title or x), "axis": {"grid": False, **ticks},
            "scale": {"nice": False, "padding": 8, **({"type": "log"} if log_x else {"zero": False})},
        },
        **_colour(values, STROKES),
        **_dashes(values),
    }  # fmt: skip
    y_axis: Spec = {"type": "quantitative", "title": y_title and _text(y_title or y), "scale": {"zero": zero}}
    tips = _tooltip(shared["x"]["title"], _text(y_title or y), interval, {"series": series, "dash": dash})
    drawn = {**shared, "y": {"field": "y", **y_axis}, "tooltip": tips}
    band = {**shared, "y": {"field": "low", **y_axis}, "y2": {"field": "high"}}
    if "strokeDash" in band:
        band["detail"] = band.pop("strokeDash")
    marks = [{"mark": {"type": "area", "opacity": 0.14}, "encoding": band}] if interval else []
    said = f"{_text(y_title or y)} against {_text(x_title or x)}"
    return _figure(said, values, [*marks, {"mark": {"type": "line", "point": points}, "encoding": drawn}])


def bars(
    rows: Iterable[Row],
    label: str,
    value: str,
    series: str = "",
    *,
    interval: Interval | None = None,
    title: str = "",
    baseline: bool = True,
    upright: str = "",
) -> Spec:
    """A bar from 0 to the value of every label, beside each other for each of `series`, with whiskers from low to high.

    They lie, unless `upright` has a title for the labels below them."""
    return _of_labels({"type": "bar"}, rows, label, value, series, interval, title, baseline, zero=True, upright=upright)


def intervals(
    rows: Iterable[Row],
    label: str,
    value: str,
    series: str = "",
    *,
    interval: Interval,
    title: str = "",
    rule: float | None = 0.0,
    baseline: bool = True,
) -> Spec:
    """A point with its interval for every label, and a line at `rule`: what does not touch it differs."""
    figure = _of_labels(
        {"type": "point", "filled": True, "size": 70}, rows, label, value, series, interval, title, baseline, zero=False
    )
    if rule is None:
        return figure
    at = {"data": {"values": [{"y": rule}]}, "mark": {"type": "rule", "strokeDash": [3, 3], "strokeWidth": 1}}
    return {**figure, "layer": [{**at, "encoding": {"x": {"field": "y", "type": "quantitative"}}}, *figure["layer"]]}


def for_page(spec: Spec) -> Spec:
    """As wide as the page lets it be."""
    return {**spec, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}


def save(spec: Spec, stem: Path) -> list[Path]:
    """Write STEM.svg and STEM.png, on white, as a paper wants them."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg({**spec, "config": theme()})
    written = []
    for ending, content in ((".svg", svg), (".png", vl_convert.svg_to_png(svg, scale=3))):
        written.append(stem.with_name(stem.name + ending))
        store.write_file(written[-1], content)
    return written


def theme(colours: Sequence[str] = SERIES, ink: str = "#1d2125", soft: str = "#5f6670", rule: str = "#e3e5e8") -> Spec:
    """What every figure looks like; the page gives names of its own colours."""
    words = {"labelColor": soft, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 11.5, "titleFontWeight": "normal"}
    font = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    return {
        "background": None if ink.startswith("var") else "white",
        "font": font,
        "padding": 6,
        "view": {"stroke": None},
        "axis": {
            **words, "gridColor": rule, "domainColor": rule, "tickColor": rule,
            "labelLimit": 200, "labelPadding": 6, "titlePadding": 8, "tickCount": 6,
        },
        "legend": {
            **words, "orient": "top", "title": None, "symbolOpacity": 1, "symbolStrokeWidth": 2.5, "labelLimit": 260,
        },
        "range": {"category": list(colours)},
        "mark": {"color": colours[1]},
        "line": {"strokeWidth": 2},
        "point": {"size": 45, "opacity": 1},
        "rule": {"color": ink, "strokeWidth": 1.5},
    }  # fmt: skip


def _of_labels(
    mark: Spec,
    rows: Iterable[Row],
    label: str,
    value: str,
    series: str,
    interval: Interval | None,
    title: str,
    baseline: bool,
    *,
    zero: bool,
    upright: str = "",
) -> Spec:
    values = _copied(rows, {"x": label, "y": value, "series": series}, interval)
    labels, several = _in_order(values, "x"), len(_in_order(values, "series"))
    across, along = ("x", "y") if upright else ("y", "x")
    place: Spec = {
        "field": "x", "type": "nominal", "title": _text(upright) if upright else None, "sort": labels,
        "axis": {"ticks": False, "domain": False, "labelAngle": 0, "labelOverlap": True}, "scale": {"paddingInner": 0.3},
    }  # fmt: skip
    beside = {"field": "series", "sort": _in_order(values, "series"), "scale": {"paddingInner": 0.15}}
    apart: Spec = {f"{across}Offset": beside} if several > 1 else {}
    axis: Spec = {"type": "quantitative", "title": _text(title or value), "scale": {"zero": zero}}
    shared = {across: place, **apart, **_colour(values, baseline=baseline)}
    drawn = {
        **shared,
        along: {"field": "y", **axis, "stack": None},
        "tooltip": _tooltip("", axis["title"], interval, {"series": series}),
    }
    whiskers = {**shared, along: {"field": "low", **axis}, f"{along}2": {"field": "high"}}
    over = mark["type"] == "bar"
    if over:
        whiskers.pop("color", None)
    layer: list[Spec] = [{"mark": mark, "encoding": drawn}]
    if interval:
        layer.insert(over, {"mark": "rule", "encoding": whiskers})
    figure = _figure(f"{axis['title']} of each {_text(label)}", values, layer)
    return figure if upright else {**figure, "height": len(labels) * (30 if several <= 1 else 8 + 16 * several)}


def _figure(said: str, values: list[dict[str, Any]], layer: list[Spec]) -> Spec:
    """`said` is what it is for those who cannot see it."""
    schema = "https://vega.github.io/schema/vega-lite/v6.json"
    return {"$schema": schema, "description": said, **SIZE, "data": {"values": values}, "layer": layer}


def _copied(rows: Iterable[Row], names: dict[str, str], interval: Interval | None) -> list[dict[str, Any]]:
    """Under our names, with nothing that JSON has no word for."""
    if interval:
        names = {**names, "low": interval[0], "high": interval[1]}
    return [{ours: _plain(row[theirs]) for ours, theirs in names.items() if theirs} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if value is None:
        return None
    return float(value) if math.isfinite(value) else None


def _in_order(values: list[dict[str, Any]], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in values if field in row))


def _colour(values: list[dict[str, Any]], legend: Spec | None = None, *, baseline: bool = True) -> Spec:
    names = _in_order(values, "series")
    shown = {"values": names, **(legend or {})} if len(names) > 1 else None
    domain = names if baseline else ["", *names]  # so that nobody has the grey
    return {"color": {"field": "series", "type": "nominal", "scale": {"domain": domain}, "legend": shown}} if names else {}


def _dashes(values: list[dict[str, Any]]) -> Spec:
    names = _in_order(values, "dash")
    dashed = {"field": "dash", "type": "nominal", "scale": {"domain": names}, "legend": STROKES}
    return {"strokeDash": dashed} if len(names) > 1 else {}


def _tooltip(x: str, y: str, interval: Interval | None, groups: dict[str, str]) -> list[Spec]:
    number = {"type": "quantitative", "format": ",.4~r"}
    return [
        *({"field": ours, "type": "nominal", "title": _text(theirs)} for ours, theirs in groups.items() if theirs),
        {"field": "x", "type": "quantitative", "title": x} if x else {"field": "x", "type": "nominal", "title": " "},
        {"field": "y", "title": y, **number},
        *({"field": end, "title": end, **number} for end in ("low", "high") if interval),
    ]


def _text(text: str) -> str:
    """On one line, of printable characters, and no longer than can be read.

    A line break in a title is an error of Vega's, a control character ends the whole process in what draws the
    static copies, and a word of 100,000 letters keeps it busy for minutes.
    """
    seen = "".join(character if character.isprintable() else " " for character in text[: LONGEST + 1])
    return seen if len(seen) <= LONGEST else seen[: LONGEST - 1] + "…"

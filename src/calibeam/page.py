"""Pages that are one file, load nothing, and run nothing but our own scripts, whatever text is in them.

Text in a template is escaped. Data for the scripts is compressed JSON in base64, in which nothing can be read as
markup, and the scripts put it on the page as text. The policy of the page names our two scripts and our style sheet by
their hashes and allows nothing else: no other script, no `eval`, no connection, and (with Trusted Types) no HTML made
from a string. Vega draws under it by interpreting its expressions in place of compiling them.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibeam import figures

MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"
TEMPLATES = Path(__file__).parent / "templates"
PAGE_THEME = figures.theme(
    [f"var(--series-{number})" for number in range(len(figures.SERIES))], "var(--ink)", "var(--soft)", "var(--line)"
)


def fill(template: str, **values: Any) -> str:
    """A template; what goes into HTML is escaped, in Markdown it is not markup that can run."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters |= {"points": _points, "figure": figure, "duration": duration, "number": number}
    return environment.get_template(template).render(**values)


def page(template: str, *, drawn: Mapping[str, figures.Spec], data: Mapping[str, str] | None = None, **values: Any) -> str:
    """A whole page: `drawn` by the names under which the template places them, `data` packed already."""
    from markupsafe import Markup

    style, scripts = _asset("page.css"), [_vega(), _asset("page.js")]
    shown = {name: figures.for_page(spec) for name, spec in drawn.items()}
    text = fill(
        template,
        policy=policy(style, scripts),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        data={"figures": pack(shown), "theme": pack(PAGE_THEME), **(data or {})},
        drawn=list(drawn),
        **values,
    )
    return text.encode(errors="replace").decode()  # a name of a file may hold what is not Unicode


def policy(style: str, scripts: list[str]) -> str:
    """The Content-Security-Policy under which these and nothing else run."""
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "default",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def pack(value: Any) -> str:
    """JSON, compressed, in base64; the same for the same value."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def duration(seconds: float) -> str:
    """As one says it: 8.4 s, 3 min 12 s, 2 h 05 min."""
    whole = round(seconds)
    if seconds < 60 and whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _points(value: float | None, form: str = ".2f") -> str:
    """A share of 1 in points of 100; what there is no figure of is a dash."""
    return NONE if value is None else figure(100 * value, form)


def figure(value: float, form: str = ".2f") -> str:
    """With a minus as wide as a plus."""
    return f"{value:{form}}".replace("-", MINUS)


def number(value: float) -> str:
    """In as many digits as it takes; what is 0 but for rounding is 0."""
    return "0" if abs(value) < 1e-8 else figure(value, ".4g").replace(f"e{MINUS}0", f"e{MINUS}")


def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


@functools.cache
def _vega() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

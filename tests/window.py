"""A page in a real browser, and everything that it does besides being shown."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

ELEMENTS = frozenset(
    re.findall(
        r"\w+",
        """html head meta title style body header footer nav main section div p h1 h2 h3 h4 ul li a b i bdi span code pre kbd
        form table thead tbody tr th td figure figcaption details summary label input select option button noscript script
        svg g path line text rect defs clippath""",
    )
)
LOOK = """() => [...document.querySelectorAll("*")].map((element) => [
    element.localName.toLowerCase(), Object.fromEntries([...element.attributes].map(({name, value}) => [name, value]))])"""


class Window:
    """`problems` has every message, error, dialog and request of the page; it must stay empty."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.problems: list[str] = []
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.goto(path.as_uri())
        self.page.on("request", lambda request: self.problems.append(f"request: {request.url}"))
        self.page.wait_for_selector("html[data-ready]")

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.close()
        assert not self.problems or error, self.problems

    def elements(self) -> Counter[str]:
        """What is on the page, all of it our own."""
        found = self.page.evaluate(LOOK)
        assert not {tag for tag, _ in found} - ELEMENTS, {tag for tag, _ in found} - ELEMENTS
        for tag, attributes in found:
            assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcdoc", "action")], tag
            assert attributes.get("href", "#").startswith("#"), attributes
            assert tag != "form" or set(attributes) == {"class"}, attributes  # Vega's, for controls, which we have none of
        return Counter(tag for tag, _ in found)

    def anew(self) -> Window:
        """As it was when it was opened, but for the example."""
        self.page.set_viewport_size({"width": 1400, "height": 900})
        for name, value in (("sort", "as in the data"), ("filter", "all"), ("rank", "likelihood"), ("setting", "beam 4")):
            self.page.select_option(f"#{name}", value)
        self.page.fill("#search", "")
        self.page.locator("#list").press("Home")
        return self

    def text(self, selector: str = "body") -> str:
        return self.page.locator(selector).first.inner_text()

    def rows(self) -> list[str]:
        """The ids in sight in the list of examples."""
        return self.page.locator("#list .row .id").all_text_contents()

    def candidates(self, side: int) -> list[list[str]]:
        """The table of candidates, before (0) or after (1)."""
        rows = self.page.locator(".candidates").nth(side).locator("tbody tr")
        return [row.locator("td").all_text_contents() for row in rows.all()]

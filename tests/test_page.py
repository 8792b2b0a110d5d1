"""What pages are made of; tests/stages/test_report.py opens whole ones in a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import pytest

from calibeam import page
from hostile import HOSTILE


def test_packed_data_comes_back_and_holds_no_markup() -> None:
    value = {"texts": HOSTILE, "numbers": [1, 2.5, None]}
    packed = page.pack(value)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)
    assert json.loads(gzip.decompress(base64.b64decode(packed))) == value
    assert page.pack(value) == packed
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.pack(float("nan"))


def test_the_policy_names_scripts_and_style_by_their_hashes() -> None:
    def hashed(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    rules = dict(rule.split(" ", 1) for rule in page.policy("p {}", ["first()", "second()"]).split("; "))
    assert rules.pop("default-src") == "'none'"
    assert rules.pop("script-src") == f"'sha256-{hashed('first()')}' 'sha256-{hashed('second()')}'"
    assert rules.pop("style-src") == f"'sha256-{hashed('p {}')}'"
    assert rules == {
        "base-uri": "'none'", "form-action": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "default",
    }  # fmt: skip


def test_neither_script_ends_its_element_early() -> None:
    for script in (page._vega(), page._asset("page.js")):
        assert not re.search(r"</script|<!--", script, re.IGNORECASE)
    assert "</style" not in page._asset("page.css")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0.0 s"), (8.44, "8.4 s"), (59.7, "1 min 00 s"), (192, "3 min 12 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations_read_as_one_says_them(seconds: float, said: str) -> None:
    assert page.duration(seconds) == said

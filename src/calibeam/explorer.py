"""What the explorer of a report reads: every example, with all its candidates before and after, in packs.

The index has what the list shows, sorts and searches; the candidates of a way of decoding come in packs of some
hundred examples, which the page opens when one of them is looked at. So a page of 10,000 examples opens at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from calibeam import page
from calibeam.paper.rouge import ROUGE_KINDS
from calibeam.records import Example

PACK = 200
Rows = Iterable[dict[str, Any]]


class Setting(NamedTuple):
    """One way of decoding: rows of evaluate's outputs and candidates, before and after, each in the examples' order."""

    name: str
    outputs: tuple[Rows, Rows]
    candidates: tuple[Rows, Rows]


def pack(examples: Sequence[Example], settings: Sequence[Setting], shown: int = 0) -> dict[str, str]:
    """The page's blocks of data, by name; `shown` is the setting to begin with."""
    index = {
        "ids": [example.id for example in examples],
        "sources": [example.source for example in examples],
        "references": [example.targets for example in examples],
        "settings": [
            {"name": each.name, "before": _columns(each.outputs[0]), "after": _columns(each.outputs[1])} for each in settings
        ],
        "shown": shown,
        "pack": PACK,
    }
    packs = {}
    for number, setting in enumerate(settings):
        pairs = ([*map(_candidates, pair)] for pair in zip(*setting.candidates, strict=True))
        for part in itertools.count():
            if not (some := [*itertools.islice(pairs, PACK)]):
                break
            packs[f"candidates-{number}-{part}"] = page.pack(some)
    return {"index": page.pack(index), **packs}


def _columns(outputs: Rows) -> dict[str, list[Any]]:
    rows = [
        {
            "output": row["output"], "log_p": _rounded(row["log_p"], 2), "words": row["words"], "repeats": row["repeats"],
            "rouge": _rounded(100 * math.fsum(row[kind] for kind in ROUGE_KINDS) / len(ROUGE_KINDS), 2),
        }
        for row in outputs
    ]  # fmt: skip
    return {name: [row[name] for row in rows] for name in ("output", "log_p", "rouge", "words", "repeats")}


def _candidates(row: dict[str, Any]) -> list[list[Any]]:
    """log P, similarity, ROUGE, the tokens and their log-probs of each."""
    return [
        [_rounded(log_p, 2), _rounded(similarity, 3), _rounded(100 * rouge, 1), pieces, [_rounded(value, 2) for value in tokens]]
        for log_p, similarity, rouge, pieces, tokens in zip(
            row["log_p"], row["similarity"], row["rouge"], row["pieces"], row["token_log_p"], strict=True
        )
    ]


def _rounded(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None

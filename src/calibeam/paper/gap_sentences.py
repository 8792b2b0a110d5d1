"""Gap-sentence generation, which the paper's models are pretrained by (PEGASUS, Zhang et al., ICML 2020, section 3).

The principal sentences of a document are masked, and their concatenation is what the decoder has to write. A sentence is
principal by its ROUGE-1 F1 with the rest of the document: taken by itself (Ind), or together with those chosen before it
(Seq); with words counted as often as they come (Orig), or once (Uniq).

Our readings: a word is a run of letters and digits, in lower case, so that scripts which ROUGE does not see count as well. Of
sentences with equal scores the first is chosen. At least one sentence is chosen, and at least one is left to read: a document of
fewer than two sentences has nothing to choose.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Span = tuple[int, int]
"""Where a sentence begins and ends in its document."""

_QUOTES = "'\"\u2018\u2019\u201c\u201d"
# Possessive, and never begun inside what it repeats: so no text takes more than one pass.
_BREAK = re.compile(
    rf"(?<![.!?…])(?P<end>[.!?…]++[»)\]{_QUOTES}]*+)\s++"  # an end, and space after it
    rf"|(?P<wide>[\u3002\uff01\uff1f\uff61]++[\u300d\u300f\uff09{_QUOTES}]*+)\s*+"  # of scripts that write no space
    r"|\n\s*+"
)
_ABBREVIATION = re.compile(
    rf"(?:^|[\s({_QUOTES}])(?:[A-Z]|[A-Za-z](?:\.[A-Za-z])+|vs|cf|al|Fig|Eq"
    r"|Mr|Mrs|Ms|Dr|Prof|St|Gen|Col|Lt|Sgt|Capt|Gov|Sen|Rep|Rev|Hon)\.$"
)
_LONGEST_ABBREVIATION = 12
_WORD = re.compile(r"[^\W_]+")


def split_sentences(text: str) -> list[Span]:
    """Sentences end at a full stop or the like before space, and with a line; never before a small letter.

    In time linear in the text, whatever it holds. What lies between two sentences is white space.
    """
    spans, start = [], len(text) - len(text.lstrip())
    for found in _BREAK.finditer(text, start):
        end = found.end()
        if found.lastgroup == "wide" or _ends_sentence(text, start, found, end):
            spans.append((start, start + len(text[start:end].rstrip())))
            start = end
    if start < len(text):
        spans.append((start, start + len(text[start:].rstrip())))
    return spans


def _ends_sentence(text: str, start: int, found: re.Match[str], end: int) -> bool:
    if text[end : end + 1].islower():
        return False
    if found["end"] != ".":
        return True
    stop = found.end("end")
    return not _ABBREVIATION.search(text[max(start, stop - _LONGEST_ABBREVIATION) : stop])


def number_of_gaps(sentences: int, ratio: float) -> int:
    """How many sentences to mask: the ratio, rounded, but at least one, and at least one is left. 0 of fewer than two."""
    return 0 if sentences < 2 else min(max(1, math.floor(ratio * sentences + 0.5)), sentences - 1)


def principal(
    sentences: Sequence[str],
    count: int,
    random: np.random.Generator,
    noise: float = 0.0,
    *,
    sequential: bool = False,
    unique: bool = False,
) -> list[int]:
    """The `count` sentences of highest ROUGE-1 F1 with the rest, in the order of the document.

    With noise e, every sentence's score is first multiplied by a number drawn from [1 - e, 1 + e]. Ind takes time linear in
    the document; Seq takes that `count` times.
    """
    import numpy as np

    document = _Document(sentences)
    factor = random.uniform(1 - noise, 1 + noise, len(sentences)) if noise else np.ones(len(sentences))
    if not sequential:
        return sorted(np.argsort(-document.scores([], unique) * factor, kind="stable")[:count].tolist())
    chosen: list[int] = []
    for _ in range(count):
        scores = document.scores(chosen, unique) * factor
        scores[chosen] = -1.0
        chosen.append(int(scores.argmax()))
    return sorted(chosen)


def at_random(sentences: Sequence[str], count: int, random: np.random.Generator, noise: float = 0.0) -> list[int]:
    return sorted(random.permutation(len(sentences))[:count].tolist())


def lead(sentences: Sequence[str], count: int, random: np.random.Generator, noise: float = 0.0) -> list[int]:
    return list(range(count))


GAP_SELECTIONS: dict[str, Callable[..., list[int]]] = {
    "ind_orig": principal,
    "ind_uniq": partial(principal, unique=True),
    "seq_orig": partial(principal, sequential=True),
    "seq_uniq": partial(principal, sequential=True, unique=True),
    "random": at_random,
    "lead": lead,
}


class _Document:
    """The words of sentences as arrays of (sentence, word, times), each pair once."""

    def __init__(self, sentences: Sequence[str]) -> None:
        import numpy as np

        numbers: dict[str, int] = {}
        counts = [Counter(_WORD.findall(sentence.lower())) for sentence in sentences]
        self._sentence = np.repeat(np.arange(len(counts)), [len(count) for count in counts])
        self._word = np.array([numbers.setdefault(word, len(numbers)) for count in counts for word in count], dtype=np.int64)
        self._times = np.array([times for count in counts for times in count.values()], dtype=np.int64)
        self._sentences = len(counts)
        self._total = np.bincount(self._word, self._times, len(numbers)).astype(np.int64)

    def scores(self, chosen: Sequence[int], unique: bool) -> np.ndarray:
        """rouge(S + x_i, D - S - x_i) of every sentence x_i, S being those chosen. [sentences]

        F1 = 2 |both| / (|S + x_i| + |D - S - x_i|), each as what it is without x_i and what x_i's own words change.
        """
        import numpy as np

        mine = np.isin(self._sentence, chosen)
        ours = np.bincount(self._word[mine], self._times[mine], len(self._total)).astype(np.int64)
        rest = self._total - ours
        ours_of, rest_of, times = ours[self._word], rest[self._word], self._times

        def by_sentence(before: np.ndarray, change: np.ndarray) -> np.ndarray:
            return before.sum() + np.bincount(self._sentence, change, self._sentences)

        if unique:
            stays, new = rest_of > times, ours_of == 0
            both = by_sentence((ours > 0) & (rest > 0), stays * 1 - (~new & (rest_of > 0)))
            size = by_sentence((ours > 0) * 1 + (rest > 0), new * 1 - ~stays)
        else:
            before = np.minimum(ours, rest)
            both = by_sentence(before, np.minimum(ours_of + times, rest_of - times) - before[self._word])
            size = np.full(self._sentences, self._total.sum())
        return 2 * both / np.maximum(size, 1)


def mask_sentences(token_ids: Sequence[int], offsets: Sequence[Span], gaps: Sequence[Span], mask_id: int) -> list[int]:
    """The tokens of a document with one mask in place of each gap. A token belongs to the sentence in which it ends.

    Tokens are known by their offsets, so that what is left is tokenised as it was, the space between sentences included.
    """
    ends = [end for _, end in offsets]
    masked: list[int] = []
    done = 0
    for start, end in gaps:
        masked += [*token_ids[done : bisect_right(ends, start)], mask_id]
        done = bisect_right(ends, end)
    return [*masked, *token_ids[done:]]


def mask_tokens(
    token_ids: Sequence[int], ratio: float, random: np.random.Generator, mask_id: int, ordinary: range
) -> tuple[list[int], list[int]]:
    """BERT's masked language model on the tokens that are `ordinary`: the tokens to read, and the places of those to tell.

    Of the tokens to tell, 80% are masked, 10% become some other ordinary token, and 10% stay as they are.
    """
    import numpy as np

    if not ratio:
        return [*token_ids], []
    masked = np.array(token_ids, dtype=np.int64)
    places = random.permutation(np.flatnonzero((masked >= ordinary.start) & (masked < ordinary.stop)))
    places = np.sort(places[: math.floor(ratio * len(places) + 0.5)])
    drawn = random.random(len(places))
    masked[places[drawn < 0.8]] = mask_id
    others = places[drawn >= 0.9]
    masked[others] = random.integers(ordinary.start, ordinary.stop, len(others))
    return masked.tolist(), places.tolist()

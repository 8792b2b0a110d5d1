"""Section 3.2 and 3.4, appendix A: what is measured besides ROUGE. Pure functions of strings and arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

SHORT = 500  # words, up to which every n is tried in turn


def geometric_mean(rouge1: float, rouge2: float, rouge_l: float) -> float:
    """The cube root of R1 R2 RL: one dataset's term of R_m."""
    return float((rouge1 * rouge2 * rouge_l) ** (1 / 3))


def r_m(datasets: Sequence[tuple[float, float, float]]) -> float:
    """R_m = 1/D sum_d (R1 R2 RL)^(1/3), over datasets' (R1, R2, RLsum)"""
    return sum(geometric_mean(*scores) for scores in datasets) / len(datasets)


def has_repetition(text: str) -> bool:
    """Whether any word n-gram is followed at once by itself ("the the", "of a of a"), case and punctuation aside."""
    words = re.findall(r"\w+", text.lower())
    return _repeats(words) if len(words) <= SHORT else _repeats_in_long(words)


def _repeats(words: Sequence[str]) -> bool:
    for n in range(1, len(words) // 2 + 1):
        run = 0  # of positions in a row whose word stands again n words later
        for here, later in zip(words, words[n:], strict=False):
            run = run + 1 if here == later else 0
            if run == n:
                return True
    return False


def _repeats_in_long(words: Sequence[str]) -> bool:
    """The same in time N log N, where N is the number of words.

    Of n words that stand again n later, one is at a multiple of n, and half of them follow or precede it. So it is enough to
    look at the n / 2 words on either side of every multiple of every n: N log N places, compared by sums of random numbers.
    What seems to be a repetition is looked at word by word.
    """
    import numpy as np

    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word, len(numbers)) for word in words])
    size, prime, random = len(ids), (1 << 31) - 1, np.random.default_rng(0)
    powers, base = np.ones(1, np.int64), int(random.integers(1 << 20, prime))
    while len(powers) <= size:
        powers = np.concatenate([powers, powers * pow(base, len(powers), prime) % prime])
    sums = np.concatenate([[0], np.cumsum(random.integers(1, prime, len(numbers))[ids] * powers[:size] % prime)])

    def again(start: np.ndarray, length: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Whether so many words stand again n later; never no where they do."""
        end = np.minimum(start + length, size - n)
        start = np.maximum(start, 0)
        here, later = sums[end] - sums[start], sums[end + n] - sums[start + n]
        return (end - start == length) & (here % prime * powers[n] % prime == later % prime)

    def reach(place: np.ndarray, n: np.ndarray, way: int) -> np.ndarray:
        """How many words from a place on, or before it, stand again n later, up to n."""
        least, most = np.zeros_like(n), n.copy()
        while (least < most).any():
            middle = (least + most + 1) // 2
            longer = again(place if way > 0 else place - middle, middle, n)
            least, most = np.where(longer, middle, least), np.where(longer, most, middle - 1)
        return least

    def repeats(place: np.ndarray, n: np.ndarray) -> bool:
        found = ids[place] == ids[np.minimum(place + n, size - 1)]
        place, n = place[found], n[found]
        half = (n + 1) // 2
        found = again(place, half, n) | again(place - half, half, n)
        place, n = place[found], n[found]
        found = reach(place, n, +1) + reach(place, n, -1) >= n
        return any(_longest_run(ids, int(p), int(m)) >= m for p, m in zip(place[found], n[found], strict=True))

    border = int(size**0.5)  # small n have many multiples, large ones few: all those of one n, or of all n, at once
    small = (repeats(np.arange(0, size - n + 1, n), np.full(size // n, n)) for n in range(1, border + 1))
    large = (
        repeats(k * n, n) for k in range(size // border) if len(n := np.arange(border + 1, min(size // (k + 1), size // 2) + 1))
    )
    return any(small) or any(large)


def _longest_run(ids: np.ndarray, place: int, n: int) -> int:
    """Of words around a place that stand again n later."""
    import numpy as np

    start, end = max(0, place - n), min(place + n, len(ids) - n)
    other = np.flatnonzero(ids[start:end] != ids[start + n : end + n])
    return int(np.diff(other, prepend=-1, append=end - start).max()) - 1


def repetition_rate(texts: Sequence[str]) -> float:
    """rep%: the share of texts that hold any consecutively repeated word n-gram."""
    return sum(map(has_repetition, texts)) / len(texts) if texts else 0.0


class Properties(NamedTuple):
    """Appendix A: means over all examples of a dataset."""

    source_words: float
    target_words: float
    coverage: float
    density: float


def properties(pairs: Sequence[tuple[str, str]]) -> Properties:
    """Of (source, target): their words as rouge-score counts them, and how much of the target is copied."""
    measured = [(len(words(s)), len(words(t)), *coverage_and_density(s, t)) for s, t in pairs]
    return Properties(*(sum(column) / len(measured) for column in zip(*measured, strict=True)))


def words(text: str) -> list[str]:
    """rouge-score's, not stemmed: runs of Latin letters and digits, lower-cased. Other letters separate them."""
    return [word.lower() for word in re.findall(r"[A-Za-z0-9]+", text)]


def coverage_and_density(source: str, target: str) -> tuple[float, float]:
    """Extractive fragment coverage and density of Grusky et al. (2018).

    Fragments are the longest shared word sequences, found greedily from left to right in the target;
    coverage is the share of the target's words in them, density their mean squared length per word.
    """
    article, summary = words(source), words(target)
    if not summary:
        return 0.0, 0.0
    places: dict[str, list[int]] = {}
    for position, word in enumerate(article):
        places.setdefault(word, []).append(position)
    fragments, i = [], 0
    while i < len(summary):
        longest = 0
        for j in places.get(summary[i], ()):
            length = 0
            while i + length < len(summary) and j + length < len(article) and summary[i + length] == article[j + length]:
                length += 1
            longest = max(longest, length)
        if longest:
            fragments.append(longest)
        i += max(longest, 1)
    return sum(fragments) / len(summary), sum(f * f for f in fragments) / len(summary)


def pair_agreement(log_p: Sequence[float], quality: Sequence[float]) -> tuple[float, int]:
    """(pairs ordered by log_p as by quality, pairs of different quality); equal log_p counts one half."""
    agreeing, pairs = 0.0, 0
    for i in range(len(quality)):
        for j in range(i):
            if quality[i] != quality[j]:
                pairs += 1
                same = (log_p[i] - log_p[j]) * (quality[i] - quality[j])
                agreeing += 1.0 if same > 0 else 0.5 if same == 0 else 0.0
    return agreeing, pairs


def kendall_tau(log_p: Sequence[float], quality: Sequence[float]) -> float | None:
    """Kendall's tau-b; None where either is constant."""
    balance, pairs, distinct_p, distinct_q = 0, 0, 0, 0
    for i in range(len(quality)):
        for j in range(i):
            p, q = log_p[i] - log_p[j], quality[i] - quality[j]
            pairs, distinct_p, distinct_q = pairs + 1, distinct_p + (p != 0), distinct_q + (q != 0)
            balance += (p * q > 0) - (p * q < 0)
    return balance / (distinct_p * distinct_q) ** 0.5 if distinct_p and distinct_q else None

"""Section 3.2 and 3.4, appendix A: what is measured besides ROUGE. Pure functions of strings and arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


def geometric_mean(rouge1: float, rouge2: float, rouge_l: float) -> float:
    """The cube root of R1 R2 RL: one dataset's term of R_m."""
    return float((rouge1 * rouge2 * rouge_l) ** (1 / 3))


def r_m(datasets: Sequence[tuple[float, float, float]]) -> float:
    """R_m = 1/D sum_d (R1 R2 RL)^(1/3), over datasets' (R1, R2, RLsum)"""
    return sum(geometric_mean(*scores) for scores in datasets) / len(datasets)


def has_repetition(text: str) -> bool:
    """Whether any word n-gram is followed at once by itself ("the the", "of a of a"), case and punctuation aside."""
    words = re.findall(r"\w+", text.lower())
    for n in range(1, len(words) // 2 + 1):
        run = 0  # of positions in a row whose word stands again n words later
        for here, later in zip(words, words[n:], strict=False):
            run = run + 1 if here == later else 0
            if run == n:
                return True
    return False


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

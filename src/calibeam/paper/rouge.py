"""Section 3.2: ROUGE-N, -L and -Lsum (Lin, 2004), equal to the package `rouge-score` to the last bit, and much faster.

Many pairs are counted at once. A set of words of their references is one integer, which Python allows to be of any size:
every pair has a lane of bits in it, and every word of its reference a bit in the lane, the first word the lowest. The
predictions are gone through word by word, side by side. A word of each gives a set, the words of the references that are
the same: a *match*. Each kind of ROUGE is a few operations on one match after another; a column of the table of longest
common subsequences is such a set, too (Crochemore et al., 2001; Hyyrö, 2004).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain, count, pairwise
from string import ascii_lowercase, digits
from typing import Any

import numpy as np

ROUGE_KINDS = ("rouge1", "rouge2", "rougeLsum")
NEWLINE_MARK = "<n>"  # which PEGASUS writes for a newline

Pair = tuple[str, Sequence[str]]  # a prediction and its references

READ_AT_ONCE = 1 << 20  # characters
COUNTED_AT_ONCE = 1 << 21  # bits of matches
WORDS_REMEMBERED = 1 << 17
WORK_OF_A_PROCESS = 1 << 24  # characters: a second or two, where starting a process takes most of one

_VISIBLE = bytes(code if chr(code) in ascii_lowercase + digits + "\n" else ord(" ") for code in range(256))


def rouge(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    *,
    kinds: Sequence[str] = ROUGE_KINDS,
    stem: bool = True,
    newline: str = "\n",
    processes: int = 1,
) -> dict[str, np.ndarray]:
    """Precision, recall and F of every prediction, by kind: float64 [examples, 3].

    Kinds are rouge1 to rouge9, rougeL and rougeLsum. Where a reference is a list of strings, the first of highest F
    counts. The sentences of rougeLsum are separated by newlines and, if it is another, by `newline`: "<n>" for
    what PEGASUS writes. Nothing else splits them. Work for several processes is shared out to as many as are allowed;
    they are fresh interpreters, so a script that allows them needs the usual `if __name__ == "__main__":`.
    """
    if isinstance(predictions, str) or isinstance(references, str):
        raise TypeError("predictions and references are lists, of a text for each example: write [text] for one")
    several = [[reference] if isinstance(reference, str) else reference for reference in references]
    _check(predictions, several, kinds, newline)
    pairs = [*zip(predictions, several, strict=True)]
    counts = _count_in_processes(pairs, processes, kinds=kinds, stem=stem, newline=newline)
    lengths, hits = counts[:2], counts[2:]  # [2, pairs], [kinds, pairs], where each of several references makes a pair
    ends = np.cumsum([len(each) for each in several], dtype=np.int64)
    example = np.searchsorted(ends, np.arange(lengths.shape[1]), side="right")  # of each pair
    _warn_of_invisible_text(pairs[row] for row in np.unique(example[(lengths == 0).any(0)]))
    scores = {}
    for kind, shared in zip(kinds, hits, strict=True):
        n = int(kind[-1]) if kind[-1].isdigit() else 1
        precision, recall = shared / np.maximum(lengths - n + 1, 1)
        f = 2 * precision * recall / np.where(shared, precision + recall, 1)
        by_f = np.lexsort((-np.arange(len(f)), f, example))  # the best of each example comes last
        scores[kind] = np.stack([precision, recall, f], axis=-1)[by_f[ends - 1]]
    return scores


def _check(predictions: Sequence[str], several: Sequence[Sequence[str]], kinds: Sequence[str], newline: str) -> None:
    if len(predictions) != len(several):
        raise ValueError(f"{len(predictions)} predictions but {len(several)} references")
    if not all(several):
        raise ValueError(f"example {[*map(bool, several)].index(False)} has no reference")
    for kind in kinds:
        if kind not in _MEASURES:
            raise ValueError(f"unknown kind {kind!r}; there are {', '.join(_MEASURES)}")
    if not newline:
        raise ValueError("newline must not be empty")
    marked = sum(NEWLINE_MARK in text for text in chain(predictions, chain.from_iterable(several)))
    if marked and newline != NEWLINE_MARK:
        message = f'{marked} texts hold "{NEWLINE_MARK}", which counts as a word unless newline="{NEWLINE_MARK}"'
        warnings.warn(message, stacklevel=3)


def _warn_of_invisible_text(wordless: Iterable[Pair]) -> None:
    """rouge-score sees a-z and 0-9 alone: text in another script would score a silent 0."""
    unseen = sum(any(map(_is_invisible, (prediction, *references))) for prediction, references in wordless)
    if unseen:
        message = f"ROUGE knows Latin letters and digits only: {unseen} examples have text without any, which scores 0"
        warnings.warn(message, stacklevel=3)


def _is_invisible(text: str) -> bool:
    return any(map(str.isalpha, text)) and not re.search(r"[a-z0-9]", text.lower())


def _count_in_processes(pairs: Sequence[Pair], processes: int, **options: Any) -> np.ndarray:
    if processes > 1:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import current_process, get_context

        work = sum(len(prediction) * len(references) for prediction, references in pairs)
        processes = min(processes, work // WORK_OF_A_PROCESS)
        if processes > 1 and not current_process().daemon:  # a daemon may not have children
            parts = [pairs[a:b] for a, b in pairwise(np.linspace(0, len(pairs), 4 * processes + 1, dtype=int))]
            # Fresh interpreters: a fork would copy locks that other threads hold, and tokenizers warns of it.
            with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
                return np.concatenate([*pool.map(partial(_count, **options), parts)], axis=1)
    return _count(pairs, **options)


def _count(pairs: Sequence[Pair], *, kinds: Sequence[str], stem: bool, newline: str) -> np.ndarray:
    """For each prediction with each reference: words of the one, words of the other, and hits by kind. [2 + kinds, pairs]"""
    sizes = [len(prediction) + sum(map(len, references)) for prediction, references in pairs]
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes, dtype=np.int64) // READ_AT_ONCE, prepend=0)).tolist()
    parts = [np.empty((2 + len(kinds), 0), dtype=np.int64)]
    for start, end in pairwise([0, *cuts, len(pairs)]):
        numbers: dict[str, int] = {}  # of the texts, each of which is read once
        chosen = [
            (numbers.setdefault(prediction, len(numbers)), numbers.setdefault(reference, len(numbers)))
            for prediction, references in pairs[start:end]
            for reference in references
        ]
        texts = _read(numbers, stem, newline)
        parts.append(_count_read(texts, np.array(chosen, dtype=np.int64).reshape(-1, 2).T, kinds))
    return np.concatenate(parts, axis=1)


def _count_read(texts: _Texts, chosen: np.ndarray, kinds: Sequence[str]) -> np.ndarray:
    """The same for predictions and references that are read, given their numbers [2, pairs]."""
    lengths, sentences = np.diff(texts.bounds)[chosen], texts.sentences[chosen]
    hits = np.empty((len(kinds), chosen.shape[1]), dtype=np.int64)
    waiting = [np.lexsort((*lengths[::-1], sentences.max(0) > 1))]  # pairs of like lengths are counted together
    while waiting:
        some = waiting.pop()
        if len(some) > 1 and len(some) * np.prod(lengths[:, some].max(1) + 8) > COUNTED_AT_ONCE:
            waiting += np.array_split(some, 2)
        elif len(some):
            group = _group(texts, *chosen[:, some])
            for row, kind in enumerate(kinds):
                hits[row, some] = group.count(_MEASURES[kind](group))
    return np.concatenate([lengths, hits])


@dataclass(frozen=True)
class _Texts:
    """The words of many texts, one after another: text i has those from bounds[i] to bounds[i + 1]."""

    words: np.ndarray
    """Equal numbers for equal words."""
    begins: np.ndarray
    """Whether a word is the first of its sentence."""
    bounds: np.ndarray

    @cached_property
    def sentences(self) -> np.ndarray:
        """How many each text has."""
        return np.diff(np.append(0, np.cumsum(self.begins))[self.bounds])


def _read(texts: Iterable[str], stem: bool, newline: str) -> _Texts:
    """Words are runs of a-z and 0-9 in lower case; a sentence is a line with any."""
    numbers = _word_numbers(stem)
    if len(numbers) > WORDS_REMEMBERED:
        _word_numbers.cache_clear()
    lowered = [text.replace(newline, "\n").lower() for text in texts]
    visible = "\n".join(lowered).encode("ascii", "replace").translate(_VISIBLE)
    words = np.fromiter(map(numbers.__getitem__, visible.split()), np.int32)
    codes = np.frombuffer(visible, np.uint8)
    starts = np.flatnonzero(np.diff(codes > ord(" "), prepend=False, append=False))[::2]
    line = np.cumsum(codes == ord("\n"))[starts]
    ends = np.cumsum([len(text) + 1 for text in lowered], dtype=np.int64)
    return _Texts(words, np.diff(line, prepend=-1) > 0, np.append(0, np.searchsorted(starts, ends)))


class _WordNumbers(dict[bytes, int]):
    """A number for each word, the same for all that have its stem."""

    def __init__(self, stem: Callable[[str], str]) -> None:
        super().__init__()
        self._stem, self._of_stems, self._next = stem, dict[str, int](), count()

    def __missing__(self, word: bytes) -> int:
        stem = self._stem(word.decode()) if len(word) > 3 else word.decode()
        number = self[word] = self._of_stems.setdefault(stem, next(self._next))
        return number


@cache
def _word_numbers(stem: bool) -> _WordNumbers:
    if not stem:
        return _WordNumbers(str)
    from nltk.stem.porter import PorterStemmer

    return _WordNumbers(PorterStemmer().stem)


@dataclass(frozen=True)
class _Group:
    """Pairs that are counted together."""

    expected: np.ndarray
    """Words of the references, -1 where there is none, as in the last column. [pairs, bits of a lane]"""
    ends: np.ndarray
    """Whether they are the last of their sentence."""
    written: np.ndarray
    """Words of the predictions, -2 where there is none. [pairs, longest]"""
    begins: np.ndarray
    """Whether they are the first of their sentence."""

    @property
    def single_sentences(self) -> bool:
        """No text has several."""
        return max(self.begins.sum(1).max(), self.ends.sum(1).max()) <= 1

    @cached_property
    def every(self) -> int:
        return _bits(self.expected >= 0)

    @cached_property
    def inner(self) -> int:
        """All words but the last of each sentence."""
        return _bits((self.expected >= 0) & ~self.ends)

    @cached_property
    def first(self) -> int:
        """The first bit of each lane."""
        return _bits(np.arange(self.expected.size) % self.expected.shape[1] == 0)

    @cached_property
    def matches(self) -> list[int]:
        return [_bits(self.expected == words[:, None]) for words in self.written.T]

    @cached_property
    def beginnings(self) -> list[int]:
        """For each word of the predictions: all words of the reference where it is the first of its sentence."""
        return [_bits((self.expected >= 0) & begins[:, None]) for begins in self.begins.T]

    @cached_property
    def within(self) -> list[tuple[int, int]]:
        """1, 2, 4, ..., and the words that have one of their sentence so many places above."""
        steps: list[tuple[int, int]] = []
        words = self.inner
        while words:
            steps.append((1 << len(steps), words))
            words &= words >> steps[-1][0]
        return steps

    def count(self, words: int) -> np.ndarray:
        """How many there are of each pair."""
        bits = np.unpackbits(np.frombuffer(words.to_bytes(self.expected.size // 8, "little"), np.uint8))
        return bits.reshape(self.expected.shape).sum(1)

    def lowest(self, words: int) -> int:
        """The first of each pair. With the free bit set, taking away 1 borrows from no other lane."""
        return words ^ (words & ((words | self.first << self.expected.shape[1] - 1) - self.first))

    def up_to(self, words: int) -> int:
        """With those before them in their sentences."""
        for places, those in self.within:
            words |= words >> places & those
        return words


def _group(texts: _Texts, predictions: np.ndarray, references: np.ndarray) -> _Group:
    expected = _align(texts, references, texts.words, -1)
    ends = _align(texts, references, np.append(texts.begins[1:], True), False)
    free = ((0, 0), (0, 8 - expected.shape[1] % 8))  # lanes of whole bytes
    return _Group(
        expected=np.pad(expected, free, constant_values=-1),
        ends=np.pad(ends, free),
        written=_align(texts, predictions, texts.words, -2),
        begins=_align(texts, predictions, texts.begins, False),
    )


def _align(texts: _Texts, chosen: np.ndarray, values: np.ndarray, missing: int) -> np.ndarray:
    """The values that belong to the words of some texts, so that all texts end in the last column. [texts, longest]"""
    starts, ends = texts.bounds[chosen], texts.bounds[chosen + 1]
    places = ends[:, None] + np.arange(-max(ends - starts), 0)
    return np.where(places >= starts[:, None], values[places], missing)


def _bits(table: np.ndarray) -> int:
    return int.from_bytes(np.packbits(table, bitorder="little").tobytes(), "little")


def _rouge_n(n: int, group: _Group) -> int:
    """Last words of n-grams of the reference that the prediction has too, as often as it has them."""
    ends = group.matches
    for later in range(1, n):
        ends = [end << 1 & match for end, match in zip(ends, group.matches[later:], strict=False)]
    return _taken(group, group.every, ends)


def _taken(group: _Group, free: int, wanted: Iterable[int]) -> int:
    """What is taken if each takes the first word it wants of those left."""
    left = free
    for words in wanted:
        left ^= group.lowest(left & words)
    return free ^ left


def _rouge_l(group: _Group) -> int:
    """As many words of the reference as the longest common subsequence has.

    Let t(i, j) be its length for the first i words of the reference and the first j of the prediction. `level` holds
    word i if t(i + 1, j) = t(i, j), and t rises at the others. The next word of the prediction lets each rise move to the
    first match since the rise before, if any: the sum carries from that match through the level words to the rise.
    """
    level, inner = group.every, group.every & group.every >> 1
    for match in group.matches:
        level = _next_level(level, match, inner)
    return group.every ^ level


def _next_level(level: int, match: int, inner: int) -> int:
    matched = level & match
    return ((level & inner) + (matched & inner)) | (level - matched)  # nothing is carried beyond a last word


def _rouge_lsum(group: _Group) -> int:
    """Words of the reference that are on the longest common subsequence of their sentence with any sentence of the
    prediction, each as often as the prediction has it.

    Which subsequence, where several are equally long, is rouge-score's choice. It looks at the last words of both
    sentences. If they match, it takes them; else it drops that of the reference, unless t falls, and then that of the
    prediction. So of the words that are left of the reference, those above the highest match or rise are dropped.
    """
    if group.single_sentences:
        return _rouge_l(group)  # no word can be taken twice
    level, levels = group.every, []
    for match, beginning in zip(group.matches, group.beginnings, strict=True):
        level = _next_level(level | beginning, match, group.inner)
        levels.append(level)
    chosen, left = 0, group.every
    for match, beginning, level in zip(*map(reversed, (group.matches, group.beginnings, levels)), strict=True):
        left = group.up_to(left & (match | (group.every ^ level)))
        taken = match & (left ^ (left >> 1 & group.inner))
        chosen |= taken
        left = left ^ taken | beginning
    return _taken(group, chosen, group.matches)


_MEASURES: dict[str, Callable[[_Group], int]] = {
    **{f"rouge{n}": partial(_rouge_n, n) for n in range(1, 10)},
    "rougeL": _rouge_l,
    "rougeLsum": _rouge_lsum,
}

"""Gap-sentence generation by hand on short documents, and against rouge-score."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from rouge_score import rouge_scorer

from calibeam.paper.gap_sentences import (
    GAP_SELECTIONS,
    _Document,
    mask_sentences,
    mask_tokens,
    number_of_gaps,
    split_sentences,
)

RANDOM = np.random.default_rng(0)


def sentences(text: str) -> list[str]:
    return [text[start:end] for start, end in split_sentences(text)]


# Splitting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t ", []),
        ("no end", ["no end"]),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("  He said: “Go.” She went...  Then (at last.) Rest. ", ["He said: “Go.”", "She went...", "Then (at last.)", "Rest."]),
        ("Mr. J. Smith of the U.S. Army met Dr. No. It cost 3.", ["Mr. J. Smith of the U.S. Army met Dr. No.", "It cost 3."]),
        ("We met at 5 p.m. on Monday. e.g. this stays", ["We met at 5 p.m. on Monday. e.g. this stays"]),
        ("A title\nA line that is\nwrapped.\n\n2015 came.", ["A title", "A line that is\nwrapped.", "2015 came."]),
        ("今日は。明日は\uff01「はい。」終", ["今日は。", "明日は\uff01", "「はい。」", "終"]),
        ("... Well.", ["...", "Well."]),
    ],
)  # fmt: skip
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_nothing_but_white_space_lies_between_sentences() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        text = "".join(random.choice(list("aB.!? \n\r\t'\")。」1é \u2028"), 40))
        spans = split_sentences(text)
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        assert edges == sorted(edges)
        assert all(not text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True))
        assert all(text[a:b] and text[a:b] == text[a:b].strip() for a, b in spans)


@pytest.mark.parametrize(
    "unit", [".", "'", ".'", ".''", "\n", " ", ". ", "。", "A. ", "a.\n", "(", "!?", "Mr. ", "\n ", ".\u00a0a"]
)
def test_splitting_takes_linear_time_for_any_text(unit: str) -> None:
    """Of quadratic time, 400,000 characters would take hours."""
    began = time.perf_counter()
    split_sentences((unit * 400_000)[:400_000] + "x")
    assert time.perf_counter() - began < 5


# How many


@pytest.mark.parametrize(
    ("count", "ratio", "gaps"),
    [(0, 0.15, 0), (1, 0.15, 0), (2, 0.15, 1), (10, 0.15, 2), (30, 0.15, 5), (4, 1.0, 3), (2, 0.0, 1), (10_000, 0.15, 1500)],
)  # fmt: skip
def test_the_number_of_gaps(count: int, ratio: float, gaps: int) -> None:
    assert number_of_gaps(count, ratio) == gaps


# Scores

HAND = ["the cat sat", "the the dog", "a cat ran", "birds"]
"""10 words: the x3, cat x2, and sat, dog, a, ran, birds once each; 7 different ones."""


def test_original_scores_by_hand() -> None:
    """F1 = 2 both / 10. Sentence 0: the 1, cat 1. Sentence 1: the min(2, 1). Sentence 2: cat 1. Sentence 3: nothing."""
    assert _Document(HAND).scores([], unique=False).tolist() == [0.4, 0.2, 0.2, 0.0]


def test_unique_scores_by_hand() -> None:
    """Sentence 0: {the, cat, sat} and {the, dog, a, cat, ran, birds} share 2: 4/9. Sentence 1: {the, dog} and all but dog
    share 1: 2/8. Sentence 2: {a, cat, ran} and {the, cat, sat, dog, birds}: 2/8. Sentence 3: 0/7."""
    assert _Document(HAND).scores([], unique=True).tolist() == [4 / 9, 2 / 8, 2 / 8, 0.0]


def test_sequential_scores_by_hand() -> None:
    """With sentence 0 chosen, S = the, cat, sat. Adding 1: the 3, dog, cat, sat against a, cat, ran, birds: both cat, 2/10.
    Adding 2: the, cat 2, sat, a, ran against the 2, dog, birds: the, 2/10. Adding 3: the, cat of the 1, cat 1 left: 4/10.
    Unique, adding 3: {the, cat, sat, birds} and {the, dog, a, cat, ran} share 2: 4/9."""
    assert _Document(HAND).scores([0], unique=False)[1:].tolist() == [0.2, 0.2, 0.4]
    assert _Document(HAND).scores([0], unique=True)[1:].tolist() == [2 / 8, 2 / 8, 4 / 9]


def test_what_each_selection_chooses() -> None:
    chosen = {name: select(HAND, 2, np.random.default_rng(0)) for name, select in GAP_SELECTIONS.items()}
    assert chosen.pop("random") in [[a, b] for a in range(4) for b in range(a + 1, 4)]
    assert chosen == {"ind_orig": [0, 1], "ind_uniq": [0, 1], "seq_orig": [0, 3], "seq_uniq": [0, 3], "lead": [0, 1]}


def made_up(random: np.random.Generator, size: int) -> list[str]:
    return [" ".join(random.choice(list("abcdefghijkl"), random.integers(1, 9))) for _ in range(size)]


def test_original_scores_are_those_of_rouge_score() -> None:
    scorer, random = rouge_scorer.RougeScorer(["rouge1"]), np.random.default_rng(2)
    for _ in range(30):
        document = made_up(random, 8)
        chosen = random.permutation(8)[: random.integers(0, 4)].tolist()
        scores = _Document(document).scores(chosen, unique=False)
        for index in set(range(8)) - set(chosen):
            ours = {*chosen, index}
            texts = [" ".join(s for i, s in enumerate(document) if (i in ours) == mine) for mine in (True, False)]
            assert scores[index] == pytest.approx(scorer.score(*texts)["rouge1"].fmeasure, abs=1e-12)


def test_unique_scores_are_those_of_sets_of_words() -> None:
    random = np.random.default_rng(3)
    for _ in range(30):
        document = made_up(random, 8)
        chosen = random.permutation(8)[: random.integers(0, 4)].tolist()
        scores = _Document(document).scores(chosen, unique=True)
        for index in set(range(8)) - set(chosen):
            ours = {*chosen, index}
            left, right = (
                {w for i, s in enumerate(document) if (i in ours) == mine for w in s.split()} for mine in (True, False)
            )
            assert scores[index] == pytest.approx(2 * len(left & right) / (len(left) + len(right)))


def test_random_selection_is_uniform() -> None:
    random = np.random.default_rng(4)
    found = Counter(tuple(GAP_SELECTIONS["random"](HAND, 2, random)) for _ in range(6000))
    assert len(found) == 6
    assert all(abs(times - 1000) < 150 for times in found.values())  # five standard deviations


def test_noise_lets_close_scores_change_places_and_no_others() -> None:
    """0.4 * 0.8 > 0.2 * 1.2: sentence 0 is always chosen. 1 and 2 have equal scores; 3 has none."""
    random = np.random.default_rng(5)
    found = Counter(tuple(GAP_SELECTIONS["ind_orig"](HAND, 2, random, 0.2)) for _ in range(200))
    assert set(found) == {(0, 1), (0, 2)}
    assert min(found.values()) > 60


# Odd documents


@pytest.mark.parametrize("name", GAP_SELECTIONS)
def test_equal_sentences_without_words_and_very_many(name: str) -> None:
    select = GAP_SELECTIONS[name]
    for document in (["the same."] * 10, ["..."] * 10, ["", "one"] * 5):
        chosen = select(document, 2, RANDOM)
        assert len(set(chosen)) == 2
        assert chosen == sorted(chosen)
        if name != "random" and len(set(document)) == 1:
            assert chosen == [0, 1]
    random = np.random.default_rng(6)
    many = [" ".join(map(str, random.zipf(1.3, 12))) for _ in range(10_000)]
    began = time.perf_counter()
    assert len(set(select(many, 100, RANDOM))) == 100
    assert time.perf_counter() - began < 30


# Masks


def test_a_mask_stands_for_each_gap() -> None:
    """ "One. Two. \\nThree": a token's offsets begin with the space before it, and the newline is nobody's."""
    tokens = [10, 11, 12, 13, 14, 15, 16]
    offsets = [(0, 3), (3, 4), (4, 8), (8, 9), (9, 10), (10, 11), (11, 16)]
    one, two, three = split_sentences("One. Two. \nThree")
    assert (one, two, three) == ((0, 4), (5, 9), (11, 16))
    assert mask_sentences(tokens, offsets, [two], 2) == [10, 11, 2, 14, 15, 16]
    assert mask_sentences(tokens, offsets, [one, two], 2) == [2, 2, 14, 15, 16]
    assert mask_sentences(tokens, offsets, [one, three], 2) == [2, 12, 13, 14, 15, 2]
    assert mask_sentences(tokens, offsets, [], 2) == tokens


def test_masked_tokens_by_their_shares() -> None:
    tokens = [2, *([50] * 10_000), 1]
    masked, places = mask_tokens(tokens, 0.15, np.random.default_rng(7), 3, range(40, 140))
    assert len(places) == len(set(places)) == 1500
    assert places == sorted(places)
    assert masked[0] == 2
    assert masked[-1] == 1
    assert all(masked[i] == 50 for i in set(range(1, 10_001)) - set(places))
    found = Counter("mask" if masked[i] == 3 else "same" if masked[i] == 50 else "other" for i in places)
    assert found["mask"] == pytest.approx(1200, abs=80)  # five standard deviations
    assert found["other"] == pytest.approx(150, abs=60)
    assert all(masked[i] == 3 or 40 <= masked[i] < 140 for i in places)


def test_nothing_to_mask() -> None:
    assert mask_tokens([], 0.15, RANDOM, 3, range(5, 9)) == ([], [])
    assert mask_tokens([2, 1], 0.15, RANDOM, 3, range(5, 9)) == ([2, 1], [])
    assert mask_tokens([6, 7], 0.0, RANDOM, 3, range(5, 9)) == ([6, 7], [])

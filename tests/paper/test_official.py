from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from calibeam.paper import official
from calibeam.paper.metrics import r_m
from calibeam.paper.official import METRICS, bleu, bleu_counts, coco_rouge_l, jackknifed, longest_common_subsequence
from calibeam.paper.rouge import rouge
from calibeam.records import CalibeamError
from conftest import sentence

PREDICTIONS = [
    'What\'s the capital of "New France" (1608-1763)?',
    "Who didn't sign the well-known U.S. treaty ?",
    "",
    "the the the the the",
]
REFERENCES = [
    ['What was the capital of "New France" (1608-1763)?', "Which city was New France's capital?"],
    ["Who did not sign the treaty?"],
    ["Where is it?"],
    ["the cat is on the mat", "there is a cat on the mat"],
]


def figures(metric: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    statistics = METRICS[metric].statistics(predictions, references)
    return {name: float(value) for name, value in METRICS[metric].figures(statistics.sum(0), len(predictions)).items()}


def made_up(seed: int, count: int = 40) -> tuple[list[str], list[list[str]]]:
    """Sentences of 1 to 9 words, and one to three references each that begin alike."""
    predictions = [sentence(seed + i, 1 + i % 9) for i in range(count)]
    ends = [[sentence(seed + 1000 + 3 * i + k, 1 + (i + k) % 4) for k in range(1 + i % 3)] for i in range(count)]
    return predictions, [
        [f"{' '.join(text.split()[: 5 - k])} {end}" for k, end in enumerate(some)]
        for text, some in zip(predictions, ends, strict=True)
    ]


# BLEU


def test_bleu_by_hand() -> None:
    """Prediction a b c d, reference a b c e: 3 of 4 words, 2 of 3 pairs, 1 of 2 triples and no four words match.

    BLEU-1 = 3/4, BLEU-2 = sqrt(3/4 * 2/3), BLEU-3 = (3/4 * 2/3 * 1/2)^(1/3), BLEU-4 = 0; lengths are equal.
    """
    counts = bleu_counts(["a b c d"], [["a b c e"]])
    assert counts.tolist() == [[4, 4, 3, 2, 1, 0, 4, 3, 2, 1]]
    scores = [float(bleu(counts[0], order)) for order in (1, 2, 3, 4)]
    assert scores == pytest.approx([75, 100 * 0.5**0.5, 100 * 0.25 ** (1 / 3), 0])


def test_the_brevity_penalty_takes_the_closest_reference() -> None:
    """2 words, references of 3 and 6: exp(1 - 3/2). Of two that are as close, the shorter counts: 3 of 1 and 5."""
    assert float(bleu(bleu_counts(["a b"], [["a b c", "a b c d e f"]])[0], 1)) == pytest.approx(100 * np.exp(-0.5))
    assert bleu_counts(["a b c"], [["a b c d e", "a"]])[0, 1] == 1


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_corpus_bleu_is_sacrebleus_to_the_last_digit(order: int) -> None:
    predictions, references = made_up(0)
    streams = list(itertools.zip_longest(*references))
    expected = BLEU(tokenize="none", smooth_method="none", max_ngram_order=order).corpus_score(predictions, streams).score
    assert float(bleu(bleu_counts(predictions, references).sum(0), order)) == expected
    assert 0 < expected < 100


def test_bleu_of_many_sums_at_once() -> None:
    predictions, references = made_up(5)
    counts = bleu_counts(predictions, references)
    together = bleu(np.stack([counts[:20].sum(0), counts[20:].sum(0)]), 2)
    assert together.tolist() == [float(bleu(part.sum(0), 2)) for part in (counts[:20], counts[20:])]


# coco-caption's ROUGE-L


def test_coco_rouge_l_by_hand() -> None:
    """Candidate a b c d, reference a c x: the subsequence a c, P = 2/4, R = 2/3, beta^2 = 1.44:

    F = 2.44 * 1/2 * 2/3 / (2/3 + 1.44 * 1/2) = 0.81333 / 1.38667.
    """
    assert coco_rouge_l(["a b c d"], [["a c x"]]).tolist() == pytest.approx([(2.44 / 3) / (2 / 3 + 0.72)])


def test_the_best_precision_and_the_best_recall_may_come_of_two_references() -> None:
    """a b c d: P = 3/4 by "a b c x x x x x x", R = 1 by "a": F = 2.44 * 3/4 / (1 + 1.44 * 3/4)."""
    assert coco_rouge_l(["a b c d"], [["a b c x x x x x x", "a"]]).tolist() == pytest.approx([1.83 / 2.08])


def test_texts_with_nothing_in_common_score_0() -> None:
    assert coco_rouge_l(["", "a", "x y"], [["a b"], [""], ["a"]]).tolist() == [0.0, 0.0, 0.0]


def test_the_longest_common_subsequence_is_that_of_the_textbook_table() -> None:
    @functools.cache
    def plain(first: str, second: str) -> int:
        if not first or not second:
            return 0
        if first[0] == second[0]:
            return 1 + plain(first[1:], second[1:])
        return max(plain(first[1:], second), plain(first, second[1:]))

    generator = np.random.default_rng(0)
    lengths = set()
    for _ in range(300):
        first, second = ("".join(generator.choice(list("abc"), generator.integers(0, 12))) for _ in range(2))
        assert longest_common_subsequence(first, second) == plain(first, second)
        lengths.add(plain(first, second))
    assert len(lengths) > 5
    long = [str(word) for word in generator.integers(50, size=200)]
    assert longest_common_subsequence(long, long) == 200


# The scripts of SQuAD QG and MSMARCO. The expected figures are those of the package pycocoevalcap 1.2 on the tokens below;
# it adds 1e-9 to every count that it divides by, which moves the ninth digit.


def test_tokens_of_squad_question_generation() -> None:
    assert [official.treebank(text) for text in PREDICTIONS[:2]] == [
        "what 's the capital of `` new france '' -lrb- 1608-1763 -rrb- ?",
        "who did n't sign the well-known u.s. treaty ?",
    ]


def test_tokens_of_msmarco() -> None:
    assert [official.spacy_english(text) for text in PREDICTIONS[:2]] == [
        'what \'s the capital of " new france " ( 1608 - 1763 ) ?',
        "who did n't sign the well - known u.s. treaty ?",
    ]


def test_the_figures_of_squad_question_generation() -> None:
    assert figures("squad_qg", PREDICTIONS, REFERENCES) == pytest.approx({
        "coco_rouge_l": 51.203594538956686,
        "bleu1": 69.59861352485109,
        "bleu2": 58.081640998100866,
        "bleu3": 50.57648884332831,
        "bleu4": 47.62688107724383,
    }, rel=1e-8)  # fmt: skip


def test_the_figures_of_msmarco() -> None:
    expected = {"coco_rouge_l": 49.64004370076477, "bleu1": 71.83839862217154}
    assert figures("msmarco", PREDICTIONS, REFERENCES) == pytest.approx(expected, rel=1e-8)


def test_the_two_rouge_ls_are_two_figures() -> None:
    """the red fox / the red fox ran: P = 1, R = 3/4; F_1.2 = 2.44 * 3/4 / (3/4 + 1.44) and F_1 = 2 * 3/4 / (7/4)."""
    pair = ["the red fox"], [["the red fox ran"]]
    assert figures("squad_qg", *pair)["coco_rouge_l"] == pytest.approx(183 / 2.19)
    assert figures("gem", *pair)["rougeL"] == pytest.approx(150 / 1.75)


def test_a_missing_package_is_named_with_the_extra() -> None:
    metric = dataclasses.replace(METRICS["msmarco"], packages=("no-such-package",))
    with pytest.raises(CalibeamError, match=r"a metric needs no-such-package, which is not installed.*calibeam\[msmarco\]"):
        metric.signed()


# GEM


def test_leaving_each_reference_out_by_hand() -> None:
    """Scores 0.2, 0.8, 0.5: without the first 0.8, without the second 0.5, without the third 0.8; their mean is 0.7."""
    assert jackknifed(np.array([[0.2, 0.1], [0.8, 0.3], [0.5, 0.3]])).tolist() == pytest.approx([0.7, 0.3])
    assert jackknifed(np.array([[0.4]])).tolist() == [0.4]


def test_the_figures_of_gem() -> None:
    """rouge-score's F in loops over the references left out, and sacrebleu's own corpus score."""
    predictions, references = made_up(200)
    references[1][0], predictions[1] = "They don't. The Fox can't run!", "they do. a fox can not run"
    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(list(kinds), use_stemmer=True)

    def score(prediction: str, wanted: list[str]) -> list[float]:
        each = [scorer.score(text.replace("don't.", "do n't .").replace("can't", "ca n't"), prediction) for text in wanted]
        if len(each) == 1:
            return [each[0][kind].fmeasure for kind in kinds]
        kept = [[one for other, one in enumerate(each) if other != left_out] for left_out in range(len(each))]
        return [sum(max(one[kind].fmeasure for one in some) for some in kept) / len(kept) for kind in kinds]

    measured = figures("gem", predictions, references)
    rows = [score(prediction, wanted) for prediction, wanted in zip(predictions, references, strict=True)]
    assert [measured[kind] for kind in kinds] == pytest.approx((100 * np.mean(rows, axis=0)).tolist(), rel=1e-12)
    expected = BLEU(lowercase=True).corpus_score(predictions, list(itertools.zip_longest(*references))).score
    assert measured["bleu"] == expected > 0


def test_bleu_of_gem_is_smoothed_and_blind_to_case() -> None:
    pair = ["The red FOX slept , then ran"], [["the red fox ran then slept."]]
    assert BLEU(lowercase=True).corpus_score(pair[0], [[pair[1][0][0]]]).score == figures("gem", *pair)["bleu"] > 0
    assert BLEU(lowercase=False).corpus_score(pair[0], [[pair[1][0][0]]]).score < figures("gem", *pair)["bleu"]


# ROUGE, and what every metric has


def test_rouge_and_r_m() -> None:
    predictions, references = made_up(300)
    means = [100 * values[:, 2].mean() for values in rouge(predictions, references).values()]
    measured = figures("rouge", predictions, references)
    assert list(measured) == ["rouge1", "rouge2", "rougeLsum", "r_m"]
    assert list(measured.values()) == pytest.approx([*means, r_m([tuple(means)])])


@pytest.mark.parametrize("metric", sorted(set(METRICS) - {"repetition"}))
def test_identical_texts_score_100_and_an_empty_prediction_0(metric: str) -> None:
    texts = [sentence(i, 8) for i in range(4)]
    for value in figures(metric, texts, [[text] for text in texts]).values():
        assert value == pytest.approx(100, rel=1e-12)
    assert set(figures(metric, [""], [["the red fox"]]).values()) == {0.0}


@pytest.mark.parametrize("metric", METRICS)
def test_a_signature_says_the_versions_of_what_was_used(metric: str) -> None:
    parts = METRICS[metric].signed().split("|")
    assert all(any(part.startswith(f"{package}:") for part in parts) for package in METRICS[metric].packages)
    assert METRICS[metric].packages or metric == "repetition"


def test_the_rate_of_repetition() -> None:
    assert figures("repetition", ["no no no", "a b", "b c", ""], [["x"]] * 4) == {"rate": 25.0}


def test_signatures_tell_the_scripts_apart() -> None:
    assert len({metric.signed() for metric in METRICS.values()}) == len(METRICS) == 5
    assert "meteor:left out" in METRICS["squad_qg"].signed()


# A function of one's own


def letters(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[int]:
    return [len(text) - len(wanted[0]) for text, wanted in zip(predictions, references, strict=True)]


def test_the_figure_of_ones_own_function_is_its_mean() -> None:
    metric = official.own(letters)
    statistics = metric.statistics(["ab", "abcd"], [["a"], ["a"]])
    assert statistics.tolist() == [[1.0], [3.0]]
    assert metric.figures(statistics.sum(0), 2) == {"mean": 2.0}
    assert metric.signed().startswith(f"metric:{__name__}:letters sha256:")


@pytest.mark.parametrize("wrong", [[1.0], [[1.0], [2.0]], [1.0, float("nan")], 3.0], ids=str)
def test_a_function_that_gives_something_else_than_a_number_each_is_refused(wrong: Any) -> None:
    def function(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Any:
        return wrong

    with pytest.raises(CalibeamError, match=r"metric .*function must give a finite number for each of 2 examples"):
        official.own(function).statistics(["a", "b"], [["a"], ["b"]])

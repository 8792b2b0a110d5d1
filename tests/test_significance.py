from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from calibeam.paper.metrics import r_m
from calibeam.paper.official import METRICS, means, rouge_figures
from calibeam.significance import Difference, intervals, paired, relative
from conftest import sentence


def without_words(share: float, seed: int, count: int = 150) -> list[str]:
    """Sentences of which some words are lost."""
    generator = np.random.default_rng(seed)
    sentences = [sentence(i, 12).split() for i in range(count)]
    return [" ".join(word for word in words if generator.random() > share) for words in sentences]


REFERENCES = [sentence(i, 12) for i in range(150)]


def test_the_interval_of_a_difference_in_r_m() -> None:
    """No difference has the interval (0, 0), a constant one no width, and a noisy one surrounds the measured value."""
    before = np.random.default_rng(0).uniform(0.1, 0.9, (200, 3))
    same = paired(before, before, rouge_figures)["r_m"]
    assert (same.low, same.high, same.p, same.verdict) == (0.0, 0.0, 1.0, "no significant difference")
    constant = np.full((50, 3), 0.2)
    by_ten = paired(constant, constant + 0.1, rouge_figures)["r_m"]
    assert (by_ten.difference, by_ten.low, by_ten.high) == pytest.approx((10, 10, 10))
    assert by_ten.verdict == "significantly higher"
    after = before + np.random.default_rng(1).normal(0.05, 0.1, before.shape)
    noisy = paired(before, after, rouge_figures)["r_m"]
    assert noisy.difference == pytest.approx(100 * (r_m([tuple(after.mean(0))]) - r_m([tuple(before.mean(0))])))
    assert 0.0 < noisy.low < noisy.difference < noisy.high < 10.0
    assert paired(before, after, rouge_figures)["r_m"] == noisy


def test_intervals_are_those_of_examples_drawn_one_by_one() -> None:
    values = np.random.default_rng(0).normal(5, 2, (30, 2))
    drawn = np.random.default_rng(7).integers(30, size=(400, 30))
    found = intervals(values, means("first", "second"), samples=400, seed=7)
    for column, name in enumerate(("first", "second")):
        expected = np.quantile(values[drawn, column].mean(1), (0.025, 0.975))
        assert found[name] == pytest.approx((values[:, column].mean(), *expected))


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    """The mean of 1,000 values of deviation 1: within 1.96 / sqrt(1000) = 0.062."""
    values = np.random.default_rng(0).normal(size=(1000, 1))
    found = intervals(values, means("mean"))["mean"]
    assert (found.high - found.low) / 2 == pytest.approx(0.062, abs=0.005)


def test_corpus_bleu_of_a_sample_is_sacrebleus_of_the_same_sentences() -> None:
    """The figure of a corpus is not a mean of its sentences': every draw is measured anew."""
    predictions, metric = without_words(0.3, 0), METRICS["gem"]
    found = intervals(metric.statistics(predictions, [[text] for text in REFERENCES]), metric.figures, samples=15, seed=3)
    drawn = np.random.default_rng(3).integers(150, size=(15, 150))
    bleu = BLEU(lowercase=True)
    scores = [bleu.corpus_score([predictions[i] for i in row], [[REFERENCES[i] for i in row]]).score for row in drawn]
    assert found["bleu"] == (
        bleu.corpus_score(predictions, [REFERENCES]).score, *np.quantile(scores, (0.025, 0.975)).tolist()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # of the 8 ways to swap, all and none give 6
        ([1.0, 2.0, -3.0], 1.0),  # a difference of 0 is never larger than chance
        ([1.0] * 6, 2 / 64),
        ([1.0, 1.0, 1.0, 1.0, -1.0], 12 / 32),  # 3 or more: 5 + 1 of each sign
    ],
)
def test_p_values_by_counting_every_way_to_swap(changes: list[float], share: float) -> None:
    before = np.arange(float(len(changes)))[:, None]
    found = paired(before, before + np.array(changes)[:, None], means("mean"), samples=20000)["mean"]
    assert found.p == pytest.approx(share, abs=0.015)
    backwards = paired(before + np.array(changes)[:, None], before, means("mean"), samples=20000)["mean"]
    assert backwards.p == pytest.approx(share, abs=0.015)
    assert backwards.difference == pytest.approx(-found.difference)


def test_intervals_and_p_values_of_bleu_agree_with_sacrebleus() -> None:
    before, after = without_words(0.30, 1), without_words(0.27, 2)
    metric = METRICS["gem"]
    statistics = [metric.statistics(texts, [[text] for text in REFERENCES]) for texts in (before, after)]
    found = paired(statistics[0], statistics[1], metric.figures, samples=4000)["bleu"]

    def sacrebleus(kind: str) -> tuple[object, ...]:
        systems = [("before", before), ("after", after)]
        bleu = BLEU(lowercase=True, references=[REFERENCES])
        return tuple(PairedTest(systems, {"BLEU": bleu}, None, test_type=kind, n_samples=4000)()[1]["BLEU"])

    first, second = sacrebleus("ar")
    assert (found.before, found.after) == (first.score, second.score)
    assert 0.02 < second.p_value < 0.9
    assert found.p == pytest.approx(second.p_value, abs=0.04)
    first, second = sacrebleus("bs")
    for theirs, ours in zip((first, second), statistics, strict=True):
        _, low, high = intervals(ours, metric.figures, samples=4000)["bleu"]
        assert (low, high) == pytest.approx((theirs.mean - theirs.ci, theirs.mean + theirs.ci), abs=0.6)
        assert theirs.ci > 2


def test_noise_is_seldom_called_a_difference() -> None:
    """Two systems of one quality, 200 times: 5% would be expected, and both tests have to agree."""
    generator = np.random.default_rng(0)
    verdicts = [
        paired(*generator.normal(size=(2, 40, 1)), means("mean"), samples=200, seed=seed)["mean"].verdict for seed in range(200)
    ]
    assert 180 <= verdicts.count("no significant difference") < 200


def test_a_difference_that_is_there_is_found() -> None:
    before, after = without_words(0.5, 1), without_words(0.1, 2)
    for name in ("rouge", "squad_qg", "msmarco", "gem"):
        metric = METRICS[name]
        statistics = [metric.statistics(texts, [[text] for text in REFERENCES]) for texts in (before, after)]
        for figure, found in paired(statistics[0], statistics[1], metric.figures, samples=300).items():
            assert found.verdict == "significantly higher", (name, figure)
        for figure, found in paired(statistics[1], statistics[0], metric.figures, samples=300).items():
            assert found.verdict == "significantly lower", (name, figure)


@pytest.mark.parametrize(
    ("low", "high", "p", "verdict"),
    [
        (0.1, 0.3, 0.01, "significantly higher"),
        (0.1, 0.3, 0.05, "no significant difference"),
        (0.0, 0.3, 0.01, "no significant difference"),
        (-0.1, 0.3, 0.2, "no significant difference"),
    ],
)
def test_both_tests_have_to_agree(low: float, high: float, p: float, verdict: str) -> None:
    assert Difference(1.0, 1.2, 0.2, low, high, p).verdict == verdict
    if verdict == "significantly higher":
        assert Difference(1.0, 0.8, -0.2, -high, -low, p).verdict == "significantly lower"


def test_rouge_2_of_nothing_but_zeros_gives_no_nan() -> None:
    """Swapping can leave a sum a rounding error below 0, whose cube root must not be undefined."""
    generator = np.random.default_rng(0)
    before, after = generator.uniform(size=(2, 7, 3))
    before[:, 1] = 0.0
    with np.errstate(all="raise"):
        found = paired(before, after, rouge_figures)["r_m"]
    assert np.isfinite(found).all()


def test_systems_with_other_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="not of the same examples"):
        paired(np.zeros((3, 1)), np.zeros((4, 1)), means("mean"))


def test_a_relative_change_of_one_dataset_is_that_of_the_pair() -> None:
    generator = np.random.default_rng(5)
    before = generator.random((40, 3)) * 0.5
    after = before + generator.random((40, 3)) * 0.1
    pair = paired(before, after, rouge_figures)["r_m"]
    found = relative([before], [after], rouge_figures, "r_m")
    assert (found.before, found.after, found.p) == pytest.approx((pair.before, pair.after, pair.p))
    assert found.difference == pytest.approx(pair.difference / pair.before)
    assert found.low < found.difference < found.high


def test_a_relative_change_over_datasets_is_of_the_mean_of_their_figures() -> None:
    """Constant scores: R_m is 10 and 40 before, 11 and 40 after, so the mean rises from 25 to 25.5, by 2%, surely."""
    before = [np.full((5, 3), 0.1), np.full((9, 3), 0.4)]
    after = [np.full((5, 3), 0.11), np.full((9, 3), 0.4)]
    found = relative(before, after, rouge_figures, "r_m")
    assert (found.before, found.after, found.difference) == pytest.approx((25, 25.5, 0.02))
    assert (found.low, found.high) == pytest.approx((0.02, 0.02))

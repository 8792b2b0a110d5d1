from __future__ import annotations

import numpy as np
import pytest
from rouge_score import tokenize

from calibeam.paper.metrics import (
    coverage_and_density,
    geometric_mean,
    has_repetition,
    kendall_tau,
    pair_agreement,
    properties,
    r_m,
    repetition_rate,
    words,
)

PIECES = [
    "the", "a", "cat", "cats", "running", "runs", "ran", "flies", "happily", "nationality", "general", "generally",
    "42", "3.14", "don't", "U.S.", "e-mail", "snake_case", "naïve", "café", "Straße", "İstanbul", "ﬁne", "\u212aelvin",
    "日本語", "Привет", "---", "(", ")", ",", ".", "!", "\n", "\n", "\r\n", "\t", "\u00a0", "\u2028",
]  # fmt: skip

# R1/R2/RLsum on CNN/DailyMail, XSUM, RedditTIFU-long and SAMSum, and the printed improvement of R_m in percent.
FINE_TUNED = "44.74/21.83/41.92 47.23/24.31/39.12 26.84/9.08/21.92 53.67/29.35/44.75"
ABLATION = {
    "similarity: ROUGE": ("46.47/22.49/43.63 47.86/24.55/39.58 29.92/9.83/23.93 54.82/30.15/45.30", 3.26),
    "similarity: decoder": ("46.55/22.50/43.69 47.88/24.62/39.62 29.86/9.84/23.91 54.72/29.96/45.10", 3.20),
    "similarity: tokens": ("46.51/22.48/43.67 47.04/23.63/38.39 29.78/9.69/23.46 53.71/29.38/44.75", 1.64),
    "loss: rank": ("46.73/22.70/43.85 48.11/24.80/40.06 30.34/9.80/24.32 55.19/30.46/46.32", 4.27),
    "loss: margin": ("46.11/22.46/43.30 47.62/24.81/39.89 30.84/9.97/24.37 54.58/30.10/45.92", 3.63),
    "loss: list rank": ("46.62/22.88/43.76 47.93/24.57/39.67 30.87/9.65/24.46 54.56/29.81/45.17", 3.49),
    "loss: reward": ("46.49/22.55/43.63 47.77/24.48/39.49 30.99/9.95/24.39 54.42/29.98/45.56", 3.47),
    "regularization: none": ("46.54/22.44/43.68 47.51/24.70/39.82 30.73/9.68/24.05 55.07/30.07/45.60", 3.48),
    "regularization: cross entropy": ("46.73/22.70/43.85 48.11/24.80/40.06 29.96/9.72/23.82 55.19/30.46/46.32", 4.06),
    "regularization: KL": ("46.80/22.83/43.98 47.96/24.92/40.09 30.73/9.68/24.05 54.87/30.20/45.95", 4.09),
    "decoding: beam": ("46.50/22.48/43.66 47.82/24.65/39.67 31.04/9.96/24.37 54.66/30.27/45.46", 3.70),
    "decoding: diverse beam": ("46.31/22.48/43.47 47.79/24.53/39.51 31.00/9.95/24.08 54.57/29.67/45.55", 3.26),
    "decoding: nucleus": ("46.45/22.46/43.54 47.67/24.50/39.47 31.09/10.01/24.31 54.61/30.04/45.63", 3.51),
    "checkpoint: ROUGE": ("46.66/22.66/43.84 48.03/24.78/39.79 30.94/9.98/24.43 54.63/30.03/45.79", 3.96),
    "checkpoint: perplexity": ("47.36/24.02/44.45 47.96/24.74/39.78 31.04/10.08/24.53 54.65/30.11/46.00", 4.93),
}


def random_texts(count: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(PIECES, generator.integers(0, 14))) for _ in range(count)]


def triples(printed: str) -> list[tuple[float, float, float]]:
    return [(r1, r2, rl) for r1, r2, rl in (map(float, scores.split("/")) for scores in printed.split())]


def test_r_m_by_hand() -> None:
    """(2 * 4 * 8)^(1/3) = 4 and (1 * 1 * 8)^(1/3) = 2: the mean over datasets is 3."""
    assert geometric_mean(2, 4, 8) == pytest.approx(4.0)
    assert r_m([(2, 4, 8), (1, 1, 8)]) == pytest.approx(3.0)
    assert r_m([(50.0, 0.0, 40.0)]) == 0.0


@pytest.mark.parametrize("row", ABLATION)
def test_r_m_reproduces_the_papers_ablation_table(row: str) -> None:
    """Delta = R_m / R_m(fine-tuned) - 1.

    The printed scores are rounded to two decimals, so each may be off by 0.005; with every one of them off
    in the worst direction a delta moves by 0.034 points, besides its own rounding. All rows lie within 0.018.
    """
    scores, printed = ABLATION[row]
    delta = 100 * (r_m(triples(scores)) / r_m(triples(FINE_TUNED)) - 1)
    assert delta == pytest.approx(printed, abs=0.02)


@pytest.mark.parametrize(
    "text", ["the the cat", "The, the cat", "of a of a", "it ran. It ran!", "x a b c a b c y", "1 1", "é é", "go\ngo"]
)
def test_an_n_gram_followed_by_itself_is_a_repetition(text: str) -> None:
    assert has_repetition(text)


@pytest.mark.parametrize(
    "text", ["", "cat", "the cat the dog", "a b c a b", "a b x a b", "bonbon", "...!!!", "a b a c a b", "then the", "a b b2 a"]
)
def test_what_is_no_repetition(text: str) -> None:
    assert not has_repetition(text)


def test_repetition_agrees_with_comparing_every_pair_of_neighbouring_n_grams() -> None:
    generator = np.random.default_rng(0)
    found = 0
    for _ in range(2000):
        words = generator.choice(list("abcd"), generator.integers(0, 10)).tolist()
        repeated = any(words[i : i + n] == words[i + n : i + 2 * n] for n in range(1, 6) for i in range(len(words) - 2 * n + 1))
        assert has_repetition(" ".join(words)) == repeated
        found += repeated
    assert 200 < found < 1800


def test_repetition_rate_is_a_share_of_texts() -> None:
    """Three repetitions in one text count once: 1 text of 4."""
    assert repetition_rate(["no no no no", "a b", "b c", ""]) == 0.25
    assert repetition_rate([]) == 0.0


def test_coverage_and_density_by_hand() -> None:
    """Source "the red fox ran over the hill"; target "The red fox sat on the hill" has 7 words.

    Fragments "the red fox" and "the hill": coverage (3 + 2) / 7, density (9 + 4) / 7.
    """
    coverage, density = coverage_and_density("the red fox ran over the hill", "The red fox sat on the hill")
    assert coverage == pytest.approx(5 / 7)
    assert density == pytest.approx(13 / 7)


def test_words_are_those_of_rouge_score() -> None:
    """Not stemmed; and letters that are not Latin are never turned into Latin ones, as the capital I with a dot would be."""
    generator = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(generator.choice(list("aZ09 _-'.\né日"), 30))
        assert words(text) == tokenize.tokenize(text, None)
    assert words("\u0130zmir \u212a2") == ["zmir", "2"]


def test_the_properties_of_a_dataset_by_hand() -> None:
    """Sources of 3 and 2 words, targets of 2 and 1; "a b" is copied in one piece, "x" is not."""
    assert properties([("a b c", "a b"), ("a b", "x")]) == pytest.approx((2.5, 1.5, 0.5, 1.0))


def test_a_fragment_is_the_longest_at_its_place() -> None:
    """ "a b" stands at two places in the source, once as "a b c": one fragment of 3 words, density 9 / 3."""
    assert coverage_and_density("a b x a b c", "a b c") == (1.0, 3.0)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [("a b c", "a b c", (1.0, 3.0)), ("a b", "x y", (0.0, 0.0)), ("", "x", (0.0, 0.0)), ("x", "", (0.0, 0.0))],
)
def test_the_extremes_of_coverage_and_density(source: str, target: str, expected: tuple[float, float]) -> None:
    assert coverage_and_density(source, target) == expected


def test_pair_agreement_by_hand() -> None:
    """Quality 3, 2, 2, 1 has 5 pairs of different quality; with log P -1, -2, -1, -4 the pairs are

    (0, 1) agrees, (0, 2) equal log P: one half, (0, 3), (1, 3) and (2, 3) agree: 4.5 of 5.
    """
    assert pair_agreement([-1, -2, -1, -4], [3, 2, 2, 1]) == (4.5, 5)
    assert pair_agreement([-1, -2], [1, 2]) == (0.0, 1)
    assert pair_agreement([-1, -2], [1, 1]) == (0.0, 0)
    assert pair_agreement([], []) == (0.0, 0)


def test_kendall_tau_by_hand() -> None:
    """1 2 3 against 1 3 2: two pairs agree, one does not: (2 - 1) / 3."""
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_kendall_tau_with_ties_is_tau_b() -> None:
    """log P 1 1 2 3, quality 1 2 2 3. Of 6 pairs, 5 differ in log P and 5 in quality, 4 in both, all agreeing:

    tau-b = 4 / sqrt(5 * 5) = 0.8.
    """
    assert kendall_tau([1, 1, 2, 3], [1, 2, 2, 3]) == pytest.approx(0.8)


@pytest.mark.parametrize(("log_p", "quality"), [([1, 1], [1, 2]), ([1, 2], [1, 1]), ([1], [1]), ([], [])])
def test_kendall_tau_of_a_constant_is_undefined(log_p: list[float], quality: list[float]) -> None:
    assert kendall_tau(log_p, quality) is None

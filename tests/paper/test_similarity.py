from __future__ import annotations

import math

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor

from calibeam.paper.similarity import SIMILARITIES, SPANS, span_similarity
from calibeam.records import Outputs

E1, E2, SLANTED = [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]


def similarity(candidate: list[list[float]], target: list[list[float]], spans: tuple[int, ...] = SPANS) -> float:
    y_hat, y_bar = torch.tensor(candidate, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    every = [torch.ones(len(y), dtype=torch.bool) for y in (y_hat, y_bar)]
    return span_similarity(y_hat, y_bar, *every, spans=spans).item()


def ragged(seed: int, batch: int = 12, longest: int = 13, size: int = 3, least: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, longest + 1, (batch,), generator=generator)
    lengths[:2] = torch.tensor([longest, least])
    mask = torch.arange(longest) < lengths[:, None]
    return torch.randn(batch, longest, size, generator=generator, dtype=torch.float64), mask


def plain_similarity(candidate: list[list[float]], target: list[list[float]]) -> float:
    """The paper's P_n, R_n and F_n, span by span: the cosine of spans of unit vectors laid end to end."""

    def unit(vector: list[float]) -> list[float]:
        return [x / math.hypot(*vector) for x in vector]

    def spans(vectors: list[list[float]], n: int) -> list[list[float]]:
        return [[x for vector in vectors[i : i + n] for x in unit(vector)] for i in range(len(vectors) - n + 1)]

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    total = 0.0
    for n in (1, 2, 4, 8):
        size = min(n, len(candidate), len(target))
        ours, theirs = spans(candidate, size), spans(target, size)
        precision = sum(max(cosine(a, b) for b in theirs) for a in ours) / len(ours)
        recall = sum(max(cosine(a, b) for a in ours) for b in theirs) / len(theirs)
        if precision > 0 and recall > 0:
            total += 2 * precision * recall / (precision + recall)
    return total


def test_single_tokens_by_hand() -> None:
    """Candidate e1 e2, target e1: P_1 = (1 + 0) / 2, R_1 = 1, F_1 = 2 * 1/2 * 1 / (3/2) = 2/3."""
    assert similarity([E1, E2], [E1], (1,)) == pytest.approx(2 / 3)


def test_pairs_of_tokens_by_hand() -> None:
    """Candidate e1 e2, target e1 v e2 with v = (0.6, 0.8): the cosines are [1, 0.6, 0] and [0, 0.8, 1].

    n = 1: P = (1 + 1) / 2 = 1, R = (1 + 0.8 + 1) / 3 = 14/15, F = 2 * 14/15 / (29/15) = 28/29.
    n = 2: "e1 e2" against "e1 v" is (1 + 0.8) / 2 = 0.9, against "v e2" (0.6 + 1) / 2 = 0.8;
           P = 0.9, R = (0.9 + 0.8) / 2 = 0.85, F = 2 * 0.9 * 0.85 / 1.75 = 1.53 / 1.75.
    """
    target = [E1, SLANTED, E2]
    assert similarity([E1, E2], target, (1,)) == pytest.approx(28 / 29)
    assert similarity([E1, E2], target, (2,)) == pytest.approx(1.53 / 1.75)
    assert similarity([E1, E2], target, (1, 2)) == pytest.approx(28 / 29 + 1.53 / 1.75)


def test_fault_26_a_sequence_shorter_than_the_span_sets_the_span_on_both_sides() -> None:
    """Candidate e2, target e1 e2 with n = 8: spans of one token; P = 1, R = (0 + 1) / 2, F = 2/3."""
    assert similarity([E2], [E1, E2], (8,)) == pytest.approx(2 / 3)


def test_opposite_vectors_score_zero() -> None:
    """P = R = -1: F is no harmonic mean there, and counts 0."""
    assert similarity([E1], [[-1.0, 0.0]], (1,)) == 0.0


@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_a_sequence_is_as_similar_to_itself_as_there_are_span_sizes(length: int) -> None:
    vectors = torch.randn(length, 4, generator=torch.Generator().manual_seed(length)).tolist()
    assert similarity(vectors, vectors) == pytest.approx(4.0)
    assert similarity(vectors, vectors, (1, 2)) == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_plain_loops_on_ragged_batches(seed: int) -> None:
    candidate, candidate_mask = ragged(seed)
    target, target_mask = ragged(seed + 100, longest=10)
    measured = span_similarity(candidate, target, candidate_mask, target_mask)
    expected = [
        plain_similarity(y_hat[kept].tolist(), y_bar[kept_too].tolist())
        for y_hat, kept, y_bar, kept_too in zip(candidate, candidate_mask, target, target_mask, strict=True)
    ]
    assert measured.tolist() == pytest.approx(expected, abs=1e-12)


def test_several_candidates_share_one_target() -> None:
    candidates, candidate_mask = ragged(1)
    target, target_mask = ragged(2, batch=2)
    together = span_similarity(
        candidates.view(2, 6, *candidates.shape[1:]), target[:, None], candidate_mask.view(2, 6, -1), target_mask[:, None]
    )
    apart = span_similarity(
        candidates, target.repeat_interleave(6, 0), candidate_mask, target_mask.repeat_interleave(6, 0)
    )  # fmt: skip
    assert torch.equal(together.flatten(), apart)


def test_padding_and_batch_mates_change_nothing() -> None:
    candidate, candidate_mask = ragged(3)
    target, target_mask = ragged(4)
    together = span_similarity(candidate, target, candidate_mask, target_mask)
    other_padding = span_similarity(
        candidate.where(candidate_mask[..., None], torch.tensor(1e6).double()),
        target.where(target_mask[..., None], torch.tensor(-7.0).double()),
        candidate_mask, target_mask,
    )  # fmt: skip
    assert torch.equal(other_padding, together)
    alone = [
        span_similarity(y_hat[kept], y_bar[kept_too], kept[kept], kept_too[kept_too])
        for y_hat, kept, y_bar, kept_too in zip(candidate, candidate_mask, target, target_mask, strict=True)
    ]
    assert torch.allclose(torch.stack(alone), together, atol=1e-12)


def test_fault_26_an_empty_sequence_scores_zero_on_either_side() -> None:
    states, mask = ragged(5, batch=3)
    nothing = torch.zeros_like(mask)
    assert span_similarity(states, states, nothing, mask).tolist() == [0.0] * 3
    assert span_similarity(states, states, mask, nothing).tolist() == [0.0] * 3
    assert span_similarity(states, states, nothing, nothing).tolist() == [0.0] * 3


def test_fault_26_zero_vectors_give_no_nan() -> None:
    """A zero vector has cosine 0 with everything: candidate 0 e1, target e1: P_1 = 1/2, R_1 = 1."""
    assert similarity([[0.0, 0.0], E1], [E1], (1,)) == pytest.approx(2 / 3)
    assert similarity([[0.0, 0.0]] * 3, [E1, E2]) == 0.0


def test_the_length_of_a_vector_does_not_count() -> None:
    candidate, candidate_mask = ragged(6)
    target, target_mask = ragged(7)
    scales = torch.rand(*candidate.shape[:2], 1, generator=torch.Generator().manual_seed(0)).double() * 1000 + 0.001
    plain = span_similarity(candidate, target, candidate_mask, target_mask)
    assert torch.allclose(span_similarity(candidate * scales, target, candidate_mask, target_mask), plain, atol=1e-12)


def test_bfloat16_states_are_compared_in_float32() -> None:
    states, mask = ragged(8)
    states = states.bfloat16()
    measured = span_similarity(states, states.flip(0), mask, mask.flip(0))
    assert measured.dtype == torch.float32
    assert torch.equal(measured, span_similarity(states.float(), states.flip(0).float(), mask, mask.flip(0)))


def outputs(texts: list[list[str]], states: Tensor, embeddings: Tensor, mask: Tensor) -> Outputs:
    return Outputs(texts, mask, lambda: states, lambda: embeddings)


def test_each_similarity_reads_its_own_representation() -> None:
    states, mask = ragged(9, batch=4)
    embeddings, _ = ragged(10, batch=4)
    candidates = outputs([["a", "b"]] * 2, *(t.view(2, 2, *t.shape[1:]) for t in (states, embeddings, mask)))
    target = outputs([["a"]] * 2, *(t[:2, None] for t in (states, embeddings, mask)))
    for name, vectors in (("decoder", states), ("tokens", embeddings)):
        expected = span_similarity(vectors.view(2, 2, 13, 3), vectors[:2, None], mask.view(2, 2, -1), mask[:2, None])
        assert torch.equal(SIMILARITIES[name](candidates, target), expected)


def test_rouge_mean_is_the_mean_f_of_the_rouge_score_package() -> None:
    texts = [["the cat sat on the mats", "a dog ran\nfar away"], ["", "birds flying south"]]
    targets = [["the cat sits on a mat"], ["birds fly\nto the south"]]
    mask = torch.ones(2, 2, 5, dtype=torch.bool)
    measured = SIMILARITIES["rouge"](
        outputs(texts, mask, mask, mask), outputs(targets, mask[:, :1], mask[:, :1], mask[:, :1])
    )  # fmt: skip
    scorer = RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=True)
    expected = [
        [sum(score.fmeasure for score in scorer.score(target, text).values()) / 3 for text in row]
        for row, (target,) in zip(texts, targets, strict=True)
    ]
    assert torch.allclose(measured, torch.tensor(expected))
    assert measured[1, 0] == 0.0
    assert measured[0, 0] > measured[0, 1]


def test_rouge_mean_takes_the_mark_that_pegasus_writes_for_a_newline() -> None:
    mask = torch.ones(1, 1, 5, dtype=torch.bool)
    candidates, target = outputs([["a cat<n>a dog"]], mask, mask, mask), outputs([["a cat\na dog"]], mask, mask, mask)
    assert SIMILARITIES["rouge"](candidates, target).tolist() == [[1.0]]

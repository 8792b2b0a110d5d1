from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from calibeam import sequence_log_p
from calibeam.paper.calibration import CALIBRATION_LOSSES, list_rank, list_rank_mean, margin, rank, reward, sample_pair
from conftest import tiny_model

PAIR_LOSSES = ["rank", "margin"]
EVERY = torch.ones(1, 3, dtype=torch.bool)
LOG_P = torch.tensor([[-4.0, -1.0, -9.0]])
SIMILARITY = torch.tensor([[0.5, 0.2, 0.9]])  # best first: candidates 2, 0, 1


def random_candidates(seed: int, batch: int = 6, candidates: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, candidates, generator=generator) * 5, torch.rand(batch, candidates, generator=generator)


def draws(count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_rank_by_hand() -> None:
    """beta = 10, pairs (y+, y-) = (2, 0), (2, 1), (0, 1):

    10 + 9 - 4 = 15, 10 + 9 - 1 = 18, 10 + 4 - 1 = 13; their mean is 46/3. With beta = -4: 1, 4 and max(0, -1) = 0.
    """
    assert rank(LOG_P, SIMILARITY, EVERY, 10.0).tolist() == pytest.approx([46 / 3])
    assert rank(LOG_P, SIMILARITY, EVERY, -4.0).tolist() == pytest.approx([5 / 3])


def test_margin_by_hand() -> None:
    """beta = 10, gaps in similarity 0.4, 0.7, 0.3 for (2, 0), (2, 1), (0, 1):

    4 + 5 = 9, 7 + 8 = 15, 3 + 3 = 6; their mean is 10.
    """
    assert margin(LOG_P, SIMILARITY, EVERY, 10.0).tolist() == pytest.approx([10.0])


def test_list_rank_by_hand() -> None:
    """beta = 10, ranks 2, 0, 1: neighbours (2, 0) 10 + 5 and (0, 1) 10 + 3, and (2, 1) 20 + 8; the sum is 56."""
    assert list_rank(LOG_P, SIMILARITY, EVERY, 10.0).tolist() == pytest.approx([56.0])


def test_list_rank_mean_is_the_sum_of_margin_ranking_losses() -> None:
    """By PyTorch's own, whose mean is over the pairs at one distance; on LOG_P (15 + 13) / 2 + 28 = 42 by hand."""
    assert list_rank_mean(LOG_P, SIMILARITY, EVERY, 10.0).tolist() == pytest.approx([42.0])
    log_p, similarity = random_candidates(7)
    ranked = log_p.gather(1, similarity.argsort(1, descending=True))
    wanted = [
        torch.nn.functional.margin_ranking_loss(ranked[:, :-i], ranked[:, i:], torch.ones(6, 5 - i), 0.5 * i) for i in range(1, 5)
    ]
    mask = torch.ones_like(log_p, dtype=torch.bool)
    assert list_rank_mean(log_p, similarity, mask, 0.5).mean().item() == pytest.approx(sum(map(float, wanted)))


def test_reward_by_hand() -> None:
    """P = 1/2, 1/4, 1/8, shares 4/7, 2/7, 1/7: -(0.5 * 4 + 0.2 * 2 + 0.9 * 1) / 7 = -3.3 / 7, whatever beta is."""
    log_p = torch.tensor([[1 / 2, 1 / 4, 1 / 8]]).log()
    assert reward(log_p, SIMILARITY, EVERY, 0.0).tolist() == pytest.approx([-3.3 / 7])
    assert torch.equal(reward(log_p, SIMILARITY, EVERY, 0.0), reward(log_p, SIMILARITY, EVERY, 100.0))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_pair_far_enough_apart_costs_nothing(name: str) -> None:
    log_p, similarity = torch.tensor([[-1.0, -20.0]]), torch.tensor([[0.9, 0.1]])
    assert CALIBRATION_LOSSES[name](log_p, similarity, EVERY[:, :2], 10.0).tolist() == [0.0]
    assert CALIBRATION_LOSSES[name](log_p.flip(1), similarity, EVERY[:, :2], 10.0).item() > 0


def test_rank_raises_the_better_and_lowers_the_worse() -> None:
    log_p = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rank(log_p, torch.tensor([[0.1, 0.9]]), EVERY[:, :2], 10.0).sum().backward()
    assert log_p.grad is not None
    assert log_p.grad.tolist() == [[1.0, -1.0]]


def test_list_rank_of_two_candidates_is_rank() -> None:
    log_p, similarity = random_candidates(0, candidates=2)
    mask = torch.ones_like(log_p, dtype=torch.bool)
    assert torch.allclose(list_rank(log_p, similarity, mask, 3.0), rank(log_p, similarity, mask, 3.0))


def test_margin_at_a_similarity_gap_of_one_is_rank() -> None:
    log_p, _ = random_candidates(1, candidates=2)
    similarity = torch.tensor([[1.5, 0.5], [0.0, 1.0]]).repeat(3, 1)
    mask = torch.ones_like(log_p, dtype=torch.bool)
    assert torch.allclose(margin(log_p, similarity, mask, 3.0), rank(log_p, similarity, mask, 3.0))


@pytest.mark.parametrize("name", CALIBRATION_LOSSES)
def test_the_order_of_candidates_does_not_count(name: str) -> None:
    log_p, similarity = random_candidates(2)
    mask = torch.ones_like(log_p, dtype=torch.bool)
    order = torch.tensor([3, 0, 4, 2, 1])
    loss = CALIBRATION_LOSSES[name]
    assert torch.allclose(loss(log_p[:, order], similarity[:, order], mask, 2.0), loss(log_p, similarity, mask, 2.0))


@pytest.mark.parametrize("name", CALIBRATION_LOSSES)
def test_one_loss_per_example_that_depends_on_no_other(name: str) -> None:
    log_p, similarity = random_candidates(3)
    mask = torch.ones_like(log_p, dtype=torch.bool)
    loss = CALIBRATION_LOSSES[name]
    alone = torch.cat([loss(log_p[i : i + 1], similarity[i : i + 1], mask[i : i + 1], 2.0) for i in range(len(log_p))])
    assert torch.equal(loss(log_p, similarity, mask, 2.0), alone)


@pytest.mark.parametrize("name", CALIBRATION_LOSSES)
@pytest.mark.parametrize("candidates", [1, 4])
def test_fault_24_ties_and_single_candidates_teach_nothing(name: str, candidates: int) -> None:
    """They cost nothing either, but for the expected reward, which is what all of them have."""
    log_p = torch.randn(2, candidates, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = CALIBRATION_LOSSES[name](log_p, torch.full((2, candidates), 0.3), torch.ones(2, candidates).bool(), 10.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.3 if name == "reward" else 0.0] * 2)
    assert log_p.grad is not None
    assert log_p.grad.abs().max() < 1e-7


@pytest.mark.parametrize("loss", [list_rank, list_rank_mean])
def test_fault_24_a_list_leaves_out_pairs_of_equal_similarity(loss: Callable[..., Tensor]) -> None:
    """Places 0, 1.5 and 1.5: 1.5 + 3 - 1 = 3.5 and 1.5 + 3 - 2 = 2.5, whichever of the tied comes first."""
    log_p, similarity = torch.tensor([[-3.0, -1.0, -2.0]]), torch.tensor([[0.9, 0.5, 0.5]])
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        assert loss(log_p[:, order], similarity[:, order], EVERY, 1.0).tolist() == [6.0]


def test_fault_27_reward_is_finite_for_vanishing_probabilities() -> None:
    """P = exp(-10000) is 0 in any float; the shares are those of 0, -log 3: 3/4 and 1/4."""
    log_p = torch.tensor([[-10_000.0, -10_000.0 - math.log(3.0)]], requires_grad=True)
    loss = reward(log_p, torch.tensor([[1.0, 0.0]]), EVERY[:, :2], 0.0)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-3 / 4], abs=1e-3)  # float32 steps are 1e-3 wide at 10,000
    assert log_p.grad is not None
    assert log_p.grad.isfinite().all()
    assert log_p.grad.any()


def test_fault_27_reward_is_finite_for_a_model_that_writes_a_thousand_tokens() -> None:
    """Of two outputs of 1,000 tokens, at some thousand nats each."""
    model = tiny_model("t5")
    token_ids = torch.randint(3, 300, (1, 2, 1000), generator=torch.Generator().manual_seed(0))
    log_p = sequence_log_p(model, torch.tensor([[5, 6, 1]]), torch.ones(1, 3, dtype=torch.bool), token_ids)
    assert (log_p < -2000).all()
    loss = reward(log_p, torch.tensor([[1.0, 0.5]]), EVERY[:, :2], 0.0)
    loss.sum().backward()
    assert -1 <= loss.item() <= -0.5
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", CALIBRATION_LOSSES)
@pytest.mark.parametrize("filling", [0.0, 1e4, -math.inf, math.nan])
def test_masked_candidates_change_neither_loss_nor_gradient(name: str, filling: float) -> None:
    log_p, similarity = random_candidates(4)
    real = torch.ones_like(log_p, dtype=torch.bool)
    plain = log_p.clone().requires_grad_()
    expected = CALIBRATION_LOSSES[name](plain, similarity, real, 2.0)
    expected.sum().backward()

    absent = torch.full((len(log_p), 1), filling)
    padded = torch.cat([log_p[:, :2], absent, log_p[:, 2:], absent], 1).requires_grad_()
    padded_similarity = torch.cat([similarity[:, :2], absent, similarity[:, 2:], absent], 1)
    mask = torch.tensor([True, True, False, True, True, True, False]).expand(len(log_p), -1)
    loss = CALIBRATION_LOSSES[name](padded, padded_similarity, mask, 2.0)
    loss.sum().backward()

    assert torch.allclose(loss, expected)
    assert plain.grad is not None
    assert padded.grad is not None
    assert torch.allclose(padded.grad[mask].view_as(plain), plain.grad)
    assert not padded.grad[~mask].any()


@pytest.mark.parametrize("name", CALIBRATION_LOSSES)
def test_an_example_without_candidates_costs_nothing(name: str) -> None:
    log_p, similarity = random_candidates(5, batch=1)
    log_p.requires_grad_()
    loss = CALIBRATION_LOSSES[name](log_p, similarity, torch.zeros(1, 5, dtype=torch.bool), 2.0)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert log_p.grad is not None
    assert not log_p.grad.any()


def test_a_sampled_pair_has_the_better_first_and_no_masked_candidate() -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.randint(4, (2000, 5), generator=generator).float()  # many ties
    mask = torch.rand(2000, 5, generator=generator) < 0.8
    has_pair = torch.tensor([row[kept].unique().numel() > 1 for row, kept in zip(similarity, mask, strict=True)])
    similarity, mask = similarity[has_pair], mask[has_pair]
    pair = sample_pair(similarity, mask, torch.rand(len(similarity), generator=generator))
    better, worse = similarity.gather(1, pair).T
    assert pair.shape == (len(similarity), 2)
    assert (better > worse).all()
    assert mask.gather(1, pair).all()


def test_a_sampled_pair_is_uniform_among_pairs_of_different_similarity() -> None:
    """s = 0.1, 0.5, 0.5, 0.9 has 5 such pairs. Chi-square with 4 degrees of freedom: 18.5 at the 0.1% level."""
    rows = 5000
    similarity = torch.tensor([0.1, 0.5, 0.5, 0.9]).expand(rows, -1)
    drawn = sample_pair(similarity, torch.ones(rows, 4, dtype=torch.bool), draws(rows))
    pairs, counts = drawn.unique(dim=0, return_counts=True)
    assert pairs.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]
    assert ((counts - rows / 5) ** 2 / (rows / 5)).sum().item() < 18.5


def test_a_sampled_pair_by_hand() -> None:
    """s = 0.1, 0.5, 0.5, 0.9: each of (1, 0), (2, 0), (3, 0), (3, 1) and (3, 2) has a fifth of the numbers from 0 to 1."""
    numbers = torch.tensor([0.0, 0.19, 0.2, 0.59, 0.61, 0.999])
    similarity = torch.tensor([0.1, 0.5, 0.5, 0.9]).expand(len(numbers), -1)
    drawn = sample_pair(similarity, torch.ones_like(similarity, dtype=torch.bool), numbers)
    assert drawn.tolist() == [[1, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2]]


def test_sampling_from_ties_returns_candidates_that_exist() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]]).repeat(50, 1)
    pair = sample_pair(torch.zeros(100, 3), mask, draws(100))
    assert pair.shape == (100, 2)
    assert mask.gather(1, pair).all()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_the_mean_over_sampled_pairs_approaches_all_pairs(name: str) -> None:
    loss, rows = CALIBRATION_LOSSES[name], 20_000
    log_p, similarity = (values.expand(rows, -1) for values in random_candidates(7, batch=1))
    mask = torch.ones(rows, 5, dtype=torch.bool)
    pair = sample_pair(similarity, mask, draws(rows))
    sampled = loss(log_p.gather(1, pair), similarity.gather(1, pair), mask.gather(1, pair), 4.0)
    exact = loss(log_p[:1], similarity[:1], mask[:1], 4.0).item()
    assert sampled.std() > 0
    assert sampled.mean().item() == pytest.approx(exact, abs=4 * sampled.std().item() / rows**0.5)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from calibeam.paper.regularization import REGULARIZERS, cross_entropy, kl, kl_target_token, none

# Two positions over the vocabulary {a, b}: P(a) now and in the reference.
LOGITS = torch.tensor([[[1 / 2, 1 / 2], [3 / 4, 1 / 4]]]).log()
REFERENCE = torch.tensor([[[1 / 4, 3 / 4], [1 / 2, 1 / 2]]]).log()
TARGET = torch.tensor([[0, 1]])  # "a b"
BOTH = torch.tensor([[True, True]])


def random_logits(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 6, 20, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 4


def test_cross_entropy_by_hand() -> None:
    """-log P("a b") = -log(1/2 * 1/4) = log 8"""
    assert cross_entropy(LOGITS, None, TARGET, BOTH).tolist() == pytest.approx([math.log(8)])


def test_kl_by_hand() -> None:
    """Position 1: 1/2 log(1/2 / 1/4) + 1/2 log(1/2 / 3/4) = 1/2 log 4/3.

    Position 2: 3/4 log(3/4 / 1/2) + 1/4 log(1/4 / 1/2) = 3/4 log 3/2 - 1/4 log 2.
    """
    expected = 0.5 * math.log(4 / 3) + 0.75 * math.log(3 / 2) - 0.25 * math.log(2)
    assert kl(LOGITS, REFERENCE, TARGET, BOTH).tolist() == pytest.approx([expected])


def test_kl_is_from_the_current_model_to_the_reference() -> None:
    """Position 1 the other way round: 1/4 log 1/2 + 3/4 log 3/2, which is not 1/2 log 4/3."""
    first = torch.tensor([[True, False]])
    assert kl(LOGITS, REFERENCE, TARGET, first).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert kl(REFERENCE, LOGITS, TARGET, first).item() == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))


def test_kl_agrees_with_torch() -> None:
    current, reference = random_logits(0), random_logits(1)
    expected = torch.nn.functional.kl_div(
        reference.log_softmax(-1), current.log_softmax(-1), reduction="none", log_target=True
    ).sum((-1, -2))
    measured = kl(current, reference, torch.zeros(8, 6, dtype=torch.int64), torch.ones(8, 6, dtype=torch.bool))
    assert torch.allclose(measured, expected, rtol=1e-5)


def test_kl_on_the_target_token_by_hand() -> None:
    """"a": 1/2 log(1/2 / 1/4) = 1/2 log 2; "b": 1/4 log(1/4 / 1/2) = -1/4 log 2; the sum is 1/4 log 2."""  # fmt: skip
    assert kl_target_token(LOGITS, REFERENCE, TARGET, BOTH).tolist() == pytest.approx([0.25 * math.log(2)])


def test_none_is_zero_for_every_example() -> None:
    assert none(random_logits(0), None, torch.zeros(8, 6), torch.ones(8, 6)).tolist() == [0.0] * 8


@pytest.mark.parametrize("name", ["kl", "kl_target_token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_does_not_diverge_from_itself(name: str, dtype: torch.dtype) -> None:
    logits = random_logits(2).to(dtype)
    target = torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(0))
    assert REGULARIZERS[name](logits, logits.clone(), target, torch.ones(8, 6, dtype=torch.bool)).tolist() == [0.0] * 8


@pytest.mark.parametrize("seed", range(5))
def test_kl_is_never_negative(seed: int) -> None:
    current = random_logits(seed, torch.float64)
    nearby = current + 1e-3 * random_logits(seed + 100, torch.float64)
    target, mask = torch.zeros(8, 6, dtype=torch.int64), torch.ones(8, 6, dtype=torch.bool)
    for reference in (nearby, random_logits(seed + 200, torch.float64)):
        assert (kl(current, reference, target, mask) > 0).all()


@pytest.mark.parametrize("name", REGULARIZERS)
def test_masked_positions_change_neither_value_nor_gradient(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target, mask = torch.randint(20, (8, 6), generator=generator), torch.arange(6) < torch.arange(8)[:, None]

    def value_and_gradient(elsewhere: float) -> tuple[Tensor, Tensor]:
        current = random_logits(3).masked_fill(~mask[..., None], elsewhere).requires_grad_()
        loss = REGULARIZERS[name](current, random_logits(4), target, mask)
        (loss.sum() + 0 * current.sum()).backward()
        assert current.grad is not None
        return loss.detach(), current.grad

    (value, gradient), (other_value, other_gradient) = value_and_gradient(0.0), value_and_gradient(50.0)
    assert torch.equal(value, other_value)
    assert torch.equal(gradient, other_gradient)
    assert not gradient[~mask].any()
    assert value[0] == 0.0  # no position at all


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "kl_target_token"])
def test_terms_are_summed_over_positions(name: str) -> None:
    """Twice the same positions cost twice as much: no division by length."""
    once = REGULARIZERS[name](LOGITS, REFERENCE, TARGET, BOTH)
    twice = REGULARIZERS[name](
        *(values.repeat(1, 2, 1) for values in (LOGITS, REFERENCE)), TARGET.repeat(1, 2), BOTH.repeat(1, 2)
    )
    assert torch.allclose(twice, 2 * once)

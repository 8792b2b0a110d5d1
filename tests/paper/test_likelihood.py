from __future__ import annotations

import math

import pytest
import torch

from calibeam.paper.likelihood import log_probabilities, perplexity, sequence_log_p, smoothed_cross_entropy, token_log_p


def test_sequence_log_p_is_the_sum_over_tokens_with_the_end_token() -> None:
    """Vocabulary {end, a} with P(a) = 3/4 at both steps: P("a end") = 3/4 * 1/4 = 3/16."""
    logits = torch.tensor([[1 / 4, 3 / 4], [1 / 4, 3 / 4]]).log() + 5.0  # a constant changes no probability
    tokens = torch.tensor([1, 0])
    each = token_log_p(logits, tokens)
    assert each.tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 4)])
    assert sequence_log_p(each, torch.tensor([True, True])).item() == pytest.approx(math.log(3 / 16))


def test_masked_tokens_change_nothing_whatever_they_hold() -> None:
    each = torch.tensor([[-1.0, -2.0, -4.0], [-1.0, math.nan, -math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sequence_log_p(each, mask).tolist() == [-3.0, -1.0]


def test_nothing_divides_by_length() -> None:
    assert sequence_log_p(torch.full((40,), -0.5), torch.ones(40, dtype=torch.bool)).item() == -20.0


def test_probabilities_sum_to_one() -> None:
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(log_probabilities(logits).exp().sum(-1), torch.ones(3, 5))


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_upcast_before_the_softmax(narrow: torch.dtype) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(narrow)
    log_p = log_probabilities(logits)
    assert log_p.dtype == torch.float32
    assert torch.equal(log_p, logits.float().log_softmax(-1))
    assert not torch.equal(log_p, logits.log_softmax(-1).float())  # what rounding would have cost


def test_float64_logits_stay_float64() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.zeros(4, dtype=torch.int64)
    assert log_probabilities(logits).dtype == torch.float64
    assert sequence_log_p(token_log_p(logits, tokens), torch.ones(4, dtype=torch.bool)).dtype == torch.float64


def test_perplexity_by_hand() -> None:
    """Three tokens of probability 1/4 each: exp(-(3 log 1/4) / 3) = 4. Unequal: (1/2 * 1/8)^(-1/2) = 4."""
    assert perplexity(3 * math.log(1 / 4), 3) == pytest.approx(4.0)
    assert perplexity(math.log(1 / 2) + math.log(1 / 8), 2) == pytest.approx(4.0)


def test_perplexity_of_no_tokens_is_not_a_number() -> None:
    assert math.isnan(perplexity(0.0, 0))


def test_smoothed_cross_entropy_is_torchs_label_smoothing() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator)
    target, mask = torch.randint(5, (2, 3), generator=generator), torch.tensor([[True, True, False], [True, True, True]])
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1, reduction="none")
    assert smoothed_cross_entropy(logits, target, mask, 0.1).tolist() == pytest.approx((expected * mask).sum(-1).tolist())
    assert smoothed_cross_entropy(logits, target, mask, 0.0).tolist() == pytest.approx(
        (-sequence_log_p(token_log_p(logits, target), mask)).tolist()
    )

"""Equation 2: what keeps the model near the fine-tuned one, on the tokens of the target.

Each takes the logits of the current model and of the frozen reference (the fine-tuned model) at every
position of the target [batch, length, vocabulary], the target [batch, length] and its mask, and
returns the sum over positions [batch].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from calibeam.paper.likelihood import log_probabilities, sequence_log_p, token_log_p

if TYPE_CHECKING:
    from torch import Tensor


def none(logits: Tensor, reference_logits: Tensor | None, target: Tensor, mask: Tensor) -> Tensor:
    return logits.new_zeros(logits.shape[0])


def cross_entropy(logits: Tensor, reference_logits: Tensor | None, target: Tensor, mask: Tensor) -> Tensor:
    """sum_t -log P(y_t | y_<t, x)"""
    return -sequence_log_p(token_log_p(logits, target), mask)


def kl(logits: Tensor, reference_logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """sum_t sum_v P(v) log(P(v) / P_ft(v)), over the whole vocabulary at every position of the target"""
    log_p, reference_log_p = log_probabilities(logits), log_probabilities(reference_logits)
    divergence = (log_p.exp() * (log_p - reference_log_p)).sum(-1)
    return divergence.masked_fill(~mask, 0.0).sum(-1)


def kl_target_token(logits: Tensor, reference_logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """sum_t P(y_t) log(P(y_t) / P_ft(y_t)): the equation as printed, on the target's tokens alone"""
    log_p, reference_log_p = token_log_p(logits, target), token_log_p(reference_logits, target)
    return (log_p.exp() * (log_p - reference_log_p)).masked_fill(~mask, 0.0).sum(-1)


REGULARIZERS: dict[str, Callable[..., Tensor]] = {
    "none": none,
    "cross_entropy": cross_entropy,
    "kl": kl,
    "kl_target_token": kl_target_token,
}
WITHOUT_REFERENCE = frozenset({none, cross_entropy})

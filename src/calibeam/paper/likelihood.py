"""Section 1: the likelihood of a sequence, and perplexity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """In float32 or better."""
    return values if values.element_size() >= 4 else values.float()


def log_probabilities(logits: Tensor) -> Tensor:
    """log P(. | y^0 ... y^{t-1}, x) over the vocabulary, in float32 or better. [..., vocabulary]"""
    return wide(logits).log_softmax(-1)


def token_log_p(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log P(y^t | y^0 ... y^{t-1}, x) of the given tokens. [..., length]"""
    return log_probabilities(logits).gather(-1, token_ids[..., None])[..., 0]


def sequence_log_p(token_log_p: Tensor, mask: Tensor) -> Tensor:
    """log P(y|x) = sum_t log P(y^t | y^0 ... y^{t-1}, x), end token included, never divided by length. [...]"""
    return token_log_p.masked_fill(~mask, 0.0).sum(-1)


def smoothed_cross_entropy(logits: Tensor, token_ids: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """sum_t -(1 - e) log P(y^t | ...) - e/V sum_v log P(v | ...): label smoothing as PEGASUS trains with. [...]"""
    log_p = log_probabilities(logits)
    told = log_p.gather(-1, token_ids[..., None])[..., 0]
    return -sequence_log_p((1 - smoothing) * told + smoothing * log_p.mean(-1), mask)


def perplexity(total_log_p: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood per token."""
    if not tokens:
        return math.nan
    try:
        return math.exp(-total_log_p / tokens)
    except OverflowError:
        return math.inf

"""Equation 1: the calibration losses.

Each takes log P(y_hat|x) [batch, candidates], the candidates' similarity to the target, a mask of the
candidates that exist, and beta; and returns one loss per example [batch]. They are summed over the
terms of the equation and never normalised by length.

Rank and margin are losses of one pair, "uniformly sampled" among the pairs of different similarity.
Given more than two candidates they return the mean over all such pairs, which is the expectation of
that sample; `sample_pair` picks the pair beforehand, so that only two candidates need the model.
list_rank leaves out pairs of equal similarity, and gives candidates that are tied the mean of their places. So an
example without a pair of different similarity (ties, a single candidate) teaches nothing: its gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rank(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """max(0, beta - log P(y+|x) + log P(y-|x))"""
    return _mean_over_pairs((beta - _gap(log_p)).clamp(min=0), ordered_pairs(similarity, mask))


def margin(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """max(0, beta (s(y+) - s(y-)) - log P(y+|x) + log P(y-|x))"""
    return _mean_over_pairs((beta * _gap(similarity) - _gap(log_p)).clamp(min=0), ordered_pairs(similarity, mask))


def list_rank(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """sum_{i<j} max(0, beta |i-j| - log P(y_i|x) + log P(y_j|x)), candidates sorted by similarity, best first"""
    loss, _ = _list_terms(log_p, similarity, mask, beta)
    return loss.sum((-1, -2))


def list_rank_mean(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """As BRIO has it: of the terms at each distance |i-j| the mean, and the sum of these."""
    loss, pairs = _list_terms(log_p, similarity, mask, beta)
    means = [
        loss.diagonal(distance, -2, -1).sum(-1) / pairs.diagonal(distance, -2, -1).sum(-1).clamp(min=1)
        for distance in range(1, log_p.shape[-1])
    ]
    return sum(means, 0.0 * loss.sum((-1, -2)))  # of a single candidate too there is a gradient: 0


def _list_terms(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The terms of list_rank [batch, i, j], 0 where there is no pair, and where there is one."""
    order = similarity.masked_fill(~mask, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    log_p, similarity, mask = (each.gather(-1, order) for each in (log_p, similarity, mask))
    pairs = ordered_pairs(similarity, mask)
    equal = (_gap(similarity) == 0) & mask[..., :, None] & mask[..., None, :]
    place = pairs.sum(-2) + (equal.sum(-1) - 1) / 2  # as many as are better, and half of those as good
    return (beta * _gap(place).abs() - _gap(log_p)).clamp(min=0).masked_fill(~pairs, 0.0), pairs


def reward(log_p: Tensor, similarity: Tensor, mask: Tensor, beta: float) -> Tensor:
    """sum_i -s(y_i) P(y_i|x) / sum_j P(y_j|x); beta plays no part"""
    share = log_p.masked_fill(~mask, float("-inf")).softmax(-1)
    return -(similarity.masked_fill(~mask, 0.0) * share.masked_fill(~mask, 0.0)).sum(-1)


CALIBRATION_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "rank": rank,
    "margin": margin,
    "list_rank": list_rank,
    "list_rank_mean": list_rank_mean,
    "reward": reward,
}
PAIR_LOSSES = frozenset({rank, margin})


def ordered_pairs(similarity: Tensor, mask: Tensor) -> Tensor:
    """[batch, i, j]: candidates i and j exist and s(i) > s(j)."""
    return (_gap(similarity) > 0) & mask[..., :, None] & mask[..., None, :]


def sample_pair(similarity: Tensor, mask: Tensor, draws: Tensor) -> Tensor:
    """(y+, y-), uniform among the pairs with s(y+) > s(y-). [batch, 2] indices; any two that exist where there is none.

    draws: for each example a random number of its own between 0 and 1.
    """
    pairs = ordered_pairs(similarity, mask).flatten(-2)
    existing = (mask[..., :, None] & mask[..., None, :]).flatten(-2)
    pairs = pairs.where(pairs.any(-1, keepdim=True), existing)
    wanted = (draws * pairs.sum(-1)).long()  # how many of them to pass over
    place = (pairs.cumsum(-1) > wanted[..., None]).int().argmax(-1)
    size = similarity.shape[-1]
    return (place[..., None] // place.new_tensor([size, 1])) % size


def _gap(values: Tensor) -> Tensor:
    """values_i - values_j, [..., i, j]"""
    return values[..., :, None] - values[..., None, :]


def _mean_over_pairs(loss: Tensor, pairs: Tensor) -> Tensor:
    return loss.masked_fill(~pairs, 0.0).sum((-1, -2)) / pairs.sum((-1, -2)).clamp(min=1)

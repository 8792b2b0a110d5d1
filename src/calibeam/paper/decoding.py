"""Section 2.4: what beam search, diverse beam search and nucleus sampling are.

Each function of `DECODERS` states its method as a `Search`; `engine/search.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Search:
    """Beam groups that avoid each other's tokens, or independent samples."""

    groups: int = 1
    width: int = 1
    """Beams in each group, or the number of samples."""
    diversity: float = 0.0
    top_p: float | None = None
    """None for beams; for samples, the share of the probability mass that is drawn from."""


def beam(num_candidates: int, groups: int | None, diversity: float, top_p: float) -> Search:
    """One group of as many beams as candidates."""
    _refuse(groups is not None and groups != 1, "groups", "diverse_beam")
    _refuse(diversity != 0.0, "diversity", "diverse_beam")
    _refuse(top_p != 1.0, "top_p", "nucleus")
    return Search(width=num_candidates)


def diverse_beam(num_candidates: int, groups: int | None, diversity: float, top_p: float) -> Search:
    """Vijayakumar et al.: groups of beams, each penalised for the tokens that the groups before it chose."""
    _refuse(top_p != 1.0, "top_p", "nucleus")
    groups = num_candidates if groups is None else groups
    if groups < 1 or num_candidates % groups:
        raise ValueError(f"groups={groups} does not divide num_candidates={num_candidates}")
    if diversity < 0:
        raise ValueError(f"diversity must not be negative, got {diversity}")
    return Search(groups=groups, width=num_candidates // groups, diversity=diversity)


def nucleus(num_candidates: int, groups: int | None, diversity: float, top_p: float) -> Search:
    """Holtzman et al.: independent samples from the most probable tokens that hold top_p of the mass."""
    _refuse(groups is not None, "groups", "diverse_beam")
    _refuse(diversity != 0.0, "diversity", "diverse_beam")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    return Search(width=num_candidates, top_p=top_p)


DECODERS: dict[str, Callable[[int, int | None, float, float], Search]] = {
    "beam": beam,
    "diverse_beam": diverse_beam,
    "nucleus": nucleus,
}


def length_normalised(log_p: Tensor, length: Tensor | int, alpha: float) -> Tensor:
    """log P / length^alpha: Hugging Face's length penalty. alpha = 0 leaves the likelihood as it is."""
    return log_p if alpha == 0.0 else log_p / length**alpha


def hamming_penalty(counts: Tensor, diversity: float) -> Tensor:
    """What a token's score loses for the number of earlier groups' beams that chose it at this step."""
    return counts * diversity


def draw_from_nucleus(log_probabilities: Tensor, top_p: float, uniform: Tensor) -> Tensor:
    """One token per row, drawn from the most probable tokens that together reach top_p. [rows]

    Draws by inverting the distribution, in the order of the vocabulary, at `uniform` in [0, 1): a row's token
    depends on that row alone.
    """
    probabilities = log_probabilities.exp()
    return draw_above(probabilities, least_of_nucleus(probabilities.sort(descending=True).values, top_p), uniform)


def least_of_nucleus(sorted_probabilities: Tensor, top_p: float) -> Tensor:
    """The probability of the token with which each row reaches top_p. Tokens that tie with it are in. [rows]"""
    before = sorted_probabilities.cumsum(-1) - sorted_probabilities
    return sorted_probabilities.masked_fill(before >= top_p, float("inf")).amin(-1)


def draw_above(probabilities: Tensor, least: Tensor, uniform: Tensor) -> Tensor:
    """One token per row among those whose probability is not below `least`. [rows]"""
    kept = probabilities.masked_fill(probabilities < least[:, None], 0.0)
    cumulative = kept.cumsum(-1)
    chosen = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
    last = kept.shape[-1] - 1 - (kept.flip(-1) > 0).int().argmax(-1)  # rounding must not step outside the nucleus
    return chosen.minimum(last)


def _refuse(given: bool, option: str, method: str) -> None:
    if given:
        raise ValueError(f"{option} belongs to method={method!r}")

from __future__ import annotations

import pytest
import torch

from calibeam.paper.decoding import DECODERS, Search, draw_from_nucleus, hamming_penalty, length_normalised

# Sorted: token 2 (0.5), token 0 (0.3), token 3 (0.15), token 1 (0.05)
PROBABILITIES = torch.tensor([0.3, 0.05, 0.5, 0.15])
NEITHER = {"groups": None, "diversity": 0.0, "top_p": 1.0}


def drawn(top_p: float, uniform: list[float]) -> list[int]:
    log_p = PROBABILITIES.log().expand(len(uniform), -1)
    return draw_from_nucleus(log_p, top_p, torch.tensor(uniform)).tolist()


@pytest.mark.parametrize(
    ("top_p", "uniform", "tokens"),
    [
        # {2} alone reaches 0.4
        (0.4, [0.0, 0.5, 0.999999], [2, 2, 2]),
        # {0, 2} reaches 0.6: 0.3 / 0.8 = 0.375 goes to token 0
        (0.6, [0.0, 0.37, 0.38, 0.999999], [0, 0, 2, 2]),
        # {0, 2, 3} reaches 0.9: 0.3 / 0.95 = 0.316, 0.8 / 0.95 = 0.842
        (0.9, [0.0, 0.31, 0.32, 0.84, 0.85, 0.999999], [0, 0, 2, 2, 3, 3]),
        # everything: bounds 0.3, 0.35, 0.85
        (1.0, [0.0, 0.29, 0.31, 0.34, 0.36, 0.84, 0.86, 0.999999], [0, 0, 1, 1, 2, 2, 3, 3]),
        # never less than the most probable token
        (1e-9, [0.0, 0.999999], [2, 2]),
    ],
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, uniform: list[float], tokens: list[int]) -> None:
    assert drawn(top_p, uniform) == tokens


def test_tokens_that_tie_are_all_in_the_nucleus() -> None:
    """0.5 and either 0.25 reach 0.6; so both are in, whatever their order."""
    log_p = torch.tensor([0.25, 0.5, 0.25]).log().expand(4, -1)
    assert draw_from_nucleus(log_p, 0.6, torch.tensor([0.0, 0.26, 0.74, 0.76])).tolist() == [0, 1, 1, 2]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    log_p = torch.tensor([[0.0, 0.5, 0.0, 0.5]]).log().expand(3, -1)
    assert draw_from_nucleus(log_p, 1.0, torch.tensor([0.0, 0.51, 0.99999994])).tolist() == [1, 3, 3]


def test_a_row_is_drawn_from_itself_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(64, 30, generator=generator).log_softmax(-1)
    uniform = torch.rand(64, generator=generator)
    together = draw_from_nucleus(log_p, 0.8, uniform)
    alone = torch.cat([draw_from_nucleus(log_p[i : i + 1], 0.8, uniform[i : i + 1]) for i in range(64)])
    assert torch.equal(together, alone)


def test_draws_follow_the_renormalised_distribution() -> None:
    """Within {2, 0}: 5/8 and 3/8. Evenly spread uniforms hit them in just those shares."""
    tokens = torch.tensor(drawn(0.6, ((torch.arange(8000) + 0.5) / 8000).tolist()))
    assert tokens.bincount(minlength=4).tolist() == pytest.approx([3000, 0, 5000, 0], abs=1)


def test_length_normalised_divides_by_a_power_of_the_length() -> None:
    """-6 / 4^1 = -1.5, -6 / 4^0.5 = -3, and alpha = 0 leaves log P alone."""
    log_p, length = torch.tensor([-6.0, -9.0]), torch.tensor([4, 9])
    assert length_normalised(log_p, length, 0.0).tolist() == [-6.0, -9.0]
    assert length_normalised(log_p, length, 1.0).tolist() == pytest.approx([-1.5, -1.0])
    assert length_normalised(log_p, length, 0.5).tolist() == pytest.approx([-3.0, -3.0])
    assert length_normalised(log_p, 2, 2.0).tolist() == pytest.approx([-1.5, -2.25])


def test_hamming_penalty_counts_beams() -> None:
    assert hamming_penalty(torch.tensor([0.0, 1.0, 3.0]), 0.5).tolist() == [0.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("method", "options", "search"),
    [
        ("beam", {}, Search(groups=1, width=6)),
        ("beam", {"groups": 1}, Search(groups=1, width=6)),
        ("diverse_beam", {}, Search(groups=6, width=1)),
        ("diverse_beam", {"groups": 3, "diversity": 0.5}, Search(groups=3, width=2, diversity=0.5)),
        ("nucleus", {}, Search(width=6, top_p=1.0)),
        ("nucleus", {"top_p": 0.9}, Search(width=6, top_p=0.9)),
    ],
)
def test_methods_by_name(method: str, options: dict[str, float], search: Search) -> None:
    assert DECODERS[method](**{"num_candidates": 6, **NEITHER, **options}) == search


@pytest.mark.parametrize(
    ("method", "options", "belongs_to"),
    [
        ("beam", {"groups": 2}, "diverse_beam"),
        ("beam", {"diversity": 0.5}, "diverse_beam"),
        ("beam", {"top_p": 0.9}, "nucleus"),
        ("diverse_beam", {"top_p": 0.9}, "nucleus"),
        ("nucleus", {"groups": 1}, "diverse_beam"),
        ("nucleus", {"diversity": 0.5}, "diverse_beam"),
    ],
)
def test_options_of_another_method_are_refused(method: str, options: dict[str, float], belongs_to: str) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} belongs to method='{belongs_to}'"):
        DECODERS[method](**{"num_candidates": 6, **NEITHER, **options})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("diverse_beam", {"groups": 4}, "does not divide"),
        ("diverse_beam", {"groups": 0}, "does not divide"),
        ("diverse_beam", {"groups": -2}, "does not divide"),
        ("diverse_beam", {"groups": 12}, "does not divide"),
        ("diverse_beam", {"diversity": -0.1}, "must not be negative"),
        ("nucleus", {"top_p": 0.0}, "top_p must be"),
        ("nucleus", {"top_p": -0.5}, "top_p must be"),
        ("nucleus", {"top_p": 1.1}, "top_p must be"),
        ("nucleus", {"top_p": float("nan")}, "top_p must be"),
    ],
)
def test_bad_values_are_refused(method: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DECODERS[method](**{"num_candidates": 6, **NEITHER, **options})

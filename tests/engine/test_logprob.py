from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from calibeam.engine.logprob import sequence_log_p
from calibeam.engine.search import decode
from conftest import FAMILIES, tiny_model

VOCABULARY, PAD, EOS = 20, 0, 1
METHODS: dict[str, dict[str, Any]] = {
    "beam": {},
    "diverse_beam": {"groups": 2, "diversity": 0.7},
    "nucleus": {"top_p": 0.9},
}
SOURCES = [[5, 9, 3, 12, 7, 4], [8, 2], [11, 11, 6, 19]]
# Of source i, candidates as decode returns them: padded after the end token, or cut without one.
CANDIDATES = [
    [[4, 6, EOS, PAD, PAD], [EOS, PAD, PAD, PAD, PAD], [7, 7, 7, 7, 7]],
    [[12, 3, 3, 9, EOS], [5, EOS, PAD, PAD, PAD], [2, 13, 14, EOS, PAD]],
    [[6, 19, 2, EOS, PAD], [10, PAD, 4, PAD, PAD], [3, EOS, PAD, PAD, PAD]],
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor, Tensor]:
    longest = max(map(len, SOURCES))
    input_ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in SOURCES])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in SOURCES])
    return input_ids, mask, torch.tensor(CANDIDATES)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_loop_over_tokens_one_sequence_at_a_time(family: str) -> None:
    """log P(y|x) = sum_t log P(y^t | y^0 ... y^{t-1}, x), up to the end token; a pad before any end is a token."""
    model = tiny_model(family, vocabulary=VOCABULARY)
    measured = sequence_log_p(model, *batch())
    for source, candidates, log_p in zip(SOURCES, CANDIDATES, measured.tolist(), strict=True):
        for candidate, value in zip(candidates, log_p, strict=True):
            written, total = [model.config.decoder_start_token_id], 0.0
            for token in candidate:
                logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([written])).logits
                total += logits[0, -1].log_softmax(-1)[token].item()
                written.append(token)
                if token == EOS:
                    break
            assert value == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_the_log_p_of_decode(family: str, method: str) -> None:
    model = tiny_model(family, vocabulary=VOCABULARY)
    input_ids, mask, _ = batch()
    for settings in ({"max_new_tokens": 6}, {"max_new_tokens": 6, "min_new_tokens": 6}, {"max_new_tokens": 1}):
        seeds = {"generator": torch.Generator().manual_seed(0)} if method == "nucleus" else {}
        found = decode(model, input_ids, mask, method=method, num_candidates=4, **settings, **seeds, **METHODS[method])
        assert torch.allclose(sequence_log_p(model, input_ids, mask, found.token_ids), found.log_p, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_after_the_end_token_changes_nothing(family: str) -> None:
    model = tiny_model(family, vocabulary=VOCABULARY)
    input_ids, mask, token_ids = batch()
    token_ids = torch.where(token_ids[..., -1:] == 7, token_ids.new_tensor([7, 7, 7, 7, EOS]), token_ids)
    token_ids[2, 1, -1] = EOS  # now all end
    expected = sequence_log_p(model, input_ids, mask, token_ids)
    longer = torch.cat([token_ids, torch.full((3, 3, 4), PAD)], -1)
    assert torch.allclose(sequence_log_p(model, input_ids, mask, longer), expected, atol=1e-5)
    ended = (token_ids == EOS).long().cumsum(-1) - (token_ids == EOS).long() > 0
    assert torch.allclose(sequence_log_p(model, input_ids, mask, token_ids.masked_fill(ended, 9)), expected, atol=1e-5)


def test_a_given_mask_says_which_tokens_count() -> None:
    model = tiny_model("bart", vocabulary=VOCABULARY)
    input_ids, mask, token_ids = batch()
    first_two = torch.tensor([True, True, False, False, False]).expand(3, 3, -1)
    prefixes = token_ids[..., :2]
    expected = sequence_log_p(model, input_ids, mask, prefixes, torch.ones(3, 3, 2, dtype=torch.bool))
    assert torch.allclose(sequence_log_p(model, input_ids, mask, token_ids, first_two), expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_finite_differences(family: str) -> None:
    """Along the gradient g, (f(w + e g) - f(w - e g)) / 2e = |g|^2.

    For the layers' weights; embeddings leave out the gradient of the pad token by design.
    """
    model = tiny_model(family, vocabulary=VOCABULARY).double()
    weights = [weight for name, weight in model.named_parameters() if "layers." in name or "block." in name]

    def total() -> Tensor:
        return sequence_log_p(model, *batch()).sum()

    total().backward()
    gradient = [weight.grad.clone() for weight in weights]
    squared = sum((g * g).sum().item() for g in gradient)
    step, values = 1e-4 / squared**0.5, []
    with torch.no_grad():
        for move in (step, -2 * step):
            for weight, g in zip(weights, gradient, strict=True):
                weight.add_(g, alpha=move)
            values.append(total().item())
    assert squared > 0
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(squared, rel=1e-3)


def test_both_encoder_and_decoder_receive_a_gradient() -> None:
    model = tiny_model("pegasus", vocabulary=VOCABULARY)
    sequence_log_p(model, *batch()).sum().backward()
    for part in (model.get_encoder(), model.get_decoder()):
        assert all(weight.grad.isfinite().all() for weight in part.layers.parameters())
        assert any(weight.grad.any() for weight in part.layers.parameters())

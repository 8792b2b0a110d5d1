"""The operations against plain formulas: by PyTorch, and by Triton kernels, on a GPU or interpreted."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from calibeam import families
from calibeam.engine import ops
from calibeam.paper.decoding import draw_from_nucleus
from conftest import tiny_model

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    pytest.param(
        "interpreted", marks=pytest.mark.skipif(torch.cuda.is_available() or not HAS_TRITON, reason="needs Triton and no GPU")
    ),
]
SLOTS, ROWS, HEADS, HEAD, STEPS = 3, 5, 4, 8, 7


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the operation runs: by PyTorch, by kernels on a GPU, or by kernels in Triton's interpreter."""
    if request.param == "interpreted":
        monkeypatch.setattr(ops, "by_kernel", lambda tensor: True)
        return "cpu"
    return str(request.param)


def noise(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """One query [heads, head] over [cells, heads, head]."""
    scores = torch.einsum("hd,chd->hc", query, keys) * scaling
    return torch.einsum("hc,chd->hd", (scores if bias is None else scores + bias).softmax(-1), values)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_rows_attend_to_the_first_cells_of_their_source(device: str) -> None:
    query, cells = noise(SLOTS * ROWS, HEADS * HEAD, device=device), noise(SLOTS, 11, 2 * HEADS * HEAD, seed=1, device=device)
    length = torch.tensor([11, 1, 6], dtype=torch.int32, device=device)
    found = ops.attend(query, cells, ops.source_reach(length, 11), rows=ROWS, heads=HEADS, scaling=0.3)
    keys, values = cells.view(SLOTS, 11, 2, HEADS, HEAD).unbind(2)
    for slot in range(SLOTS):
        n = int(length[slot])
        for row in range(slot * ROWS, (slot + 1) * ROWS):
            expected = plain_attention(query[row].view(HEADS, HEAD), keys[slot, :n], values[slot, :n], None, 0.3)
            assert torch.allclose(found[row].view(HEADS, HEAD), expected, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_attend_to_their_own_path(device: str, biased: bool) -> None:
    """At step t a row sees the one cell that its ancestor wrote, with the bias of its distance; its own it writes now."""
    query = noise(SLOTS * ROWS, HEADS * HEAD, device=device)
    cells = noise(SLOTS, STEPS, ROWS, 2 * HEADS * HEAD, seed=1, device=device)
    generator = torch.Generator().manual_seed(2)
    ancestor = torch.randint(ROWS, (SLOTS, ROWS, STEPS), generator=generator).int().to(device)
    position = torch.tensor([6, 0, 3], device=device)
    bias = noise(HEADS, STEPS, seed=3, device=device) if biased else None
    every_slot, rows = torch.arange(SLOTS, device=device), torch.arange(ROWS, device=device)
    ancestor[every_slot, :, position] = rows.int()
    reach = ops.own_reach(ancestor, position, bias, STEPS)
    new, before = noise(SLOTS * ROWS, 3 * HEADS * HEAD, seed=4, device=device)[:, HEADS * HEAD :], cells.clone()
    found = ops.attend(query, cells.flatten(1, 2), reach, new, rows=ROWS, heads=HEADS, scaling=0.3)
    before[every_slot, position] = new.reshape(SLOTS, ROWS, -1)
    assert torch.equal(cells, before)
    keys, values = cells.view(SLOTS, STEPS, ROWS, 2, HEADS, HEAD).unbind(3)
    for slot in range(SLOTS):
        steps = torch.arange(int(position[slot]) + 1, device=device)
        for row in range(ROWS):
            path = ancestor[slot, row, steps].long()
            gain = None if bias is None else bias[:, steps.flip(0)]
            mine = query[slot * ROWS + row].view(HEADS, HEAD)
            expected = plain_attention(mine, keys[slot, steps, path], values[slot, steps, path], gain, 0.3)
            assert torch.allclose(found[slot * ROWS + row].view(HEADS, HEAD), expected, atol=1e-5)


class ScaleNorm(nn.Module):
    """As T5's: no mean, no bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(noise(size, seed=5)), 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states * (states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("norm", [nn.LayerNorm(24), ScaleNorm(24)], ids=["layer", "scale"])
def test_add_norm(device: str, norm: Any) -> None:
    norm = norm.to(device)
    states, delta = noise(9, 24, device=device), noise(9, 24, seed=1, device=device)
    with torch.no_grad():
        total, normed = ops.add_norm(states, delta, norm)
        assert torch.allclose(total, states + delta, atol=1e-6)
        assert torch.allclose(normed, norm(states + delta), atol=1e-5)


def gradients(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, inputs, allow_unused=True)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("used", ["sum", "norm", "both"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm(24), ScaleNorm(24)], ids=["layer", "scale"])
def test_the_gradients_of_add_norm(device: str, norm: Any, biased: bool, used: str) -> None:
    norm = norm.to(device)
    states, delta = (noise(3, 50, 24, seed=seed, device=device).requires_grad_() for seed in (0, 1))
    bias = noise(24, seed=7, device=device).requires_grad_() if biased else None
    factors = [noise(3, 50, 24, seed=seed, device=device) for seed in (2, 3)]
    wanted = [each for each in (states, delta, bias, *norm.parameters()) if each is not None]

    def value(total: Tensor, normed: Tensor) -> Tensor:
        parts = [(total * factors[0]).sum()] * (used != "norm") + [(normed * factors[1]).sum()] * (used != "sum")
        return torch.stack(parts).sum()

    found = gradients(value(*ops.add_norm(states, delta, norm, bias)), *wanted)
    total = states + delta if bias is None else states + delta + bias
    expected = gradients(value(total, norm(total)), *wanted)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("rows", [1, 70, 700])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradients_of_layers_with_one_input(device: str, rows: int, biased: bool, count: int) -> None:
    layers = [nn.Linear(8, columns, bias=biased).to(device) for columns in (150, 150, 150)[:count]]
    states = noise(2, rows, 8, device=device).requires_grad_()
    factors = [noise(2, rows, layer.out_features, seed=1, device=device) for layer in layers]
    wanted = [states, *(weight for layer in layers for weight in layer.parameters())]

    def value(outputs: Sequence[Tensor]) -> Tensor:
        return torch.stack([(output * factor).sum() for output, factor in zip(outputs, factors, strict=True)]).sum()

    found = gradients(value(ops.linears(states, *layers)), *wanted)
    for mine, theirs in zip(found, gradients(value([layer(states) for layer in layers]), *wanted), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("norm", [nn.LayerNorm(24), ScaleNorm(24)], ids=["layer", "scale"])
def test_gradients_with_states_that_are_made_again(device: str, norm: Any) -> None:
    norm, layers = norm.to(device), [nn.Linear(24, 40).to(device) for _ in range(2)]
    states, delta = (noise(3, 50, 24, seed=seed, device=device).requires_grad_() for seed in (0, 1))
    wanted = [states, delta, *norm.parameters(), *(weight for layer in layers for weight in layer.parameters())]

    def value(normed: Tensor) -> Tensor:
        (first,) = ops.linears(normed, layers[0])
        return (first * ops.activated(normed, layers[1], nn.ReLU())).square().sum()

    found = gradients(value(ops.add_norm(states, delta, norm)[1]), *wanted)
    for mine, theirs in zip(found, gradients(value(norm(states + delta)), *wanted), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=["relu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradients_of_an_activated_layer(device: str, activation: nn.Module, biased: bool) -> None:
    layer, states = nn.Linear(8, 150, bias=biased).to(device), noise(2, 70, 8, device=device).requires_grad_()
    factor, wanted = noise(2, 70, 150, seed=1, device=device), [states, *layer.parameters()]
    found, expected = ops.activated(states, layer, activation), activation(layer(states))
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, theirs in zip(
        gradients((found * factor).sum(), *wanted), gradients((expected * factor).sum(), *wanted), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_that_are_cast_at_once_are_those_of_autocast() -> None:
    model = tiny_model("pegasus").cuda()
    layer, states = model.model.encoder.layers[0].fc1, noise(5, model.config.d_model, device="cuda")
    found = {}
    for blocks in ([], families.blocks(model)):
        with torch.autocast("cuda", torch.bfloat16), ops.cast_at_once(blocks):
            output = ops.linears(states, layer)[0]
        found[bool(blocks)] = (output, *gradients(output.float().square().sum(), *layer.parameters()))
    for mine, theirs in zip(found[True], found[False], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("vocabulary", [5, 40, 4096, 5001])
@pytest.mark.parametrize("padding", [0, 64])
def test_the_divergence_and_its_gradient(device: str, vocabulary: int, padding: int) -> None:
    """Also of logits with columns beyond the vocabulary, which do not count."""
    padded = [noise(6, vocabulary + padding, seed=seed, device=device) * 3 for seed in (0, 1)]
    logits, reference = (each[:, :vocabulary] for each in padded)
    factor, leaf = noise(6, seed=2, device=device), logits.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(-1), reference.log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    divergence, log_sum, shift = ops.divergence(logits, reference)
    assert torch.allclose(divergence, expected, atol=1e-5)
    assert torch.equal(ops.divergence(logits, logits.clone())[0], torch.zeros(6, device=device))
    (gradient,) = gradients((expected * factor).sum(), leaf)
    weighed = ops.weigh_divergence(*padded, log_sum, shift, factor)[:, :vocabulary]
    assert torch.allclose(weighed, gradient, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_weighing_a_softmax(device: str) -> None:
    """In columns that hold more than the log of the sum, nothing overflows."""
    logits, factor = noise(6, 5001, device=device) * 3, noise(6, seed=2, device=device)
    expected = logits.softmax(-1) * factor[:, None]
    wider = torch.cat([logits - 200.0, torch.zeros(6, 3, device=device)], 1)
    found = ops.weigh(wider, logits.logsumexp(-1) - 200.0, factor)
    assert torch.allclose(found[:, :5001], expected, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("vocabulary", "count"), [(5, 9), (40, 7), (3000, 7), (3001, 23), (20_000, 31)])
def test_best_tokens_are_those_of_topk(device: str, vocabulary: int, count: int) -> None:
    logits = noise(6, vocabulary, device=device) * 3
    log_p, tokens, log_sum = ops.best_tokens(logits, count)
    best, index = logits.log_softmax(-1).topk(min(count, vocabulary))
    assert torch.equal(tokens, index)
    assert torch.allclose(log_p, best, atol=1e-5)
    assert torch.allclose(log_sum, logits.logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("scale", [0.1, 6.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 1.0])
def test_draws_are_those_of_the_paper(device: str, scale: float, top_p: float) -> None:
    """A flat distribution has a nucleus larger than what is looked at first."""
    logits, uniform = (
        noise(200, 5000, device=device) * scale,
        torch.rand(200, generator=torch.Generator().manual_seed(1)).to(device),
    )
    expected = draw_from_nucleus(logits.log_softmax(-1), top_p, uniform)
    found = ops.draw(logits.clone(), top_p, uniform)
    # A sum of thousands of numbers in another order may put a draw on the other side of an edge.
    assert (found == expected).float().mean() >= 0.95

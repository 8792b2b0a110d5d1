"""The tree against the plain way: the encoder's output once per sequence, Hugging Face's forward pass, full logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calibeam import seq2seq
from calibeam.engine import layout, packing
from calibeam.engine.packing import Forced, Source, plant
from calibeam.paper import likelihood
from calibeam.paper.calibration import CALIBRATION_LOSSES
from calibeam.paper.regularization import REGULARIZERS
from calibeam.paper.similarity import span_similarity
from conftest import FAMILIES, tiny_model

VOCABULARY, PAD, EOS, START = 23, 0, 1, 0
SOURCES, SEQUENCES, LENGTH = 3, 6, 9


def sources() -> tuple[Tensor, Tensor]:
    mask = torch.arange(8) < torch.tensor([8, 3, 5])[:, None]
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(~mask, PAD), mask


def sequences(shared: bool, seed: int = 0, count: int = SEQUENCES) -> tuple[Tensor, Tensor]:
    """Of a source: ragged ones that begin alike, as beams do; or ones of a length that have nothing in common."""
    rng = random.Random(seed)  # noqa: S311
    written = []
    for _ in range(SOURCES):
        stem = [rng.randrange(2, VOCABULARY) for _ in range(LENGTH)]
        for number in range(count):
            begin = rng.randrange(3, LENGTH - 1) if shared else 0
            rest = rng.randrange(1, LENGTH - begin + 1) if number and shared else LENGTH - begin
            written.append([*stem[:begin], *(rng.randrange(2, VOCABULARY) for _ in range(rest - 1)), EOS])
    ids, mask = seq2seq.pad_rows(written, PAD)
    return ids.view(SOURCES, count, -1), mask.view(SOURCES, count, -1)


@pytest.mark.parametrize("shared", [True, False])
def test_a_tree_holds_every_prefix_once(shared: bool) -> None:
    ids, mask = sequences(shared)
    tree = plant(tiny_model("pegasus", vocabulary=VOCABULARY), ids, mask)
    assert (tree.reach is not None) == shared
    if not shared:
        return
    for source in range(SOURCES):
        sentences = [[START, *row[keep].tolist()] for row, keep in zip(ids[source], mask[source], strict=True)]
        prefixes = {tuple(row[: end + 1]) for row in sentences for end in range(len(row) - 1)}
        assert (tree.asked // tree.tokens.shape[1] == source).sum() == len(prefixes)
        for number, row in enumerate(sentences):
            for step in range(len(row) - 1):
                place, node = divmod(int(tree.place[source, number, step]), tree.tokens.shape[1])
                assert place == source
                seen = tree.reach[source, node].nonzero()[:, 0]
                path = sorted(seen.tolist(), key=lambda node: int(tree.depth[source, node]))
                assert [int(tree.tokens[source, node]) for node in path] == row[: step + 1]
                assert [int(tree.depth[source, node]) for node in path] == list(range(step + 1))


def force(model: Any, ids: Tensor, mask: Tensor, tokens: Tensor, kept: Tensor, together: bool = False, first: int = 0) -> Forced:
    """together: the first source and the third share a row, a last row is empty, and there is more room than needed, as on a
    GPU."""
    size, gpu = model.config.hidden_size, torch.device("cuda")
    if not together:
        planned = packing.plan(tokens, kept, size, torch.device("cpu"), first=first)
        return Forced(Source(model, ids, mask), plant(model, tokens, kept, planned))
    texts = [row[keep].numpy() for row, keep in zip(ids, mask, strict=True)]
    batch = layout.side_by_side(texts, np.array([0, 1, 0]), 3, PAD, gpu)
    planned = packing.plan(tokens, kept, size, gpu, first=first, rows=3, row=batch["row"])
    assert planned.nodes is not None
    assert planned.asked > packing.distinct_prefixes(tokens.numpy()[:, first:], kept.numpy()[:, first:]).sum()
    assert batch["mask"].shape[1] > batch["mask"].sum(1).max()
    shared = layout.Shared(batch["segment"], batch["position"])
    source = Source(model, batch["input_ids"], batch["mask"], whole=False, shared=shared)
    return Forced(source, plant(model, tokens, kept, planned, batch["row"]))


TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])


def plain(model: Any, ids: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and states, one sequence at a time."""
    logits, states = [], []
    for source in range(len(ids)):
        encoded = seq2seq.encode(model, ids[source : source + 1], mask[source : source + 1])
        for row in tokens[source]:
            arguments = (model, encoded, mask[source : source + 1], row[None, None])
            logits.append(seq2seq.force(*arguments)[0, 0])
            states.append(seq2seq.force_states(*arguments)[0, 0])
    shape = (*tokens.shape, -1)
    return torch.stack(logits).view(shape), torch.stack(states).view(shape)


def wide_model(family: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """T5's norm computes in float32 whatever it is given; here it computes in what it is given."""
    model = tiny_model(family, seed, VOCABULARY).to(dtype)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_scale_norm, module)
    return model


def _scale_norm(module: Any, states: Tensor) -> Tensor:
    return module.weight * states * (states.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def gradients(model: Any, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_equal(model: Any, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], tolerance: float) -> None:
    value, grads = gradients(model, ours)
    expected, expected_grads = gradients(model, theirs)
    assert torch.allclose(value, expected, rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, expected_grads[name], rtol=tolerance, atol=tolerance), name


PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 2e-3)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "plain"])
@pytest.mark.parametrize(
    ("loss", "dtype", "tolerance"), [*((loss, *PRECISIONS[0]) for loss in CALIBRATION_LOSSES), ("list_rank", *PRECISIONS[1])]
)
@TOGETHER
def test_losses_and_every_gradient(
    family: str, shared: bool, loss: str, dtype: torch.dtype, tolerance: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all losses, with chunks of 7 tokens, a candidate that does not exist, and every parameter's gradient."""
    monkeypatch.setattr(packing, "CHUNK", 7)
    model, (ids, mask), (tokens, kept) = wide_model(family, dtype), sources(), sequences(shared)
    similarity = torch.rand(SOURCES, SEQUENCES, generator=torch.Generator().manual_seed(1), dtype=dtype)
    exists = torch.arange(SEQUENCES) < torch.tensor([6, 5, 6])[:, None]

    def ours() -> Tensor:
        log_p = force(model, ids, mask, tokens, kept, together).log_p()
        return CALIBRATION_LOSSES[loss](log_p, similarity, exists, 0.7).sum()

    def theirs() -> Tensor:
        log_p = likelihood.sequence_log_p(likelihood.token_log_p(plain(model, ids, mask, tokens)[0], tokens), kept)
        return CALIBRATION_LOSSES[loss](log_p, similarity, exists, 0.7).sum()

    assert_equal(model, ours, theirs, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "plain"])
def test_kernels_on_cuda_give_the_losses_and_gradients_of_the_cpu(family: str, shared: bool) -> None:
    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        model, reference = (wide_model(family, dtype, seed).to(device) for seed in (0, 5))
        (ids, mask), (tokens, kept) = sources(), sequences(shared)
        (target, target_kept) = sequences(False, seed=3, count=1)
        ids, mask, tokens, kept, target, target_kept = (
            each.to(device) for each in (ids, mask, tokens, kept, target, target_kept)
        )

        def loss() -> Tensor:
            source, tree = Source(model, ids, mask), plant(model, target, target_kept)
            with torch.no_grad():
                theirs = Forced(Source(reference, ids, mask), tree).at_target()
            log_p = Forced(source, plant(model, tokens, kept)).log_p()
            return log_p.square().mean() + Forced(source, tree).regularization(REGULARIZERS["kl"], theirs).sum()

        value, found = gradients(model, loss)
        return value.cpu().double(), {name: each.cpu().double() for name, each in found.items()}

    torch.backends.cuda.matmul.allow_tf32 = False
    (value, found), (expected, wanted) = run("cuda", torch.float32), run("cpu", torch.float64)
    assert torch.allclose(value, expected, rtol=1e-4)
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        assert (each - wanted[name]).norm() <= 1e-3 * wanted[name].norm() + 1e-3, (name, each.norm(), wanted[name].norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@TOGETHER
def test_regularizers_and_every_gradient(
    family: str, name: str, dtype: torch.dtype, tolerance: float, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "CHUNK", 10)
    model, reference = (wide_model(family, dtype, seed) for seed in (0, 5))
    (ids, mask), (tokens, kept) = sources(), sequences(False, count=1)

    def ours() -> Tensor:
        with torch.no_grad():
            theirs = force(reference, ids, mask, tokens, kept, together).at_target()
        forced = force(model, ids, mask, tokens, kept, together)
        return forced.regularization(REGULARIZERS[name], theirs).sum()

    def plainly() -> Tensor:
        with torch.no_grad():
            theirs = plain(reference, ids, mask, tokens)[0][:, 0]
        logits = plain(model, ids, mask, tokens)[0][:, 0]
        return REGULARIZERS[name](logits, theirs, tokens[:, 0], kept[:, 0]).sum()

    if name == "none":
        assert ours().item() == plainly().item() == 0.0
    else:
        assert_equal(model, ours, plainly, tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "plain"])
@TOGETHER
def test_a_target_beside_its_candidates(family: str, shared: bool, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sequence is regularised, by a reference that saw it alone and shorter; the others are asked for log P."""
    monkeypatch.setattr(packing, "CHUNK", 7)
    model, reference = (wide_model(family, torch.float64, seed) for seed in (0, 5))
    (ids, mask), (tokens, kept) = sources(), sequences(shared)
    kept[:, 0, LENGTH - 2 :] = False
    target, target_kept = tokens[:, :1, : LENGTH - 2], kept[:, :1, : LENGTH - 2]

    def ours() -> Tensor:
        with torch.no_grad():
            theirs = force(reference, ids, mask, target, target_kept, together).at_target()
        planned = packing.plan(tokens, kept, model.config.hidden_size, torch.device("cpu"), first=1)
        assert (planned.nodes is not None) == shared
        every = force(model, ids, mask, tokens, kept, together, first=1)
        return every.log_p().square().sum() + every.regularization(REGULARIZERS["kl"], theirs).sum()

    def plainly() -> Tensor:
        with torch.no_grad():
            theirs = plain(reference, ids, mask, target)[0][:, 0]
        logits = plain(model, ids, mask, tokens)[0]
        log_p = likelihood.sequence_log_p(likelihood.token_log_p(logits[:, 1:], tokens[:, 1:]), kept[:, 1:])
        divergence = REGULARIZERS["kl"](logits[:, 0, : LENGTH - 2], theirs, target[:, 0], target_kept[:, 0])
        return log_p.square().sum() + divergence.sum()

    assert_equal(model, ours, plainly, 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@TOGETHER
def test_label_smoothing_without_logits(family: str, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK", 7)
    model, (ids, mask), (tokens, kept) = wide_model(family, torch.float64), sources(), sequences(False, count=1)

    def plainly() -> Tensor:
        return likelihood.smoothed_cross_entropy(plain(model, ids, mask, tokens)[0], tokens, kept, 0.1).sum()

    assert_equal(model, lambda: force(model, ids, mask, tokens, kept, together).cross_entropy(0.1).sum(), plainly, 1e-9)


def test_a_bias_by_distance_has_the_gradient_of_a_plain_index() -> None:
    generator = torch.Generator().manual_seed(0)
    depth = torch.randint(5, (3, 12), generator=generator)
    bias = torch.randn(2, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    distance = depth[:, :, None] - depth[:, None]
    weight = torch.randn(3, 2, 12, 12, dtype=torch.float64, generator=generator) * (distance >= 0)[:, None]
    plain = bias[:, distance.clamp(min=0)].transpose(0, 1)
    found = packing.ByDistance.apply(bias, depth)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    expected, gradient = (torch.autograd.grad((each * weight).sum(), bias)[0] for each in (plain, found))
    assert expected.abs().min(1).values.tolist() == [0, 0]  # nothing is so far apart as the last distance
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_single_sequence_is_no_tree_however_much_room_it_has() -> None:
    ids = torch.randint(2, VOCABULARY, (SOURCES, 1, 40))
    assert packing.plan(ids, torch.arange(40).expand_as(ids) < 8, 16, torch.device("cpu")).nodes is None


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_dropout_does_what_hugging_faces_does(family: str) -> None:
    """Mean and spread of the loss over a thousand draws, within four standard errors."""
    config = tiny_model(family, vocabulary=VOCABULARY).config
    for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
        if hasattr(config, name):
            setattr(config, name, 0.3)
    torch.manual_seed(0)
    model, draws = type(tiny_model(family, vocabulary=VOCABULARY))(config).train(), 1000
    (ids, mask), (tokens, kept) = ([each[:1].repeat(draws, *[1] * (each.dim() - 1)) for each in some]
                                   for some in (sources(), sequences(False, count=1)))  # fmt: skip
    with torch.no_grad():
        logits = seq2seq.force(model, seq2seq.encode(model, ids, mask), mask, tokens)
        theirs = -likelihood.sequence_log_p(likelihood.token_log_p(logits, tokens), kept)
        ours = force(model, ids, mask, tokens, kept).cross_entropy()
    error = float((ours.var() + theirs.var()).sqrt()) / draws**0.5
    assert float(ours.std()) > 0
    assert float(ours.mean()) == pytest.approx(float(theirs.mean()), abs=4 * error)
    assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.15)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "plain"])
@TOGETHER
def test_states_and_similarity(family: str, shared: bool, together: bool) -> None:
    model, (ids, mask) = wide_model(family, torch.float64), sources()
    (tokens, kept), (target, target_kept) = sequences(shared), sequences(False, seed=1, count=1)
    with torch.no_grad():
        states, target_states = (
            force(model, ids, mask, *each, together).states() for each in ((tokens, kept), (target, target_kept))
        )
        expected, expected_target = plain(model, ids, mask, tokens)[1], plain(model, ids, mask, target)[1]
    assert torch.allclose(states[kept], expected[kept], atol=1e-9)
    found = span_similarity(states, target_states, kept, target_kept)
    assert torch.allclose(found, span_similarity(expected, expected_target, kept, target_kept), atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_order_and_any_padding(family: str) -> None:
    model, (ids, mask), (tokens, kept) = wide_model(family, torch.float64), sources(), sequences(True)
    with torch.no_grad():
        log_p = force(model, ids, mask, tokens, kept).log_p()
        order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(3))
        shuffled = force(model, ids, mask, tokens[:, order], kept[:, order]).log_p()
        longer, longer_kept = (torch.nn.functional.pad(each, (0, 4)) for each in (tokens, kept))
        padded = force(model, ids, mask, longer.masked_fill(~longer_kept, 9), longer_kept).log_p()
    assert torch.allclose(shuffled, log_p[:, order], atol=1e-9)
    assert torch.allclose(padded, log_p, atol=1e-9)


def test_logits_of_more_than_a_chunk_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as tokens x vocabulary is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(packing, "CHUNK", 8)
    vocabulary = 997
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, Tensor) and each.dim() > 1 and each.shape[-1] == vocabulary:
                    largest = max(largest, each.numel() // vocabulary)
            return result

    model, (ids, mask), (tokens, kept) = tiny_model("pegasus", vocabulary=vocabulary), sources(), sequences(True)
    with Watch():
        forced = force(model, ids, mask, tokens, kept)
        (forced.log_p().sum() + forced.regularization(REGULARIZERS["cross_entropy"], None).sum()).backward()
    assert 0 < largest <= 32  # 8, or the transposed head of size 32, or the 9 tokens of one target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False], ids=["tree", "plain"])
def test_gradient_checkpointing_gives_the_same_bits_and_keeps_less(family: str, shared: bool) -> None:
    """With dropout, which has to be drawn again as it was."""
    model, (ids, mask), (tokens, kept) = tiny_model(family, vocabulary=VOCABULARY).train(), sources(), sequences(shared)

    def run(seed: int = 7) -> tuple[Tensor, dict[str, Tensor], int]:
        held: dict[int, int] = {}

        def hold(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(seed)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            loss = force(model, ids, mask, tokens, kept).log_p().square().sum()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return *gradients(model, lambda: loss), sum(size for place, size in held.items() if place not in weights)

    whole, wanted, most = run()
    model.gradient_checkpointing_enable()
    loss, found, least = run()
    assert torch.equal(loss, whole)
    assert not torch.equal(loss, run(seed=8)[0])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())
    assert least < most / 3

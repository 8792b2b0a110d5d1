"""A family's decoder, as the engine runs it, against Hugging Face's own forward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from calibeam import decode, families, seq2seq
from calibeam.engine.decoder import Decoder
from conftest import FAMILIES, IDS, SIZES, STRANGERS, T5_SIZES, tiny_model

SLOTS, ROWS, STEPS, VOCABULARY = 3, 2, 20, 50  # as many steps as reach T5's buckets of several distances
T5 = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, **T5_SIZES, **IDS}
SCALED = {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "scale_embedding": True, **SIZES, **IDS}
VARIANTS: dict[str, Callable[[], Any]] = {
    **{family: lambda family=family: tiny_model(family, vocabulary=VOCABULARY) for family in FAMILIES},
    "t5 gated, tied": lambda: T5ForConditionalGeneration(T5Config(feed_forward_proj="gated-gelu", **T5)),
    "t5 with heads of another size": lambda: T5ForConditionalGeneration(T5Config(**{**T5, "d_kv": 6})),
    "bart scaled": lambda: BartForConditionalGeneration(BartConfig(**SCALED)),
    "mbart scaled": lambda: MBartForConditionalGeneration(MBartConfig(**SCALED)),
    "pegasus scaled": lambda: PegasusForConditionalGeneration(PegasusConfig(**SCALED)),
    "marian scaled": lambda: MarianMTModel(MarianConfig(**SCALED)),
    "marian with two vocabularies": lambda: MarianMTModel(
        MarianConfig(decoder_vocab_size=37, share_encoder_decoder_embeddings=False, tie_word_embeddings=False, **SCALED)
    ),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def shaken(model: Any) -> Any:
    """With no weight at 0 or 1, where it starts: a bias or a norm that is left out must show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in [*model.parameters(), *(value for name, value in model.named_buffers() if name == "final_logits_bias")]:
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def ragged(lengths: list[int], seed: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    places = torch.arange(max(lengths))
    mask = places < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if left else mask
    ids = torch.randint(3, 30, mask.shape, generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill(~mask, 0), mask


def check_steps(model: Any, decoder: Decoder, input_ids: Tensor, mask: Tensor, seed: int) -> None:
    """Every step's logits, of rows that go on from each other's outputs, are those of the whole forward pass."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.zeros(SLOTS, ROWS, STEPS, dtype=torch.int64)
    found, written = [], []
    decoder.enter(torch.arange(SLOTS), seq2seq.encode(model, input_ids, mask), mask)
    for step in range(STEPS):
        history[..., step] = torch.randint(3, 30, (SLOTS, ROWS), generator=generator)
        found.append(decoder.step(history[..., step], torch.full((SLOTS,), step), step + 1).view(SLOTS, ROWS, -1))
        written.append(history.clone())
        parents = torch.randint(ROWS, (SLOTS, ROWS), generator=generator)
        decoder.reorder(parents)
        history = history.gather(1, parents[..., None].expand_as(history))
    source = {"input_ids": input_ids, "attention_mask": mask}
    source = {name: each.repeat_interleave(ROWS * STEPS, 0) for name, each in source.items()}
    whole = model(**source, decoder_input_ids=torch.stack(written, 2).flatten(0, 2)).logits.view(SLOTS, ROWS, STEPS, STEPS, -1)
    for step in range(STEPS):
        expected = whole[:, :, step, step]
        assert torch.allclose(found[step], expected, atol=2e-4 * float(expected.std())), f"step {step}"


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_steps_give_the_logits_of_hugging_face(make: Callable[[], Any]) -> None:
    """Also when other sources take the slots, and when sources are padded on the left."""
    torch.manual_seed(0)
    model = shaken(make())
    anatomy = families.anatomy(model, torch.float32)
    assert anatomy is not None
    decoder = Decoder(anatomy, SLOTS, ROWS, STEPS, source_length=9)
    check_steps(model, decoder, *ragged([9, 1, 4], seed=1), seed=1)
    check_steps(model, decoder, *ragged([2, 6, 3], seed=2), seed=2)
    check_steps(model, decoder, *ragged([3, 7, 1], seed=3, left=True), seed=3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_decoder_takes_over_weights_that_change_in_place(family: str) -> None:
    """All of them: a training loop decodes between its steps."""
    model = shaken(tiny_model(family, vocabulary=VOCABULARY))
    anatomy = families.anatomy(model, torch.float32)
    assert anatomy is not None
    decoder = Decoder(anatomy, SLOTS, ROWS, STEPS, source_length=9)
    check_steps(model, decoder, *ragged([9, 1, 4], seed=1), seed=1)
    shaken(model)
    decoder.refresh()
    check_steps(model, decoder, *ragged([9, 1, 4], seed=1), seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_another_type_are_copies(family: str) -> None:
    model = tiny_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    anatomy = families.anatomy(model, torch.bfloat16)
    assert anatomy is not None
    assert {anatomy.head_weight.dtype, anatomy.blocks[0].own.query.weight.dtype} == {torch.bfloat16}
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", STRANGERS)
def test_other_families_are_not_known(family: str) -> None:
    assert families.anatomy(tiny_model(family), torch.float32) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_keeps_a_model_alive(device: str, family: str) -> None:
    """Neither its anatomy nor what a search keeps for the next one: a model may be most of the memory there is."""
    model = tiny_model(family).to(device)
    anatomy = families.anatomy(model, torch.float32)
    input_ids = torch.tensor([[5, 6, 7]], device=device)
    found = decode(model, input_ids, torch.ones_like(input_ids), num_candidates=2, max_new_tokens=3)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert anatomy is not None
    assert found.log_p.isfinite().all()

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from plain_search import plain_decode
from torch import Tensor

from calibeam.engine import search
from calibeam.engine.logprob import sequence_log_p
from calibeam.engine.search import decode
from conftest import FAMILIES, STRANGERS, tiny_model

VOCABULARY, PAD, EOS = 12, 0, 1
METHODS: dict[str, dict[str, Any]] = {
    "beam": {},
    "diverse_beam": {"groups": 2, "diversity": 0.7},
    "nucleus": {"top_p": 0.9},
}


# With these a model ends some outputs early and not others.
SEEDS = {"mt5": 1, "t5": 1, "t5-untied": 1, "bart": 4, "mbart": 2, "pegasus": 2, "marian": 4, "umt5": 1, "m2m_100": 2}


def lively_model(family: str, vocabulary: int = VOCABULARY) -> Any:
    """A tiny model with a head of its own, so that it does not repeat itself and ends now and then."""
    model = tiny_model(family, SEEDS[family], vocabulary)
    model.lm_head = torch.nn.Linear(32, vocabulary, bias=False)
    with torch.no_grad():
        ids, mask = sources(4, vocabulary)
        model.lm_head.weight.mul_(2 / model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits.std())
    return model.eval()


def sources(count: int, vocabulary: int = VOCABULARY, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ragged sources of 2 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (count,), generator=generator)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return torch.randint(2, vocabulary, mask.shape, generator=generator).masked_fill(~mask, PAD), mask


@contextmanager
def patched_slots(rows: int) -> Iterator[None]:
    """So few rows at once that sources have to wait for a slot."""
    old = dict(search.ROWS)
    search.ROWS.update(cpu=rows, cuda=rows)
    try:
        yield
    finally:
        search.ROWS.update(old)


def until_end(row: list[int]) -> tuple[int, ...]:
    """A sequence with its first end token and nothing after it."""
    return tuple(row[: row.index(EOS) + 1] if EOS in row else row)


def sequences(token_ids: Tensor) -> list[list[tuple[int, ...]]]:
    return [[until_end(row) for row in rows] for rows in token_ids.tolist()]


def generators(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [tiny_model, lively_model])
@pytest.mark.parametrize("forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beam_search_is_that_of_generate(family: str, make: Callable[..., Any], forced: bool, alpha: float) -> None:
    model, width, steps = make(family, vocabulary=VOCABULARY), 4, 6
    for batch in (1, 16):
        input_ids, mask = sources(batch, seed=batch)
        ours = decode(
            model, input_ids, mask, num_candidates=width, max_new_tokens=steps, min_new_tokens=steps * forced, length_alpha=alpha
        )
        theirs = model.generate(
            input_ids=input_ids, attention_mask=mask, num_beams=width, num_return_sequences=width, length_penalty=alpha,
            early_stopping=False, do_sample=False, forced_eos_token_id=None, forced_bos_token_id=None,
            max_new_tokens=steps, min_new_tokens=steps * forced, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        expected = sequences(theirs.sequences[:, 1:].view(batch, width, -1))
        assert sequences(ours.token_ids) == expected
        lengths = torch.tensor([[len(row) for row in rows] for rows in expected])
        assert torch.allclose(ours.log_p / lengths**alpha, theirs.sequences_scores.view(batch, width), atol=1e-5)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("least", [0, 3, 7], ids=["free", "at least 3", "forced"])
def test_the_engine_finds_what_the_plain_search_finds(device: str, family: str, method: str, least: int) -> None:
    """With sources that enter while others are under way, ragged, in every batch size."""
    model = lively_model(family, vocabulary=500).to(device)
    if family == "mbart":
        model.generation_config.forced_bos_token_id = 7
    settings = {"method": method, "num_candidates": 6, "max_new_tokens": 7, "min_new_tokens": least, **METHODS[method]}
    for count, alpha in ((1, 0.0), (3, 0.7), (8, 0.7 if least else 0.0)):
        input_ids, mask = (each.to(device) for each in sources(count, 500, seed=count))
        seeds = {"generator": generators(count)} if method == "nucleus" else {}
        expected = plain_decode(model, input_ids, mask, length_alpha=alpha, **settings, **seeds)
        for slots in {count, max(1, count // 3)}:
            seeds = {"generator": generators(count)} if method == "nucleus" else {}
            with patched_slots(slots * 6):
                found = decode(model, input_ids, mask, length_alpha=alpha, **settings, **seeds)
            assert sequences(found.token_ids) == sequences(expected.token_ids)
            assert torch.allclose(found.log_p, expected.log_p, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_above_write_outputs_that_end_and_outputs_that_are_cut(family: str) -> None:
    """Else the comparison with generate would leave out half of the search."""
    found = decode(lively_model(family), *sources(16, seed=16), num_candidates=4, max_new_tokens=6)
    ended = (found.token_ids == EOS).any(-1)
    assert 5 < ended.sum() < 59
    assert len({row for rows in sequences(found.token_ids) for row in rows}) > 20


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_of_the_paper_are_those_of_generate(family: str) -> None:
    """15 beams, more than the first step has tokens to offer."""
    model, (input_ids, mask) = lively_model(family), sources(3)
    ours = decode(model, input_ids, mask, num_candidates=15, max_new_tokens=5)
    theirs = model.generate(
        input_ids=input_ids, attention_mask=mask, num_beams=15, num_return_sequences=15, length_penalty=0.0,
        early_stopping=False, do_sample=False, forced_eos_token_id=None, forced_bos_token_id=None, max_new_tokens=5,
    )  # fmt: skip
    assert sequences(ours.token_ids) == sequences(theirs[:, 1:].view(3, 15, -1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("vocabulary", "steps", "least"), [(4, 2, 0), (4, 2, 2), (5, 2, 0), (6, 2, 0), (6, 1, 0)])
def test_fault_25_wide_beams_find_the_best_of_all_outputs_and_no_ghosts(
    family: str, vocabulary: int, steps: int, least: int
) -> None:
    """16 beams over at most 2 steps see every output there is; 4 tokens and 2 steps make 1 + 3 * 4 = 13 of them.

    Where all are returned their probabilities sum to 1 (unless the end token was banned).
    """
    model, (input_ids, mask) = lively_model(family, vocabulary=vocabulary), sources(3, vocabulary)
    found = decode(model, input_ids, mask, num_candidates=16, max_new_tokens=steps, min_new_tokens=least)
    every = {
        until_end(list(row)) for row in itertools.product(range(vocabulary), repeat=steps) if EOS not in row[:least]
    }  # fmt: skip
    padded = torch.tensor([[*row, *[PAD] * (steps - len(row))] for row in sorted(every)])
    log_p = sequence_log_p(model, input_ids, mask, padded.expand(3, -1, -1))
    best, order = log_p.sort(descending=True)
    count = min(16, len(every))
    assert found.log_p.shape == (3, count)
    assert found.log_p.isfinite().all()
    assert torch.allclose(found.log_p, best[:, :count], atol=1e-5)
    assert sequences(found.token_ids) == [[until_end(padded[i].tolist()) for i in rows[:count]] for rows in order.tolist()]
    if least == 0 and len(every) <= 16:
        assert torch.allclose(found.log_p.exp().sum(1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("beam", {}),
        ("diverse_beam", {}),
        ("diverse_beam", {"groups": 4}),
        ("diverse_beam", {"groups": 4, "diversity": 1.0}),
        ("diverse_beam", {"diversity": 2.0}),
    ],
)
def test_beams_are_distinct_finite_and_best_first(family: str, method: str, options: dict[str, Any]) -> None:
    model = lively_model(family)
    for steps in (1, 2, 6):
        found = decode(model, *sources(5), method=method, num_candidates=8, max_new_tokens=steps, **options)
        for rows, log_p in zip(sequences(found.token_ids), found.log_p.tolist(), strict=True):
            assert len(set(rows)) == len(rows) == 8
            assert all(value > float("-inf") for value in log_p)
            assert log_p == sorted(log_p, reverse=True)


@pytest.mark.parametrize("diversity", [0.0, 1.0])
def test_fault_25_diverse_groups_make_no_ghosts(diversity: float) -> None:
    model = lively_model("bart", vocabulary=4)
    found = decode(
        model, *sources(3, 4), method="diverse_beam", num_candidates=16, max_new_tokens=2, diversity=diversity
    )  # fmt: skip
    exists = found.log_p.isfinite()
    assert found.log_p.shape[1] < 16
    assert (found.token_ids[~exists] == PAD).all()
    for rows, real in zip(sequences(found.token_ids), exists.tolist(), strict=True):
        kept = [row for row, is_real in zip(rows, real, strict=True) if is_real]
        assert len(set(kept)) == len(kept) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_one_diverse_group_is_beam_search(family: str, alpha: float) -> None:
    model, (input_ids, mask) = lively_model(family), sources(4)
    sizes = {"num_candidates": 5, "max_new_tokens": 6, "length_alpha": alpha}
    beam = decode(model, input_ids, mask, **sizes)
    diverse = decode(model, input_ids, mask, method="diverse_beam", groups=1, diversity=3.0, **sizes)
    assert torch.equal(beam.token_ids, diverse.token_ids)
    assert torch.equal(beam.log_p, diverse.log_p)


@pytest.mark.parametrize("family", FAMILIES)
def test_diversity_brings_more_distinct_first_tokens(family: str) -> None:
    model, (input_ids, mask) = lively_model(family), sources(8)

    def first_tokens(diversity: float) -> int:
        found = decode(
            model, input_ids, mask, method="diverse_beam", num_candidates=4, max_new_tokens=5, min_new_tokens=5,
            diversity=diversity,
        )  # fmt: skip
        return sum(len({row[0] for row in rows}) for rows in sequences(found.token_ids))

    assert first_tokens(0.0) < first_tokens(2.0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 4])
def test_an_overwhelming_diversity_leaves_no_token_to_two_groups_at_one_step(family: str, steps: int) -> None:
    """Groups of one beam, each penalised by 100 for every token that a group before it chose at the same step."""
    found = decode(
        lively_model(family), *sources(8), method="diverse_beam", num_candidates=3, diversity=100.0,
        max_new_tokens=steps, min_new_tokens=steps,
    )  # fmt: skip
    for rows in sequences(found.token_ids):
        for step, tokens in enumerate(zip(*rows, strict=True)):
            assert len(set(tokens)) == 3, f"step {step} of {rows}"


@pytest.mark.parametrize("family", FAMILIES)
def test_diverse_groups_of_one_beam_are_greedy_searches_that_avoid_each_other(family: str) -> None:
    """By plain loops: each group takes the token of highest log P - diversity * (groups before it that took it now).

    A group is over when it takes the end token, and takes nothing at later steps; at the step itself the
    token that its beam would go on with counts. No output is written twice.
    """
    model, (input_ids, mask) = lively_model(family), sources(6)
    diversity, steps = 1.0, 5
    found = decode(
        model, input_ids, mask, method="diverse_beam", num_candidates=3, max_new_tokens=steps, diversity=diversity
    )  # fmt: skip
    ended_early = 0
    for source, kept, rows in zip(input_ids, mask, sequences(found.token_ids), strict=True):
        written: list[list[int]] = [[], [], []]
        ended: list[list[int]] = []
        for step in range(steps):
            taken: list[int] = []
            for row in written:
                if EOS in row:
                    continue
                prefix = torch.tensor([[model.config.decoder_start_token_id, *row]])
                with torch.no_grad():
                    log_p = model(input_ids=source[None, kept], decoder_input_ids=prefix).logits[0, -1].log_softmax(-1)
                score = {token: log_p[token].item() - diversity * taken.count(token) for token in range(VOCABULARY)}
                new = [token for token in sorted(score, key=score.__getitem__, reverse=True) if [*row, token] not in ended]
                row.append(new[0])
                taken.append(next(token for token in new if token != EOS))
                if new[0] == EOS or step == steps - 1:
                    ended.append(list(row))
        ended_early += any(len(row) < steps for row in written)
        assert set(rows) == set(map(tuple, written))
    assert ended_early


@pytest.mark.parametrize("method", METHODS)
def test_log_p_carries_no_penalty_and_no_normalisation(method: str) -> None:
    model, (input_ids, mask) = lively_model("mbart"), sources(16)
    found = decode(
        model, input_ids, mask, method=method, num_candidates=4, max_new_tokens=6, length_alpha=0.3,
        generator=torch.Generator().manual_seed(0) if method == "nucleus" else None, **METHODS[method],
    )  # fmt: skip
    assert torch.allclose(found.log_p, sequence_log_p(model, input_ids, mask, found.token_ids), atol=1e-4)
    lengths = torch.tensor([[len(row) for row in rows] for rows in sequences(found.token_ids)])
    score = found.log_p / lengths**0.3
    assert (score.diff(dim=1) <= 0).all()
    assert len(lengths.unique()) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_fault_29_a_source_alone_gives_what_it_gives_in_a_batch(family: str, method: str) -> None:
    model, (input_ids, mask) = lively_model(family), sources(6)
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 6, **METHODS[method]}
    seeds = {"generator": generators(6)} if method == "nucleus" else {}
    together = decode(model, input_ids, mask, **settings, **seeds)
    for i in range(6):
        seed = {"generator": generators(1, first=i)} if method == "nucleus" else {}
        alone = decode(model, input_ids[i : i + 1, mask[i]], mask[i : i + 1, mask[i]], **settings, **seed)
        assert sequences(alone.token_ids)[0] == sequences(together.token_ids)[i]
        assert torch.allclose(alone.log_p[0], together.log_p[i], atol=1e-4)


def test_nucleus_is_reproducible_from_a_seed() -> None:
    model, (input_ids, mask) = lively_model("bart"), sources(3)

    def samples(seed: int) -> list[list[tuple[int, ...]]]:
        generator = torch.Generator().manual_seed(seed)
        found = decode(model, input_ids, mask, method="nucleus", num_candidates=5, max_new_tokens=6, generator=generator)
        return sequences(found.token_ids)

    assert samples(1) == samples(1)
    assert samples(1) != samples(2)


def test_nucleus_samples_differ_by_source_under_one_generator() -> None:
    model, (input_ids, mask) = lively_model("bart"), sources(1)
    found = decode(
        model, input_ids.repeat(4, 1), mask.repeat(4, 1), method="nucleus", num_candidates=5, max_new_tokens=6,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert len({tuple(rows) for rows in sequences(found.token_ids)}) == 4


def test_nucleus_of_almost_nothing_is_greedy() -> None:
    model, (input_ids, mask) = lively_model("t5"), sources(4)
    samples = decode(model, input_ids, mask, method="nucleus", num_candidates=3, max_new_tokens=6, top_p=1e-6)
    greedy = model.generate(
        input_ids=input_ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=6
    )  # fmt: skip
    assert sequences(samples.token_ids) == [[until_end(row)] * 3 for row in greedy[:, 1:].tolist()]


def test_nucleus_draws_tokens_as_often_as_they_are_probable() -> None:
    """2000 samples of one token: every share within 4 standard deviations of its probability."""
    model, (input_ids, mask) = lively_model("bart"), sources(1)
    found = decode(
        model, input_ids, mask, method="nucleus", num_candidates=2000, max_new_tokens=1,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    every = torch.arange(VOCABULARY).view(1, -1, 1)
    probability = sequence_log_p(model, input_ids, mask, every)[0].exp()
    share = found.token_ids.flatten().bincount(minlength=VOCABULARY) / 2000
    assert ((share - probability).abs() < 4 * (probability * (1 - probability) / 2000).sqrt() + 1e-6).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_heuristics_of_the_generation_config_are_not_applied(family: str, method: str) -> None:
    model, (input_ids, mask) = lively_model(family), sources(4)
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 6, **METHODS[method]}

    def found() -> list[list[tuple[int, ...]]]:
        seeds = {"generator": generators(4)} if method == "nucleus" else {}
        return sequences(decode(model, input_ids, mask, **settings, **seeds).token_ids)

    plain = found()
    config = model.generation_config
    config.no_repeat_ngram_size, config.repetition_penalty, config.length_penalty = 1, 5.0, 3.0
    config.min_length, config.bad_words_ids, config.suppress_tokens = 5, [[3]], [4, 5]
    config.forced_bos_token_id, config.forced_eos_token_id = 7, EOS
    assert found() == plain


@pytest.mark.parametrize("method", METHODS)
def test_mbart_begins_with_its_language_code(method: str) -> None:
    model, (input_ids, mask) = lively_model("mbart"), sources(4)
    model.generation_config.forced_bos_token_id = 7
    settings = {"method": method, "num_candidates": 6, "max_new_tokens": 5, **METHODS[method]}
    seeds = {"generator": generators(4)} if method == "nucleus" else {}
    found = decode(model, input_ids, mask, **settings, **seeds)
    assert (found.token_ids[..., 0] == 7).all()
    assert found.log_p.isfinite().all()
    assert torch.allclose(found.log_p, sequence_log_p(model, input_ids, mask, found.token_ids), atol=1e-4)


def test_bart_is_not_made_to_begin_with_anything() -> None:
    model, (input_ids, mask) = lively_model("bart"), sources(4)
    plain = decode(model, input_ids, mask, num_candidates=6, max_new_tokens=5)
    model.generation_config.forced_bos_token_id = 7
    assert torch.equal(decode(model, input_ids, mask, num_candidates=6, max_new_tokens=5).token_ids, plain.token_ids)
    assert (plain.token_ids[..., 0] != 7).any()


@pytest.mark.parametrize("method", METHODS)
def test_min_new_tokens_count_before_the_end_token(method: str) -> None:
    found = decode(
        lively_model("mbart"), *sources(8), method=method, num_candidates=4, min_new_tokens=3, max_new_tokens=6, **METHODS[method]
    )  # fmt: skip
    lengths = {len(row) for rows in sequences(found.token_ids) for row in rows}
    assert min(lengths) >= 4
    assert (found.token_ids[..., :3] != EOS).all()


@pytest.mark.parametrize("method", METHODS)
def test_several_end_tokens_all_end(method: str) -> None:
    model = lively_model("pegasus")
    model.generation_config.eos_token_id = [EOS, 5]
    found = decode(model, *sources(8), method=method, num_candidates=4, max_new_tokens=6, **METHODS[method])
    ends = torch.isin(found.token_ids, torch.tensor([EOS, 5]))
    after = ends.cumsum(-1) - ends.long() > 0
    assert (found.token_ids[after] == PAD).all()
    assert (found.token_ids == 5).any()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_in_its_mode_and_decodes_without_dropout(method: str, training: bool) -> None:
    model, (input_ids, mask) = lively_model("bart"), sources(4)
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 5, **METHODS[method]}

    def seeds() -> dict[str, Any]:
        return {"generator": generators(4)} if method == "nucleus" else {}

    expected = decode(model, input_ids, mask, **settings, **seeds())
    model.train(training)
    found = decode(model, input_ids, mask, **settings, **seeds())
    assert all(module.training == training for module in model.modules())
    assert torch.equal(found.token_ids, expected.token_ids)
    assert not found.log_p.requires_grad


def test_the_mode_is_restored_after_an_error() -> None:
    model = lively_model("bart").train()
    with pytest.raises(ValueError, match="3 generators for 4 sources"):
        decode(model, *sources(4), method="nucleus", num_candidates=2, max_new_tokens=3, generator=generators(3))
    assert model.training


def test_candidates_have_the_promised_types() -> None:
    model = lively_model("t5").bfloat16()
    found = decode(model, *sources(3), num_candidates=4, max_new_tokens=5)
    assert found.token_ids.dtype == torch.int64
    assert found.log_p.dtype == torch.float32
    assert found.token_ids.shape[:2] == found.log_p.shape == (3, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "greedy"}, "method must be one of beam, diverse_beam, nucleus"),
        ({"num_candidates": 0}, "num_candidates must be at least 1"),
        ({"num_candidates": -3}, "num_candidates must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 6}, "min_new_tokens"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"groups": 2}, "groups belongs to"),
        ({"top_p": 0.9}, "top_p belongs to"),
        ({"method": "diverse_beam", "groups": 3}, "does not divide"),
        ({"method": "nucleus", "top_p": 0.0}, "top_p must be"),
        ({"method": "nucleus", "diversity": 1.0}, "diversity belongs to"),
    ],
)
def test_bad_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(tiny_model("bart", vocabulary=8), *sources(1, 8), **{"num_candidates": 4, "max_new_tokens": 5, **settings})


def test_what_the_generation_config_asks_for_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("bart")
    model.generation_config.no_repeat_ngram_size = 3
    input_ids = torch.tensor([[5, 6, 7]])
    for _ in range(2):
        decode(model, input_ids, torch.ones_like(input_ids), num_candidates=2, max_new_tokens=2)
    notes = [record.message for record in caplog.records if "no_repeat_ngram_size=3" in record.message]
    assert len(notes) == 1


# Families that the engine does not know


@pytest.mark.parametrize("family", STRANGERS)
@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_family_is_decoded_by_its_own_forward_pass(
    family: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """In waves, for no source can enter while others are being written. The log says so, once per model."""
    model, (input_ids, mask) = lively_model(family), sources(7)
    if family == "m2m_100":
        model.generation_config.forced_bos_token_id = 7
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 6, **METHODS[method]}

    def seeds() -> dict[str, Any]:
        return {"generator": generators(7)} if method == "nucleus" else {}

    expected = plain_decode(model, input_ids, mask, **settings, **seeds())
    for slots in (7, 3, 1):
        with patched_slots(slots * 4):
            found = decode(model, input_ids, mask, **settings, **seeds())
        assert sequences(found.token_ids) == sequences(expected.token_ids)
        assert torch.allclose(found.log_p, expected.log_p, atol=1e-4)
    assert [record.levelname for record in caplog.records if f"does not know {family} models" in record.message] == ["WARNING"]


def test_a_known_family_is_not_decoded_by_its_own_forward_pass(caplog: pytest.LogCaptureFixture) -> None:
    decode(lively_model("t5"), *sources(1), num_candidates=2, max_new_tokens=2)
    assert "forward pass" not in caplog.text


# Sources that come and go


@pytest.mark.parametrize("family", ["t5", "bart", "umt5"])
def test_fault_29_samples_do_not_depend_on_how_many_sources_are_under_way(family: str) -> None:
    model, (input_ids, mask) = lively_model(family), sources(11)
    found = []
    for slots in (1, 2, 5, 11):
        with patched_slots(slots * 4):
            settings = {"method": "nucleus", "num_candidates": 4, "max_new_tokens": 6, "top_p": 0.95}
            found.append(decode(model, input_ids, mask, **settings, generator=generators(11)))
    for other in found[1:]:
        assert sequences(other.token_ids) == sequences(found[0].token_ids)
        assert torch.allclose(other.log_p, found[0].log_p, atol=1e-4)


class Sources:
    """What `stream` asks for sources, with memory for so many at a time, and once for none at all."""

    def __init__(self, count: int, room: int = 99, full_at: int = -1) -> None:
        self.input_ids, self.mask = sources(count)
        self.asked: list[list[int]] = []
        self._room, self._full_at = room, full_at

    def __call__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.asked.append([*numbers])
        if len(numbers) > self._room or len(self.asked) == self._full_at:
            raise torch.OutOfMemoryError("no room")
        return self.input_ids[numbers], self.mask[numbers]

    def stream(self, model: Any, slots: int = 0, count: int | None = None) -> Iterator[search.Found]:
        task = search.Task.of(model, num_candidates=4, max_new_tokens=6)
        every = len(self.input_ids)
        return search.stream(
            task, range(every), count or every, self.input_ids.shape[1], self, noise=lambda number: Tensor(), slots=slots
        )  # fmt: skip


def check_each_comes_out_once(model: Any, given: Sources, found: list[search.Found]) -> None:
    """With what it gives undisturbed."""
    expected = decode(model, given.input_ids, given.mask, num_candidates=4, max_new_tokens=6)
    assert sorted(number for number, _, _ in found) == [*range(len(given.input_ids))]
    for number, tokens, log_p in found:
        assert sequences(tokens[None])[0] == sequences(expected.token_ids)[number]
        assert torch.allclose(log_p, expected.log_p[number], atol=1e-4)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "fit into memory" in record.message]


@pytest.mark.parametrize("family", ["t5", "bart", "umt5"])
@pytest.mark.parametrize("slots", [0, 13], ids=["chosen", "given"])
def test_fault_08_where_memory_ends_fewer_sources_are_taken_at_once(
    family: str, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, given = lively_model(family), Sources(13, room=3)
    check_each_comes_out_once(model, given, [*given.stream(model, slots)])
    assert warnings_of(caplog) == [
        "13 sources at once do not fit into memory: continuing with 6",
        "6 sources at once do not fit into memory: continuing with 3",
    ]


@pytest.mark.parametrize("family", ["t5", "bart", "umt5"])
def test_fault_08_sources_that_are_done_are_not_decoded_again_when_memory_ends(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The third time sources enter, when some are done and, but for an unknown family, some are under way."""
    model, given = lively_model(family), Sources(13, full_at=3)
    found, asked_before = [], {}
    for number, *rest in given.stream(model, 4):
        found.append((number, *rest))
        asked_before[number] = sum(number in some for some in given.asked)
    check_each_comes_out_once(model, given, found)
    assert len(warnings_of(caplog)) == 1
    asked = {number: sum(number in some for some in given.asked) for number in range(13)}
    assert {*asked.values()} == {1, 2}
    assert asked == asked_before
    again = {number for number, times in asked.items() if times == 2}
    assert {*given.asked[2]} <= again
    assert len(again) <= 4


@pytest.mark.parametrize("family", ["bart", "umt5"])
def test_fault_08_one_source_for_which_memory_does_not_suffice_is_an_error(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, given = lively_model(family).train(), Sources(4, room=0)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        [*given.stream(model)]
    assert [len(some) for some in given.asked] == [4, 2, 1]
    assert len(warnings_of(caplog)) == 2
    assert model.training


def test_fault_08_where_memory_ends_before_a_source_has_entered_the_warning_has_the_number_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The decoder's cells are the largest part of what a search needs, and the first."""

    class LargeDecoder(search.Decoder):
        def __init__(self, anatomy: Any, slots: int, *sizes: int) -> None:
            if slots > 2:
                raise torch.OutOfMemoryError("no room")
            super().__init__(anatomy, slots, *sizes)

    model, given = lively_model("bart"), Sources(13)
    with monkeypatch.context() as patch, patched_slots(4 * 4):
        patch.setattr(search, "Decoder", LargeDecoder)
        found = [*given.stream(model)]
    check_each_comes_out_once(model, given, found)
    assert warnings_of(caplog) == ["4 sources at once do not fit into memory: continuing with 2"]


def test_fault_08_where_memory_ends_while_outputs_are_fetched_none_comes_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    best, model = search._Beams.best, lively_model("bart")
    for when in range(5):
        calls = itertools.count()

        def failing(state: Any, slots: list[int], calls: Iterator[int] = calls, when: int = when) -> Any:
            if next(calls) == when:
                raise torch.OutOfMemoryError("no room")
            return best(state, slots)

        given = Sources(13)
        with monkeypatch.context() as patch:
            patch.setattr(search._Beams, "best", failing)
            found = [*given.stream(model, 4)]
        check_each_comes_out_once(model, given, found)


@pytest.mark.parametrize("family", ["bart", "umt5"])
@pytest.mark.parametrize("slots", [0, 4], ids=["chosen", "given"])
def test_fewer_sources_may_come_than_were_announced(family: str, slots: int) -> None:
    """As when a stage goes on where it stopped: what was done before is announced and does not come."""
    model, given = lively_model(family), Sources(6)
    check_each_comes_out_once(model, given, [*given.stream(model, slots, count=20)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("megabytes", [200, 290, 550])
def test_fault_08_where_the_memory_of_a_gpu_ends_fewer_sources_are_taken_at_once(
    megabytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """128 sources with room for 8192 tokens each need 537 MB for their cells; 64, half of it, and more for a step."""
    model, (input_ids, mask) = lively_model("bart").cuda(), (each.cuda() for each in sources(128))
    expected = decode(model, input_ids, mask, num_candidates=4, max_new_tokens=6)
    task = search.Task.of(model, num_candidates=4, max_new_tokens=6)
    memory = torch.cuda.memory_reserved() + megabytes * 1e6
    torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = [*search.stream(task, range(128), 128, 8192, lambda some: (input_ids[some], mask[some]), lambda number: Tensor())]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert warnings_of(caplog)[0] == "128 sources at once do not fit into memory: continuing with 64"
    assert sorted(number for number, _, _ in found) == [*range(128)]
    for number, tokens, log_p in found:
        assert sequences(tokens[None])[0] == sequences(expected.token_ids)[number]
        assert torch.allclose(log_p, expected.log_p[number].cpu(), atol=1e-4)


# Weights and their type


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", [*FAMILIES, "umt5"])
def test_weights_that_change_in_place_count_from_the_next_search_on(device: str, family: str) -> None:
    """A training loop decodes between its steps; on a GPU by a graph recorded before."""
    model, (input_ids, mask) = lively_model(family).to(device), (each.to(device) for each in sources(6))
    settings = {"num_candidates": 4, "max_new_tokens": 6}
    before = decode(model, input_ids, mask, **settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(device)
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight *= 2
    found, fresh = decode(model, input_ids, mask, **settings), decode(copy.deepcopy(model), input_ids, mask, **settings)
    assert sequences(found.token_ids) == sequences(fresh.token_ids)
    assert torch.allclose(found.log_p, fresh.log_p, atol=1e-4)
    assert not torch.allclose(found.log_p, before.log_p, atol=1e-2)


@pytest.mark.parametrize("family", [*FAMILIES, "umt5"])
@pytest.mark.parametrize("method", METHODS)
def test_a_search_under_autocast(family: str, method: str) -> None:
    """As a training loop does it: the weights stay what they are, and log P is that of bfloat16."""
    model, (input_ids, mask) = lively_model(family), sources(6)
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 6, **METHODS[method]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = decode(model, input_ids, mask, **settings)
    exact = sequence_log_p(model, input_ids, mask, found.token_ids)
    assert {weight.dtype for weight in model.parameters()} == {found.log_p.dtype} == {torch.float32}
    assert 1e-4 < (found.log_p - exact).abs().max() < 0.5

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from calibeam.engine.logprob import sequence_log_p
from calibeam.engine.search import decode
from conftest import FAMILIES, tiny_model

VOCABULARY, PAD, EOS = 12, 0, 1
METHODS: dict[str, dict[str, Any]] = {
    "beam": {},
    "diverse_beam": {"groups": 2, "diversity": 0.7},
    "nucleus": {"top_p": 0.9},
}


# With these a model ends some outputs early and not others.
SEEDS = {"t5": 1, "t5-untied": 1, "bart": 4, "mbart": 2, "pegasus": 2, "marian": 4}


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
    for batch in (1, 3, 16):
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
def test_wide_beams_find_the_best_of_all_outputs_and_no_ghosts(family: str, vocabulary: int, steps: int, least: int) -> None:
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
def test_diverse_groups_make_no_ghosts(diversity: float) -> None:
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
def test_a_source_alone_gives_what_it_gives_in_a_batch(family: str, method: str) -> None:
    model, (input_ids, mask) = lively_model(family), sources(16)
    settings = {"method": method, "num_candidates": 4, "max_new_tokens": 6, **METHODS[method]}
    seeds = {"generator": generators(16)} if method == "nucleus" else {}
    together = decode(model, input_ids, mask, **settings, **seeds)
    for i in range(16):
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

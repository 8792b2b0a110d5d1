"""Which examples share a row, beside what can be counted by hand; that the pass over them is the same is in test_packing.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from calibeam.engine import layout

CPU = torch.device("cpu")


def test_short_sources_stand_beside_each_other_and_long_ones_alone() -> None:
    """4 + 3 + 3 tokens are as many as the longest has, and 5 nodes as many as most; one token fits beside 9, its nodes do not."""
    row = layout._fitted(np.array([10, 4, 3, 3, 9, 1]) / 10, np.array([5, 2, 2, 1, 5, 5]) / 5)
    assert row[1] == row[2] == row[3]
    assert len({row[0], row[1], row[4], row[5]}) == 4
    assert row.max() == 3


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_longer_than_it_may_be_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    sources = [[rng.randrange(2, 99) for _ in range(rng.randrange(1, 200))] for _ in range(48)]
    nodes = np.array([rng.randrange(1, 60) for _ in sources])
    row, count = layout.share([*map(len, sources)], nodes, 512, CPU) or (None, 0)
    assert row is not None
    assert 48 > count == row.max() + 1
    batch = layout.side_by_side(sources, row, count, 0, CPU)
    kept = batch["mask"]
    assert kept.shape[1] == kept.sum(1).max()
    assert int(kept.sum()) == sum(map(len, sources)) > 0.6 * kept.numel()
    for number, source in enumerate(sources):
        own = batch["segment"] == number + 1
        assert batch["input_ids"][own].tolist() == source
        assert batch["position"][own].tolist() == [*range(len(source))]
        assert set(own.nonzero()[:, 0].tolist()) == {row[number]}


def test_sources_of_one_length_have_rows_of_their_own() -> None:
    assert layout.share([64] * 16, np.full(16, 30), 512, CPU) is None
    assert layout.share([64] * 15 + [56], np.full(16, 30), 512, CPU) is None


def test_where_attention_would_cost_more_than_padding_nothing_is_shared() -> None:
    """No two of these fit into 40 places. Of twice as many, 7 rows would do, with 1.75 times the pairs of tokens."""
    lengths = [40, 21] * 8
    assert layout.share(lengths, np.array(lengths), 4, CPU) is None
    assert (layout.share(lengths, np.array(lengths), 4000, CPU) or ())[1:] == (7,)


def test_where_little_is_saved_a_gpu_is_spared_the_shapes() -> None:
    """Eight rows of 64 for ten sources: a fifth less, which a CPU takes. Of short ones both do."""
    little, much = [64] * 6 + [32] * 4, [64] * 2 + [16] * 14
    for lengths, shared in ((little, {"cpu"}), (much, {"cpu", "cuda"})):
        given = lengths, np.array(lengths), 512
        assert {device for device in ("cpu", "cuda") if layout.share(*given, torch.device(device))} == shared


def test_on_a_gpu_some_rows_may_be_empty_so_that_few_numbers_of_them_are_recorded() -> None:
    gpu = torch.device("cuda")
    found = {layout._few(count, gpu) for count in range(1, 65)}
    assert all(layout._few(count, gpu) >= count for count in range(1, 65))
    assert len(found) < 24
    assert max(layout._few(count, gpu) / count for count in range(8, 65)) <= 1.25

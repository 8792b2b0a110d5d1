"""The frozen fine-tuned model, beside which Eq. 2 holds the one in training: run with it, or remembered.

What it makes of a target never changes. So where training comes to every target, that is computed once, before the first step,
and no second model is needed; otherwise the reference reads the targets of every batch, without gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from calibeam import display, distributed, signals
from calibeam.training import Compact, TrainingConfig, autocast, batch_of_pairs, encoded, forced, planned_targets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from calibeam.engine.graphs import Batch
    from calibeam.engine.packing import AtTarget
    from calibeam.seq2seq import Seq2Seq

Switch = Callable[[], AbstractContextManager[Any]]
BATCH = 64
"""Examples whose states are computed together: always the same ones, so that a run that was stopped finds the same states."""
MEMORY_SHARE = 4
"""What is remembered may take one part in so many of the machine's memory."""


class Reference(Protocol):
    model: Any
    """That is held beside the one in training, if one is."""

    def inputs(self, places: Sequence[int], batch: Batch) -> dict[str, Any]:
        """What `at_target` reads besides the batch of the examples in these places, whose first sequences are the targets; on
        the host."""

    def at_target(self, batch: Batch) -> AtTarget: ...


class Running:
    """It reads every batch: a copy of the model, or the model itself while its adapter is off."""

    def __init__(self, tuned: Seq2Seq, off: Switch | None = None) -> None:
        """off: switches off the adapter, where this is the model in training."""
        self._tuned, self._off = tuned, off or nullcontext
        self.model = None if off else tuned.model.requires_grad_(False)

    def inputs(self, places: Sequence[int], batch: Batch) -> dict[str, Any]:
        target, mask = (batch[name][:, :1].contiguous() for name in ("token_ids", "token_mask"))
        return planned_targets(self._tuned, target, mask, batch)

    def at_target(self, batch: Batch) -> AtTarget:
        import torch

        with torch.no_grad(), self._off():
            return forced(encoded(self._tuned.model, batch), batch).at_target()


class Remembered:
    """What the model was before its first step: its states at all targets, and its output head."""

    model = None

    def __init__(
        self, tuned: Seq2Seq, sources: Compact, targets: Compact, config: TrainingConfig, off: Switch = nullcontext
    ) -> None:
        import torch

        from calibeam import families, seq2seq
        from calibeam.engine.graphs import Recorded
        from calibeam.engine.packing import Head

        self._places, batches = targets.places, seq2seq.batches_by_length(sources, BATCH)

        def states_at(batch: Batch) -> Tensor:
            return forced(encoded(tuned.model, batch), batch).at_target().states[batch["target_mask"][:, 0]]

        with (
            torch.no_grad(), autocast(tuned.device, config), off(), display.Bar("reference", len(targets)) as bar,
            signals.postponed() if distributed.size() > 1 else nullcontext(),
        ):  # fmt: skip
            dtype, anatomy = dtype_of_states(tuned, config), families.anatomy(tuned.model)
            assert anatomy is not None
            self._head = Head(anatomy).frozen(dtype)
            self._states = torch.zeros(targets.total, tuned.model.config.hidden_size, dtype=dtype)
            moved = Recorded(states_at, tuned.device, enabled=False)
            for some in batches[distributed.rank() :: distributed.size()]:
                read, written = ([ids[place] for place in some] for ids in (sources, targets))
                found = moved(batch_of_pairs(tuned, read, written, config)).to(dtype).cpu()
                for place, states in zip(some, found.split([*map(len, written)]), strict=True):
                    self._states[self._slice(place)] = states
                bar.advance(len(some) * distributed.size())
            distributed.add_up([*self._states.view(torch.uint8).flatten().split(distributed.BUCKET)])  # the others' are 0 here
            asked = distributed.highest(signals.asked())
        signals.heed(asked)

    def inputs(self, places: Sequence[int], batch: Batch) -> dict[str, Any]:
        found = self._states.new_zeros(len(places), batch["token_ids"].shape[-1], self._states.shape[1])
        for row, place in zip(found, places, strict=True):
            states = self._states[self._slice(place)]
            row[: len(states)] = states
        return {"remembered": found}

    def at_target(self, batch: Batch) -> AtTarget:
        from calibeam.engine.packing import AtTarget

        return AtTarget(batch["remembered"], self._head)

    def _slice(self, place: int) -> slice:
        own = self._places(place)
        return slice(own.start, own.stop)


def dtype_of_states(tuned: Seq2Seq, config: TrainingConfig) -> torch.dtype:
    """In which products with the head take them."""
    from calibeam.engine.ops import dtype_of_products

    with autocast(tuned.device, config):
        return dtype_of_products(next(tuned.model.parameters()))


def pays(tuned: Seq2Seq, targets: Compact, config: TrainingConfig, seen: int) -> bool:
    """Whether to remember costs less than to run, where training is to see so many targets: as many as there are, and what is
    to be remembered of them has room."""
    from calibeam import families

    size = targets.total * tuned.model.config.hidden_size * dtype_of_states(tuned, config).itemsize
    room = distributed.by_first(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // MEMORY_SHARE
    return families.anatomy(tuned.model) is not None and seen >= len(targets) and size <= room

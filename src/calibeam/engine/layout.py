"""Which examples share a row of a batch: short ones stand side by side, so that little of it is padding.

A row holds the sources of its examples one after another, and likewise all that the decoder is to write for them. Nobody sees
anything of a neighbour, and positions begin anew with each example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibeam.engine.graphs import room

WORTH = {"cpu": 0.9, "cuda": 0.6}
"""The most of the work of a row for each example that is worth sharing rows. A GPU has every shape to record: where little is
saved, more shapes cost more."""
ROOMY = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4))
"""What is tried: rows with room for so many times the longest source, and so many times what most is written for."""


@dataclass(frozen=True)
class Shared:
    """Of a batch in which sources share rows. [rows, length] each"""

    segment: Tensor
    """Whose token this is, counting sources from 1 on; 0 for padding."""
    position: Tensor
    """In its own source."""


def share(lengths: Sequence[int], nodes: np.ndarray, size: int, device: torch.device) -> tuple[np.ndarray, int] | None:
    """The row of every example, and how many rows there are; None where a row for each is less work, or hardly more.

    lengths: of the sources. nodes: of what is written for each. size: of the model's states.
    """
    own = np.array(lengths)
    longest, most = room(int(own.max()), device), room(int(nodes.max()), device)
    best, row = WORTH.get(device.type, WORTH["cuda"]) * _work(len(own), longest, most, size), None
    for more, more_nodes in ROOMY:
        found = _fitted(own / (more * longest), nodes / (more_nodes * most))
        rows = _few(int(found.max()) + 1, device)
        length, written = (room(int(np.bincount(found, weights=values).max()), device) for values in (own, nodes))
        if (work := _work(rows, length, written, size)) < best:
            best, row, count = work, found, rows
    return None if row is None else (row, count)


def _work(rows: int, length: int, nodes: int, size: int) -> int:
    """Of a pass, in units of its own. By a GPU's clock, attention takes some four times what its operations alone would."""
    return rows * (length * (6 * size + 4 * length) + nodes * (8 * size + 4 * (nodes + length)))


def _fitted(*parts: np.ndarray) -> np.ndarray:
    """A row for every example, whose shares of what a row has room for are given: the largest first, each where it fits."""
    shares = np.stack(parts, 1)
    row, free, begun = np.zeros(len(shares), dtype=np.int64), np.ones_like(shares), 0
    for example in np.argsort(-shares.sum(1), kind="stable"):
        place = int((free[: begun + 1] >= shares[example] - 1e-9).all(1).argmax())  # one that is empty has room
        free[place] -= shares[example]
        row[example], begun = place, max(begun, place + 1)
    return row


def _few(rows: int, device: torch.device) -> int:
    """As many or a few more, on a GPU: some may be empty, that few shapes have to be recorded."""
    step = 1 if device.type != "cuda" else max(1, (1 << rows.bit_length()) // 8)
    return -rows // step * -step


def side_by_side(
    sources: Sequence[Sequence[int] | np.ndarray], row: np.ndarray, count: int, pad: int, device: torch.device
) -> dict[str, Any]:
    """So many rows of sources, each in its own, as a batch on the host."""
    lengths = np.array([len(source) for source in sources])
    width = room(int(np.bincount(row, weights=lengths).max()), device)
    input_ids, (segment, position) = np.full((count, width), pad), np.zeros((2, count, width), np.int64)
    end = np.zeros(count, np.int64)
    for number, (source, place) in enumerate(zip(sources, row, strict=True), start=1):
        of = slice(end[place], end[place] + len(source))
        input_ids[place, of], segment[place, of], position[place, of] = source, number, np.arange(len(source))
        end[place] = of.stop
    found = {"input_ids": input_ids, "mask": segment > 0, "segment": segment, "position": position, "row": row}
    return {name: torch.from_numpy(values) for name, values in found.items()} | {"whole": False}

"""Several processes that train one model together, as torchrun and `accelerate launch` start them.

Every process holds the whole model and does its share of every step; the first one alone writes files and speaks. One process by
itself is the case of a group of one, which costs nothing and never asks `torch.distributed` for anything.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from calibeam import display
from calibeam.records import CalibeamError

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
Found = TypeVar("Found")
PATIENCE = timedelta(hours=2)
"""For how long a process waits for the others in the middle of a step. Whoever started them ends all if one has died."""
BUCKET = 1 << 24
"""Numbers that are added up at once: many small tensors would take a message each, and one for all of them a copy of them all."""


@dataclass
class _Group:
    rank: int
    size: int
    store: Any
    """Text by name, which every process can read and write."""
    calls: int = 0


_group: _Group | None = None
"""None while a process is by itself."""


def size() -> int:
    return _group.size if _group else 1


def rank() -> int:
    return _group.rank if _group else 0


def is_first() -> bool:
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """Meanwhile, what was started as one of several processes works as one of them, each on its own GPU if there are any."""
    global _group
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise CalibeamError(
                f"this machine has {gpus} GPUs and more processes than that: start one for each GPU, or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        torch.cuda.set_device(local)
    store, number, count = next(rendezvous("env://", timeout=PATIENCE))
    distributed.init_process_group(store=store, rank=number, world_size=count, timeout=PATIENCE)
    _group = _Group(number, count, PrefixStore("calibeam", store))
    display.console.quiet = number > 0
    try:
        yield
    except SystemExit:  # the command line's way to end well
        distributed.destroy_process_group()
        raise
    except BaseException:
        display.errors.quiet = not _fails_first(_group)
        raise
    else:
        distributed.destroy_process_group()
    finally:
        _group = None
        display.console.quiet = False


def _fails_first(group: _Group) -> bool:
    """An error of one process is followed by errors of others, or all have the same one. The first is the one to tell."""
    try:
        return group.store.add("failed", 1) == 1
    except RuntimeError:  # who kept the store is gone already
        return False


def by_first(function: Callable[[], Found]) -> Found:
    """What the first process finds by itself, plain data, while the others wait for it as long as it takes.

    They wait awake: a signal reaches them, which no process hears inside an operation of `torch.distributed`.
    """
    global _group
    if _group is None:
        return function()
    group = _group
    group.calls += 1
    name = f"by-first-{group.calls}"
    if group.rank == 0:
        _group = None
        try:
            found = function()
        finally:
            _group = group
        group.store.set(name, json.dumps(found))
        return found
    pause = 0.01
    while not group.store.check([name]):
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)
    return json.loads(group.store.get(name))


def spread(function: Callable[[Sequence[Item]], Sequence[Found]], items: Sequence[Item]) -> list[Found]:
    """`function` of all items, one result of plain data for each: every process does some of them, and all get all results."""
    own = items[rank() :: size()]
    found = [*function(own)] if own else []
    if size() == 1:
        return found
    every: list[Any] = [None] * len(items)
    for number, some in enumerate(_gather(found)):
        every[number :: size()] = some
    return every


def _gather(value: Any) -> list[Any]:
    """The value of every process, as JSON: `all_gather_object` would unpickle what comes."""
    import torch
    from torch import distributed

    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size())]
    distributed.all_gather(lengths, torch.tensor([len(text)]))
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size())]
    distributed.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in zip(texts, lengths, strict=True)]


def add_up(tensors: Sequence[Tensor]) -> None:
    """Put the sum over all processes in place of each: the same bits in all of them."""
    import torch
    from torch import distributed

    if size() == 1:
        return
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket]) if len(bucket) > 1 else bucket[0]
        distributed.all_reduce(flat)
        if len(bucket) > 1:
            parts = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, up to a size. What is larger stands alone, and need not be copied."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def sharded(optimizer_class: type, parameters: Iterable[Tensor], **settings: Any) -> Any:
    """An optimizer of which every process holds the state of some parameters, updates these and sends them to the others."""
    if size() == 1:
        return optimizer_class(parameters, **settings)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class, **settings)


def collect(optimizer: Any) -> None:
    """Bring all of its state to the first process, to be saved, if it is sharded."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)


def highest(number: int) -> int:
    """Of the numbers of all processes."""
    import torch
    from torch import distributed

    if size() == 1:
        return number
    found = torch.tensor([number])
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return int(found)


def from_first(content: bytes) -> bytes:
    """What the first process has, in all of them."""
    import torch
    from torch import distributed

    if size() == 1:
        return content
    length = torch.tensor([len(content)])
    distributed.broadcast(length, 0)
    found = torch.frombuffer(bytearray(content), dtype=torch.uint8) if is_first() else torch.zeros(int(length), dtype=torch.uint8)
    distributed.broadcast(found, 0)
    return found.numpy().tobytes()

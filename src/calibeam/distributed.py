"""Several processes that work together, as torchrun and `accelerate launch` start them.

In training, every process holds the whole model, or a share of it, and does its part of every step; in decoding, scoring and
evaluation, it makes a shard that nobody else has taken. The first one alone speaks, and writes what is not a shard or a share.
One process by itself is the case of a group of one, which costs nothing and never asks `torch.distributed` for anything.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from calibeam import display, signals
from calibeam.records import CalibeamError

if TYPE_CHECKING:
    from torch import Tensor

Item = TypeVar("Item")
Found = TypeVar("Found")
PATIENCE = timedelta(hours=2)
"""For how long a process waits for the others in the middle of a step. Whoever started them ends all if one has died."""
BUCKET = 1 << 24
"""Numbers that are added up at once: many small tensors would take a message each, and one for all of them a copy of them all."""
FAILED = "failed"
"""What is there when one of the processes has failed."""


class LostTouchError(CalibeamError):
    """Another process has died, or cannot be reached."""


@dataclass
class _Group:
    rank: int
    size: int
    store: Any
    """Text by name, which every process can read and write."""
    calls: int = 0

    def name(self) -> str:
        """Of what is said next: all processes come to the same things in the same order."""
        self.calls += 1
        return f"call-{self.calls}"

    def say(self, name: str, value: Any) -> None:
        self.store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """What another process says, however long that takes, unless one of them fails.

        It waits awake: a signal reaches it, which no process hears inside an operation of `torch.distributed`.
        """
        pause = 0.01
        while not self.store.check([name]):
            self.check()
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)
        return json.loads(self.store.get(name))

    def check(self) -> None:
        """That nobody has failed."""
        if self.store.check([FAILED]):
            raise CalibeamError("another process has failed")

    def fails_first(self, error: BaseException) -> bool:
        """Tell all that this process fails. Of their errors, which are the same or follow from another, one is to be told."""
        try:
            return self.store.add(FAILED, 1) == 1
        except RuntimeError:  # who kept the store is gone already, and may have been killed
            return isinstance(error, LostTouchError)


_group: _Group | None = None
"""None while a process is by itself."""
_uses = itertools.count(1)


def size() -> int:
    return _group.size if _group else 1


def rank() -> int:
    return _group.rank if _group else 0


def is_first() -> bool:
    return rank() == 0


def is_started_first() -> bool:
    """Whether this process was started by itself, or as the first of several, whether they have met or not."""
    return not _are_several() or (os.environ.get("RANK") or "0") == "0"


def _are_several() -> bool:
    return (os.environ.get("WORLD_SIZE") or "1") != "1"


@contextmanager
def joined() -> Iterator[None]:
    """Meanwhile, what was started as one of several processes works as one of them, each on its own GPU if there are any."""
    global _group
    if not _are_several():
        yield
        return
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore

    place, number, count = _meet()
    place = PrefixStore(f"calibeam-{next(_uses)}", place)  # what was said before is no news
    _group = _Group(number, count, place)
    display.console.quiet = number > 0
    try:
        _take_gpu()
        distributed.init_process_group(store=place, rank=number, world_size=count, timeout=PATIENCE)
        yield
        highest(0)  # all have come so far: the first may keep the store, and would take it along
        distributed.destroy_process_group()
    except BaseException as error:
        display.errors.quiet = not _group.fails_first(error)
        raise
    finally:
        _group = None
        display.console.quiet = False


@cache
def _meet() -> tuple[Any, int, int]:
    """A store that all processes of this program share from now on, the number of this one, and how many there are."""
    from torch.distributed import DistError
    from torch.distributed.rendezvous import rendezvous

    given = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")}
    wrong = [name for name, value in given.items() if not (value if name == "MASTER_ADDR" else value.isdecimal())]
    if wrong or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        told = ", ".join(f"{name}={value}" if value else f"no {name}" for name, value in given.items())
        raise CalibeamError(
            f"the environment says that this is one of several processes, and not which: {told}. Start them by torchrun or "
            "accelerate launch, or unset WORLD_SIZE"
        )
    if is_started_first():
        display.say(f"waiting for all of {given['WORLD_SIZE']} processes")
    try:
        return signals.aside(lambda: next(rendezvous("env://", timeout=PATIENCE)))
    except DistError as error:
        place = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
        raise CalibeamError(f"the processes cannot meet at {place}: {str(error).partition(chr(10))[0]}") from error


def has_met() -> bool:
    """Whether this process has been one of several."""
    return _meet.cache_info().currsize > 0


def _take_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= gpus:
            raise CalibeamError(
                f"this machine has {gpus} GPUs and more processes than that: start one for each GPU, or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        torch.cuda.set_device(local)


@contextmanager
def apart() -> Iterator[None]:
    """Meanwhile, this process works as one by itself."""
    global _group
    group, _group = _group, None
    try:
        yield
    finally:
        _group = group


def by_first(function: Callable[[], Found]) -> Found:
    """What the first process finds by itself, plain data, while the others wait for it as long as it takes."""
    if _group is None:
        return function()
    group, name = _group, _group.name()
    if group.rank > 0:
        return group.hear(name)
    with apart():
        found = function()
    group.say(name, found)
    return found


def tell_first(value: Any) -> list[Any]:
    """What every process tells the first, plain data. The others hear nothing."""
    if _group is None:
        return [value]
    group, name = _group, _group.name()
    if group.rank > 0:
        group.say(f"{name}-{group.rank}", value)
        return []
    return [value, *(group.hear(f"{name}-{number}") for number in range(1, group.size))]


def tell_all(value: Any) -> list[Any]:
    """What every process tells all, plain data, in their order. Whoever waits for the others, waits awake."""
    told = tell_first(value)
    return by_first(lambda: told)


class Tally:
    """A number that every process may add to at any time."""

    def __init__(self) -> None:
        self._group, self._own = _group, 0
        self._name = _group.name() if _group else ""

    def add(self, amount: int) -> int:
        """What it is then."""
        if self._group is None:
            self._own += amount
            return self._own
        self._group.check()
        return self._group.store.add(self._name, amount)


def each_by_one(items: Sequence[Item]) -> Iterator[Item]:
    """The items that this process takes: the first that nobody has taken, whenever it is ready for another."""
    taken = Tally()
    while (place := taken.add(1) - 1) < len(items):
        yield items[place]


def spread(function: Callable[[Sequence[Item]], Sequence[Found]], items: Sequence[Item]) -> list[Found]:
    """`function` of all items, one result of plain data for each: every process does some of them, and all get all results."""
    own = items[rank() :: size()]
    found = [*function(own)] if own else []
    if size() == 1:
        return found
    every: list[Any] = [None] * len(items)
    for number, some in enumerate(gather(found)):
        every[number :: size()] = some
    return every


def gather(value: Any) -> list[Any]:
    """The value of every process, as JSON, in a step: `all_gather_object` would unpickle what comes."""
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

"""The shards of a stage: each made of one shard of its input alone, here or by workers on a Ray cluster, to the same bits.

Here means this process, or all that torchrun started: each takes the next shard that nobody has, and writes it.

On Ray, nothing but the numbers of shards passes through the cluster. A worker is an actor that has loaded the model once; it
reads the rows of a shard from the store and writes what it makes of them, so that no row goes through Ray's memory or through
the process that asked. Ray Data gives a worker the next numbers when it is free, and again those that a worker or a machine took
with it when it died; a shard that is there and whole is not made again, whoever made it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import platform
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from calibeam import display, distributed, signals, store
from calibeam.recipe import ModelStageConfig, option
from calibeam.records import CalibeamError

SIZE = 1024
"""Sources whose rows are written together, and lost together when a run is killed."""
MOST_TASKS = 100_000
"""That Ray is to keep in mind at a time; beyond, a task is several shards."""
MOST_TRIES = 5
"""Of a shard on Ray: what has ended so many workers will end the next one too."""

Facts = dict[str, Any]
"""Of a shard: `counts` to be added up, numbers of any kind, and `notes`, texts that are told once whatever shards have them."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelStageConfig):
    """Who does a stage's work, which does not change what comes out."""

    engine: str = option(
        "local", "local: this process, or all that torchrun starts; ray: workers on a Ray cluster", choices=lambda: ENGINES,
        identity=False,
    )  # fmt: skip
    workers: int = option(0, "for ray: workers; 0 for as many as the cluster has room for", at_least=0, identity=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "ray" and not (find_spec("ray") and find_spec("pandas")):
            raise CalibeamError("engine=ray needs Ray and what its datasets need: pip install 'calibeam[ray]'")


class Maker(Protocol):
    """What makes the rows of a shard. It is sent to workers as it is, so what takes memory is loaded when first wanted."""

    config: Any

    def load(self) -> object: ...

    def inputs(self, number: int) -> dict[str, Any]:
        """By id, what a shard is made of."""

    def make(self, inputs: dict[str, Any], advance: Callable[..., None]) -> tuple[list[dict[str, Any]], Facts]: ...


def fill(table: store.Shards, maker: Maker, total: int, description: str) -> tuple[Counter[str], list[str]]:
    """Write all shards of `total` inputs, but for those that are there; the sum of their counts, and their notes.

    The sum is the same in whatever order workers end: `fsum` rounds but once.
    """
    number, done, notes = len(numbers(total)), distributed.Tally(), dict[str, None]()
    own, counts = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
    with display.Bar(description, total) as bar:
        for facts in ENGINES[maker.config.engine](maker, table, number, bar.advance):
            for name, value in facts["counts"].items():
                own[name].append(value)
            notes |= dict.fromkeys(facts["notes"])
            bar.reach(done.add(facts["counts"]["sources"]))
        for theirs, told in distributed.tell_all([own, [*notes]]):
            for name, values in theirs.items():
                counts[name] += values
            notes |= dict.fromkeys(told)
        bar.reach(total)
    distributed.by_first(lambda: table.drop_from(number))
    return Counter({name: type(values[0])(math.fsum(values)) for name, values in counts.items()}), [*notes]


def numbers(total: int, size: int | None = None) -> range:
    """Of the shards of so many inputs, in this process's size if no other is told."""
    return range(-(-total // (size or SIZE)))


def in_process(maker: Maker, table: store.Shards, number: int, advance: Callable[..., None]) -> Iterator[Facts]:
    for shard in distributed.each_by_one(range(number)):
        with distributed.apart():
            facts = make(maker, table, shard, advance)
        yield facts


def on_ray(maker: Maker, table: store.Shards, number: int, advance: Callable[..., None]) -> Iterator[Facts]:
    import torch

    config, threads = maker.config, torch.get_num_threads()
    for file in table.folder.glob(".*.tried"):
        file.unlink()
    with _cluster() as ray:
        there = ray.cluster_resources()
        on_gpus = config.device.startswith("cuda") or (config.device == "auto" and there.get("GPU", 0) >= 1)
        needs: dict[str, float] = {"num_gpus": 1} if on_gpus else {"num_cpus": threads}
        room = int(there.get("GPU", 0) if on_gpus else there.get("CPU", 0) // threads)
        if not (room or config.workers):
            raise CalibeamError(f"the Ray cluster has no room for a worker, which needs {needs}; it has {there}")
        config = dataclasses.replace(config, device="cuda" if on_gpus else "cpu")
        worker = (dataclasses.replace(maker, config=config), table, threads, store.deciding_versions())  # type: ignore[type-var]
        pool = ray.data.ActorPoolStrategy(size=min(config.workers or room, max(number, 1)), max_tasks_in_flight_per_actor=2)
        shards = ray.data.from_items([{"shard": one} for one in range(number)], override_num_blocks=min(number, MOST_TASKS) or 1)
        for made in shards.map(Worker, fn_constructor_args=worker, compute=pool, **needs).iter_rows():
            if made["problem"]:
                raise CalibeamError(made["problem"])
            yield json.loads(made["facts"])


ENGINES: dict[str, Callable[[Maker, store.Shards, int, Callable[..., None]], Iterator[Facts]]] = {
    "local": in_process,
    "ray": on_ray,
}


def make(
    maker: Maker, table: store.Shards, shard: int, advance: Callable[..., None], begin: Callable[[int], None] = lambda _: None
) -> Facts:
    """A shard, if it is not there already: as it will be read, not as it was made."""
    inputs = maker.inputs(shard)
    ids = [*inputs]
    facts = table.facts(shard, ids)
    if facts is None:
        begin(shard)
        table.write(shard, *maker.make(inputs, advance))
        facts = table.facts(shard, ids)
        assert facts is not None
    return facts


class Worker:
    """An actor: numbers of shards in, the shards in their folder. What a user can mend comes back as a text."""

    def __init__(self, maker: Maker, table: store.Shards, threads: int, versions: dict[str, str]) -> None:
        import torch

        torch.set_num_threads(threads)
        self._maker, self._table, self._versions = maker, table, versions

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        facts, problem = "", ""
        try:
            self._check()
            facts = json.dumps(make(self._maker, self._table, row["shard"], lambda *_: None, self._try))
        except (CalibeamError, OSError) as error:
            known = error if isinstance(error, CalibeamError) else store.problem_of_disk(error, self._table.folder)
            if not known:
                raise
            problem = f"{platform.node()}: {known}"
        return {"facts": facts, "problem": problem}

    def _check(self) -> None:
        """This machine has what the one that asked has."""
        if not self._table.folder.is_dir():
            raise CalibeamError(f"{self._table.folder} is not there: every machine of the cluster must have the same storage")
        for name, version in store.deciding_versions().items():
            if version != self._versions.get(name):
                raise CalibeamError(f"{name} is {version} there, and {self._versions.get(name)} where the run was started")

    def _try(self, shard: int) -> None:
        with (self._table.folder / f".{self._table.name}-{shard:05}.tried").open("ab") as file:
            file.write(b".")
            if file.tell() > MOST_TRIES:
                raise CalibeamError(
                    f"shard {shard} was started {MOST_TRIES} times, and each time its worker died: is there too little memory? "
                    f"Try a smaller batch_size"
                )


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray on the cluster that RAY_ADDRESS names or that this machine is part of, or else one on this machine meanwhile."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    if ray.is_initialized():
        yield ray
        return
    before = [(number, signal.getsignal(number)) for number in signals.STOPPING]
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise CalibeamError(f"no Ray cluster could be reached or started: {error}") from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in before:  # Ray puts its own in their place
            signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()

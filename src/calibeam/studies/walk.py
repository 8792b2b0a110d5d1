"""The steps of a study, each once, after what it reads: one at a time, or several at once in processes of their own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from calibeam import display, distributed, signals
from calibeam.pipeline import Step
from calibeam.recipe import ModelStageConfig
from calibeam.records import CalibeamError
from calibeam.studies import preview
from calibeam.studies.plan import Point, Row, in_order
from calibeam.studies.results import best

MEMORY_SHARE = 0.9
"""Of a GPU's memory, for what its processes allocate; each holds some more by itself."""


def walk(
    studies: Sequence[Sequence[Row]], measured: Callable[[int, Sequence[Point]], None], *, jobs: int = 1, force: bool = False
) -> list[Exception]:
    """Run the steps of some studies' rows, those of the first first, verifying and keeping what is there, and choose what is to
    be chosen. What went wrong: several at once go on without what needs a step that failed; one at a time ends there.

    measured: told the number of a study, and the point of each of its rows, as soon as all of them are measured.
    """
    if jobs > 1 and distributed.size() > 1:
        raise CalibeamError("--jobs starts its own processes, one for every step at work: start it alone, without torchrun")
    agenda, errors = Agenda(studies), list[Exception]()
    if jobs == 1:
        while step := agenda.begin():
            step.run(force=force)
            for study in agenda.finish(step):
                measured(*study)
        return errors

    def note(error: Exception) -> None:
        display.say(f"{error}\nWhat does not need this goes on", style="yellow")
        errors.append(error)

    with Workers(min(jobs, agenda.total)) as workers, display.Bar("steps", agenda.total) as bar:
        while True:
            while workers.are_free and (step := agenda.begin()):
                workers.start(step, force)
            bar.advance(0, "at work: " + ", ".join(Path(step.config.output).name for step in workers.at_work))
            if not workers.at_work:
                return errors
            for step, error in workers.finished():
                bar.advance()
                if error is not None:
                    note(error)
                    continue
                for study in agenda.finish(step):
                    try:
                        measured(*study)
                    except CalibeamError as of_table:
                        note(of_table)


class Agenda:
    """What is to be done next. What a row is measured by may be known only when its trials are done."""

    def __init__(self, studies: Sequence[Sequence[Row]]) -> None:
        self._studies = studies
        self.total = len(preview.expected([row for rows in studies for row in rows]))
        self._chosen: dict[int, Point] = {}
        """By the identity of a row."""
        self._begun, self._done, self._told = set[str](), set[str](), set[int]()
        self._look()

    def begin(self) -> Step | None:
        """Of those that nobody has begun and that have all they read: one of the first study that has any, the step that most
        others wait for one after another."""
        ready = [step for step in self._steps if step.config.output not in self._begun and self._are_done(step.needs)]
        if not ready:
            return None
        # of several, the first of the plan
        step = min(ready, key=lambda step: (self._first[step.config.output], -self._heights[step.config.output]))
        self._begun.add(step.config.output)
        display.say(f"[{len(self._begun)}/{self.total}] {step.stage} -> {step.config.output}", style="bold")
        return step

    def finish(self, step: Step) -> list[tuple[int, list[Point]]]:
        """The studies of which everything is measured now, with the point of each row."""
        self._done.add(step.config.output)
        self._look()
        complete = list[tuple[int, list[Point]]]()
        for number, rows in enumerate(self._studies):
            points = [self._chosen[id(row)] for row in rows if id(row) in self._chosen]
            if number not in self._told and len(points) == len(rows) and self._are_done([point.measured for point in points]):
                self._told.add(number)
                complete.append((number, points))
        return complete

    def _look(self) -> None:
        """What is known of the rows by now."""
        needed = list[list[Step]]()
        for rows in self._studies:
            for row in rows:
                if id(row) not in self._chosen and self._are_done(row.trials):
                    self._chosen[id(row)] = best(row)
            chosen = [self._chosen[id(row)].measured for row in rows if id(row) in self._chosen]
            needed.append(in_order([*(step for row in rows for step in row.trials), *chosen]))
        self._steps = in_order(step for steps in needed for step in steps)
        self._first = {step.config.output: number for number, steps in reversed([*enumerate(needed)]) for step in steps}
        self._heights = dict.fromkeys((step.config.output for step in self._steps), 0)
        for step in reversed(self._steps):
            for need in step.needs:
                self._heights[need.config.output] = max(self._heights[need.config.output], self._heights[step.config.output] + 1)

    def _are_done(self, steps: Sequence[Step]) -> bool:
        return all(step.config.output in self._done for step in steps)


class Workers:
    """Processes that run a step each. They have the machine's GPUs in turn, and an equal part of its cores."""

    def __init__(self, number: int) -> None:
        self._free: list[_Worker] = []
        self._at_work: dict[_Worker, Step] = {}
        self._number = number

    @property
    def are_free(self) -> bool:
        return bool(self._free)

    @property
    def at_work(self) -> list[Step]:
        return [*self._at_work.values()]

    def __enter__(self) -> Workers:
        gpus, cores = _gpus(), len(os.sched_getaffinity(0)) // self._number
        on_each = -(-self._number // max(1, len(gpus)))
        self._free = [
            _Worker(gpus[number % len(gpus)] if gpus else None, 1 / on_each, max(1, cores)) for number in range(self._number)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Where there is an error or a signal: those still at work are told to stop, and save what would be a pity to lose."""
        for worker in self._at_work:
            worker.stop()
        for worker in (*self._free, *self._at_work):
            worker.end()

    def start(self, step: Step, force: bool) -> None:
        worker = self._free.pop(0)
        try:
            worker.connection.send((step, force))
        except OSError:  # it has died meanwhile
            worker = worker.replaced()
            worker.connection.send((step, force))
        self._at_work[worker] = step

    def finished(self) -> Iterator[tuple[Step, Exception | None]]:
        """Those that end next, when they have, and what went wrong with them."""
        by_connection = {worker.connection: worker for worker in self._at_work}
        for connection in wait([*by_connection]):
            worker = by_connection[cast("Connection", connection)]
            step, error = self._at_work.pop(worker), None
            try:
                error = worker.connection.recv()
            except (EOFError, OSError):
                error = CalibeamError(
                    f"{step.stage} -> {step.config.output}: its process has died; is there too little memory? Try fewer --jobs"
                )
                worker = worker.replaced()
            self._free.append(worker)
            yield step, error


class _Worker:
    def __init__(self, gpu: str | None, memory: float, cores: int) -> None:
        """gpu: none if all have the same. memory: the share of the GPU's that it may take."""
        self._shares = gpu, memory, cores
        spawning = get_context("spawn")  # a fork could inherit locks that threads of libraries hold
        self.connection, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_work, args=(theirs, *self._shares))
        with signals.held_back():
            self._process.start()
        theirs.close()

    def replaced(self) -> _Worker:
        """One that has died, by another."""
        self.end()
        return _Worker(*self._shares)

    def stop(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGTERM)

    def end(self) -> None:
        self.connection.close()
        self._process.join()


def _gpus() -> list[str]:
    """To be shared out among workers; none if they all have the same."""
    import torch

    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [] if count < 2 else given.split(",")[:count] if given else [str(number) for number in range(count)]


def _work(connection: Connection, gpu: str | None, memory: float, cores: int) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from calibeam.cli import quiet

    quiet()
    torch.set_num_threads(cores)
    display.console.quiet = display.errors.quiet = True
    signals.follow_parent()
    try:
        with signals.listening():
            while True:
                step, force = connection.recv()
                connection.send(_error_of(step, force, memory))
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
    except (EOFError, OSError):
        return  # there is nothing more to do, or nobody to tell
    except signals.Stopped as stop:
        sys.exit(stop.exit_code)


def _error_of(step: Step, force: bool, memory: float) -> Any:
    """Run a step, with a share of its GPU's memory if it uses one."""
    import torch

    from calibeam import seq2seq

    try:
        if isinstance(step.config, ModelStageConfig) and seq2seq.best_device(step.config.device).type == "cuda":
            torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE * memory)
        step.run(force=force)
    except CalibeamError as error:
        return CalibeamError(f"{step.stage} -> {step.config.output}: {error}")
    except Exception:
        return RuntimeError(f"{step.stage} -> {step.config.output}:\n{traceback.format_exc()}")
    return None

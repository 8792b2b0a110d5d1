"""Processes that are forked from one that has imported what takes seconds, and has no thread that a fork could lose."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HEAVY = [
    "calibeam.cli",
    "calibeam.seq2seq",
    "calibeam.checkpoint",
    "calibeam.engine.graphs",
    "calibeam.engine.search",
    "calibeam.engine.packing",
    "calibeam.stages.calibrate",
    "torch.distributed.fsdp",
    "calibeam.stages.evaluate",
    "conftest",
]
forking = get_context("forkserver")
forking.set_forkserver_preload(HEAVY)


class Process:
    """A function at work in a process of its own; what it says on standard output and error goes to files in a folder."""

    def __init__(
        self, place: Path | str, function: Callable[..., Any], *arguments: Any,
        environment: Mapping[str, str] = os.environ, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._streams = [Path(place) / name for name in ("stdout", "stderr")]
        given = (function, arguments, {**environment}, cwd or Path.cwd(), self._streams)
        self._process = forking.Process(target=_work, args=given)
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def said(self) -> list[str]:
        return [stream.read_text(encoding="utf-8", errors="surrogateescape") for stream in self._streams]

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.is_alive(), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.005)

    def is_halted(self) -> bool:
        """By SIGSTOP."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def end(self, seconds: float = 120) -> int:
        """Its exit code, when it has ended."""
        self._process.join(seconds)
        if self.is_alive():
            self._process.kill()
            raise subprocess.TimeoutExpired(f"{self.said()}", seconds)
        assert self._process.exitcode is not None
        return self._process.exitcode


def run(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ, cwd: Path | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m calibeam` would be."""
    with tempfile.TemporaryDirectory() as place, Process(place, command, *arguments, environment=environment, cwd=cwd) as process:
        return subprocess.CompletedProcess(list(arguments), process.end(seconds), *process.said())


def run_several(
    processes: int, script: Path, arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """As torchrun would be with a script, but that nobody ends the others when one has ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    started: list[Process] = []
    with ExitStack() as stack:
        for rank in map(str, range(processes)):
            own, streams = (
                {**environment, **place, "RANK": rank, "LOCAL_RANK": rank},
                stack.enter_context(tempfile.TemporaryDirectory()),
            )
            process = Process(streams, _run_script, script, *arguments, environment=own, cwd=script.parent)
            started.append(stack.enter_context(process))
        ended = [process.end(seconds) for process in started]
        said = ["".join(of_all) for of_all in zip(*(process.said() for process in started), strict=True)]
    return subprocess.CompletedProcess(list(arguments), ended[0], *said)


def _run_script(script: Path, *arguments: str) -> None:
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def command(*arguments: str) -> None:
    """The command line."""
    from calibeam import cli

    sys.argv = ["calibeam", *arguments]
    cli.main()


def _work(
    function: Callable[..., Any], arguments: Sequence[Any], environment: dict[str, str], cwd: Path, streams: list[Path]
) -> None:
    import torch

    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.path.insert(0, str(cwd))
    function(*arguments)

"""The command line in a process of its own, forked from one that has imported what takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

HEAVY = [
    "calibeam.cli",
    "calibeam.seq2seq",
    "calibeam.engine.search",
    "calibeam.engine.packing",
    "calibeam.stages.evaluate",
    "conftest",
]
forking = get_context("forkserver")
forking.set_forkserver_preload(HEAVY)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None, seconds: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m calibeam` would be."""
    with tempfile.TemporaryDirectory() as place:
        streams = [f"{place}/{name}" for name in ("stdout", "stderr")]
        process = forking.Process(target=_command, args=(list(arguments), dict(environment), cwd or Path.cwd(), streams))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), seconds)
        said = [Path(stream).read_text(encoding="utf-8", errors="surrogateescape") for stream in streams]
    return subprocess.CompletedProcess(list(arguments), process.exitcode or 0, *said)


def _command(arguments: list[str], environment: dict[str, str], cwd: Path, streams: list[str]) -> None:
    import torch

    from calibeam import cli

    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.path.insert(0, str(cwd))
    sys.argv = ["calibeam", *arguments]
    cli.main()

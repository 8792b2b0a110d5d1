"""The command line in processes of its own, each of which may get a signal at one point; a server for tests/test_signals.py.

It reads a line of JSON for every command and answers with the exit code. What calibeam needs is imported once and forked from
here, where no thread is that a fork could lose.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from typing import Any

import torch
from rich.console import Console

import conftest  # noqa: F401
from calibeam import checkpoint, cli, display, seq2seq, shards, training  # noqa: F401
from calibeam.engine import graphs, logprob, packing, search  # noqa: F401
from calibeam.stages import calibrate, create, decode, evaluate, export, finetune, prepare, report, score  # noqa: F401

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir")


def command(line: list[str], watched: str, said: str, at: int) -> int:
    """Halts just before the change `at` of the disk, so that a signal from outside comes at that very point."""
    faulthandler.dump_traceback_later(200, exit=True)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    display.console, display.errors = Console(width=200), Console(width=200, stderr=True)
    shards.SIZE = 3
    torch.set_num_threads(1)
    changes = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        if event in CHANGES and watched in str(arguments[0]):
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(watch)
    sys.argv = ["calibeam", *line]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(number: int, **given: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = command(**given)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    for asked in sys.stdin:
        print(run(**json.loads(asked)), flush=True)

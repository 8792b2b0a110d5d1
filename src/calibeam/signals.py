"""SIGTERM and SIGINT: a run that is told to stop saves what it has, says so by its exit code, and can go on.

Everything on disk survives a kill at any point, so a signal may end a stage anywhere: it raises `Stopped` there. Only what would
be a pity to lose, a training step and its checkpoint, is finished first (`postponed`). A second SIGINT waits for nothing.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

Found = TypeVar("Found")
STOPPING = (signal.SIGTERM, signal.SIGINT)

_asked: signal.Signals | None = None
_postponed = 0


class Stopped(BaseException):
    """A signal asked for the end. No Exception: nothing but the command line has anything to do with it."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number


@contextmanager
def listening() -> Iterator[None]:
    """Meanwhile, a signal that asks for the end raises Stopped. Those that are ignored at the end stay so."""
    global _asked
    before = [(number, signal.signal(number, _ask)) for number in STOPPING]
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        yield
    finally:
        _asked = None
        for number, handler in before:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


@contextmanager
def postponed() -> Iterator[None]:
    """Meanwhile, a signal is only remembered; it takes effect when the block ends well."""
    global _postponed
    _postponed += 1
    try:
        yield
    finally:
        _postponed -= 1
    if _asked and not _postponed:
        raise Stopped(_asked)


def asked() -> int:
    """The number of the postponed signal that waits; 0 if there is none."""
    return _asked or 0


def heed(number: int) -> None:
    """Stop by a signal, if it is one, that another process may have had."""
    if number:
        raise Stopped(signal.Signals(number))


def aside(function: Callable[[], Found]) -> Found:
    """`function()` in a thread of its own, for a library that works for long and hears no signal: this thread does."""
    found: Future[Found] = Future()

    def work() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return found.result()
    except Stopped as stop:
        atexit.register(os._exit, stop.exit_code)  # the library is still at work, and must not see the interpreter go
        raise


def ignore() -> None:
    """On the way out there is nothing more to stop."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[None]:
    """Meanwhile, none reaches this process, nor one that it starts, before that one is `listening`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_main_thread() -> None:
    """In another thread: none reaches it, nor a process that it starts, before that one can say `leave_to_parent`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def leave_to_parent() -> None:
    """In a process that works for another: signals reach both, and the parent sees to it; without a parent it ends."""
    ignore()
    follow_parent()


def follow_parent() -> None:
    """In a process that works for another: without it, this one ends too."""
    from multiprocessing import parent_process

    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _ask(number: int, _: FrameType | None) -> None:
    global _asked
    if _asked and number == signal.SIGINT:
        os._exit(128 + number)  # at once, as a kill would
    first, _asked = _asked is None, _asked or signal.Signals(number)
    if first and not _postponed:
        raise Stopped(_asked)

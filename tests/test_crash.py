"""A few points of the crash sweep; `make crash-sweep` takes all of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked


def sweep(*arguments: str) -> None:
    import crash_sweep

    sys.argv = ["crash_sweep.py", *arguments]
    crash_sweep.main()


def test_fault_01_a_killed_stage_is_started_again_and_ends_at_the_same_bits(tmp_path: Path) -> None:
    """Decoding has a test of its own (stages/test_decode.py)."""
    with forked.Process(tmp_path, sweep, "2", "finetune", "score", "calibrate", "evaluate") as process:
        assert process.end(240) == 0, process.said()
    kills, wrong = re.findall(r"^(\d+) kills, (\d+) wrong$", process.said()[0], re.MULTILINE)[0]
    assert int(kills) >= 6  # a moment may come too late
    assert wrong == "0"

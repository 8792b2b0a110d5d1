"""A few points of the crash sweep; `make crash-sweep` takes all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import calibeam


def test_fault_01_a_killed_stage_is_started_again_and_ends_at_the_same_bits() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join((str(Path(calibeam.__file__).parents[1]), str(here)))
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(here / "crash_sweep.py"), "2", "finetune", "score"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kills, wrong = re.findall(r"^(\d+) kills, (\d+) wrong$", done.stdout, re.MULTILINE)[0]
    assert int(kills) >= 3  # a moment may come too late
    assert wrong == "0"

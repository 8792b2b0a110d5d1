"""What `calibeam doctor` says of this machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import torch

import calibeam


def test_doctor_names_versions_memory_and_the_gpu_or_its_absence() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "calibeam", "doctor"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = dict(cells for line in done.stdout.splitlines() if len(cells := re.split(r"\s{2,}", line.strip(), maxsplit=1)) == 2)
    assert lines["calibeam and python"] == f"calibeam {calibeam.__version__}, python {platform.python_version()}"
    assert lines["torch"] == torch.__version__
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert lines["memory"] == f"{gib:.1f} GiB in all"
    assert lines["disk here"].endswith("GiB free")
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in lines["GPU 0"]
        assert "run on the GPU" in done.stdout or "runs on the GPU" in done.stdout
    else:
        assert lines["GPU"] == "none that torch can use"
        assert "runs on the CPU in float32" in done.stdout

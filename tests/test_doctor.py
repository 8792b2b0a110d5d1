"""What `calibeam doctor` says of this machine."""

from __future__ import annotations

import os
import platform
import re
import tomllib
from pathlib import Path

import torch

import calibeam
import forked


def test_doctor_names_versions_memory_and_the_gpu_or_its_absence() -> None:
    done = forked.run(["doctor"], {**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    lines = dict(cells for line in done.stdout.splitlines() if len(cells := re.split(r"\s{2,}", line.strip(), maxsplit=1)) == 2)
    calibeam_here, python_here = lines["calibeam and python"].split(", ")
    assert calibeam_here.startswith(f"calibeam {calibeam.__version__}")
    assert python_here == f"python {platform.python_version()}"
    assert lines["torch"] == torch.__version__
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev", "fuzz"}  # which are for those who work on calibeam
    assert {name.removeprefix("extra: ") for name in lines if name.startswith("extra: ")} == extras
    assert lines["extra: lora"] == "yes; calibrate trains LoRA adapters (lora_rank)"
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert lines["memory"] == f"{gib:.1f} GiB in all"
    assert lines["disk here"].endswith("GiB free")
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in lines["GPU 0"]
        assert "run on the GPU" in done.stdout or "runs on the GPU" in done.stdout
    else:
        assert lines["GPU"] == "none that torch can use"
        assert "runs on the CPU in float32" in done.stdout

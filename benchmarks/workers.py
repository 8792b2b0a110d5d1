"""Throughput of decoding by processes of torchrun and by workers on Ray, 1 and 2 (or more), in one run on one machine.

    OMP_NUM_THREADS=1 python benchmarks/workers.py [--rows 1024] [--shard 64] [--workers 1 2]

The demo's model decodes 8 candidates of made-up functions on the CPU, one thread in every process. Speed is counted from the
first shard to the last, so that starting, told beside it, does not count; efficiency is the speed over that of one process and
the number of workers. Whether the rows are the same is told too. Speeds of a machine that others use mean
little: beside them is what a source takes of a core, which other work changes less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import calibeam
from calibeam import display, distributed, shards, store
from calibeam.stages import decode, prepare

MODEL = Path(calibeam.__file__).parent / "demo/model"
MARKS = {"torchrun": "--settings", "ray": "MapWorker"}
"""What the command line of a process has that makes shards."""


def write(folder: Path, rows: int) -> str:
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(rows):
            source = f"def scale_{i}(values, factor={i}):\n    return [value * factor for value in values if value > {i}]"
            file.write(json.dumps({"id": str(i), "source": source, "target": "Scale the values."}) + "\n")
    file_name = str(folder / "rows.jsonl")
    return str(prepare.run(prepare.Config(output=str(folder / "data"), train=file_name, validation=file_name, max_validation=1)))


class Watch(threading.Thread):
    """How many shards were there when those who make them had used so much of the processor."""

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(daemon=True)
        self._folder, self._engine = folder, engine
        self.seen: dict[int, float] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.seen.setdefault(len(list(self._folder.glob("*.parquet"))), self._used())

    def _used(self) -> float:
        used = 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if MARKS[self._engine] in line and "torch.distributed.run" not in line:
                    used += sum(process.cpu_times()[:2])
        return used

    def per_shard(self, first: int) -> float:
        begun, done = min(number for number in self.seen if number >= first), max(self.seen)
        return (self.seen[done] - self.seen[begun]) / (done - begun)


def measure(data: str, output: Path, engine: str, workers: int) -> tuple[float, float, float, str]:
    """Seconds to the first shard, sources per second from there on, seconds of a core for each, and a digest of the rows."""
    settings: dict[str, Any] = {
        "output": str(output), "data": data, "model": str(MODEL), "num_candidates": 8, "max_new_tokens": 24,
        "max_source_length": 128, "device": "cpu",
    }  # fmt: skip
    watch, started = Watch(output.with_name(f".{output.name}.partial"), engine), time.time()
    watch.start()
    if engine == "ray":
        decode.run(decode.Config(**settings, engine=engine, workers=workers))
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        own = ["--shard", str(shards.SIZE), "--settings", json.dumps(settings)]
        subprocess.run([sys.executable, *launcher, __file__, *own], check=True)  # noqa: S603
    watch.over.set()
    written = sorted(file.stat().st_mtime for file in output.glob("*.parquet"))
    found = store.read(output, "decode").manifest
    sources = found["counts"]["sources"]
    speed = sources * (1 - workers / len(written)) / (written[-1] - written[workers - 1])  # without those before the clock runs
    return written[0] - started, speed, watch.per_shard(workers) * len(written) / sources, found["digest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--shard", type=int, default=64, help="sources of one")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    shards.SIZE = chosen.shard
    torch.set_num_threads(1)
    if chosen.settings:
        with distributed.joined():
            decode.run(decode.Config(**chosen.settings))
        return
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else they stand back behind the one process, by 15
    with tempfile.TemporaryDirectory(prefix="calibeam-ray-") as name:
        data = write(Path(name), chosen.rows)
        ways = [(engine, workers) for engine in MARKS for workers in chosen.workers]
        found = [(*way, *measure(data, Path(name) / f"{way[0]}-{way[1]}", *way)) for way in ways]
    _, _, _, alone, core, digest = found[0]
    columns = ("engine", "workers", "start, s", "sources/s", "times", "efficiency", "core, ms/source", "times", "same rows")
    rows = [
        (engine, workers, f"{start:.1f}", f"{speed:.2f}", f"{speed / alone:.2f}", f"{speed / alone / workers:.2f}",
         f"{1000 * used:.1f}", f"{used / core:.2f}", own == digest)
        for engine, workers, start, speed, used, own in found
    ]  # fmt: skip
    display.table("Decoding", columns, rows)
    for row in rows:
        print(json.dumps(dict(zip(columns[:5] + columns[6:7], row[:5] + row[6:7], strict=True)) | {"same": row[-1]}))


if __name__ == "__main__":
    main()

"""Throughput of decoding on Ray, by 1 and 2 workers (or more), beside one process, in one run on one machine.

    OMP_NUM_THREADS=1 python benchmarks/workers.py [--rows 1024] [--shard 64] [--workers 1 2]

The demo's model decodes 8 candidates of made-up functions on the CPU, one thread in every process. Speed is counted from the
first shard to the last, so that starting Ray and its workers, told beside it, does not count; efficiency is the speed over that
of one process and the number of workers. Whether the rows are the same is told too. Speeds of a machine that others use mean
little by themselves: compare the rows of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch

import calibeam
from calibeam import display, shards, store
from calibeam.stages import decode, prepare

MODEL = Path(calibeam.__file__).parent / "demo/model"


def write(folder: Path, rows: int) -> str:
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(rows):
            source = f"def scale_{i}(values, factor={i}):\n    return [value * factor for value in values if value > {i}]"
            file.write(json.dumps({"id": str(i), "source": source, "target": "Scale the values."}) + "\n")
    file_name = str(folder / "rows.jsonl")
    return str(prepare.run(prepare.Config(output=str(folder / "data"), train=file_name, validation=file_name, max_validation=1)))


def measure(data: str, output: Path, engine: str, workers: int) -> tuple[float, float, str]:
    """Seconds to the first shard, sources per second from there on, and the digest of what was written."""
    config = decode.Config(
        output=str(output), data=data, model=str(MODEL), num_candidates=8, max_new_tokens=24, max_source_length=128,
        device="cpu", engine=engine, workers=workers,
    )  # fmt: skip
    started = time.time()
    folder = decode.run(config)
    written = sorted(file.stat().st_mtime for file in folder.glob("*.parquet"))
    found = store.read(folder, "decode").manifest
    first = found["counts"]["sources"] * workers / len(written)  # those that were made before the clock runs
    return written[0] - started, (found["counts"]["sources"] - first) / (written[-1] - written[workers - 1]), found["digest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--shard", type=int, default=64, help="sources of one")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    chosen = parser.parse_args()
    shards.SIZE = chosen.shard
    torch.set_num_threads(1)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # else they stand back behind the one process, by 15
    with tempfile.TemporaryDirectory(prefix="calibeam-ray-") as name:
        data = write(Path(name), chosen.rows)
        ways = [("local", 1), *(("ray", workers) for workers in chosen.workers)]
        found = [(*way, *measure(data, Path(name) / f"{way[0]}-{way[1]}", *way)) for way in ways]
    alone, digest = found[0][3], found[0][4]
    rows = [
        (engine, workers, f"{start:.1f}", f"{speed:.1f}", f"{speed / alone:.2f}", f"{speed / alone / workers:.2f}", own == digest)
        for engine, workers, start, speed, own in found
    ]
    display.table("Decoding", ("engine", "workers", "start, s", "sources/s", "times", "efficiency", "same rows"), rows)
    for engine, workers, start, speed, own in found:
        told = {"engine": engine, "workers": workers, "start_s": round(start, 1), "sources_per_s": round(speed, 2)}
        print(json.dumps({**told, "times": round(speed / alone, 3), "same": own == digest}))


if __name__ == "__main__":
    main()

"""Time and memory of everything around the model, at 20,000, 200,000 and 2 million rows.

    python benchmarks/load.py [ROWS ...]

prepare reads a JSON lines file of that many rows. What decode and score do besides the model, on the folder that prepare wrote:
reading sources in shards, writing candidates (4 of 12 tokens each) or their scores, counting, sealing, and verifying what
they read. Each in a process of its own, whose largest memory is told; that of Python with what calibeam imports is beside it.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from calibeam import display, shards, store
from calibeam.paper.metrics import pair_agreement
from calibeam.recipe import StageConfig
from calibeam.stages import prepare

WORDS = [f"word{i}" for i in range(5000)]
Row = dict[str, Any]


def write(folder: Path, count: int) -> None:
    numbers = random.Random(0)  # noqa: S311
    with (folder / "train.jsonl").open("w") as file:
        for i in range(count):
            source = " ".join(numbers.choices(WORDS, k=60))
            file.write(json.dumps({"id": f"row-{i}", "source": source, "target": source[:80]}) + "\n")
    with (folder / "validation.jsonl").open("w") as file:
        file.writelines(json.dumps({"source": f"source {i}", "target": f"target {i}"}) + "\n" for i in range(100))


def prepared(folder: Path) -> None:
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    prepare.run(prepare.Config(output=str(folder / "prepare"), **files))


@dataclass
class Decoder:
    """What `decode` does besides the model."""

    examples: store.Table

    def inputs(self, number: int) -> dict[str, str]:
        rows = self.examples.between(number * shards.SIZE, (number + 1) * shards.SIZE)
        return {row["id"]: row["source"] for row in rows}

    def make(self, inputs: dict[str, str], _: Any) -> tuple[list[Row], shards.Facts]:
        rows = [
            {"id": name, "method": "beam", "seed": 0, "token_ids": [[len(source) + k] * 12 for k in range(4)],
             "texts": [source[k : k + 60] for k in range(4)], "log_p": [-float(k) for k in range(4)], "times_drawn": [1] * 4}
            for name, source in inputs.items()
        ]  # fmt: skip
        return rows, {"counts": {"sources": len(rows), "candidates": sum(len(row["log_p"]) for row in rows)}}


@dataclass
class Scorer:
    """What `score` does besides the model."""

    examples: store.Table
    candidates: store.Table

    def inputs(self, number: int) -> dict[str, Row]:
        place = number * shards.SIZE, (number + 1) * shards.SIZE
        pairs = zip(self.examples.between(*place), self.candidates.between(*place), strict=True)
        return {example["id"]: row for example, row in pairs if example["id"] == row["id"]}

    def make(self, inputs: dict[str, Row], _: Any) -> tuple[list[Row], shards.Facts]:
        rows = [{**row, "similarity": [float(len(text)) for text in row["texts"]]} for row in inputs.values()]
        return rows, {"counts": {"agreeing": sum(pair_agreement(row["log_p"], row["similarity"])[0] for row in rows)}}


def decoded(folder: Path) -> None:
    data = store.read(folder / "prepare", "prepare")
    fill(folder, "decode", data, data, Decoder(data.example_table("train")), "candidates", store.CANDIDATES)


def scored(folder: Path) -> None:
    data, decoding = store.read(folder / "prepare", "prepare"), store.read(folder / "decode", "decode")
    maker = Scorer(data.example_table("train"), decoding.table("candidates", store.CANDIDATES))
    fill(folder, "score", decoding, data, maker, "scored", store.SCORED)


def fill(folder: Path, kind: str, source: store.Folder, data: store.Folder, maker: Any, name: str, schema: Any) -> None:
    number, counts = -(-data.count("train") // shards.SIZE), Counter[str]()
    with make_output(folder, kind, source).writing(resume=True) as output:
        for facts in shards.in_process(maker, output.shards(name, schema), number, lambda *_: None):
            counts.update(facts["counts"])
        output.counts |= counts


def make_output(folder: Path, kind: str, source: store.Folder) -> store.Output:
    return store.Output(kind, StageConfig(output=str(folder / kind)), {"source": source})


def nothing(folder: Path) -> None:
    pass


def measure(work: Callable[[Path], None], folder: Path, told: Any) -> None:
    started = time.perf_counter()
    work(folder)
    told.put((time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    context, found = get_context("spawn"), []
    for count in [int(number) for number in sys.argv[1:]] or [20_000, 200_000, 2_000_000]:
        folder = Path(tempfile.mkdtemp(prefix="calibeam-load-"))
        write(folder, count)
        for work in (nothing, prepared, decoded, scored):
            told = context.Queue()
            process = context.Process(target=measure, args=(work, folder, told))
            process.start()
            seconds, peak = told.get()
            process.join()
            found.append((f"{count:,}", work.__name__, f"{seconds:.1f}", f"{count / seconds:,.0f}", f"{peak:,.0f}"))
            print(*found[-1], flush=True)
        shutil.rmtree(folder)
    display.table("Around the model", ("rows", "stage", "seconds", "rows/s", "peak MiB"), found)


if __name__ == "__main__":
    main()

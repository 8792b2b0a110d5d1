"""Time and memory of everything around the model, at 20,000, 200,000 and 2 million rows.

    python benchmarks/load.py [ROWS ...]

prepare reads a JSON lines file of that many rows. What decode, score and evaluate do besides the model, on the folder that
prepare wrote: reading sources in shards, writing candidates (4 of 12 tokens each), their scores or their tokens, measuring
outputs, drawing samples for intervals, counting, sealing, and verifying what they read. report is the stage itself, with one
evaluation on both sides. Each in a process of its own, whose largest memory is told; that of Python with what calibeam imports
is beside it.
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
from calibeam.paper.official import METRICS
from calibeam.recipe import StageConfig
from calibeam.stages import evaluate, prepare, report

WAY = evaluate.Way("beam", 4, 0.0)
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
        rows = [{**row, "similarity": [float(ord(text[0]) % 7) for text in row["texts"]]} for row in inputs.values()]
        return rows, {"counts": {"agreeing": sum(pair_agreement(row["log_p"], row["similarity"])[0] for row in rows)}}


@dataclass
class Evaluator:
    """What `evaluate` does besides the model, until it measures."""

    scored: store.Table

    def inputs(self, number: int) -> dict[str, Row]:
        return {row["id"]: row for row in self.scored.between(number * shards.SIZE, (number + 1) * shards.SIZE)}

    def make(self, inputs: dict[str, Row], _: Any) -> tuple[list[Row], shards.Facts]:
        tokens = {"pieces": [["word"] * 12] * 4, "token_log_p": [[-0.5] * 12] * 4, "setting": WAY.name}
        return [{**row, **tokens, "rouge": row["similarity"]} for row in inputs.values()], {"counts": {}}


def decoded(folder: Path) -> None:
    data = store.read(folder / "prepare", "prepare")
    with make_output(folder, "decode", data=data).writing(resume=True) as output:
        fill(output, data, Decoder(data.example_table("train")), "candidates", store.CANDIDATES)


def scored(folder: Path) -> None:
    data, decoding = store.read(folder / "prepare", "prepare"), store.read(folder / "decode", "decode")
    maker = Scorer(data.example_table("train"), decoding.table("candidates", store.CANDIDATES))
    with make_output(folder, "score", data=data, candidates=decoding).writing(resume=True) as output:
        fill(output, data, maker, "scored", store.SCORED)


def fill(output: store.Output, data: store.Folder, maker: Any, name: str, schema: Any) -> store.Shards:
    table = output.shards(name, schema)
    for facts in shards.in_process(maker, table, number_of_shards(data), lambda *_: None):
        output.counts |= Counter(output.counts) + Counter(facts["counts"])
    return table


def number_of_shards(data: store.Folder) -> int:
    return len(shards.numbers(data.count("train")))


def evaluated(folder: Path) -> None:
    data, scoring = store.read(folder / "prepare", "prepare"), store.read(folder / "score", "score")
    config = evaluate.Config(data=str(data.path), model="none", output=str(folder / "evaluate"), split="train")
    output, count = store.Output("evaluate", config, {"data": data}), data.count("train")
    with output.writing(resume=True), display.Bar("measure", count) as bar:
        table = fill(output, data, Evaluator(scoring.table("scored", store.SCORED)), "candidates", evaluate.CANDIDATES)
        examples = data.example_table("train")
        made = (
            (table.rows(number), [*map(store.example_of, examples.between(number * shards.SIZE, (number + 1) * shards.SIZE))])
            for number in range(number_of_shards(data))
        )
        found = evaluate.record(output, made, {name: METRICS[name] for name in evaluate.ALWAYS}, bar.advance)
        result = {**WAY._asdict(), "length_alpha": 0.0, "setting": WAY.name, "signature": "", **found[WAY.name].figures()}
        figures = {"split": "train", "examples": count, "perplexity": 1.0, "perplexity_signature": "", "settings": [result]}
        output.write_json("results.json", {**figures, "reference_repetition_rate": 0.0, "reference_words": 0.0})


def reported(folder: Path) -> None:
    model = store.Folder(folder / "model", "", {})  # of which the page says only what is there
    calibrated = make_output(folder, "calibrate", scored=store.read(folder / "score", "score"), model=model)
    with calibrated.writing():
        calibrated.counts["best_step"] = 1
    sides = dict.fromkeys(("before", "after"), str(folder / "evaluate"))
    report.run(report.Config(**sides, calibrated=str(calibrated.path), output=str(folder / "report")))


def make_output(folder: Path, kind: str, **inputs: store.Folder) -> store.Output:
    return store.Output(kind, StageConfig(output=str(folder / kind)), inputs)


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
        for work in (nothing, prepared, decoded, scored, evaluated, reported):
            told = context.Queue()
            process = context.Process(target=measure, args=(work, folder, told))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
            seconds, peak = told.get()
            found.append((f"{count:,}", work.__name__, f"{seconds:.1f}", f"{count / seconds:,.0f}", f"{peak:,.0f}"))
            print(*found[-1], flush=True)
        shutil.rmtree(folder)
    display.table("Around the model", ("rows", "stage", "seconds", "rows/s", "peak MiB"), found)


if __name__ == "__main__":
    main()

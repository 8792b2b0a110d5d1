"""How much faster a calibration is on several processes than on one, and what takes the rest, in one run on one machine.

    python benchmarks/scaling.py cpu                      # 1, 2 and 4 processes of one thread each, by gloo
    python benchmarks/scaling.py gpu --processes 1 2 4 8  # a GPU each, by NCCL
    python benchmarks/scaling.py cpu --shard-model        # with shares of the model, by FSDP2

Every number of processes is started by torchrun and takes the same steps: a batch of random sources, a sampled pair of candidates
and the target of each, rank + KL, AdamW. The first steps are not counted. Two things keep efficiency below 1: the time in which
gradients are added up, which each process also spends waiting for the slowest, and that what is computed meanwhile gets slower
where processes share memory, caches or cores. With shares, weights are gathered and gradients added up amid the computing, and
count as that. Megabytes are those of weights, gradients, the optimizer's state and the reference in one process. Prints a table
and one JSON line per row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode import random_pegasus
from rich.console import Console
from rich.table import Table

from calibeam import distributed
from calibeam.engine.sharding import Sharded, is_share
from calibeam.seq2seq import Seq2Seq
from calibeam.stages.calibrate import CalibrationStep, Config
from calibeam.training import Item, Problem, TrainingStep, make_optimizer


@dataclass(frozen=True)
class Case:
    size: str
    changes: dict[str, int]
    """Of that size."""
    batch: int
    micro_batch: int
    source_length: int
    length: int
    vocabulary: int


TINY = {"d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
CASES = {"cpu": Case("SMALL", TINY, 16, 2, 64, 16, 4_000), "gpu": Case("LARGE", {}, 256, 8, 512, 64, 96_103)}
CANDIDATES = 4
UNCOUNTED = 2


class Clock:
    """Adds up the time that a function takes, the GPU's part included."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *given: Any) -> Any:
        start = now()
        found = self.function(*given)
        self.seconds += now() - start
        return found


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def work(kind: str, steps: int, shard_model: bool, output: Path) -> None:
    """One of the processes; the first writes what it measured."""
    case, rng = CASES[kind], random.Random(0)  # noqa: S311
    device = "cpu" if kind == "cpu" else f"cuda:{torch.cuda.current_device()}"
    model, reference = (random_pegasus(case.size, case.vocabulary, device, torch.float32, **case.changes) for _ in range(2))
    config = Config(
        data="", model="", scored="", output="unused", beta=0.01, batch_size=case.batch, micro_batch_size=case.micro_batch
    )
    step = CalibrationStep(Seq2Seq(model, None), Seq2Seq(reference, None), config)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, case.vocabulary) for _ in range(length)]

    examples = [
        (ids(case.source_length), ids(case.length), {
            "token_ids": [ids(case.length) for _ in range(CANDIDATES)], "log_p": [0.0] * CANDIDATES,
            "similarity": [rng.random() for _ in range(CANDIDATES)],
        })
        for _ in range(case.batch)
    ]  # fmt: skip
    batch = [Item(str(number), case.source_length, 1, example) for number, example in enumerate(examples)]
    problem: Any = Problem(
        batches=None,  # type: ignore[arg-type]
        batch=lambda some, seeds: step.batch(*map(list, zip(*some, strict=True)), seeds),
        loss=step.loss, validate=dict, save=print, dropout=False, shown={},
    )  # fmt: skip
    sharded = Sharded(model, reference) if shard_model and distributed.size() > 1 else None
    optimizer = make_optimizer(model, config, steps)[0]
    update = TrainingStep(model, config, problem, optimizer, sharded)
    distributed.add_up = adding = Clock(distributed.add_up)
    start = 0.0
    for number in range(1, UNCOUNTED + steps + 1):
        figures = update(batch, number)
        if number == UNCOUNTED:
            adding.seconds, start = 0.0, now()
    row = {"seconds_per_step": (now() - start) / steps, "adding_up": adding.seconds / steps, "loss": figures["loss"]}
    row["megabytes"] = held(model, reference, optimizer) / 1e6
    if distributed.is_first():
        output.write_text(json.dumps({**row, "parameters": model.num_parameters()}))


def held(model: Any, reference: Any, optimizer: Any) -> int:
    """Bytes of weights, gradients, the optimizer's state and the reference in this process."""
    weights = [*model.parameters(), *reference.parameters()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    own = (each.to_local() if is_share(each) else each for each in (*weights, *gradients, *moments))
    return sum(tensor.nbytes for tensor in own)


def measured(kind: str, processes: int, steps: int, shard_model: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "row.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        line = [sys.executable, *launcher, __file__, kind, "--steps", str(steps), "--output", str(found)]
        line += ["--shard-model"] if shard_model else []
        environment = {**os.environ, **({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})}
        subprocess.run(line, check=True, env=environment)  # noqa: S603
        return {"processes": processes, **json.loads(found.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shard-model", action="store_true")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.output:
        with distributed.joined():
            work(chosen.case, chosen.steps, chosen.shard_model, chosen.output)
        return
    table = Table("processes", "examples/s", "times one", "efficiency", "adding up", "computing, times one's share", "MB each")
    first: dict[str, Any] = {}
    for processes in chosen.processes:
        row = measured(chosen.case, processes, chosen.steps, chosen.shard_model)
        first = first or row
        times = first["seconds_per_step"] / row["seconds_per_step"]
        ratio = row["processes"] / first["processes"]
        computing, alone = (each["seconds_per_step"] - each["adding_up"] for each in (row, first))
        row |= {
            "examples_per_second": round(CASES[chosen.case].batch / row["seconds_per_step"], 2), "times_first": round(times, 2),
            "efficiency": round(times / ratio, 3), "adding_up_share": round(row["adding_up"] / row["seconds_per_step"], 3),
            "computing_slower": round(computing * ratio / alone, 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        cells = (processes, row["examples_per_second"], row["times_first"], f"{row['efficiency']:.0%}")
        cells += (f"{row['adding_up_share']:.0%}", row["computing_slower"], f"{row['megabytes']:.0f}")
        table.add_row(*map(str, cells))
    Console().print(table)


if __name__ == "__main__":
    main()

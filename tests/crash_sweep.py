"""kill -9 at many points of every stage that takes long; the run is started again; the same bits come out.

    python tests/crash_sweep.py [POINTS [STAGE ...]]

Half of the points are calls that change the disk, spread evenly over all that the stage makes: the process kills itself just
before one. The other half are moments, spread evenly over the time the stage takes: another process kills it, in the middle of
whatever it is at. `make crash-sweep` takes 60 points a stage, the tests a few.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import torch

from calibeam import seq2seq, store
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, create, decode, evaluate, finetune, prepare, score
from conftest import sentence, tiny_model  # first: it sets the environment

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
ROWS = 24
decode.shards.SIZE = 4


def setup(work: Path) -> Path:
    """Data, a model, its candidates and their scores."""
    rows = [{"id": f"row-{i}", "source": sentence(i, 6 + i % 7), "target": sentence(i, 3)} for i in range(ROWS)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(work / "rows.jsonl")
    prepare.run(prepare.Config(output=str(work / "data"), train=file, validation=file, max_validation=6))
    tokenizer = create.train_tokenizer([sentence(seed, 20) for seed in range(50)], 300)
    seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), work / "model")
    for stage in ("decode", "score"):
        (work / "inputs").mkdir(exist_ok=True)
        STAGES[stage](work, work / "inputs" / stage)()
    return work


def stages(work: Path, output: Path, module: Any, **settings: Any) -> Callable[[], Path]:
    places = {"data": str(work / "data"), "model": str(work / "model"), "output": str(output), "device": "cpu"}
    return lambda: module.run(module.Config(**places, **settings))


TRAINING: dict[str, Any] = {
    "batch_size": 8, "micro_batch_size": 3, "max_steps": 6, "eval_steps": 3, "save_steps": 2, "learning_rate": 1e-2,
    "max_source_length": 20, "max_target_length": 8,
}  # fmt: skip
STAGES: dict[str, Callable[[Path, Path], Callable[[], Path]]] = {
    "finetune": lambda work, output: stages(work, output, finetune, **TRAINING),
    "decode": lambda work, output: stages(
        work, output, decode, num_candidates=3, max_new_tokens=6, max_source_length=20, batch_size=3, method="nucleus"
    ),
    "score": lambda work, output: stages(
        work, output, score, candidates=str(work / "inputs" / "decode"), batch_size=2, max_target_length=8
    ),
    "calibrate": lambda work, output: stages(
        work, output, calibrate, scored=str(work / "inputs" / "score"), select="perplexity", loss="reward", select_num_beams=1,
        select_examples=2, max_drift=0.0, **TRAINING,
    ),
    "evaluate": lambda work, output: stages(
        work, output, evaluate, num_candidates=(1, 2), max_new_tokens=6, max_source_length=20, max_target_length=8, batch_size=3
    ),
}  # fmt: skip


def child(work: Path, run: Callable[[], Path], *, at: int = 0, after: float = 0.0) -> tuple[int, int]:
    """Run in a process of its own, killed at a change of the disk or after some time. Its status, and the changes it made."""
    counted, said = work / "changes", work / "said"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            faulthandler.dump_traceback_later(300, exit=True)
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(file, stream)
            changes = 0

            def watch(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal changes
                ours = event == "open" and str(arguments[0]).startswith(str(work)) and "/out/" in str(arguments[0])
                if ours or event in CHANGES:
                    changes += 1
                    if changes == at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
            run()
            at = 0
            counted.write_text(str(changes))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    if after:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return status, int(counted.read_text()) if not status else 0


def contents(folder: Path) -> dict[str, Any]:
    """Every file, bit by bit; of the manifest, what does not say when or where it was made."""
    found: dict[str, Any] = {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
    manifest = json.loads(found.pop(store.MANIFEST))
    changing = {"started": "", "seconds": 0, "seal": ""}
    found[store.MANIFEST] = {**manifest, **changing, "settings": {**manifest["settings"], "output": ""}}
    return found


def check(work: Path, name: str, expected: dict[str, Any], **kill: Any) -> str:
    """Kill, start again, compare. What was found: killed, too late, or what is wrong."""
    output = work / "out" / name
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir()
    status, _ = child(work, STAGES[name](work, output), **kill)
    if status == 0:
        return "too late"
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        return "ended by itself: " + (work / "said").read_text(errors="replace")[-2000:]
    if output.exists():
        try:
            store.read(output, name)
        except CalibeamError as error:
            return f"half a result is at its place: {error}"
    status, _ = child(work, STAGES[name](work, output))
    said = (work / "said").read_text(errors="replace")
    if status:
        return f"the second run failed: {said[-2000:]}"
    if "is damaged" in said:
        return f"something torn was met: {said[-2000:]}"
    found = contents(output)
    if differing := [file for file in sorted({*found, *expected}) if found.get(file) != expected.get(file)]:
        return f"differs: {differing}"
    left = {file.name for file in output.parent.iterdir()} - {name, f".{name}.lock"}
    return f"left behind: {left}" if left else "killed"


def sweep(work: Path, name: str, points: int) -> dict[str, int]:
    output = work / "out" / name
    shutil.rmtree(output.parent, ignore_errors=True)
    started = time.monotonic()
    status, changes = child(work, STAGES[name](work, output))
    seconds = time.monotonic() - started
    assert status == 0, (work / "said").read_text(errors="replace")
    expected = contents(output)
    kills: list[dict[str, Any]] = [{"at": 1 + (2 * i + 1) * changes // points} for i in range(points // 2)]
    kills += [{"after": seconds * (i + 0.5) / (points - points // 2)} for i in range(points - points // 2)]
    results: dict[str, int] = {}
    for kill in kills:
        while (result := check(work, name, expected, **kill)) == "too late":
            kill = {"after": 0.8 * kill["after"]}  # other work may have slowed the first run down
        if result != "killed":
            print(f"{name}, {kill}: {result}", flush=True)
            result = "wrong"
        results[result] = results.get(result, 0) + 1
    print(f"{name:10} {changes:4} changes of the disk, {seconds:.1f} s undisturbed: {results}", flush=True)
    return results


def main() -> None:
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    with tempfile.TemporaryDirectory(prefix="calibeam-crash-") as folder:
        work = Path(folder)
        assert child(work, lambda: setup(work))[0] == 0, (work / "said").read_text()  # so that forks are from no thread's side
        found = [sweep(work, name, points) for name in sys.argv[2:] or STAGES]
    wrong = sum(result.get("wrong", 0) for result in found)
    print(f"{sum(result.get('killed', 0) for result in found)} kills, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

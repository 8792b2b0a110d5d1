"""SIGTERM and SIGINT in every stage that takes time: saved, said by the exit code, and gone on with to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import calibeam
from calibeam import display, seq2seq, signals, store
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, decode, evaluate, finetune, prepare, score
from conftest import sentence, tiny_model

TRAINING: dict[str, Any] = {
    "batch_size": 4, "max_steps": 4, "eval_steps": 2, "save_steps": 1000, "learning_rate": 1e-2, "max_source_length": 20,
    "max_target_length": 6, "select": "perplexity", "select_num_beams": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Data, a model, candidates and scores; what every stage makes undisturbed is under `whole`."""
    folder = tmp_path_factory.mktemp("signals")
    rows = [{"id": f"row-{i}", "source": sentence(i, 6 + i % 5), "target": sentence(i, 3)} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(folder / "rows.jsonl")
    prepare.run(prepare.Config(output=str(folder / "data"), train=file, validation=file, max_validation=2))
    seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.shards, "SIZE", 3)
        for name in ("decode", "score", "finetune", "calibrate"):
            run(folder, name, folder / "whole" / name)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.shards, "SIZE", 3)


def run(work: Path, name: str, output: Path, **changes: Any) -> Path:
    own: dict[str, Any] = {
        "decode": {"num_candidates": 2, "max_new_tokens": 6, "max_source_length": 20, "batch_size": 2},
        "score": {"candidates": str(work / "whole/decode"), "batch_size": 2},
        "finetune": TRAINING,
        "calibrate": {"scored": str(work / "whole/score"), "max_drift": 0.0, **TRAINING},
    }
    module = {"decode": decode, "score": score, "finetune": finetune, "calibrate": calibrate}[name]
    config = module.Config(
        output=str(output), **{"data": str(work / "data"), "model": str(work / "model"), "device": "cpu"} | own[name] | changes
    )
    return module.run(config)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != store.MANIFEST
    }


def signalled(patch: pytest.MonkeyPatch, place: Any, name: str, number: signal.Signals, call: int) -> None:
    """This process gets a signal at some call of a function."""
    function, calls = getattr(place, name), itertools.count(1)

    def wrapped(*given: Any, **named: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return function(*given, **named)

    patch.setattr(place, name, wrapped)


@pytest.mark.parametrize(
    ("number", "name", "place", "function", "call", "left"),
    [
        (signal.SIGINT, "finetune", store.Output, "append_log", 3, "checkpoint-000000002"),  # 0 validated, 1, and here: step 2
        (signal.SIGTERM, "finetune", evaluate.Validation, "measure", 2, "checkpoint-000000002"),
        (signal.SIGTERM, "calibrate", store.Output, "append_log", 2, "checkpoint-000000001"),
        (signal.SIGINT, "calibrate", evaluate.Validation, "measure", 1, ""),  # before anything was done
        (signal.SIGTERM, "decode", display.Bar, "advance", 5, "candidates-00000"),
        (signal.SIGINT, "decode", display.Bar, "advance", 1, ""),
        (signal.SIGTERM, "score", display.Bar, "advance", 3, "scored-00000"),
    ],
    ids=["finetune", "finetune while validating", "calibrate", "calibrate before it begins", "decode", "decode first", "score"],
)
def test_fault_02_a_stage_that_is_told_to_stop_keeps_what_it_did_and_goes_on_to_the_same_bits(
    number: signal.Signals, name: str, place: Any, function: str, call: int, left: str, work: Path, tmp_path: Path
) -> None:
    output = tmp_path / name
    with pytest.MonkeyPatch.context() as patch, signals.listening():
        signalled(patch, place, function, number, call)
        with pytest.raises(signals.Stopped) as stopped:
            run(work, name, output)
    assert stopped.value.exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert not output.exists()
    kept = [file.stem for file in (tmp_path / f".{name}.partial").iterdir() if file.suffix in (".safetensors", ".parquet")]
    assert kept == ([left] if left else [])
    assert contents(run(work, name, output)) == contents(work / "whole" / name)


@pytest.mark.parametrize("name", ["finetune"])
def test_fault_13_one_two_and_three_interruptions_in_one_epoch_change_nothing(name: str, work: Path, tmp_path: Path) -> None:
    """The last at the last step, after it is trained and before it is validated."""
    output = tmp_path / name
    for call in (2, 1, 2):  # in steps 1, 2 and, after its validation, 3
        with pytest.MonkeyPatch.context() as patch, signals.listening():
            signalled(patch, store.Output, "append_log", signal.SIGTERM, call)
            with pytest.raises(signals.Stopped):
                run(work, name, output)
    assert contents(run(work, name, output)) == contents(work / "whole" / name)


@pytest.mark.parametrize("call", [1, 3], ids=["before step 1", "at the last step"])
def test_fault_14_a_run_stopped_at_a_border_loses_and_repeats_nothing(call: int, work: Path, tmp_path: Path) -> None:
    """Where epochs begin and end there are validations: the third is after the last step. The second is above."""
    with pytest.MonkeyPatch.context() as patch, signals.listening():
        signalled(patch, evaluate.Validation, "measure", signal.SIGTERM, call)
        with pytest.raises(signals.Stopped):
            run(work, "finetune", tmp_path / "out")
    assert contents(run(work, "finetune", tmp_path / "out")) == contents(work / "whole" / "finetune")


def test_fault_12_and_15_a_run_goes_on_with_what_it_began_with_or_not_at_all(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another batch, other versions and another model are refused; how many examples go through the model at once is not."""
    output, versions = tmp_path / "out", store.versions()
    with pytest.MonkeyPatch.context() as patch, signals.listening():
        signalled(patch, store.Output, "append_log", signal.SIGTERM, 3)
        with pytest.raises(signals.Stopped):
            run(work, "finetune", output)
    with pytest.raises(
        CalibeamError, match=r"interrupted, of another making:\n  settings\.batch_size: 4 there, 8 now\nPass --force"
    ):
        run(work, "finetune", output, batch_size=8)
    with pytest.raises(CalibeamError, match=r"  inputs\.model: '.*' there, '.*' now"):
        run(work, "finetune", output, model=str(work / "whole/calibrate"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "versions", lambda: {**versions, "torch": "1.13"})
        with pytest.raises(CalibeamError, match=r"\n  versions\.torch: '.*' there, '1\.13' now"):
            run(work, "finetune", output)
    resumed = run(work, "finetune", output, micro_batch_size=1)
    steps = [[json.loads(line) for line in (folder / "log.jsonl").open()] for folder in (resumed, work / "whole/finetune")]
    assert [record["step"] for record in steps[0]] == [record["step"] for record in steps[1]]


def test_a_signal_waits_for_what_is_postponed_and_handlers_are_put_back() -> None:
    before, done = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with signals.postponed():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(signals.asked())

    with signals.listening():
        for _ in range(2):  # a signal that something swallowed is found again
            with pytest.raises(signals.Stopped, match="SIGTERM"):
                work()
    assert done == [signal.SIGTERM, signal.SIGTERM]
    assert not signals.asked()
    assert signal.getsignal(signal.SIGTERM) is before


# As a user sees it

SLOW = """
import sys, time
from calibeam import cli, store
append, pause = store.Output.append_log, float(sys.argv.pop())
def slowly(self, record):
    append(self, record)
    print("at", record["step"], flush=True)
    if record["step"] == 1:
        time.sleep(pause)
store.Output.append_log = slowly
cli.main()
"""


def command(work: Path, output: Path, pause: str) -> Any:
    settings = {**TRAINING, "data": str(work / "data"), "model": str(work / "model"), "output": str(output), "device": "cpu"}
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", SLOW, "finetune", *(f"{key}={value}" for key, value in settings.items()), pause]
    return subprocess.Popen(  # noqa: S603
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(process: Any, line: str) -> None:
    while process.stdout.readline().strip() != line:
        assert process.poll() is None


def test_fault_02_a_process_that_gets_sigterm_ends_with_143_and_says_how_to_go_on(work: Path, tmp_path: Path) -> None:
    with command(work, tmp_path / "out", "1") as process:
        until(process, "at 1")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "error: stopped by SIGTERM. Nothing half-written is left behind; the same command goes on from here" in said
    assert [file.name for file in (tmp_path / ".out.partial").glob("checkpoint-*")] == ["checkpoint-000000001.safetensors"]
    assert contents(run(work, "finetune", tmp_path / "out")) == contents(work / "whole" / "finetune")


SEARCH = {"max_new_tokens": 6, "max_source_length": 20, "device": "cpu"}
COMPARED = {"before": "{work}/cli/evaluate", "after": "{work}/cli/after", "calibrated": "{work}/whole/calibrate"}
PLACES = {"data": "{work}/data", "model": "{work}/model"}
COMMANDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "prepare": (5, "data", {"train": "{work}/rows.jsonl", "validation": "{work}/rows.jsonl", "max_validation": 2}),
    "create": (4, "", {"data": "{work}/data", "vocab_size": 280, "d_model": 8, "num_heads": 1, "ffn_dim": 8}),
    "finetune": (20, "whole/finetune", {**PLACES, **TRAINING, "device": "cpu"}),
    "decode": (12, "whole/decode", {**PLACES, **SEARCH, "num_candidates": 2, "batch_size": 2}),
    "score": (12, "whole/score", {**PLACES, "candidates": "{work}/whole/decode", "batch_size": 2, "device": "cpu"}),
    "calibrate": (20, "whole/calibrate", {**PLACES, **TRAINING, "scored": "{work}/whole/score", "max_drift": 0, "device": "cpu"}),
    "evaluate": (16, "cli/evaluate", {**PLACES, **SEARCH, "num_candidates": "[1,2]"}),
    "report": (4, "", COMPARED),
    "export": (4, "", COMPARED),
}  # fmt: skip
"""Of every stage: the change of the disk at which it is stopped, what an undisturbed run made, if one was there, and settings."""


def settings_of(work: Path, stage: str) -> dict[str, Any]:
    return {key: value.format(work=work) if isinstance(value, str) else value for key, value in COMMANDS[stage][2].items()}


Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def in_a_process() -> Iterator[Run]:
    """The command line as in `signalled.py`: its exit code, and what it said."""
    path = os.pathsep.join((str(Path(calibeam.__file__).parents[1]), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(Path(__file__).parent / "signalled.py")]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603
        assert server.stdin is not None
        assert server.stdout is not None
        asked, told = server.stdin, server.stdout

        def ask(output: Path, stage: str, settings: dict[str, Any], *, at: int = 0, number: int = 0) -> tuple[int, str]:
            said = output.with_suffix(".said")
            line = [stage, f"output={output}", *(f"{key}={value}" for key, value in settings.items())]
            asked.write(
                json.dumps({"line": line, "watched": f".{output.name}.partial", "said": str(said), "at": at, "number": number})
            )
            asked.write("\n")
            asked.flush()
            return int(told.readline()), said.read_text()

        yield ask
        asked.close()


@pytest.fixture(scope="module")
def evaluated(work: Path, in_a_process: Run) -> Path:
    """What report and export read."""
    (work / "cli").mkdir()
    sides = {"evaluate": {}, "after": {"model": str(work / "whole/calibrate"), "reference": str(work / "model")}}
    for name, more in sides.items():
        code, said = in_a_process(work / "cli" / name, "evaluate", settings_of(work, "evaluate") | more)
        assert code == 0, said
    return work


@pytest.mark.parametrize("stage", COMMANDS)
def test_fault_02_and_04_every_stage_ends_by_either_signal_and_goes_on_to_the_same_bytes(
    stage: str, evaluated: Path, in_a_process: Run, tmp_path: Path
) -> None:
    """SIGTERM, then SIGINT at the same number of changes further on (or from the beginning), then to the end."""
    at, made, settings = COMMANDS[stage][0], evaluated / COMMANDS[stage][1], settings_of(evaluated, stage)
    output = tmp_path / "out" / stage
    output.parent.mkdir()
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        code, said = in_a_process(output, stage, settings, at=at, number=number)
        assert (code, f"stopped by {number.name}" in said) == (expected, True), said
        assert not output.exists()
    code, said = in_a_process(output, stage, settings)
    assert code == 0, said
    if not COMMANDS[stage][1]:
        (tmp_path / "whole").mkdir()
        made = tmp_path / "whole" / stage
        assert in_a_process(made, stage, settings)[0] == 0
    assert contents(output) == contents(made)


HELD_UP = """
import time
from calibeam import signals
with signals.listening(), signals.postponed():
    print("at it", flush=True)
    while True:
        time.sleep(0.1)
"""


def test_fault_04_a_second_sigint_stops_at_once() -> None:
    """The first would wait for what never ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", HELD_UP], env=environment, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        until(process, "at it")
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - started < 5


# Processes that work for others

WORKER = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from calibeam import signals
import os
if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), signals.leave_to_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_fault_09_a_worker_ignores_signals_and_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1])}
    with subprocess.Popen(  # noqa: S603
        [sys.executable, str(tmp_path / "parent.py")], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGINT)
        time.sleep(0.2)
        assert is_alive(worker)
        parent.kill()
    wait_for(lambda: not is_alive(worker))

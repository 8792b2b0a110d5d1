"""SIGTERM and SIGINT in every stage that takes time: saved, said by the exit code, and gone on with to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import calibeam
import forked
from calibeam import display, recipe, seq2seq, signals, stages, store
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
    with pytest.raises(CalibeamError, match=r"interrupted, with other .*:\n  settings\.batch_size: 4 before, 8 now\n--force"):
        run(work, "finetune", output, batch_size=8)
    with pytest.raises(CalibeamError, match=r"\n  .*: other contents\n"):
        run(work, "finetune", output, model=str(work / "whole/calibrate"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "versions", lambda: {**versions, "torch": "1.13"})
        with pytest.raises(CalibeamError, match=r"\n  versions\.torch: '.*' before, '1\.13' now"):
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

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir")


def halting(line: list[str], watched: str, at: int) -> None:
    """The command line, which halts just before the change `at` of what is watched, so that a signal comes at that very point."""
    decode.shards.SIZE = 3
    changes = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        if event in CHANGES and watched in str(arguments[0]):
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(watch)
    forked.command(*line)


def in_a_process(
    output: Path, stage: str, settings: dict[str, Any], number: signal.Signals | None = None, at: int = 0
) -> tuple[int, str]:
    """A stage as a command that may get a signal at one point: its exit code, and what it said."""
    line = [stage, f"output={output}", *(f"{key}={value}" for key, value in settings.items())]
    with forked.Process(output.parent, halting, line, f".{output.name}.partial", at) as process:
        if number:
            process.wait_until(process.is_halted)
            process.signal(number)
            process.signal(signal.SIGCONT)
        sent = time.monotonic()
        while number == signal.SIGTERM and process.is_alive():  # more of them change nothing
            process.signal(number)
            time.sleep(0.01)
        code = process.end()
        assert not number or time.monotonic() - sent < GRACE
        return code, "".join(process.said())


GRACE = 30
"""Seconds that torchrun and Kubernetes leave a process before they kill it; the tiny stages here take one or two."""
SEARCH = {"max_new_tokens": 6, "max_source_length": 20, "device": "cpu"}
COMPARED = {"before": "{work}/cli/evaluate", "after": "{work}/cli/after", "calibrated": "{work}/whole/calibrate"}
UNSELECTED = {key: value for key, value in TRAINING.items() if "select" not in key}
SIZES = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 1, "ffn_dim": 8, "max_position_embeddings": 32}
PLACES = {"data": "{work}/data", "model": "{work}/model"}
COMMANDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tokenizer": (2, "cli/tokenizer", {"files": '["{work}/documents.txt"]', "vocab_size": 320}),
    "pretrain": (20, "", {
        **UNSELECTED, "files": '["{work}/documents.txt"]', "model": "{work}/cli/masked", "device": "cpu",
        "workers": 0, "buffer_size": 20,
    }),
    "prepare": (5, "data", {"train": "{work}/rows.jsonl", "validation": "{work}/rows.jsonl", "max_validation": 2}),
    "create": (4, "", {**SIZES, "data": "{work}/data", "vocab_size": 280}),
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
    return {
        key: value.replace("{work}", str(work)) if isinstance(value, str) else value for key, value in COMMANDS[stage][2].items()
    }


@pytest.fixture(scope="module")
def evaluated(work: Path) -> Path:
    """What report, export and pretrain read."""
    (work / "cli").mkdir()
    documents = [". ".join(sentence(10 * i + j, 3 + j).capitalize() for j in range(4)) + "." for i in range(30)]
    (work / "documents.txt").write_text("\n\n".join(documents))
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "evaluate": ("evaluate", {}),
        "after": ("evaluate", {"model": str(work / "whole/calibrate"), "reference": str(work / "model")}),
        "tokenizer": ("tokenizer", {}),
        "masked": ("create", {"tokenizer": str(work / "cli/tokenizer"), "data": ""}),
    }
    for name, (stage, more) in made.items():
        code, said = in_a_process(work / "cli" / name, stage, settings_of(work, stage) | more)
        assert code == 0, said
    return work


@pytest.mark.parametrize("stage", COMMANDS)
def test_fault_02_and_04_every_stage_ends_by_either_signal_and_goes_on_to_the_same_bytes(
    stage: str, evaluated: Path, tmp_path: Path
) -> None:
    """SIGTERM, then SIGINT at the same number of changes further on (or from the beginning), then to the end."""
    at, made, settings = COMMANDS[stage][0], evaluated / COMMANDS[stage][1], settings_of(evaluated, stage)
    output = tmp_path / "out" / stage
    output.parent.mkdir()
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        code, said = in_a_process(output, stage, settings, number, at)
        assert code == expected, said
        assert (
            f"error: stopped by {number.name}. Nothing half-written is left behind; run the same command again to resume" in said
        )
        assert not output.exists()
    code, said = in_a_process(output, stage, settings)
    assert code == 0, said
    if not COMMANDS[stage][1]:
        given = [f"{key}={value}" for key, value in {**settings, "output": tmp_path / "again/out" / stage}.items()]
        config = recipe.build(stages.load(stage).Config, stage, recipe.override({}, given, table=stage)[stage])
        made = stages.load(stage).run(config)
    assert contents(output) == contents(made)


# Without what takes seconds to import

HELD_UP = """
with signals.listening(), signals.postponed():
    print("at it", flush=True)
    while True:
        time.sleep(0.1)
"""
DEAF = """
with signals.listening():
    try:
        signals.aside(lambda: (print("at it", flush=True), hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)))
    except signals.Stopped as stop:
        sys.exit(stop.exit_code)
"""


@contextmanager
def script(code: str) -> Iterator[subprocess.Popen[str]]:
    """At work, when it has said so."""
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1])}
    line = [sys.executable, "-c", f"import hashlib, sys, time\nfrom calibeam import signals\n{code}"]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stdout.readline() == "at it\n"
        yield process


def test_fault_04_a_second_sigint_stops_at_once() -> None:
    """The first would wait for what never ends."""
    with script(HELD_UP) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 130


def test_fault_02_a_library_that_hears_no_signal_is_not_waited_for() -> None:
    """As those that train vocabularies. This one would take minutes."""
    with script(DEAF) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 143


def test_a_process_that_waits_for_others_to_be_started_hears_signals(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    line = ("finetune", "output=x")
    with forked.Process(tmp_path, forked.command, *line, environment={**os.environ, **given}) as waiting:
        said = tmp_path / "stdout"
        waiting.wait_until(lambda: said.exists() and "waiting for all of 2 processes" in said.read_text())
        time.sleep(0.3)
        waiting.signal(signal.SIGTERM)
        assert waiting.end(20) == 143


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

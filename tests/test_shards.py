"""Shards by two processes that were started together, and by workers of a real Ray cluster, of which some fail or die: the bytes
that one process writes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import calibeam
import forked
from calibeam import pipeline, seq2seq, shards, store
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import decode, evaluate, score
from conftest import prepared, tiny_model

COUNT, SIZE = 81, 2
NUMBER = 41
SETTINGS: dict[str, Any] = {
    "method": "nucleus", "top_p": 0.9, "num_candidates": 4, "max_new_tokens": 12, "max_source_length": 20, "device": "cpu",
}  # fmt: skip
EVALUATED: dict[str, Any] = {
    "num_candidates": (2,), "max_new_tokens": 6, "max_source_length": 20, "max_examples": 5, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SIZE", SIZE)
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("shards")
    data = prepared(folder, COUNT, words=4, max_validation=1)
    seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), folder / "model")
    return {"data": data, "model": str(folder / "model")}


@pytest.fixture(scope="module")
def in_process(places: dict[str, str]) -> Path:
    return decode.run(decode.Config(output=str(Path(places["data"]).with_name("decode")), **places, **SETTINGS))


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Three nodes with room for a worker each: the head, one that may go, and one to take its place."""
    short = tempfile.mkdtemp(prefix="r-")  # not in the folder of the test: the names of sockets must be short
    memory = {"object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", short)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for the other tests
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("PYTHONPATH", f"{Path(calibeam.__file__).parents[1]}:{Path(__file__).parent}")
        ray = pytest.importorskip("ray")
        from ray.cluster_utils import Cluster

        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
        started = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": quick, **memory},
        )
        for _ in range(2):
            started.add_node(num_cpus=1, **memory)
        ray.init(address=started.address, log_to_driver=False)
        yield started
        ray.shutdown()
        started.shutdown()
    shutil.rmtree(short, ignore_errors=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.parquet")}


def workers(node: Any) -> list[int]:
    """The processes of a node that make shards."""
    import psutil

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [child.pid for child in raylet.children() if "MapWorker" in " ".join(child.cmdline())]


def disturb(folder: Path, events: list[tuple[int, Callable[[], object]]]) -> threading.Thread:
    """When so many shards are there, something happens."""

    def watch() -> None:
        for number, event in events:
            while len(list(folder.glob("*.parquet"))) < number:
                time.sleep(0.005)
            event()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def pairs_of_letters(candidates: Any, targets: Any) -> Any:
    """A similarity of the user's own."""
    import torch

    return torch.tensor([
        [float(len(set(pairwise(text)) & set(pairwise(wanted)))) for text in texts]
        for texts, (wanted,) in zip(candidates.texts, targets.texts, strict=True)
    ])  # fmt: skip


def in_small_shards(*line: str) -> None:
    """The command line."""
    shards.SIZE = SIZE
    forked.command(*line)


def test_fault_09_a_worker_and_a_node_die_and_nothing_is_lost_or_different(
    cluster: Any, places: dict[str, str], in_process: Path, tmp_path: Path
) -> None:
    """Then a run of the command line is told to stop, and the other engine finishes it; then candidates are scored."""
    config = decode.Config(output=str(tmp_path / "decode"), engine="ray", workers=2, **places, **SETTINGS)
    partial, died = tmp_path / ".decode.partial", dict[str, Any]()

    def kill() -> None:
        died["worker"], *_ = workers(cluster.head_node) or workers(next(iter(cluster.worker_nodes)))
        os.kill(died["worker"], signal.SIGKILL)

    def remove() -> None:
        died["done"] = len(list(partial.glob("*.parquet")))
        node = next(node for node in cluster.worker_nodes if set(workers(node)) - {died["worker"]})
        cluster.remove_node(node, allow_graceful=False)
        died["node"] = node

    thread = disturb(partial, [(3, kill), (8, remove)])
    folder = decode.run(config)
    thread.join(1)
    assert died["node"] not in cluster.worker_nodes
    assert died["done"] < NUMBER
    assert len(contents(in_process)) == NUMBER
    assert contents(folder) == contents(in_process)
    found, expected = (store.read(each, "decode").manifest for each in (folder, in_process))
    assert (found["counts"], found["digest"]) == (expected["counts"], expected["digest"])
    assert found["counts"]["sources"] == COUNT

    stopped = tmp_path / "stopped"
    one = {"engine": "ray", "workers": 1}
    settings = [f"{key}={value}" for key, value in {**places, **SETTINGS, "output": stopped, **one}.items()]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    with forked.Process(tmp_path, in_small_shards, "decode", *settings, environment=environment) as child:
        disturb(tmp_path / ".stopped.partial", [(3, lambda: child.signal(signal.SIGTERM))])
        assert child.end(300) == 128 + signal.SIGTERM, child.said()
    left = {file.name: file.stat().st_mtime_ns for file in (tmp_path / ".stopped.partial").glob("*.parquet")}
    assert 3 <= len(left) < NUMBER
    decode.run(decode.Config(output=str(stopped), **places, **SETTINGS))
    assert contents(stopped) == contents(in_process)
    assert {name: (stopped / name).stat().st_mtime_ns for name in left} == left

    similar = {"candidates": str(in_process), "device": "cpu", "similarity": pairs_of_letters, "workers": 1, **places}
    scored = [score.run(score.Config(output=str(tmp_path / engine), engine=engine, **similar)) for engine in shards.ENGINES]
    assert contents(scored[0]) == contents(scored[1])
    counts = [store.read(each, "score").manifest["counts"] for each in scored]
    assert counts[0] == counts[1]
    assert 0 < counts[0]["likelihood_agrees"] < 1

    how = {**EVALUATED, "workers": 1}
    evaluated = [evaluate.run(evaluate.Config(output=str(tmp_path / "local-evaluate"), **how, **places))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seq2seq, "load", None)  # the process that asks may have no GPU
        evaluated.append(evaluate.run(evaluate.Config(output=str(tmp_path / "ray-evaluate"), engine="ray", **how, **places)))
    assert contents(evaluated[0]) == contents(evaluated[1])
    assert len(contents(evaluated[0])) == 3 * 3
    assert len({(each / "results.json").read_bytes() for each in evaluated}) == 1


TOGETHER = """
import errno, json, os, sys, time
from pathlib import Path
from calibeam import cli, shards

failing, *lines = json.loads(sys.argv[1])
rank, made, make, shards.SIZE = int(os.environ["RANK"]), [], shards.make, failing["size"]

def observed(maker, table, shard, *others):
    made.append(shard)
    if rank == 1 and len(made) == failing["at"]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if len(made) == 1:  # neither is done before the other has begun
        mine, theirs = (Path(f"began-{failing['at']}-{line[0]}-{number}") for number in (rank, 1 - rank))
        mine.touch()
        while not theirs.exists():
            time.sleep(0.01)
    return make(maker, table, shard, *others)

shards.make = observed
for line in lines:
    made.clear()
    sys.argv = ["calibeam", *line]
    try:
        cli.main()
    except SystemExit as end:
        os.write(1, f"{line[0]} {rank} ends with {end.code}, made {json.dumps(made)}\\n".encode())
"""


def test_two_processes_share_out_the_shards_and_go_on_where_one_failed(
    places: dict[str, str], in_process: Path, tmp_path: Path
) -> None:
    """As torchrun starts them: `decode` meets with a full disk in the second and is started again, then what it wrote is scored,
    and a model evaluated."""
    settings: dict[str, dict[str, Any]] = {
        "decode": {**places, **SETTINGS, "output": tmp_path / "decode"},
        "score": {**places, "candidates": in_process, "device": "cpu", "output": tmp_path / "score"},
        "evaluate": {**places, **EVALUATED, "output": tmp_path / "evaluate"},
    }
    lines = {name: [name, *(f"{key}={as_typed(value)}" for key, value in own.items())] for name, own in settings.items()}
    alone = {
        "decode": in_process,
        "score": score.run(score.Config(**{**settings["score"], "candidates": str(in_process), "output": str(tmp_path / "one")})),
        "evaluate": evaluate.run(evaluate.Config(**places, **EVALUATED, output=str(tmp_path / "one-evaluate"))),
    }
    script = tmp_path / "script.py"
    script.write_text(TOGETHER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(failing: int, *names: str) -> dict[str, list[list[int]]]:
        """What each of the two made, if it ended well."""
        given = json.dumps([{"size": SIZE, "at": failing}, *(lines[name] for name in names)])
        ended = forked.run_several(2, script, [given], environment, seconds=240)
        said = re.findall(r"(\w+) \d ends with (\d), made (.*)", ended.stdout)
        assert len(said) == 2 * len(names), ended
        assert {code for _, code, _ in said} == {"2" if failing else "0"}, ended
        problem = f"error: {tmp_path / 'decode'} cannot be written: No space left on device"
        assert ended.stderr.count("error: ") == ended.stderr.count(problem) == bool(failing)
        return {name: [json.loads(made) for stage, _, made in said if stage == name] for name in names}

    assert 5 in map(len, start(5, "decode")["decode"])
    left = {file.name: file.stat().st_mtime_ns for file in (tmp_path / ".decode.partial").glob("*.parquet")}
    assert 4 < len(left) < NUMBER
    for name, (mine, theirs) in start(0, "decode", "score", "evaluate").items():
        assert sorted([*mine, *theirs]) == [*range(3 if name == "evaluate" else NUMBER)]
        assert min(mine, theirs, key=len)
        whole = tmp_path / name
        assert contents(whole) == contents(alone[name])
        found, expected = (store.read(folder, name).manifest for folder in (whole, alone[name]))
        assert (found["counts"], found["notes"], found["digest"]) == (expected["counts"], expected["notes"], expected["digest"])
    assert {name: (tmp_path / "decode" / name).stat().st_mtime_ns for name in left} == left
    assert len({(each / "results.json").read_bytes() for each in (tmp_path / "evaluate", alone["evaluate"])}) == 1


def as_typed(value: Any) -> str:
    """On a command line."""
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


class Deadly:
    """A maker whose worker dies."""

    def inputs(self, number: int) -> dict[str, Any]:
        return {f"row-{number}": ""}

    def make(self, inputs: dict[str, Any], advance: Callable[..., None]) -> Any:
        raise MemoryError


def test_a_worker_says_what_a_user_can_mend(tmp_path: Path) -> None:
    table, versions = store.Shards(tmp_path, "candidates", store.CANDIDATES), store.versions()
    worker = shards.Worker(Deadly(), table, 1, versions)  # type: ignore[arg-type]
    for _ in range(shards.MOST_TRIES):
        with pytest.raises(MemoryError):
            worker({"shard": 7})
    assert "shard 7 was started 5 times, and each time its worker died" in worker({"shard": 7})["problem"]
    table.write(7, [{"id": "row-7"}], {"counts": {}, "notes": []})
    assert not worker({"shard": 7})["problem"]  # another worker has made it
    other = shards.Worker(Deadly(), table, 1, {**versions, "torch": "1.0"})  # type: ignore[arg-type]
    assert "and 1.0 where the run was started" in other({"shard": 0})["problem"]
    away = store.Shards(tmp_path / "elsewhere", "candidates", store.CANDIDATES)
    assert "must have the same storage" in shards.Worker(Deadly(), away, 1, versions)({"shard": 0})["problem"]  # type: ignore[arg-type]


def test_without_ray_the_extra_is_named_before_any_stage_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    files = {"train": "train.jsonl", "validation": "validation.jsonl"}
    with pytest.raises(CalibeamError, match=r"score.engine=ray needs Ray .* pip install 'calibeam\[ray\]'"):
        pipeline.plan({"output": "out", "model": "model", "prepare": files, "score": {"engine": "ray"}})

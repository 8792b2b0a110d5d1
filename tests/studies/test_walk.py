"""Steps of a study several at once, as a user asks for it: what comes out is what one after the other gives."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import forked
from calibeam import store, studies
from calibeam.records import CalibeamError
from calibeam.studies.plan import Point
from calibeam.studies.walk import Agenda, Workers, walk
from conftest import TINY_RECIPE, sentence

RECIPE = f"""
max_source_length = 24
max_target_length = 8
{TINY_RECIPE}[finetune]
learning_rate = 1e-2
batch_size = 16
max_steps = 60
eval_steps = 20
[decode]
num_candidates = 3
[calibrate]
batch_size = 16
max_steps = 2
[study]
learning_rates = [1e-3, 1e-2]
alphas = [0.0, 1.0]
num_beams = 2
calibrated_num_beams = 3
"""
COMMAND = ["study", "final", "recipe.toml", "--jobs", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, first, count in (("train", 0, 32), ("validation", 100, 12)):
        sources = [sentence(i, 4) for i in range(first, first + count)]
        rows = ({"source": source, "target": f"the {source.split()[0]} ran over"} for source in sources)
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.toml").write_text(RECIPE)
    return tmp_path


def at_work(process: int) -> Iterator[int]:
    """Its workers, and theirs."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from at_work(child)


def found(root: str) -> tuple[Any, dict[str, str]]:
    """The table, and the digest of every step."""
    steps = {file.parent.name: json.loads(file.read_text())["digest"] for file in Path(root, "steps").glob(f"*/{store.MANIFEST}")}
    return json.loads(Path(root, "final/table.json").read_text())["records"], steps


def test_several_at_once_end_as_one_after_the_other_even_when_stopped_on_their_way(place: Path) -> None:
    with forked.Process(place, forked.command, *COMMAND, environment=ENVIRONMENT, cwd=place) as process:
        process.wait_until(lambda: any(place.glob("out/steps/.finetune-*/checkpoint-*")))
        workers = [*at_work(process.pid)]
        process.signal(signal.SIGTERM)
        assert process.end() == 128 + signal.SIGTERM
        said = process.said()
        assert "stopped by SIGTERM" in said[1]
        assert "Traceback" not in "".join(said)
    assert len(workers) >= 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert not Path("out/final").exists()

    again = forked.run(COMMAND, ENVIRONMENT, place, 240)
    assert (again.returncode, again.stderr) == (0, "")
    assert "final: out/final/table.md" in again.stdout
    several = found("out")
    shutil.move("out", "several")
    one = forked.run(COMMAND[:-2], ENVIRONMENT, place, 240)
    assert one.returncode == 0, one.stderr
    assert found("out") == several


def test_what_fails_is_told_with_its_step_and_the_others_go_on(place: Path) -> None:
    """Of two studies, one has a row that needs what failed; the other has all of its rows."""
    from calibeam import recipe

    _, _, rows = studies.plan("final", recipe.read(Path("recipe.toml")))
    obstacle = Path(rows[1].points[0].measured.config.model)
    obstacle.mkdir(parents=True)
    (obstacle / "something else").touch()
    alone = [*COMMAND[:1], "final,length", *COMMAND[2:], "study.length.learning_rates=[1e-4]", "study.length.alphas=[1.0]"]
    ended = forked.run(alone, ENVIRONMENT, place, 240)
    assert ended.returncode == 2
    assert f"calibrate -> {obstacle}: {obstacle} is in use" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "What does not need this goes on" in ended.stdout
    assert not Path("out/final").exists()
    assert [record["slic"] for record in studies.read(Path("out/length"))] == ["no", "no", "yes", "yes"]


def test_a_table_that_fails_keeps_no_other_from_being_made(place: Path) -> None:
    """Of two studies that end with the same step."""
    from calibeam import recipe

    every = [studies.plan(name, recipe.read(Path("recipe.toml")))[-1][:1] for name in ("length", "length")]
    told = []

    def measured(number: int, points: Sequence[Point]) -> None:
        told.append((number, len(points)))
        if number == 0:
            raise CalibeamError("no room for the table")

    errors = walk(every, measured, jobs=2)
    assert [str(error) for error in errors] == ["no room for the table"]
    assert told == [(0, 1), (1, 1)]


def test_a_worker_that_dies_is_told(place: Path) -> None:
    with forked.Process(place, forked.command, *COMMAND, environment=ENVIRONMENT, cwd=place) as process:
        process.wait_until(lambda: any(place.glob("out/steps/.finetune-*")))
        for worker in at_work(process.pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        assert process.end() == 2
        said = " ".join(process.said()[1].split())
    assert "its process has died" in said
    assert "Traceback" not in said


def test_a_worker_that_died_idle_is_replaced(place: Path) -> None:
    from calibeam import recipe

    agenda = Agenda([studies.plan("final", recipe.read(Path("recipe.toml")))[-1]])
    step = agenda.begin()
    assert step is not None
    with Workers(1) as workers:
        (idle,) = workers._free
        idle._process.kill()
        idle._process.join()
        workers.start(step, force=False)
        assert [*workers.finished()] == [(step, None)]
    assert Path(step.config.output, store.MANIFEST).is_file()


def test_a_folder_in_use_is_refused_before_any_step(place: Path) -> None:
    from calibeam import recipe

    Path("out/length").mkdir(parents=True)
    Path("out/length/something else").touch()
    with pytest.raises(CalibeamError, match="out/length is in use"):
        studies.run("final,length", recipe.read(Path("recipe.toml")))
    assert not Path("out/steps").exists()


def test_several_studies_have_folders_of_their_own(place: Path) -> None:
    from calibeam import recipe

    with pytest.raises(CalibeamError, match=r"study\.output is one folder for several studies"):
        studies.run("final,length", recipe.override(recipe.read(Path("recipe.toml")), ["study.output=out/both"]))


def test_several_processes_and_jobs_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from calibeam import distributed, recipe

    monkeypatch.setattr(distributed, "size", lambda: 2)
    with pytest.raises(CalibeamError, match="without torchrun"):
        studies.run("final", recipe.read(Path("recipe.toml")), jobs=2)

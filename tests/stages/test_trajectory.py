"""Fifty steps of calibration beside the figures of an earlier day, in trajectory.json: no step may drift unnoticed.

Nothing hangs on what may change from one machine or release to another but rounding: weights are drawn here, words
are tokens, candidates and similarities are made up, and all pairs of candidates count. Weights that are a millionth
off move no figure by more than a tenth of the tolerance; 1% more beta, lambda or learning rate moves some by 4 to 500
times as much as it allows. A change that is meant to alter the figures writes them anew, to be read and committed:

    PYTHONPATH=src:tests python tests/stages/test_trajectory.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from calibeam import seq2seq, store
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import calibrate, prepare, score
from conftest import model_of_words, sentence

COMMITTED = Path(__file__).with_name("trajectory.json")
STEPS, ROWS, CANDIDATES = 50, 8, 4
RUNS: dict[str, dict[str, Any]] = {
    "list_rank, kl": {"loss": "list_rank", "beta": 4.0, "regularizer": "kl"},
    "rank, kl": {"loss": "rank", "beta": 10.0, "regularizer": "kl"},
    "reward, cross_entropy": {"loss": "reward", "regularizer": "cross_entropy"},
}
FIGURES = ("loss", "calibration", "regularization", "agreement")


def trajectories(work: Path, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """What every step of the runs logs."""
    model = model_of_words()
    seq2seq.save(model, work / "model")
    for name, first, count in (("train", 0, ROWS), ("validation", 100, 1), ("test", 200, 1)):
        sources = [sentence(seed, 6 + seed % 5) for seed in range(first, first + count)]
        rows = [{"id": source, "source": source, "target": " ".join(source.split()[:4])} for source in sources]
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(work / f"{name}.jsonl") for name in ("train", "validation", "test")}
    data = store.read(prepare.run(prepare.Config(output=str(work / "data"), **files)), "prepare")
    places = {"data": str(work / "data"), "model": str(work / "model")}
    scored = store.Output(
        "score",
        score.Config(**places, candidates="", output=str(work / "score")),
        {"data": data, "model": store.read_model(work / "model")},
    )
    with scored.writing():
        scored.write_rows(
            "scored", (candidates(model, number, e.id) for number, e in enumerate(data.examples("train"))), store.SCORED
        )
        scored.counts["split"] = "train"
    settings = {
        "learning_rate": 1e-3,
        "reg_weight": 0.1,
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": STEPS,
        "pairs": "all",
    }
    once = {"eval_steps": STEPS, "select_num_beams": 1, "max_source_length": 16, "max_target_length": 8, "device": "cpu"}
    found = {}
    for name in names:
        output = work / name.replace(", ", "-")
        config = calibrate.Config(**places, scored=str(work / "score"), output=str(output), **settings, **once, **RUNS[name])
        lines = (calibrate.run(config) / "log.jsonl").read_text().splitlines()
        steps = [record["train"] for record in map(json.loads, lines) if "train" in record]
        found[name] = {figure: [step[figure] for step in steps] for figure in FIGURES}
    return found


def candidates(model: Seq2Seq, number: int, source: str) -> dict[str, Any]:
    """The target's words with more and more of them replaced, in an order that likelihood does not know."""
    texts = []
    for place in range(CANDIDATES):
        kept, new = source.split()[: 4 - place], sentence(1000 + 10 * number + place, place + number % 2)
        texts.append(" ".join([*kept, *new.split()]))
    token_ids, _ = model.encode_targets(texts, 8)
    return {
        "id": source, "method": "beam", "seed": 0, "token_ids": token_ids, "texts": texts, "log_p": [0.0] * CANDIDATES,
        "times_drawn": [1] * CANDIDATES, "similarity": [(place * 3 + number) % CANDIDATES + 0.5 for place in range(CANDIDATES)],
    }  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_fifty_steps_are_those_that_were_committed(name: str, tmp_path: Path) -> None:
    committed, found = json.loads(COMMITTED.read_text())[name], trajectories(tmp_path, [name])[name]
    assert found.keys() == committed.keys()
    for figure in FIGURES:
        # Agreement counts pairs: near a tie rounding may turn one of the 24 round.
        tolerance = {"abs": 1.5 / 24} if figure == "agreement" else {"rel": 2e-4, "abs": 1e-5}
        assert len(found[figure]) == STEPS
        assert found[figure] == pytest.approx(committed[figure], **tolerance), figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        figures = trajectories(Path(folder), [*RUNS])
    lines = (
        f'"{name}": {json.dumps({k: [round(v, 7) for v in vs] for k, vs in each.items()})}' for name, each in figures.items()
    )
    COMMITTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {COMMITTED}")  # what changed: git diff

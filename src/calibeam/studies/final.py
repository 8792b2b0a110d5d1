"""The recommended recipe on any set of tasks, against the fine-tuned model and the published figures (section 3.6, table 3).

Reads:   a recipe; with `study.tasks` a list of datasets
Writes:  R1/R2/RL by each task's own script: before the paper, in the paper, fine-tuned with its best alpha, and calibrated
Example: calibeam study final mine.toml 'study.tasks=["samsum", "webnlg_en"]' 'prepare.path=data/{task}'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibeam import figures
from calibeam.studies import published, table
from calibeam.studies.plan import CALIBRATED, FINE_TUNED, Config, Row, Subject, decoder, overlay
from calibeam.studies.results import ALL, Record
from calibeam.tasks import TASKS

SPLIT = "test"
PAPER: dict[published.Labels, dict[str, published.Scores]] = {}  # its figures are with the tasks
BASELINE = {"model": "fine-tuned"}
HELD = {
    "finetune": {"select": "perplexity"},
    "score": {"similarity": "decoder"},
    "calibrate": {"loss": "rank", "beta": 10.0, "regularizer": "kl"},
}


def rows(subjects: Sequence[Subject], config: Config) -> list[Row]:
    return [row for subject in subjects for row in _rows(subject, config)]


def _rows(subject: Subject, config: Config) -> Iterator[Row]:
    held = overlay(HELD, decoder(subject.tables, "beam")) if config.around == "paper" else {}
    yield Row(subject.task, BASELINE, subject.points(FINE_TUNED, held, alphas=config.alphas))
    points = subject.points(CALIBRATED, held, learning_rates=subject.learning_rates, num_candidates=config.calibrated_num_beams)
    yield Row(subject.task, {"model": "calibrated"}, points, BASELINE)


def make_table(records: Sequence[Record]) -> table.Table:
    """Turned about: a line for every task, as in the paper."""
    lines = []
    for tuned in (record for record in records if record["model"] == "fine-tuned"):
        calibrated = next(one for one in records if (one["task"], one["model"]) == (tuned["task"], "calibrated"))
        name = tuned.get("published_task", "")
        paper = TASKS[name].paper if name in TASKS else None
        system, best = published.BEFORE.get(name, ("", ""))
        lines.append([
            tuned["task"], system, best, _printed(paper.finetuned if paper else ()), _printed(paper.calibrated if paper else ()),
            _official(tuned), _official(calibrated), tuned.get("official_metric", ""),
            table.figure(tuned["r_m"]), table.figure(calibrated["r_m"]), table.delta(calibrated), table.p_value(calibrated),
            "; ".join(filter(None, (tuned.get("tried", ""), calibrated.get("tried", "")))),
        ])  # fmt: skip
    columns = [
        "dataset", "before the paper", "R1/R2/RL", "paper: fine-tuned (2B)", "paper: calibrated (2B)", "fine-tuned", "calibrated",
        "script", "R_m fine-tuned", "R_m calibrated", "Δ R_m (95%)", "p", "chosen on validation",
    ]  # fmt: skip
    notes = [
        "R1/R2/RL by each dataset's own script; R_m by ROUGE for all. The fine-tuned model has the alpha that is best on "
        "validation; the calibrated one has no heuristics. The paper reports MSMARCO NLG and CommonGen on validation."
    ]
    return table.Table("Final results", columns, lines, notes).without_empty_columns(1)


def _official(record: Record) -> str:
    return table.scores(record, "official_rouge1", "official_rouge2", "official_rouge_l")


def _printed(scores: Sequence[float | None]) -> str:
    return "/".join("-" if score is None else f"{score:.2f}" for score in scores)


def make_figure(records: Sequence[Record]) -> figures.Spec:
    shown = [one for one in records if one["model"] == "calibrated" and one["delta"] is not None]
    shown.sort(key=lambda one: one["task"] == ALL)
    return figures.intervals(shown, "task", "delta", interval=("delta_low", "delta_high"), title="Δ R_m against fine-tuned, %")

"""With and without length normalisation, fine-tuned and calibrated: quality and repetition (section 3.4, table 2).

Reads:   a recipe; with `study.tasks` a list of datasets
Writes:  R1/R2/RL and the rate of repetition of the four rows, beside that of the references
Example: calibeam study length samsum.toml 'study.alphas=[0, 0.5, 1]'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibeam import figures
from calibeam.studies import published, table
from calibeam.studies.ablation import SHARED
from calibeam.studies.plan import CALIBRATED, FINE_TUNED, Config, Row, Subject, decoder, overlay
from calibeam.studies.results import ALL, Record

SPLIT = "validation"
PAPER = published.LENGTH
BASELINE = {"slic": "no", "alpha": "yes"}
NAMES = {
    ("no", "no"): "fine-tuned",
    ("no", "yes"): "fine-tuned, alpha",
    ("yes", "no"): "calibrated",
    ("yes", "yes"): "calibrated, alpha",
}


def rows(subjects: Sequence[Subject], config: Config) -> list[Row]:
    return [row for subject in subjects for row in _rows(subject, config)]


def _rows(subject: Subject, config: Config) -> Iterator[Row]:
    """Alpha is the one that is best for the fine-tuned model, also in the calibrated model's row."""
    held = overlay(SHARED, decoder(subject.tables, "beam"), {"calibrate": {"regularizer": "cross_entropy"}})
    if config.around == "recipe":
        held = {}
    rates, betas = subject.learning_rates, subject.betas(subject.loss)
    for alpha, alphas in (("no", (0.0,)), ("yes", config.alphas)):
        yield Row(subject.task, {"slic": "no", "alpha": alpha}, subject.points(FINE_TUNED, held, alphas=alphas), BASELINE)
    for alpha, alphas in (("no", (0.0,)), ("yes", config.alphas)):
        points = subject.points(CALIBRATED, held, learning_rates=rates, betas=betas, alphas=alphas)
        yield Row(subject.task, {"slic": "yes", "alpha": alpha}, points, BASELINE)


def make_table(records: Sequence[Record]) -> table.Table:
    gold = [
        {"task": one["task"], "slic": "gold reference", "alpha": "", "repetition": one["reference_repetition"]}
        for one in records
        if one["task"] != ALL and (one["slic"], one["alpha"]) == ("no", "no")
    ]
    tasks = {one["task"]: one.get("published_task", "") for one in records}

    def paper_repetition(record: Record) -> str:
        found = published.REPETITION.get((record["slic"], record["alpha"]), {}).get(tasks[record["task"]])
        return "" if found is None else table.figure(found)

    return table.pivot(
        "Length normalisation",
        [*gold, *records],
        {"slic": "SLiC", "alpha": "alpha"},
        {
            "R1/R2/RL": table.rouge,
            "rep% (95%)": lambda record: table.between(record, "repetition"),
            "chosen on validation": lambda record: record.get("tried", ""),
            "paper (500M)": table.paper_rouge,
            "paper's rep%": paper_repetition,
        },
        {"Δ R_m (95%)": table.delta, "p": table.p_value, "paper's Δ": table.paper_delta},
        ["Δ: change of R_m relative to the fine-tuned model with alpha."],
    )


def make_figure(records: Sequence[Record]) -> figures.Spec:
    shown = [{**one, "row": NAMES[one["slic"], one["alpha"]]} for one in records if one["task"] != ALL]
    gold = [{**one, "row": "gold reference", "repetition": one["reference_repetition"],
             "repetition_low": one["reference_repetition"], "repetition_high": one["reference_repetition"]}
            for one in shown if one["row"] == "fine-tuned"]  # fmt: skip
    return table.beside({
        "Quality": figures.bars(shown, "row", "r_m", "task", interval=("r_m_low", "r_m_high"), title="R_m"),
        "Repetition": figures.bars(
            [*gold, *shown], "row", "repetition", "task", interval=("repetition_low", "repetition_high"), title="rep%"
        ),
    })  # fmt: skip

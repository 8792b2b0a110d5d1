"""Quality against the number of candidates, by what a model was calibrated on and what it is decoded by (section 3.4, figure 2).

Reads:   a recipe; with `study.tasks` a list of datasets
Writes:  R1/R2/RL and R_m of the fine-tuned model and of those calibrated on beam and nucleus candidates, decoded by both
Example: calibeam study decoding samsum.toml 'study.num_candidates=[1, 5, 10]'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from calibeam import figures
from calibeam.studies import published, table
from calibeam.studies.ablation import REWARD, SHARED
from calibeam.studies.plan import CALIBRATED, FINE_TUNED, Config, Row, Subject, decoder, overlay
from calibeam.studies.results import ALL, Record

SPLIT = "validation"
PAPER = published.DECODING
METHODS = ("beam", "nucleus")


def rows(subjects: Sequence[Subject], config: Config) -> list[Row]:
    return [row for subject in subjects for row in _rows(subject, config)]


def _rows(subject: Subject, config: Config) -> Iterator[Row]:
    """Every curve point by point; each point is compared with the one before it, of fewer candidates."""
    held = overlay(SHARED, REWARD) if config.around == "paper" else {}
    models = {
        "fine-tuned": (FINE_TUNED, held, (0.0,)),
        "fine-tuned, alpha": (FINE_TUNED, held, config.alphas),
        **{
            f"calibrated on {name}": (CALIBRATED, overlay(held, decoder(subject.tables, name)), (0.0,))
            for name in config.calibrated_on
        },
    }
    for name, (model, patch, alphas) in models.items():
        for method in METHODS:
            fewer = None
            for number in config.num_candidates:
                labels = {"model": name, "decoder": method, "candidates": number}
                points = subject.points(model, patch, alphas=alphas, method=method, num_candidates=number)
                yield Row(subject.task, labels, points, fewer)
                fewer = labels


def make_table(records: Sequence[Record]) -> table.Table:
    return table.pivot(
        "Decoding methods",
        records,
        {"model": "model", "decoder": "decoded by", "candidates": "candidates"},
        {
            "R1/R2/RL": table.rouge,
            "R_m (95%)": table.r_m,
            "since fewer candidates (95%)": table.delta,
            "p": table.p_value,
            "rep%": lambda record: table.figure(record["repetition"]),
            "paper (500M)": table.paper_rouge,
        },
        notes=[
            "Since fewer candidates: the relative change of R_m from the line above, with fewer candidates of the same model."
        ],
    )


def make_figure(records: Sequence[Record]) -> figures.Spec:
    """A panel for every task and decoder."""
    panels: dict[str, list[Record]] = {}
    for record in records:
        if record["task"] != ALL:
            panels.setdefault(f"{record['task']}, decoded by {record['decoder']}", []).append(record)
    return table.beside({title: _curves(some) for title, some in panels.items()})


def _curves(some: Sequence[Record]) -> figures.Spec:
    ends = ("r_m_low", "r_m_high")
    return figures.line(some, "candidates", "r_m", "model", interval=ends, x_title="candidates", y_title="R_m", log_x=True)

"""The paper's ablation of its method (section 3.3, table 1): one choice at a time, against the fine-tuned model.

Reads:   a recipe; with `study.tasks` a list of datasets
Writes:  R1/R2/RL of every row on every dataset, and Delta, the relative change of R_m, with its interval
Example: calibeam study ablation samsum.toml 'study.factors=["loss"]' 'study.learning_rates=[1e-5]' 'study.betas=[10]'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from calibeam import figures
from calibeam.studies import published, table
from calibeam.studies.plan import CALIBRATED, FINE_TUNED, Config, Row, Subject, decoder, overlay
from calibeam.studies.results import ALL, Record

SPLIT = "validation"
PAPER = published.ABLATION
BASELINE = {"group": "", "row": "fine-tuned"}


@dataclass(frozen=True)
class Factor:
    """A group of the table: what is held, what varies, and whether the best learning rate and beta of every row count."""

    held: dict[str, Any]
    """The appendix's settings for the group."""
    rows: dict[str, dict[str, Any]]
    takes_best: bool = False


SHARED = {"finetune": {"select": "rouge"}, "score": {"similarity": "decoder"}}
REWARD = {"calibrate": {"loss": "reward", "regularizer": "cross_entropy"}}
SIMILARITIES = {"ROUGE": "rouge", "decoder repr": "decoder", "token emb": "tokens"}
LOSSES = {"rank": "rank", "margin": "margin", "list rank": "list_rank", "reward": "reward"}
REGULARIZERS = {"none": "none", "cross entropy": "cross_entropy", "KL divergence": "kl"}
DECODERS = {"beam search": "beam", "diverse beam": "diverse_beam", "nucleus": "nucleus"}
SELECTIONS = {"ROUGE": "rouge", "perplexity": "perplexity"}


def factors(subject: Subject) -> dict[str, Factor]:
    """Table 1, with the settings of the appendix's table."""
    return {
        "similarity": Factor(REWARD, {name: {"score": {"similarity": value}} for name, value in SIMILARITIES.items()}),
        "loss": Factor(
            {"calibrate": {"regularizer": "cross_entropy"}},
            {name: {"calibrate": {"loss": value}} for name, value in LOSSES.items()},
            takes_best=True,
        ),
        "regularizer": Factor(
            {"calibrate": {"loss": "rank"}}, {name: {"calibrate": {"regularizer": value}} for name, value in REGULARIZERS.items()}
        ),
        "decoding": Factor(REWARD, {name: decoder(subject.tables, value) for name, value in DECODERS.items()}),
        "checkpoint": Factor(REWARD, {name: {"finetune": {"select": value}} for name, value in SELECTIONS.items()}),
    }


def rows(subjects: Sequence[Subject], config: Config) -> list[Row]:
    return [row for subject in subjects for row in _rows(subject, config)]


def _rows(subject: Subject, config: Config) -> Iterator[Row]:
    as_paper = config.around == "paper"
    shared = overlay(SHARED, decoder(subject.tables, "beam")) if as_paper else {}
    yield Row(subject.task, BASELINE, subject.points(FINE_TUNED, shared, alphas=config.alphas))
    for group, factor in factors(subject).items():
        if group not in config.factors or (group == "checkpoint" and "finetune" not in subject.tables):
            continue
        for name, patch in factor.rows.items():
            own = overlay(shared, factor.held if as_paper else {}, patch)
            points = subject.points(
                CALIBRATED,
                own,
                learning_rates=subject.learning_rates if factor.takes_best else (),
                betas=subject.betas(LOSSES[name]) if factor.takes_best else (),
            )
            yield Row(subject.task, {"group": group, "row": name}, points, BASELINE)


def make_table(records: Sequence[Record]) -> table.Table:
    return table.pivot(
        "Ablation: one choice at a time",
        records,
        {"group": "ablation", "row": ""},
        {
            "R1/R2/RL": table.rouge,
            "paper (500M)": table.paper_rouge,
            "chosen on validation": lambda record: record["tried"],
        },
        {"Δ R_m (95%)": table.delta, "p": table.p_value, "paper's Δ": table.paper_delta},
        ["Δ: change of R_m relative to the fine-tuned model with its best alpha. The paper's Δ is of the same tasks."],
    )


def make_figure(records: Sequence[Record]) -> figures.Spec:
    """Delta of every row."""
    over = ALL if any(record["task"] == ALL for record in records) else records[0]["task"]
    shown = [record for record in records if record["task"] == over and record["delta"] is not None]
    both = {"paper": ("paper_delta",) * 3, "measured": ("delta", "delta_low", "delta_high")}
    points = [
        {"row": f"{one['group']}: {one['row']}", "who": who, "delta": one[delta], "low": one[low], "high": one[high]}
        for one in shown
        for who, (delta, low, high) in both.items()
        if one.get(delta) is not None
    ]
    series = "who" if any(point["who"] == "paper" for point in points) else ""
    return figures.intervals(points, "row", "delta", series, interval=("low", "high"), title="Δ R_m against fine-tuned, %")

from __future__ import annotations

import pytest

from calibeam.paper.metrics import r_m
from calibeam.studies import ablation, decoding, length, published
from calibeam.studies.published import TASKS
from paper.test_metrics import ABLATION, FINE_TUNED, triples
from studies.test_plan import rows

PRINTED = {("no", "no"): -5.15, ("no", "yes"): 0.0, ("yes", "no"): 3.31, ("yes", "yes"): 3.42}


def test_table_1_is_as_printed() -> None:
    """The deltas of these figures are checked in tests/paper/test_metrics.py."""
    own = [[tuple(scores[task]) for task in TASKS] for scores in published.ABLATION.values()]
    assert own == [triples(FINE_TUNED), *(triples(line) for line, _ in ABLATION.values())]


@pytest.mark.parametrize("labels", PRINTED)
def test_the_deltas_of_table_2_follow_from_its_figures(labels: tuple[str, str]) -> None:
    """Within what rounding the scores to two digits can do."""
    values, baseline = ([*published.LENGTH[one].values()] for one in (labels, ("no", "yes")))
    assert 100 * (r_m(values) / r_m(baseline) - 1) == pytest.approx(PRINTED[labels], abs=0.011)


def test_more_candidates_help_the_papers_calibrated_models() -> None:
    """A slip of the pen would stand out: from 1 to 5 candidates R_m rises on every dataset, for every calibrated model."""
    for table in (published.DECODING, published.SCALING):
        for labels, scores in table.items():
            if "calibrated" in f"{labels}" and labels[-1] == 1:
                more = table[(*labels[:-1], 5)]
                assert all(more[task].r_m > scores[task].r_m for task in TASKS)


@pytest.mark.parametrize(
    ("study", "table"), [(ablation, published.ABLATION), (decoding, published.DECODING), (length, published.LENGTH)]
)
def test_every_figure_of_the_paper_has_a_row(study: object, table: dict[tuple[object, ...], object]) -> None:
    name = study.__name__.rsplit(".", 1)[-1]  # type: ignore[attr-defined]
    assert set(table) <= {tuple(row.labels.values()) for row in rows(name)}

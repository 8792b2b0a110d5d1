"""Datasets known by name: the embedded one, and the paper's eight."""

from __future__ import annotations

from calibeam.tasks import docstrings
from calibeam.tasks.paper import PAPER_TASKS
from calibeam.tasks.task import UNSPLIT, Scores, Task

TASKS: dict[str, Task] = {task.name: task for task in (docstrings.TASK, *PAPER_TASKS)}


def describe(task: Task) -> str:
    """For a person to read."""
    facts = {
        "from": task.hub.removeprefix("hf://datasets/") or "this machine",
        "splits": "by a hash of the id" if UNSPLIT in task.files else ", ".join(task.files) or "by a hash of the name",
        "fields": task.fields,
        "source": task.source,
        "lengths": f"{task.max_source_length} source tokens, {task.max_target_length} target tokens",
        "metric": task.metric,
    }
    if task.paper:
        facts["paper"] = f"{task.paper.examples} examples; lr {task.paper.learning_rate:g}"
        facts[""] = (
            f"R1/R2/RL on {task.paper.reported_on}: fine-tuned {_scores(task.paper.finetuned)}, "
            f"calibrated {_scores(task.paper.calibrated)}"
        )
    return "\n".join([f"{task.name}: {task.about}", *(f"  {name:8} {fact}" for name, fact in facts.items())])


def _scores(scores: Scores) -> str:
    return "/".join("-" if score is None else f"{score:.2f}" for score in scores)

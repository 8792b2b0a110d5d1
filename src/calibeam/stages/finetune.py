"""Train a model by maximum likelihood, and keep the checkpoint that does best on the validation split.

Reads:   the folder written by prepare, and a model to begin with
Writes:  model/: the best checkpoint; log.jsonl: every step and validation
Example: calibeam finetune output=out/tuned data=out/data model=google-t5/t5-small num_train_epochs=3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from calibeam import store
from calibeam.recipe import option
from calibeam.training import ExamplesConfig, Pairs, Problem, Shuffled, batch_of_pairs, encoded, forced, train

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.engine.graphs import Batch


@dataclass(frozen=True, kw_only=True)
class Config(ExamplesConfig):
    batch_size: int = option(512, "examples per step", at_least=1)
    num_train_epochs: float = option(3.0, "passes over the training data", above=0)
    select: str = option("perplexity", "what to choose the checkpoint by", choices=lambda: ("perplexity", "rouge"))


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq
    from calibeam.stages.decode import check_lengths, look_at_sources
    from calibeam.stages.evaluate import Validation

    data = store.read(config.data, "prepare")
    start = store.read_model(seq2seq.locate(config.model))
    output = store.Output("finetune", config, {"data": data, "model": start}, force=force)
    if output.done:
        return output.path
    model = seq2seq.load(start.path, device=config.device)
    check_lengths("finetune", config, seq2seq.max_positions(model.model.config))
    notes = look_at_sources("finetune", start.path, data, "train")
    texts = ((e.id, e.source, target) for e in data.stream_examples("train") for target in e.targets)
    pairs = Pairs(model, texts, config, by_token=True)
    validation = Validation(model, data.examples("validation"), config)

    def batch(some: Sequence[int], seeds: Sequence[int]) -> Batch:
        return batch_of_pairs(model, [pairs.sources[place] for place in some], [pairs.targets[place] for place in some], config)

    def loss(batch: Batch) -> dict[str, Tensor]:
        return {"loss": forced(encoded(model.model, batch), batch).cross_entropy().sum()}

    problem = Problem(
        batches=Shuffled(pairs, config.batch_size, config.seed),
        batch=batch,
        loss=loss,
        validate=lambda: validation.measure(config.select),
        save=partial(seq2seq.save, model),
        dropout=True,
        shown={"loss": "loss"},
    )
    with output.writing(resume=True):
        output.notes += notes
        output.counts |= {"examples": len(pairs), **pairs.cut}
        train(model.model, config, config.plan(len(pairs), config.select), problem, output)
    return output.path

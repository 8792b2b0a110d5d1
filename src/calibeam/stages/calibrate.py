"""Train a fine-tuned model on, so that the likelihood of its own outputs follows their similarity to the target.

Reads:   the folders written by prepare and score, and the fine-tuned model
Writes:  model/: the calibrated checkpoint; log.jsonl: every step and validation; with lora_save=adapter also adapter/
Example: calibeam calibrate out/data.toml loss=rank beta=10 regularizer=kl learning_rate=1e-5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, lora, store
from calibeam.paper.calibration import CALIBRATION_LOSSES, PAIR_LOSSES, ordered_pairs, sample_pair
from calibeam.paper.decoding import length_normalised
from calibeam.paper.regularization import REGULARIZERS, WITHOUT_REFERENCE
from calibeam.paper.similarity import span_similarity
from calibeam.recipe import option
from calibeam.records import CalibeamError
from calibeam.training import SELECTIONS, ExamplesConfig, Item, Problem, Shuffled, batch_of_pairs, encoded, forced, train

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.engine.graphs import Batch
    from calibeam.engine.packing import Forced
    from calibeam.seq2seq import Seq2Seq

Switch = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Config(ExamplesConfig):
    scored: str = option(help="the folder written by score", identity=False)
    learning_rate: float = option(1e-5, "the peak learning rate", above=0)
    loss: str | Callable[..., Any] = option("rank", "Eq. 1", choices=lambda: CALIBRATION_LOSSES)
    beta: float = option(10.0, "the margin of the loss", at_least=0)
    length_alpha: float = option(0.0, "compare log P / length^alpha in the loss, as BRIO does; the paper: 0", at_least=0)
    pairs: str = option("sampled", "rank and margin: one sampled pair per example, or all", choices=lambda: ("sampled", "all"))
    regularizer: str | Callable[..., Any] = option("kl", "Eq. 2", choices=lambda: REGULARIZERS)
    reg_weight: float | None = option(None, "lambda; 1e-5 / learning_rate if not given, as in the paper", at_least=0)
    similarity: str = option(
        "fine_tuned", "as scored, or by the decoder states of the model in training", choices=lambda: ("fine_tuned", "current")
    )
    select: str = option("rouge", "what to choose the checkpoint by", choices=lambda: SELECTIONS)
    max_drift: float = option(
        4.0,
        "stop when the perplexity of validation targets is above so many times what it was, or that of training targets by "
        "kl; 0 for never",
        at_least=0,
    )
    lora_rank: int = option(0, "train a LoRA adapter of this rank in place of the model; 0 for none", at_least=0)
    lora_alpha: float = option(16.0, "what the adapter adds counts lora_alpha / lora_rank", above=0)
    lora_target_modules: tuple[str, ...] = option((), "the layers to adapt; all linear ones but the output head if empty")
    lora_save: str = option(
        "merged", "export a checkpoint with the adapter in it, or the adapter alone", choices=lambda: lora.SAVES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank:
            lora.check_installed()
            return
        for name in ("lora_alpha", "lora_target_modules", "lora_save"):
            if getattr(self, name) != getattr(Config, name):
                raise CalibeamError(f"{name} says how to adapt, and nothing is adapted: lora_rank is 0")


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq
    from calibeam.stages.decode import check_lengths
    from calibeam.stages.evaluate import Validation
    from calibeam.stages.export import public_name

    data = store.read(config.data, "prepare")
    scored = store.read(config.scored, "score")
    start = store.read_model(seq2seq.locate(config.model))
    scored.must_come_from(data=data, model=start)
    output = store.Output("calibrate", config, {"data": data, "scored": scored, "model": start}, force=force)
    if output.done:
        return output.path
    model = seq2seq.load(start.path, device=config.device)
    check_lengths(model, config.max_source_length, config.max_target_length)
    adapter = adapt(model, config)
    reference = model if adapter else seq2seq.load(start.path, device=config.device)
    step = CalibrationStep(model, reference, config, adapter.off if adapter else nullcontext)
    merged: Switch = adapter.merged if adapter else nullcontext

    examples = {example.id: example for example in data.examples(scored.manifest["counts"]["split"])}
    rows = scored.rows("scored", store.SCORED)
    sources, sources_cut = model.encode_sources([examples[row["id"]].source for row in rows], config.max_source_length)
    targets, targets_cut = model.encode_targets([examples[row["id"]].targets[0] for row in rows], config.max_target_length)
    validation = Validation(model, data.examples("validation"), config)

    def batch(some: Sequence[int], seeds: Sequence[int]) -> Batch:
        return step.batch([sources[i] for i in some], [targets[i] for i in some], [rows[i] for i in some], seeds)

    def validate() -> dict[str, float]:
        with merged():
            return validation.measure("rouge", "perplexity")

    def save(folder: Path) -> None:
        with merged():
            seq2seq.save(model, folder)
        if adapter and config.lora_save == "adapter":
            adapter.save(folder.with_name("adapter"), public_name(config.model))

    items = [Item(row["id"], len(sources[index]), 1, index) for index, row in enumerate(rows)]
    problem = Problem(
        batches=Shuffled(items, config.batch_size, config.seed),
        batch=batch,
        loss=step.loss,
        validate=validate,
        save=save,
        dropout=False,
        shown={
            "loss": "loss",
            "agreement": "agreement",
            "regularization": "regularization" if callable(config.regularizer) else config.regularizer,
        },
        drift=partial(_drift, sum(map(len, targets)) / len(targets)) if config.regularizer == "kl" else None,
    )
    with output.writing(resume=True):
        without = sum(len(set(row["similarity"])) < 2 for row in rows)
        cut = {"sources_cut": sources_cut, "targets_cut": targets_cut}
        output.counts |= {"examples": len(items), **cut, "examples_without_a_pair": without}
        display.say(
            f"calibrate: {len(rows):,} examples, {without:,} of them without a pair to compare; lambda {step.reg_weight:.3g}"
        )
        plan = config.plan(len(items), config.select)._replace(max_drift=config.max_drift)
        train(model.model, config, plan, problem, output)
    return output.path


def _drift(tokens: float, figures: Mapping[str, float]) -> float:
    """e to the divergence of a token, by the mean number of tokens in a target: a ratio, as one of perplexities is."""
    return math.exp(min(figures["regularization"] / tokens, 700.0))


def adapt(model: Seq2Seq, config: Config) -> lora.Adapter | None:
    """The adapter that is trained in place of the model, if one is."""
    if not config.lora_rank:
        return None
    adapter = lora.Adapter(
        model.model,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=config.lora_target_modules,
        seed=config.seed,
    )
    display.say(
        f"calibrate: LoRA trains {adapter.size:,} weights beside the model's {model.model.num_parameters() - adapter.size:,}"
    )
    return adapter


class CalibrationStep:
    """Algorithm 1's loss: calibration of candidates plus lambda times regularisation on the target.

    The frozen fine-tuned model is the reference: a copy, or the model itself without its adapter. Dropout is off in
    both, so before the first step the KL divergence between them is 0 but for rounding. The target goes through the model
    together with the candidates.
    """

    def __init__(self, model: Seq2Seq, reference: Seq2Seq, config: Config, off: Switch = nullcontext) -> None:
        """off: switches off the adapter, where the reference is the model itself."""
        self._model, self._reference, self._off = model, reference.model, off
        if reference is not model:
            reference.model.requires_grad_(False)
        self._loss = config.loss if callable(config.loss) else CALIBRATION_LOSSES[config.loss]
        self._regularizer = config.regularizer if callable(config.regularizer) else REGULARIZERS[config.regularizer]
        self._sample = self._loss in PAIR_LOSSES and config.pairs == "sampled"
        self._beta, self._length_alpha, self._similarity = config.beta, config.length_alpha, config.similarity
        self._config = config
        self.reg_weight = 1e-5 / config.learning_rate if config.reg_weight is None else config.reg_weight

    def batch(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
    ) -> Batch:
        """What `loss` reads, on the host. seeds: of the pair that is drawn for each row, so that it does not depend on others."""
        from calibeam.engine.packing import plan

        tuned, most = self._model, max(len(ids) for row in rows for ids in row["token_ids"])
        similarity, exists, candidates = self._choose(rows, seeds)
        sequences = [ids for target, own in zip(targets, candidates, strict=True) for ids in (target, *own)]
        token_ids, token_mask = (
            each.view(len(rows), -1, each.shape[-1])
            for each in tuned.roomy_batch(sequences, max(most, self._config.max_target_length))
        )
        return {
            **batch_of_pairs(tuned, sources, targets, self._config), "similarity": similarity, "exists": exists,
            "token_ids": token_ids, "token_mask": token_mask,
            "plan": plan(token_ids, token_mask, tuned.model.config.hidden_size, tuned.device, first=1),
        }  # fmt: skip

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Summed over the examples, with figures to show, summed likewise."""
        from calibeam.engine.packing import Forced, plant

        model, similarity, exists = self._model.model, batch["similarity"], batch["exists"]
        reference = None if self._regularizer in WITHOUT_REFERENCE else self._refer(batch)
        token_mask = batch["token_mask"]
        every = Forced(encoded(model, batch), plant(model, batch["token_ids"], token_mask, batch["plan"])).settled()
        regularization = every.regularization(self._regularizer, reference).sum()
        log_p = every.log_p()
        if self._similarity == "current":
            states = every.states().detach()
            similarity = span_similarity(states[:, 1:], states[:, :1], token_mask[:, 1:], token_mask[:, :1])
        compared = length_normalised(log_p, token_mask[:, 1:].sum(-1), self._length_alpha)
        calibration = self._loss(compared, similarity, exists, self._beta).sum()

        pairs = ordered_pairs(similarity, exists)
        agreeing = pairs & (log_p[:, :, None] > log_p[:, None, :])
        share = agreeing.sum((1, 2)) / pairs.sum((1, 2)).clamp(min=1)
        return {
            "loss": calibration + self.reg_weight * regularization,
            "calibration": calibration,
            "regularization": regularization,
            "agreement": share.sum(),
        }

    def _choose(self, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> tuple[Tensor, Tensor, list[list[list[int]]]]:
        """Similarities and which candidates exist [batch, candidates], and the candidates' token ids."""
        import torch

        most = max(len(row["similarity"]) for row in rows)
        exists = torch.arange(most) < torch.tensor([len(row["similarity"]) for row in rows])[:, None]
        similarity = torch.tensor([row["similarity"] + [0.0] * (most - len(row["similarity"])) for row in rows])
        if not self._sample:
            none = [self._model.ids.eos[0]]
            return similarity, exists, [row["token_ids"] + [none] * (most - len(row["token_ids"])) for row in rows]
        draws = torch.tensor([seed % 2**53 / 2**53 for seed in seeds], dtype=torch.float64)
        pair = sample_pair(similarity, exists, draws)
        token_ids = [[row["token_ids"][index] for index in own] for row, own in zip(rows, pair.tolist(), strict=True)]
        return similarity.gather(1, pair), exists.gather(1, pair), token_ids

    def _refer(self, batch: Batch) -> Forced:
        import torch

        with torch.no_grad(), self._off():
            return forced(encoded(self._reference, batch), batch).settled()

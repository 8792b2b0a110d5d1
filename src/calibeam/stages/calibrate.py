"""Train a fine-tuned model further, so that the likelihood of its own outputs follows their similarity to the target.

Reads:   the folders written by prepare and score, and the fine-tuned model
Writes:  model/: the calibrated checkpoint; log.jsonl: every step and validation; with lora_save=adapter also adapter/
Example: calibeam calibrate out/data.toml loss=rank beta=10 regularizer=kl learning_rate=[1e-5,1e-4]

Of several learning rates each is tried in a folder of its own beside the output, which then gets what is in the best one's.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam import display, distributed, functions, lora, reference, store
from calibeam.paper.calibration import CALIBRATION_LOSSES, PAIR_LOSSES, ordered_pairs, sample_pair
from calibeam.paper.decoding import length_normalised
from calibeam.paper.regularization import REGULARIZERS, WITHOUT_REFERENCE
from calibeam.paper.similarity import span_similarity
from calibeam.recipe import option
from calibeam.records import CalibeamError, DivergedError
from calibeam.reference import Reference, Switch
from calibeam.training import (
    SELECTIONS,
    Compact,
    ExamplesConfig,
    Pairs,
    Problem,
    Shuffled,
    batch_of_sources,
    encoded,
    planned,
    train,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.engine.graphs import Batch
    from calibeam.seq2seq import Ids, Seq2Seq


@dataclass(frozen=True, kw_only=True)
class Config(ExamplesConfig):
    scored: str = option(help="the folder written by score", identity=False)
    learning_rate: float | tuple[float, ...] = option(  # type: ignore[assignment]  # what is trained with has one
        1e-5, "the peak learning rate; of several, the one that does best on validation", above=0, at_most=1000
    )
    loss: str | Callable[..., Any] = option("rank", "Eq. 1", choices=lambda: CALIBRATION_LOSSES)
    beta: float = option(10.0, "the margin of the loss", at_least=0)
    length_alpha: float = option(0.0, "compare log P / length^alpha in the loss, as BRIO does; the paper: 0", at_least=0)
    pairs: str = option("sampled", "rank and margin: one sampled pair per example, or all", choices=lambda: ("sampled", "all"))
    regularizer: str | Callable[..., Any] = option("kl", "Eq. 2", choices=lambda: REGULARIZERS)
    reg_weight: float | None = option(None, "lambda; 1e-5 / learning_rate if not given, as in the paper", at_least=0)
    similarity: str = option(
        "fine_tuned", "as scored, or by the decoder states of the model in training", choices=lambda: ("fine_tuned", "current")
    )
    select: str = option(
        "rouge", "what to choose the checkpoint by; similarity: of outputs to targets, in the fine-tuned model's decoder states",
        choices=lambda: SELECTIONS,
    )  # fmt: skip
    max_drift: float = option(
        4.0,
        "stop when the perplexity of validation targets is above so many times what it was, or that of training targets by "
        "kl; 0 for never",
        at_least=0,
    )
    lora_rank: int = option(0, "train a LoRA adapter of this rank instead of the model; 0 for none", at_least=0)
    lora_alpha: float = option(16.0, "what the adapter adds is scaled by lora_alpha / lora_rank", above=0)
    lora_target_modules: tuple[str, ...] = option((), "the layers to adapt; all linear ones but the output head if empty")
    lora_save: str = option(
        "merged", "export a checkpoint with the adapter in it, or the adapter alone", choices=lambda: lora.SAVES
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.learning_rates or len(set(self.learning_rates)) < len(self.learning_rates):
            raise CalibeamError(f"learning_rate must be one or several different numbers, got {list(self.learning_rates)}")
        if len(self.learning_rates) == 1:
            object.__setattr__(self, "learning_rate", self.learning_rates[0])
        if self.lora_rank:
            lora.check_installed()
            if self.shard_model:
                raise CalibeamError("lora_rank trains few weights, which shard_model cannot share out: set only one of them")
            return
        for name in ("lora_alpha", "lora_target_modules", "lora_save"):
            if getattr(self, name) != getattr(Config, name):
                raise CalibeamError(f"{name} is for LoRA, but lora_rank is 0")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Those to try."""
        return self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)


def run(config: Config, *, force: bool = False) -> Path:
    from calibeam import seq2seq

    data = store.read(config.data, "prepare")
    scored = store.read(config.scored, "score")
    start = store.read_model(seq2seq.locate(config.model))
    scored.must_come_from(data=data, model=start)
    output = store.Output("calibrate", config, {"data": data, "scored": scored, "model": start}, force=force)
    if not output.done:
        if isinstance(config.learning_rate, tuple):
            _take_best(config, output, force)
        else:
            _calibrate(config, data, scored, start, output)
    return output.path


def _take_best(config: Config, output: store.Output, force: bool) -> None:
    """Try every learning rate, and make the one that does best on validation the output."""

    def take(best: store.Folder) -> None:
        for name in best.manifest["files"]:
            (output.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(best.path / name, output.folder / name)
        for rate in failed:
            store.discard(places[rate])

    with output.writing(resume=True):
        tried, failed = dict[float, store.Folder](), dict[float, DivergedError]()
        places = {rate: output.path.with_name(f"{output.path.name}-{rate!r}") for rate in config.learning_rates}
        for rate, place in places.items():
            display.say(f"calibrate: learning rate {rate:g}", style="bold")
            try:
                tried[rate] = store.read(run(replace(config, learning_rate=rate, output=str(place)), force=force), "calibrate")
            except DivergedError as error:
                failed[rate] = error.with_traceback(None)  # whose frames hold the model
                display.say(f"  {error}", style="yellow")
        if not tried:
            raise failed.popitem()[1]
        figures = {rate: folder.manifest["counts"][f"best_{config.select}"] for rate, folder in tried.items()}
        best = max(tried, key=lambda rate: SELECTIONS[config.select] * figures[rate])
        distributed.by_first(lambda: take(tried[best]))
        output.counts |= {**tried[best].manifest["counts"], "learning_rate": best}
        listed = ", ".join(
            [f"{each:.4g} with {rate:g}" for rate, each in figures.items()] + [f"none with {rate:g}" for rate in failed]
        )
        improved = tried[best].manifest["counts"]["best_step"] > 0
        chosen = f"learning rate {best:g} was kept" if improved else "no learning rate was better than the starting point"
        output.notes += [*tried[best].manifest["notes"], f"{chosen}, by validation {config.select}: {listed}"]
        display.say(f"  {output.notes[-1]}")


def _calibrate(config: Config, data: store.Folder, scored: store.Folder, start: store.Folder, output: store.Output) -> None:
    from calibeam import seq2seq
    from calibeam.stages.decode import check_lengths
    from calibeam.stages.evaluate import Validation
    from calibeam.stages.report import public_name

    model = seq2seq.load(start.path, device=config.device)
    check_lengths("calibrate", config, seq2seq.max_positions(model.model.config))
    adapter = adapt(model, config)
    merged: Switch = adapter.merged if adapter else nullcontext

    examples = data.stream_examples(scored.manifest["counts"]["split"])
    several = 0

    def with_first_reference() -> Iterator[tuple[str, str, str]]:
        nonlocal several
        for example in examples:
            several += len(example.targets) > 1
            yield example.id, example.source, example.targets[0]

    pairs = Pairs(model, with_first_reference(), config, by_token=False)
    candidates = Candidates(scored, pairs)
    without = candidates.without_a_pair
    _check_pairs(config, candidates.most, all_tied=without == len(pairs))
    judge = start.path if config.select == "similarity" else None
    validation = Validation(model, data.examples("validation"), config, judge)

    plan = config.plan(len(pairs), config.select)._replace(max_drift=config.max_drift)

    def refer() -> Reference | None:
        if _regularizer(config) in WITHOUT_REFERENCE:
            return None
        off = adapter.off if adapter else None
        if reference.pays(model, pairs.targets, config, plan.steps * config.batch_size):
            return reference.Remembered(model, pairs.sources, pairs.targets, config, off or nullcontext)
        return reference.Running(model if off else seq2seq.load(start.path, device=config.device), off)

    def batch(some: Sequence[int], seeds: Sequence[int]) -> Batch:
        sources, targets = ([ids[place] for place in some] for ids in (pairs.sources, pairs.targets))
        return step.batch(sources, targets, [candidates[place] for place in some], seeds, some)

    def validate() -> dict[str, float]:
        with merged():
            return validation.measure("rouge", "perplexity", config.select)

    def save(folder: Path) -> None:
        with merged():
            seq2seq.save(model, folder)
        if adapter and config.lora_save == "adapter":
            adapter.save(folder.with_name("adapter"), public_name(config.model))

    with output.writing(resume=True):
        output.counts |= {"examples": len(pairs), **pairs.cut, "examples_without_a_pair": without}
        if several and config.similarity == "current":
            output.notes.append(f"similarity=current looks at the first reference only: {several:,} examples have more")
            display.say(f"calibrate: {output.notes[-1]}", style="yellow")
        frozen = refer()
        step = CalibrationStep(model, frozen, config)
        weights = f"lambda {step.reg_weight:.3g}" + ("" if config.loss == "reward" else f", beta {config.beta:g}")
        display.say(
            f"calibrate: {len(pairs):,} examples, {without:,} of them without a pair to compare; {weights}; "
            f"log P of a source's candidates spans {candidates.log_p_span:.3g} on average"
        )
        problem = Problem(
            batches=Shuffled(pairs, config.batch_size, config.seed),
            batch=batch,
            loss=step.loss,
            validate=validate,
            save=save,
            dropout=False,
            frozen=frozen.model if frozen else None,
            shown={
                "loss": "loss",
                "agreement": "agreement",
                "regularization": "regularization" if callable(config.regularizer) else config.regularizer,
            },
            figures=_with_agreement,
            drift=partial(_drift, pairs.targets.mean_length) if config.regularizer == "kl" else None,
        )
        train(model.model, config, plan, problem, output)


def _check_pairs(config: Config, most: int, all_tied: bool) -> None:
    """That any source has candidates to compare; a loss of one's own may do without. most: candidates of a source."""
    if callable(config.loss) or (most > 1 and not (all_tied and config.similarity == "fine_tuned")):
        return
    why = "every source has one candidate only" if most < 2 else "all candidates of a source are equally similar to its target"
    raise CalibeamError(
        f"there is nothing to calibrate: {why}. Decode more candidates (decode.num_candidates), sample them "
        "(decode.method=nucleus), or compare them in another way (score.similarity)"
    )


def _with_agreement(figures: Mapping[str, float]) -> dict[str, float]:
    """With the share of pairs that likelihood orders as similarity does, as `score` has it; a half where there are none."""
    found = dict(figures)
    agreeing, pairs = found.pop("agreeing"), found.pop("pairs")
    return {**found, "agreement": agreeing / pairs if pairs else 0.5}


def _drift(tokens: float, figures: Mapping[str, float]) -> float:
    """e to the divergence of a token, by the mean number of tokens in a target: a ratio, as one of perplexities is."""
    return math.exp(min(figures["regularization"] / tokens, 700.0))


def _regularizer(config: Config) -> Callable[..., Any]:
    return config.regularizer if callable(config.regularizer) else REGULARIZERS[config.regularizer]


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


class Candidates:
    """The candidates of every example with their similarities, as `score` wrote them."""

    def __init__(self, scored: store.Folder, pairs: Pairs) -> None:
        self._token_ids, self._similarity, self.most, self.without_a_pair = Compact(), Compact("f"), 0, 0
        spans = 0.0
        rows = scored.stream("scored", store.SCORED, columns=["id", "token_ids", "log_p", "similarity"])
        for name, row in itertools.zip_longest(map(pairs.name, range(len(pairs))), rows):
            if row is None or row["id"] != name:
                raise CalibeamError(f"{scored.path} does not hold the examples of its data in their order")
            for token_ids in row["token_ids"]:
                self._token_ids.append(token_ids)
            self._similarity.append(row["similarity"])
            self.most = max(self.most, len(row["similarity"]))
            self.without_a_pair += len(set(row["similarity"])) < 2
            spans += max(row["log_p"], default=0.0) - min(row["log_p"], default=0.0)
        self.log_p_span = spans / len(pairs)
        """From the likeliest candidate of a source to the least likely, on average: a margin far above it is out of reach."""

    def __getitem__(self, place: int) -> dict[str, Any]:
        own = self._similarity.places(place)
        return {"token_ids": [self._token_ids[number] for number in own], "similarity": self._similarity[place].tolist()}


class CalibrationStep:
    """Algorithm 1's loss: calibration of candidates plus lambda times regularisation on the target.

    The frozen fine-tuned model is the reference, where one is needed. Dropout is off in both, so before the first step the KL
    divergence between them is 0 but for rounding. The target goes through the model together with the candidates.
    """

    def __init__(self, model: Seq2Seq, reference: Reference | None, config: Config) -> None:
        self._model, self._reference = model, reference
        loss = config.loss if callable(config.loss) else CALIBRATION_LOSSES[config.loss]
        self._loss = functions.looked_at(loss, "loss", lambda log_p, *_: log_p.shape[:1]) if callable(config.loss) else loss
        self._regularizer = _regularizer(config)
        self._sample = loss in PAIR_LOSSES and config.pairs == "sampled"
        self._beta, self._length_alpha, self._similarity = config.beta, config.length_alpha, config.similarity
        self._config = config
        (rate,) = config.learning_rates
        self.reg_weight = 1e-5 / rate if config.reg_weight is None else config.reg_weight

    def batch(
        self,
        sources: Sequence[Ids],
        targets: Sequence[Ids],
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        places: Sequence[int] = (),
    ) -> Batch:
        """What `loss` reads, on the host.

        seeds: of the pair that is drawn for each row, so that it does not depend on others. places: of the rows among all
        examples, for a reference that remembers them.
        """
        tuned, most = self._model, max(len(ids) for row in rows for ids in row["token_ids"])
        similarity, exists, candidates = self._choose(rows, seeds)
        sequences = [ids for target, own in zip(targets, candidates, strict=True) for ids in (target, *own)]
        token_ids, token_mask = (
            each.view(len(rows), -1, each.shape[-1])
            for each in tuned.roomy_batch(sequences, max(most, self._config.max_target_length))
        )
        found = {
            **batch_of_sources(tuned, sources, self._config, token_ids, token_mask), "similarity": similarity, "exists": exists,
            "token_ids": token_ids, "token_mask": token_mask,
        }  # fmt: skip
        found["plan"] = planned(tuned, token_ids, token_mask, found, first=1)
        return {**found, **self._reference.inputs(places, found)} if self._reference else found

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Summed over the examples, with figures to show, summed likewise."""
        from calibeam.engine.packing import Forced, plant

        model, similarity, exists = self._model.model, batch["similarity"], batch["exists"]
        reference = self._reference.at_target(batch) if self._reference else None
        token_mask = batch["token_mask"]
        tree = plant(model, batch["token_ids"], token_mask, batch["plan"], batch.get("row"))
        every = Forced(encoded(model, batch), tree).settled()
        regularization = every.regularization(self._regularizer, reference).sum()
        log_p = every.log_p()
        if self._similarity == "current":
            states = every.states().detach()
            similarity = span_similarity(states[:, 1:], states[:, :1], token_mask[:, 1:], token_mask[:, :1])
        compared = length_normalised(log_p, token_mask[:, 1:].sum(-1), self._length_alpha)
        calibration = self._loss(compared, similarity, exists, self._beta).sum()

        pairs = ordered_pairs(similarity, exists)
        higher, lower = log_p[:, :, None], log_p[:, None, :]
        agreeing = (pairs & (higher > lower)).sum() + (pairs & (higher == lower)).sum() / 2
        return {
            "loss": calibration + self.reg_weight * regularization,
            "calibration": calibration,
            "regularization": regularization,
            "agreeing": agreeing,
            "pairs": pairs.sum(),
        }

    def _choose(self, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> tuple[Tensor, Tensor, list[list[Ids]]]:
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

"""The one training loop, shared by pretraining, fine-tuning and calibration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shutil
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from calibeam import display, distributed, shards, signals, store, trackers
from calibeam.recipe import ModelStageConfig, option
from calibeam.records import CalibeamError, DivergedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from calibeam.checkpoint import Position
    from calibeam.engine.graphs import Batch
    from calibeam.engine.packing import Forced, Source
    from calibeam.engine.packing import Plan as Packed
    from calibeam.engine.sharding import Sharded
    from calibeam.seq2seq import Ids, Seq2Seq

OPTIMIZERS = {"adamw": "AdamW", "adafactor": "Adafactor"}
SCHEDULES = ("constant_with_warmup", "linear", "cosine", "inverse_sqrt")
FEW_STEPS = 10
"""With fewer, hardly anything is learnt, and a user should know."""
SELECTIONS = {"perplexity": -1, "rouge": +1, "similarity": +1}
"""What a checkpoint is chosen by on the validation split, and which way is better."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(ModelStageConfig):
    model: str = option(help="the model to begin with: a folder or a Hub id", identity=False)
    learning_rate: float = option(1e-4, "the peak learning rate", above=0, at_most=1000)
    batch_size: int = option(64, "examples per step", at_least=1)
    micro_batch_size: int = option(8, "examples per forward pass; gradients add up to the batch", at_least=1, identity=False)
    optimizer: str = option("adamw", "the optimizer", choices=lambda: OPTIMIZERS)
    weight_decay: float = option(0.0, "of the optimizer", at_least=0)
    lr_scheduler_type: str = option("constant_with_warmup", "as in transformers", choices=lambda: SCHEDULES)
    warmup_steps: int = option(0, "steps over which the learning rate rises", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", above=0)
    max_source_length: int = option(512, "source tokens; longer sources are cut", at_least=1)
    max_target_length: int = option(128, "target tokens; longer targets are cut", at_least=1)
    seed: int = option(0, "of shuffling, dropout and sampling", at_least=0)
    save_steps: int = option(
        500, "steps between checkpoints to resume from; every validation saves one, too", at_least=1, identity=False
    )
    report_to: tuple[str, ...] = option(
        (), "also report the figures of steps and validations to these", choices=lambda: trackers.NEEDS, identity=False
    )
    cuda_graphs: bool = option(True, "on a GPU, record the work of each shape once and replay it", identity=False)
    gradient_checkpointing: bool = option(
        False,
        "keep what goes into each block, and compute the rest again for its gradients: less memory, more work",
        identity=False,
    )
    shard_model: bool = option(
        False, "of several processes, each holds a share of weights, gradients and optimizer, by FSDP2", identity=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        trackers.check_installed(self.report_to)


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig(TrainingConfig):
    """Of training on the examples of a prepared dataset."""

    data: str = option(help="the folder written by prepare", identity=False)
    num_train_epochs: float = option(1.0, "passes over the training data", above=0)
    max_steps: int = option(0, "stop after this many steps; 0 for all epochs", at_least=0)
    eval_steps: int = option(0, "steps between validations; 0 for one per epoch", at_least=0)
    patience: int = option(0, "stop after this many validations without improvement; 0 for never", at_least=0)
    select_examples: int = option(500, "validation examples to select by, chosen by a hash of their id; 0 for all", at_least=0)
    select_num_beams: int = option(5, "beams when selecting by ROUGE", at_least=1)

    def plan(self, examples: int, select: str) -> Plan:
        steps_per_epoch = math.ceil(examples / self.batch_size)
        steps = self.max_steps or math.ceil(self.num_train_epochs * steps_per_epoch)
        return Plan(steps, self.eval_steps or steps_per_epoch, select, self.patience)


class Plan(NamedTuple):
    """How long to train, and which weights to keep."""

    steps: int
    every: int
    """Steps between validations."""
    select: str | None
    """What the checkpoint is chosen by; None for the last one."""
    patience: int = 0
    max_drift: float = 0.0
    """Stop when a token of a target is so many times less likely than at the start; 0 for never."""

    def validates(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps


class Item(NamedTuple):
    """One example, as the loop sees it."""

    name: str
    length: int
    """By which those of a batch are sorted, so that those of similar length go together."""
    weight: float
    """What it counts in its batch's mean: 1, or its number of tokens."""
    content: Any
    """What `Problem.batch` takes."""


class Compact(Sequence[Any]):
    """Rows of numbers, one after another in one array: a token takes 4 bytes, where Python's own lists take 36."""

    def __init__(self, kind: str = "i") -> None:
        """kind: as in `array`."""
        self._numbers, self._ends = array(kind), array("q", [0])

    def append(self, row: Iterable[float]) -> None:
        self._numbers.extend(row)  # type: ignore[arg-type]
        self._ends.append(len(self._numbers))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: Any) -> Any:
        return self._view[self._ends[place] : self._ends[place + 1]]

    def places(self, place: int) -> range:
        """Of the numbers of a row, among all."""
        return range(self._ends[place], self._ends[place + 1])

    @property
    def total(self) -> int:
        return len(self._numbers)

    @property
    def mean_length(self) -> float:
        return self.total / len(self)

    @cached_property
    def _view(self) -> np.ndarray:
        return np.frombuffer(self._numbers, self._numbers.typecode)


class Pairs(Sequence[Item]):
    """The sources and targets to train on, as token ids. Of the texts, no more than some are held at a time."""

    def __init__(self, model: Seq2Seq, pairs: Iterable[tuple[str, str, str]], config: ExamplesConfig, *, by_token: bool) -> None:
        """pairs: names, sources, targets. by_token: a pair counts as many times as its target has tokens, not once."""
        self._names, self.sources, self.targets, self._by_token = Compact("B"), Compact(), Compact(), by_token
        self.cut = Counter({"sources_cut": 0, "targets_cut": 0})
        left = iter(pairs)
        while some := [*itertools.islice(left, shards.SIZE)]:
            names, sources, targets = zip(*some, strict=True)
            source_ids, sources_cut = model.encode_sources(sources, config.max_source_length)
            target_ids, targets_cut = model.encode_targets(targets, config.max_target_length)
            self.cut.update({"sources_cut": sources_cut, "targets_cut": targets_cut})
            for name, source, target in zip(names, source_ids, target_ids, strict=True):
                self._names.append(name.encode())
                self.sources.append(source)
                self.targets.append(target)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, place: Any) -> Any:
        weight = len(self.targets[place]) if self._by_token else 1
        return Item(self.name(place), len(self.sources[place]), weight, place)

    def name(self, place: int) -> str:
        return self._names[place].tobytes().decode()


class Batches(Protocol):
    def next(self) -> Sequence[Item]: ...

    def position(self) -> Position:
        """After the last batch that `next` gave."""

    def restore(self, position: Position) -> None: ...


class Problem(NamedTuple):
    """What to train on, and how."""

    batches: Batches
    batch: Callable[[Sequence[Any], Sequence[int]], Batch]
    """The contents of some items, on the host; each has a random number of its own."""
    loss: Callable[[Batch], dict[str, Tensor]]
    """The summed loss of a batch, and figures to show, summed likewise. It must not wait for a GPU."""
    validate: Callable[[], dict[str, float]]
    save: Callable[[Path], None]
    """Into the folder of the checkpoint."""
    dropout: bool
    shown: Mapping[str, str]
    """The figures to show as it goes, and what to call them."""
    figures: Callable[[Mapping[str, float]], dict[str, float]] = dict
    """What to show and log of a step, by the means of what the loss gave."""
    frozen: Any = None
    """Another model that the loss reads, if there is one."""
    drift: Callable[[Mapping[str, float]], float] | None = None
    """How many times less likely a token of a target is, by a step's figures."""


def train(model: Any, config: TrainingConfig, plan: Plan, problem: Problem, output: store.Output) -> None:
    """Train, validate, and leave the chosen weights in `output.folder/model`.

    Where weights are chosen, the starting point is validated too: a run that only makes things worse gives it back unchanged.
    Several processes walk through this side by side: each decides as the others do, and the first alone writes.
    """
    from calibeam import checkpoint

    store.must_agree(str(output.path), {"device": model.device.type})  # a machine may have lost sight of its GPU
    output.temporary = checkpoint.FILES
    select = plan.select
    sharded = _shard(model, config, problem)
    optimizer, schedule = make_optimizer(model, config, plan.steps)
    step, state, kept = 0, _Progress(), _Kept(output.folder)

    def log(kind: str, figures: dict[str, float]) -> None:
        if distributed.is_first():
            output.append_log({"step": step, kind: figures})
            told.log(step, kind, figures)

    def validate(shown: str) -> None:
        model.eval()
        with whole():
            figures = problem.validate()
            if figures:
                log("validation", figures)
                display.say(f"  step {step}: {shown}validation " + _show(figures))
            if state.judge(figures, step, plan):
                distributed.by_first(keep)

    def keep() -> None:
        problem.save(kept.emptied(step) / "model")

    def whole() -> AbstractContextManager[None]:
        """Where the model has all its weights."""
        return sharded.whole() if sharded else nullcontext()

    def save() -> None:
        facts = {"step": step, "progress": dataclasses.asdict(state)}
        checkpoint.save(output.folder, facts, model, optimizer, schedule, problem.batches.position)
        distributed.by_first(lambda: kept.clear(state.best_step))

    if found := checkpoint.load(output.folder, model, optimizer, schedule):
        step, state = found[0]["step"], _Progress(**found[0]["progress"])
        kept.known = state.best_step
        problem.batches.restore(found[1])
        display.say(f"  resuming after step {step}")
    if distributed.highest(step) != -distributed.highest(-step):
        raise CalibeamError(
            f"processes find different checkpoints in {output.folder}: it must be on a disk that all of them share"
        )
    # A checkpoint is of the moment after a step and before its validation, if one is due.
    if distributed.is_first():
        checkpoint.drop_after(output.folder, step)
        output.keep_log(lambda record: record["step"] < step or (record["step"] == step and "train" in record))
    if (parts := math.ceil(config.batch_size / config.micro_batch_size)) < distributed.size():
        idle = f"{distributed.size() - parts} of {distributed.size()} processes have nothing to do"
        display.say(f"  a step is {parts} micro-batches: {idle}. Set a smaller micro_batch_size", style="yellow")
    _tell_length(plan, config, output)
    update = TrainingStep(model, config, problem, optimizer, sharded)
    shown, told_by_first = "", config.report_to if distributed.is_first() else ()
    with (
        signals.postponed() if distributed.size() > 1 else nullcontext(),  # until all know of it
        trackers.opened(told_by_first, output.path, config.identity()) as told,
        display.Bar(output.kind, plan.steps) as bar,
    ):
        bar.advance(step)
        while True:
            if plan.validates(step):
                validate(shown)
                signals.heed(distributed.highest(signals.asked()))
            if stop := state.stop(plan):
                output.notes.append(f"stopped at step {step}: {stop}")
                display.say(f"  {output.notes[-1]}", style="yellow")
            if stop or step == plan.steps:
                break
            with signals.postponed():
                step += 1
                model.train(problem.dropout)
                batch, start = problem.batches.next(), time.perf_counter()
                figures = problem.figures(update(batch, step))
                seconds = time.perf_counter() - start
                figures["learning_rate"] = schedule.get_last_lr()[0]
                schedule.step()
                log("train", figures)
                shown = (
                    f"{display.number(len(batch) / seconds)} examples/s  "  # not in the log, which is the same for the same run
                )
                shown += _show({called: figures[name] for name, called in problem.shown.items()}) + "  "
                bar.advance(figures=shown)
                state.drift = problem.drift(figures) if problem.drift else 1.0
                asked = distributed.highest(signals.asked())
                if plan.validates(step) or step % config.save_steps == 0 or asked:
                    save()
            signals.heed(asked)
    model.eval()
    output.counts["steps"] = step
    if select is None:
        with whole():
            distributed.by_first(keep)
    distributed.by_first(lambda: kept.publish(step if select is None else state.best_step))
    if select is not None:
        output.counts |= {"best_step": state.best_step, f"best_{select}": SELECTIONS[select] * state.best}
        if state.best_step == 0:
            output.notes.append("no step was better on validation than the starting point, which is kept unchanged")
            display.say(f"  {output.notes[-1]}", style="yellow")
        else:
            display.say(f"  kept step {state.best_step}, the best by validation {select}")


def _tell_length(plan: Plan, config: TrainingConfig, output: store.Output) -> None:
    display.say(f"  {plan.steps:,} steps of {config.batch_size:,} examples, with a validation every {plan.every:,}")
    if plan.steps < FEW_STEPS and isinstance(config, ExamplesConfig):
        stage, epochs = output.kind, config.num_train_epochs
        more = f"lower {stage}.batch_size ({config.batch_size}) or raise {stage}.num_train_epochs ({epochs:g})"
        more = f"raise {stage}.max_steps ({config.max_steps})" if config.max_steps else more
        output.notes.append(f"very few steps ({plan.steps}): for more, {more}")
        display.say(f"  {output.notes[-1]}", style="yellow")


class _Kept:
    """The weights that were best, by their step. Those that a checkpoint knows of stay until a newer one knows of others: a run
    that was stopped between the two finds them as it left them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.known = 0
        """The step that the last checkpoint has for the best."""

    def emptied(self, step: int) -> Path:
        """Where those of a step go, without what a run that was killed there left."""
        shutil.rmtree(self._place(step), ignore_errors=True)
        return self._place(step)

    def clear(self, best: int) -> None:
        """All but those that one of the last two checkpoints knows."""
        for place in self._folder.glob("best-*"):
            if place not in (self._place(best), self._place(self.known)):
                shutil.rmtree(place)
        self.known = best

    def publish(self, best: int) -> None:
        """As the result. A run that was stopped in here has done some of it, or all."""
        for part in self._place(best).glob("*"):
            shutil.rmtree(self._folder / part.name, ignore_errors=True)
            os.replace(part, self._folder / part.name)
        for place in self._folder.glob("best-*"):
            shutil.rmtree(place)

    def _place(self, step: int) -> Path:
        return self._folder / f"best-{step:09}"


@dataclass
class _Progress:
    """What the loop knows of the run so far."""

    best: float = -math.inf
    best_step: int = 0
    worse: int = 0
    """Validations without improvement."""
    first_perplexity: float = math.inf
    perplexity: float = 0.0
    drift: float = 1.0
    """By the last step's figures."""

    def judge(self, figures: Mapping[str, float], step: int, plan: Plan) -> bool:
        """Take note of a validation; whether these are the weights to keep."""
        self.perplexity = figures.get("perplexity", 0.0)
        if step == 0:
            self.first_perplexity = self.perplexity
        if plan.select is None:
            return False
        value = SELECTIONS[plan.select] * figures[plan.select]
        better = step == 0 or value > self.best or (math.isnan(self.best) and not math.isnan(value))
        self.best, self.best_step = (value, step) if better else (self.best, self.best_step)
        self.worse = 0 if better else self.worse + 1
        return better

    def stop(self, plan: Plan) -> str:
        """Why to go no further, if there is a reason."""
        if plan.patience and self.worse >= plan.patience:
            return f"{self.worse} validations without improvement"
        if not plan.max_drift:
            return ""
        if not self.perplexity <= plan.max_drift * self.first_perplexity:  # nor is it where it is no number
            times = self.perplexity / self.first_perplexity
            return f"perplexity on validation is {times:.3g} times what it was, above max_drift, which is {plan.max_drift:g}"
        if self.drift > plan.max_drift:
            return (
                f"the divergence is e^kl = {self.drift:.3g} a token of the target, above max_drift, which is {plan.max_drift:g}"
            )
        return ""


def autocast(device: torch.device, config: ModelStageConfig) -> AbstractContextManager[Any]:
    """Products in the type that the settings ask for, on float32 weights."""
    import torch

    from calibeam.seq2seq import dtype_named

    wanted = dtype_named(config.dtype, device)
    return nullcontext() if wanted is torch.float32 else torch.autocast(device.type, wanted)


def batch_of_sources(
    model: Seq2Seq, sources: Sequence[Ids], config: TrainingConfig, token_ids: Tensor | None = None, mask: Tensor | None = None
) -> dict[str, Any]:
    """On the host; short ones share rows where that is less work, if what is to be written for them is given. [batch,
    sequences, length] each"""
    from calibeam import families
    from calibeam.engine import layout
    from calibeam.engine.packing import distinct_prefixes

    if token_ids is not None and mask is not None and families.is_known(model.model):
        nodes = distinct_prefixes(token_ids.numpy(), mask.numpy())
        found = layout.share([*map(len, sources)], nodes, model.model.config.hidden_size, model.device)
        if found:
            return layout.side_by_side(sources, *found, model.ids.pad, model.device)
    input_ids, seen = model.roomy_batch(sources, config.max_source_length, per_octave=2)
    return {"input_ids": input_ids, "mask": seen, "whole": bool(seen.all())}


def batch_of_pairs(
    model: Seq2Seq, sources: Sequence[Ids], targets: Sequence[Ids], config: TrainingConfig, *, apart: bool = False
) -> dict[str, Any]:
    """Sources and a target of each, on the host. apart: every source has a row of its own."""
    target, mask = (each[:, None] for each in model.roomy_batch(targets, config.max_target_length))
    batch = batch_of_sources(model, sources, config, *(() if apart else (target, mask)))
    return batch | planned_targets(model, target, mask, batch)


def planned_targets(model: Seq2Seq, target: Tensor, mask: Tensor, batch: Batch) -> dict[str, Any]:
    """What `forced` reads beside the sources of a batch. [batch, 1, length] each"""
    return {"target": target, "target_mask": mask, "target_plan": planned(model, target, mask, batch)}


def planned(model: Seq2Seq, token_ids: Tensor, mask: Tensor, batch: Batch, *, first: int = 0) -> Packed:
    """For sequences [batch, sequences, length] of the sources of a batch."""
    from calibeam.engine.packing import plan

    size, rows = model.model.config.hidden_size, len(batch["input_ids"])
    return plan(token_ids, mask, size, model.device, first=first, rows=rows, row=batch.get("row"))


def encoded(model: Any, batch: Batch) -> Source:
    """The sources of such a batch."""
    from calibeam.engine.layout import Shared
    from calibeam.engine.packing import Source

    shared = Shared(batch["segment"], batch["position"]) if "row" in batch else None
    return Source(model, batch["input_ids"], batch["mask"], whole=batch["whole"], often=True, shared=shared)


def forced(source: Source, batch: Batch) -> Forced:
    """What the decoder makes of their targets."""
    from calibeam.engine.packing import Forced, plant

    return Forced(source, plant(source.model, batch["target"], batch["target_mask"], batch["target_plan"], batch.get("row")))


class TrainingStep:
    """One update from the mean loss over a batch, computed some examples of similar length at a time.

    Which examples go together, and the random numbers of each, depend on the batch alone: several processes take turns, and what
    they found is added up. One that has no turn where others have computes what counts nothing, so that all gather the same
    weights, and have gradients of the same parameters.
    """

    def __init__(
        self, model: Any, config: TrainingConfig, problem: Problem, optimizer: Any, sharded: Sharded | None = None
    ) -> None:
        from calibeam import families
        from calibeam.engine.graphs import Recorded

        self._model, self._config, self._problem, self._optimizer = model, config, problem, optimizer
        self._sharded, self._names = sharded, list[str]()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._blocks = families.blocks(model)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        # Of unknown families nobody knows whether they wait for the GPU. Sharding does, and so does noise that is drawn again.
        recorded = config.cuda_graphs and self._blocks and not sharded and not config.gradient_checkpointing
        this: Any = weakref.proxy(self)  # in a cycle, models would outlive their training
        self._add_gradients = Recorded(partial(TrainingStep._backward, this), model.device, enabled=bool(recorded))

    def __call__(self, batch: Sequence[Item], step: int) -> dict[str, float]:
        import torch
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        batch, size = sorted(batch, key=lambda item: item.length), self._config.micro_batch_size
        weight = sum(item.weight for item in batch)
        generator = torch.Generator().manual_seed(mixed(self._config.seed, step))
        seeds = torch.randint(2**62, (len(batch),), generator=generator).tolist()
        parts = [slice(start, start + size) for start in range(0, len(batch), size)]
        turns = slice(distributed.rank(), None, distributed.size())
        own = parts[turns]
        idle = math.ceil(len(parts) / distributed.size()) - len(own)
        taken = [(of, weight) for of in own] + [(slice(1), math.inf)] * idle
        found = torch.stack([self._part(batch[of], seeds[of], counts) for of, counts in taken])
        values = found.new_zeros(len(parts), found.shape[1])
        values[turns] = found[: len(own)]
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        distributed.add_up([values] if self._sharded else [*gradients, values])
        norm: Any = get_total_norm(gradients)
        norm = norm.full_tensor() if self._sharded else norm
        clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
        for of, loss in zip(parts, values[:, 0].tolist(), strict=True):
            if not math.isfinite(loss):
                raise _not_finite("loss", loss, step, batch[of])
        if not math.isfinite(norm):
            raise _not_finite("gradient", float(norm), step, batch)
        self._optimizer.step()
        clear_gradients(self._parameters)
        return dict(zip(self._names, (values.double().sum(0) / weight).tolist(), strict=True))

    def _part(self, items: Sequence[Item], seeds: Sequence[int], weight: float) -> Tensor:
        """Some of the batch; what is random in the pass itself, dropout, goes by the number of the first of them."""
        import torch

        torch.manual_seed(seeds[0])
        batch = self._problem.batch([item.content for item in items], seeds)
        return self._add_gradients({**batch, "weight": torch.tensor(weight, dtype=torch.float32)})

    def _backward(self, batch: Batch) -> Tensor:
        import torch

        from calibeam.engine.ops import cast_at_once

        with autocast(self._model.device, self._config), cast_at_once([] if self._sharded else self._blocks):
            figures = self._sharded(lambda: self._problem.loss(batch)) if self._sharded else self._problem.loss(batch)
        loss = figures["loss"] / batch["weight"]
        if self._sharded:
            loss.backward()  # FSDP2 looks for gradients where this leaves them
        else:
            add_gradients(loss, self._parameters)
        self._names = list(figures)
        return torch.stack([value.detach().float() for value in figures.values()])


def add_gradients(loss: Tensor, parameters: Sequence[Tensor]) -> None:
    """As `backward` does, but all sums at once: a model has hundreds of small parameters."""
    import torch

    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    sums, new = [], []
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            sums.append(parameter.grad)
            new.append(gradient)
    torch._foreach_add_(sums, new)


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """To 0, where they are: a recorded step adds to them there."""
    import torch

    if gradients := [parameter.grad for parameter in parameters if parameter.grad is not None]:
        torch._foreach_zero_(gradients)


def _not_finite(what: str, value: float, step: int, batch: Sequence[Item]) -> DivergedError:
    names = ", ".join(item.name for item in batch[:8]) + (", ..." if len(batch) > 8 else "")
    return DivergedError(
        f"the {what} is {value} at step {step}, on examples {names}. Nothing of this step was saved. "
        "A lower learning rate may help; so may a look at these examples"
    )


def mixed(seed: int, number: int) -> int:
    """A seed for each number. PyTorch's generator on the host looks at 32 bits of it, no more."""
    return (seed * 0x9E3779B1 + number) % 2**32


class Shuffled:
    """Every item once per epoch, in an order that depends on seed and epoch alone."""

    def __init__(self, items: Sequence[Item], batch_size: int, seed: int) -> None:
        self._items, self._batch_size, self._seed = items, batch_size, seed
        self._given = 0
        self._order: tuple[int, Tensor] | None = None

    def next(self) -> Sequence[Item]:
        import torch

        epoch, place = divmod(self._given, math.ceil(len(self._items) / self._batch_size))
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
            self._order = epoch, torch.randperm(len(self._items), generator=generator)
        self._given += 1
        start = place * self._batch_size
        return [self._items[index] for index in self._order[1][start : start + self._batch_size].tolist()]

    def position(self) -> Position:
        from calibeam.checkpoint import Position

        return Position({"given": self._given}, {})

    def restore(self, position: Position) -> None:
        self._given = position.facts["given"]


def make_optimizer(model: Any, config: TrainingConfig, steps: int) -> tuple[Any, Any]:
    import torch
    from transformers import get_scheduler

    from calibeam.engine import sharding

    optimizer_class: Any = getattr(torch.optim, OPTIMIZERS[config.optimizer])
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw" and model.device.type == "cuda":
        settings["fused"] = True
    if config.optimizer == "adafactor" and is_sharded(config):
        optimizer_class = sharding.Adafactor
    optimizer = optimizer_class(model.parameters(), **settings)
    schedule = get_scheduler(config.lr_scheduler_type, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps)
    return optimizer, schedule


def is_sharded(config: TrainingConfig) -> bool:
    return config.shard_model and distributed.size() > 1


def _shard(model: Any, config: TrainingConfig, problem: Problem) -> Sharded | None:
    if not is_sharded(config):
        return None
    from calibeam import seq2seq
    from calibeam.engine.sharding import Sharded

    return Sharded(model, seq2seq.dtype_named(config.dtype, model.device), problem.frozen)


def _show(figures: dict[str, float]) -> str:
    return "  ".join(f"{name} {display.number(value)}" for name, value in figures.items())

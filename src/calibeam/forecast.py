"""What a recipe will take on machines of some kind, before it is run: time, memory, storage and money of every stage.

Time is the FLOPs of the paper's appendix (`studies.cost`) over those per second that a stage reached where it was measured, with
models of about that size, and, one after the other with it, what one process does alone: it begins, which takes seconds, it reads
rows in `prepare`, and it computes the SHA-256 of everything that a stage reads and writes, checkpoints included. Several GPUs are
taken to be as fast as one is, times their number: the time is a lower bound.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from calibeam import display, pipeline, recipe, shards, stages
from calibeam.pipeline import Step
from calibeam.records import CalibeamError
from calibeam.reference import MEMORY_SHARE
from calibeam.studies import cost
from calibeam.studies.cost import Data, Size
from calibeam.studies.plan import places
from calibeam.tasks.task import SPLITS

GIB = 2**30
HELD_OUT = 10_000
"""Examples of a split that nobody has counted."""

PREPARE = 16.1e6
"""Characters that `prepare` reads in a second: 26,583 rows of 606 (docs/reliability.md)."""
HASH = 1.0e9
"""Bytes that one core computes the SHA-256 of in a second."""
BYTES_PER_CHARACTER, BYTES_PER_OUTPUT_TOKEN = 0.51, {"decode": 2.9, "score": 3.4}
"""In the store, after compression; the demo's, whose outputs have 11 tokens."""
HOST_BYTES_PER_ROW = 200
"""Of memory: `prepare` knows rows again."""
HOST_BYTES_PER_EXAMPLE, HOST_BYTES_PER_CANDIDATE, HOST_BYTES_PER_TOKEN = 80, 12, 4.1
"""The same of fine-tuning and calibration, which hold the ids of all tokens, with room to grow; as measured."""

TRAINING = ("pretrain", "finetune", "calibrate")
TRAINED, SAVED = {"adamw": 16, "adafactor": 8}, {"adamw": 12, "adafactor": 4}
"""Bytes per parameter while it is trained, and in a checkpoint: weights and gradients in float32, and the optimizer's own."""
CHECKPOINTS = 2
"""So many are kept while a training runs."""
FROZEN = 4
"""Bytes per parameter that is not trained: of the copy that `calibrate` has, or of the model that an adapter is for."""
ACTIVATIONS = {"pretrain": 53, "finetune": 53, "calibrate": 14, "score": 6}
"""Bytes per token, layer and dimension; what was measured on PEGASUS LARGE, less weights and the optimizer's."""
MEMORY = 128 * GIB
"""Of a host, where that matters."""
CHECKPOINTED = 6
"""The same with `gradient_checkpointing`, of layers that are not at work: states in float32, and what was last added to them."""
WHOLE = 6
"""Bytes per parameter of a shared model in a validation: all weights in float32, and as the search wants them."""


class Measurement(NamedTuple):
    """How many examples a stage did in a second, of which lengths, with a model of which size."""

    stage: str
    per_second: float
    size: str
    source_length: float
    target_length: float
    settings: dict[str, Any]


class Machine(NamedTuple):
    """A GPU, or all cores of a machine without one."""

    memory: float
    """Bytes."""
    measured: tuple[Measurement, ...]
    where: str
    faster: float = 1.0
    """Times as fast as what was measured."""
    begins: float = 0.0
    """Seconds in which a stage loads its model and gets ready."""


ON_H200 = (
    Measurement("pretrain", 212_000 / 640, "large", 512, 128, {"max_steps": 1, "batch_size": 1, "files": ()}),
    Measurement("decode", 3462 / 15, "large", 512, 64, {"num_candidates": 15}),
    Measurement("score", 283, "large", 512, 64, {}),
    Measurement("calibrate", 136, "large", 512, 64, {"loss": "list_rank"}),
)
"""bfloat16, PEGASUS LARGE, as in the README ("How fast"): benchmarks/pretrain.py, decode.py and step.py, of which the list of 15
candidates that share nothing. Fine-tuning is taken as pretraining, and evaluation as decoding, though it scores too, faster."""
SAMSUM = (126.4, 27.3)
ON_H200_SMALL = (
    Measurement("pretrain", 256_000 / 219, "small", 512, 128, {"max_steps": 1, "batch_size": 1, "files": ()}),
    Measurement("finetune", 3 * 14_731 / 55.6, "small", *SAMSUM, {"num_train_epochs": 1}),
    Measurement("decode", 14_731 / 23.4, "small", *SAMSUM, {"num_candidates": 15}),
    Measurement("score", 14_731 / 13.7, "small", *SAMSUM, {}),
    Measurement("calibrate", 2 * 14_731 / 60.2, "small", *SAMSUM, {"pairs": "all", "num_train_epochs": 1}),
)
"""The stages of docs/results.md as they were run, with validations, padding and shapes to record, less the seconds in which each
begins. So small a model keeps no GPU busy. All but the first with a T5 that has 5% more weights than SMALL."""
ON_TWO_CORES = (
    Measurement("decode", 1400 / 49.3, "demo", 122, 13.6, {"num_candidates": 15}),
    Measurement("score", 1400 / 15.8, "demo", 122, 13.6, {}),
    Measurement("calibrate", 1400 / 109.4, "demo", 122, 13.6, {"loss": "reward"}),
    Measurement("evaluate", 700 / 64.0, "demo", 122, 13.6, {"num_candidates": (1, 5, 10)}),
)
"""float32, the demo (`make demo`), validation of `calibrate` included. Training by likelihood is taken as calibration."""
MACHINES = {
    "h200": Machine(141e9, (*ON_H200, *ON_H200_SMALL), "one H200", begins=5.0),
    "h100": Machine(80e9, (*ON_H200, *ON_H200_SMALL), "one H200, at the same rate", begins=5.0),
    "a100": Machine(80e9, (*ON_H200, *ON_H200_SMALL), "one H200, and scaled by its peak", 312 / 989, begins=5.0),
    "cpu": Machine(8e9, ON_TWO_CORES, "two CPU cores"),
}
LIKE = {"finetune": ("pretrain", "calibrate"), "pretrain": ("calibrate",), "evaluate": ("decode",)}
"""Whose rate a stage has that was not measured."""


@dataclass(frozen=True)
class Forecast:
    """Of a stage. Bytes, seconds, GPU hours; the money if a price was named."""

    stage: str
    flops: float
    gpus: int
    seconds: float
    seconds_alone: float
    """Of these: while one process works and the GPUs wait."""
    gpu_hours: float
    money: float | None
    gpu_memory: float
    host_memory: float
    storage: float
    storage_meanwhile: float
    """More, while the stage runs."""
    shards: int
    limit: str
    """What more GPUs would not change, or what does not fit."""


def forecast(
    tables: dict[str, Any], *, gpu: str = "h200", gpus: int = 1, sources: int | None = None, price: float | None = None
) -> list[Forecast]:
    """The stages of the recipe in order, as if nothing of it were there, but for those that take next to nothing."""
    if gpu not in MACHINES:
        raise CalibeamError(f"--gpu must be one of {', '.join(MACHINES)}, got {gpu!r}")
    machine, found, written = MACHINES[gpu], list[Forecast](), dict[str, float]()
    steps = [step for step in linked(pipeline.plan(tables)) if step.stage in {"prepare", *cost.FLOPS}]
    rows = _data(steps, sources)
    for step in steps:
        data = (cost.data_of(step) if step.stage == "pretrain" else None) or rows
        size = _size(step) if step.stage in cost.FLOPS else None
        flops = cost.flops_of(step, size, data) if size else 0.0
        storage, most = _storage(step, size, data), _most_gpus(step, data)
        used = min(gpus, most) if flops else 1
        working = flops / (used * rate(gpu, step.stage, size)) if size else 0.0
        read = sum(written.get(need.config.output, 0.0) for need in step.needs)
        checkpoint = _checkpoint(step, size) if size else 0.0
        saved = _saves(step, data) * checkpoint / (used if getattr(step.config, "shard_model", False) else 1)
        alone = (storage + read + saved) / HASH + (machine.begins if size else _characters(data) / PREPARE)
        written[step.config.output] = storage
        gpu_memory, host_memory = _gpu_memory(step, size, data, gpu, used), _host_memory(step, size, data)
        limits = [
            _idle(step, most) if flops and gpus > most else "",
            "one process takes longer than the GPUs" if 60 < alone > working else "",
            f"{_bytes(gpu_memory)} do not fit in a GPU of {_bytes(machine.memory)}" if gpu_memory > machine.memory else "",
            f"one process holds {_bytes(host_memory)}" if host_memory > 256 * GIB else "",
        ]
        hours = used * (working + alone) / 3600 if flops else 0.0
        found.append(Forecast(
            step.stage, flops, used if flops else 0, working + alone, alone, hours, None if price is None else hours * price,
            gpu_memory, host_memory, storage, CHECKPOINTS * checkpoint, _shards(step, data), "; ".join(filter(None, limits)),
        ))  # fmt: skip
    return found


def linked(steps: Iterable[Step]) -> list[Step]:
    """The steps of a run, each with those that it reads from."""
    made: dict[str, Step] = {}
    for step in steps:
        needs = tuple(made[place] for place in places(step.config).values() if place in made)
        made[step.config.output] = Step(step.stage, step.config, needs)
    return [*made.values()]


@cache
def rate(gpu: str, stage: str, size: Size) -> float:
    """FLOPs per second that a stage reaches with a model of this size: between those of measured sizes, on a scale of powers."""
    machine, like = MACHINES[gpu], (stage, *LIKE.get(stage, ()))
    measured = {each.size: each for name in reversed(like) for each in machine.measured if each.stage == name}
    points = sorted((math.log(_size_named(name).parameters), math.log(_rate_of(each))) for name, each in measured.items())
    sizes, rates = ([point[axis] for point in points] for axis in (0, 1))
    return machine.faster * math.exp(np.interp(math.log(size.parameters), sizes, rates))


def _rate_of(measured: Measurement) -> float:
    """By the same formula that predicts."""
    decoding = Step("decode", _config("decode", {"num_candidates": 15}))
    step = Step(measured.stage, _config(measured.stage, measured.settings), () if measured.stage == "decode" else (decoding,))
    data = Data({"train": 1, "validation": 0, "test": 1}, measured.source_length, measured.target_length)
    return measured.per_second * cost.flops_of(step, _size_named(measured.size), data)


def _config(stage: str, settings: dict[str, Any]) -> Any:
    """With nothing at the places that it reads and writes."""
    kind = stages.load(stage).Config
    places = {field.name: "-" for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    return kind(**places | settings)


def _size_named(name: str) -> Size:
    if name == "demo":
        return cost.size_created(_config("create", {"decoder_layers": 2}), 8192)
    return cost.size_created(_config("create", {"size": name}), 96_103)


def _size(step: Step) -> Size:
    size = cost.size_of(step)
    if size is None:
        raise CalibeamError(f"{step.config.model} cannot be read, so its size is not known: name a folder, or a [create] table")
    return size


def _data(steps: Sequence[Step], sources: int | None) -> Data:
    """As prepared, or as the paper has it; else as long as the recipe allows. `sources` says how many to train on."""
    prepare, decode = (next(step for step in steps if step.stage == name) for name in ("prepare", "decode"))
    known = cost.data_of(prepare)
    if known is None and sources is None:
        task = prepare.config.task
        told = f"The paper has no figures of {task}: run" if task else "Name a task, run"
        raise CalibeamError(f"how many sources? {told} prepare first, or pass --sources")
    data = known or Data({}, decode.config.max_source_length, decode.config.max_new_tokens)
    limits = {split: getattr(prepare.config, f"max_{split}") for split in SPLITS}
    counts = {split: min(filter(None, (data.examples.get(split, HELD_OUT), limits[split]))) for split in SPLITS}
    return data._replace(examples={**counts, "train": sources or counts["train"]})


def _characters(data: Data) -> float:
    return sum(data.examples.values()) * cost.CHARACTERS_PER_TOKEN * (data.source_length + data.target_length)


def _candidates(step: Step) -> int:
    return cost.ancestor(step, "decode").config.num_candidates


def _shards(step: Step, data: Data) -> int:
    return len(shards.numbers(cost.examples_of(step, data))) if hasattr(step.config, "engine") else 0


def _most_gpus(step: Step, data: Data) -> int:
    """That have anything to do: one takes a shard, or a micro-batch, at a time."""
    if step.stage in TRAINING:
        return math.ceil(step.config.batch_size / step.config.micro_batch_size)
    return _shards(step, data)


def _idle(step: Step, most: int) -> str:
    """Why no more GPUs than `most` have work."""
    pieces = f"a step is {most:,} micro-batches" if step.stage in TRAINING else f"there are {most:,} shards"
    return f"{pieces}, so no more than {most:,} GPUs have work"


def _checkpoint(step: Step, size: Size) -> float:
    """Bytes of what a training resumes from."""
    if step.stage not in TRAINING:
        return 0.0
    adapter = _adapter(step, size)
    each = SAVED[step.config.optimizer]
    return FROZEN * size.all_parameters + each * adapter if adapter else float(each * size.all_parameters)


def _saves(step: Step, data: Data) -> float:
    """How many checkpoints a training writes."""
    if step.stage not in TRAINING:
        return 0.0
    config, steps = step.config, _tries(step) * cost.seen(step, data) / step.config.batch_size
    validated = config.eval_steps or math.ceil(cost.epoch(step, data) / config.batch_size)
    return steps / config.save_steps + steps / validated - steps / math.lcm(config.save_steps, validated)


def _adapter(step: Step, size: Size) -> int:
    """Parameters of the adapter that is trained in place of the model; 0 if there is none."""
    return getattr(step.config, "lora_rank", 0) * size.adapter_parameters


def _storage(step: Step, size: Size | None, data: Data) -> float:
    if step.stage == "prepare":
        return _characters(data) * BYTES_PER_CHARACTER
    if step.stage in BYTES_PER_OUTPUT_TOKEN:
        _, target = cost.lengths_of(step, data)
        candidates = step.config.num_candidates if step.stage == "decode" else _candidates(step)
        return cost.examples_of(step, data) * candidates * target * BYTES_PER_OUTPUT_TOKEN[step.stage]
    models = _tries(step) + (_tries(step) > 1)  # the best one twice
    return 4.0 * size.all_parameters * models if size and step.stage in TRAINING else 0.0


def _tries(step: Step) -> int:
    return len(step.config.learning_rates) if step.stage == "calibrate" else 1


def _gpu_memory(step: Step, size: Size | None, data: Data, gpu: str, processes: int) -> float:
    config = step.config
    if size is None:
        return 0.0
    source, target = cost.lengths_of(step, data)
    layers = size.encoder_layers + size.decoder_layers
    cell = size.attention_size * layers / 2
    if step.stage in TRAINING:
        sequences = _candidates(step) + 1 if step.stage == "calibrate" else 1
        tokens = config.micro_batch_size * (source + sequences * target)
        has_copy = _has_reference(step) and not config.lora_rank and not _remembered(step, size, data)
        reference = FROZEN if has_copy else 0
        each, kept = TRAINED[config.optimizer] + reference, float(ACTIVATIONS[step.stage])
        if config.gradient_checkpointing:
            kept = kept / layers + CHECKPOINTED
        activations = kept * tokens * cell
        if adapter := _adapter(step, size):
            merged = FROZEN * size.parameters  # layers that stand in for the adapted ones in a validation
            return FROZEN * size.all_parameters + each * adapter + max(activations, merged)
        if not config.shard_model or processes == 1:
            return each * size.all_parameters + activations
        embeddings = (2 * 4 + reference) * (size.all_parameters - size.parameters)  # gathered, and their gradients
        at_work = each * size.all_parameters / processes + max(activations + embeddings, WHOLE * size.all_parameters)
        return max(at_work, (4 + reference) * size.all_parameters)  # as it is loaded, before it is shared out
    number = 4 if gpu == "cpu" else 2  # bytes of one
    if step.stage == "score":
        tokens = config.batch_size * (source + (_candidates(step) + 1) * target)
        return number * size.all_parameters + ACTIVATIONS["score"] * tokens * cell
    candidates = max(config.num_candidates) if step.stage == "evaluate" else config.num_candidates
    slots = getattr(config, "batch_size", 0) or max(1, (256 if gpu == "cpu" else 2048) // candidates)
    positions = config.max_source_length + candidates * config.max_new_tokens
    kept = 2 * number * size.decoder_layers * size.attention_size * positions  # keys and values
    return number * size.all_parameters + slots * (kept + 8 * candidates * size.vocabulary)


def _host_memory(step: Step, size: Size | None, data: Data) -> float:
    if step.stage == "prepare":
        return HOST_BYTES_PER_ROW * float(sum(data.examples.values()))
    source, target = cost.lengths_of(step, data)
    if step.stage not in ("finetune", "calibrate"):
        return 0.0
    candidates = _candidates(step) if step.stage == "calibrate" else 0
    tokens = source + (1 + candidates) * target
    each = HOST_BYTES_PER_EXAMPLE + HOST_BYTES_PER_CANDIDATE * candidates + HOST_BYTES_PER_TOKEN * tokens
    return cost.epoch(step, data) * each + (_remembered(step, size, data) if _has_reference(step) else 0.0)


def _has_reference(step: Step) -> bool:
    return step.stage == "calibrate" and not cost.needs_no_reference(step.config)


def _remembered(step: Step, size: Size | None, data: Data) -> float:
    """Bytes of the frozen reference's states at all targets, if it is held in that form (`reference.pays`)."""
    _, target = cost.lengths_of(step, data)
    needed = cost.epoch(step, data) * target * size.hidden_size * 2.0 if size else 0.0
    return needed if cost.seen(step, data) >= cost.epoch(step, data) and needed <= MEMORY / MEMORY_SHARE else 0.0


def show(found: Sequence[Forecast], gpu: str, gpus: int) -> None:
    display.table(
        f"{gpus:,} x {gpu}",
        ("stage", "time", "GPUs", "GPU hours", "cost", "FLOPs", "GPU memory", "host memory", "store", "shards"),
        [
            (
                each.stage, _time(each.seconds), each.gpus or "", f"{each.gpu_hours:,.1f}" if each.gpus else "",
                f"{each.money:,.0f}" if each.money and each.gpus else "", f"{each.flops:.2g}" if each.flops else "",
                _bytes(each.gpu_memory), _bytes(each.host_memory), _bytes(each.storage),
                f"{each.shards:,}" if each.shards else "",
            )
            for each in found
        ],
    )  # fmt: skip
    slowest = max(found, key=lambda each: each.seconds)
    seconds, largest = sum(each.seconds for each in found), max(found, key=lambda each: each.storage_meanwhile)
    meanwhile = f", and {_bytes(largest.storage_meanwhile)} for checkpoints while {largest.stage} runs"
    display.say(
        f"In all: {_time(seconds)}, {sum(each.gpu_hours for each in found):,.1f} GPU hours, "
        f"{_bytes(sum(each.storage for each in found))} of storage{meanwhile if largest.storage_meanwhile else ''}. "
        f"The bottleneck is {slowest.stage}: {slowest.seconds / seconds:.0%} of the time, {_why(slowest)}.",
        style="bold",
    )
    for each in found:
        if each.limit:
            display.say(f"{each.stage}: {each.limit}")
    display.say(
        f"Based on rates measured on {MACHINES[gpu].where}. Several GPUs are taken to be that many times as fast: times are "
        "lower bounds."
    )


def _why(each: Forecast) -> str:
    return "most of it one process" if each.seconds_alone > each.seconds / 2 else "most of it the model"


def as_json(found: Sequence[Forecast]) -> str:
    return json.dumps([recipe.plain(dataclasses.asdict(each)) for each in found], indent=2)


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, name in ((86_400, "days"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} min"


def _bytes(value: float) -> str:
    sizes = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
    return next((f"{value / size:.1f} {name}" for size, name in sizes if value >= size / 10), "")

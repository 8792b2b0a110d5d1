"""What a step costs before it is run: floating point operations by the paper's appendix, and seconds by what was measured.

Lengths are those of the prepared data, a token for every four characters, or else the paper's table of datasets; a
backward pass counts two forward ones, and one more where it computes again what was not kept. What cannot be known yet (a
model that is still to be made, data that nobody has counted) is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from calibeam import store
from calibeam.paper.calibration import PAIR_LOSSES
from calibeam.paper.flops import decoder_flops, encoder_flops, total_flops
from calibeam.paper.regularization import WITHOUT_REFERENCE
from calibeam.pipeline import Step
from calibeam.records import CalibeamError
from calibeam.stages import create
from calibeam.tasks import TASKS
from calibeam.tasks.task import SPLITS

CHARACTERS_PER_TOKEN = 4
TOKENS_PER_WORD = 1.3
PATIENCE = 5.0
"""Seconds in which the Hub has to answer."""

Once = Callable[[float], float]
"""The FLOPs of one source and so many outputs."""


@dataclass(frozen=True)
class Size:
    """What the FLOPs of a model depend on. Parameters without embeddings."""

    encoder_parameters: int
    decoder_parameters: int
    encoder_layers: int
    decoder_layers: int
    hidden_size: int
    attention_size: int
    vocabulary: int
    all_parameters: int
    """With embeddings."""
    adapter_parameters: int
    """Of an adapter of rank 1, on all linear layers but the head."""

    @property
    def parameters(self) -> int:
        return self.encoder_parameters + self.decoder_parameters

    def flops(self, source_length: float, target_length: float, candidates: float) -> float:
        """total_C of one source and so many outputs"""
        encoder = encoder_flops(self.encoder_parameters, self.encoder_layers, source_length, self.attention_size)
        decoder = decoder_flops(self.decoder_parameters, self.decoder_layers, target_length, self.attention_size)
        return total_flops(encoder, decoder, source_length, target_length, candidates)


class Data(NamedTuple):
    """Examples by split, mean tokens, and mean references of a training example."""

    examples: dict[str, int]
    source_length: float
    target_length: float
    references: float = 1.0


def is_there(step: Step) -> bool:
    return (Path(step.config.output) / store.MANIFEST).is_file()


def flops(step: Step) -> float | None:
    """All that the step computes."""
    if step.stage not in FLOPS:
        return 0.0
    size, data = size_of(step), data_of(step)
    return None if size is None or data is None else flops_of(step, size, data)


def flops_of(step: Step, size: Size, data: Data) -> float:
    """The same, of a model and data that may be but thought of."""
    source, target = lengths_of(step, data)
    return FLOPS[step.stage](step, data, partial(size.flops, source, target))


def lengths_of(step: Step, data: Data) -> tuple[float, float]:
    """Mean tokens of sources and targets, as the step cuts them."""
    config = step.config
    longest = getattr(config, "max_new_tokens", getattr(config, "max_target_length", data.target_length))
    return min(data.source_length, getattr(config, "max_source_length", data.source_length)), min(data.target_length, longest)


def _passes(config: Any) -> int:
    """Forward and backward, in forward passes."""
    return 4 if config.gradient_checkpointing else 3


def _pretrain(step: Step, data: Data, once: Once) -> float:
    return _passes(step.config) * step.config.max_steps * step.config.batch_size * once(1)


def _finetune(step: Step, data: Data, once: Once) -> float:
    validating = _validating(step, data, once) if step.config.select == "rouge" else 0.0
    return _passes(step.config) * seen(step, data) * once(1) + validating


def _decode(step: Step, data: Data, once: Once) -> float:
    return data.examples[step.config.split] * once(step.config.num_candidates)


def _score(step: Step, data: Data, once: Once) -> float:
    """Every candidate, and every target."""
    return examples_of(step, data) * once(ancestor(step, "decode").config.num_candidates + data.references)


def _calibrate(step: Step, data: Data, once: Once) -> float:
    """Two candidates or all of them, the target, and the target once more for the reference, which remembers what it has seen."""
    config = step.config
    pair = config.pairs == "sampled" and config.loss in {loss.__name__ for loss in PAIR_LOSSES}
    candidates = 2 if pair else ancestor(step, "decode").config.num_candidates
    reference = 0.0 if needs_no_reference(config) else min(seen(step, data), epoch(step, data)) * once(1)
    tries = len(config.learning_rates)
    return tries * (seen(step, data) * _passes(config) * once(candidates + 1) + reference + _validating(step, data, once))


def needs_no_reference(config: Any) -> bool:
    """Whether a calibration goes without the model it began with."""
    return config.regularizer in {function.__name__ for function in WITHOUT_REFERENCE}


def _evaluate(step: Step, data: Data, once: Once) -> float:
    """Every search with its similarity, and perplexity."""
    config = step.config
    ways = len(config.methods) * len(config.length_alphas)
    searches = ways * sum(once(number) + once(number + 1) for number in config.num_candidates)
    return examples_of(step, data) * (searches + once(1))


def examples_of(step: Step, data: Data) -> int:
    """Those that a step goes through, or trains on: of the split that is decoded, if it needs candidates."""
    decode = ancestor(step, "decode") if step.stage in ("score", "calibrate") else step
    there = data.examples[getattr(decode.config, "split", "train")]
    return min(getattr(step.config, "max_examples", 0) or there, there)


def seen(step: Step, data: Data) -> float:
    """Examples that are trained on, each as often as it is."""
    config = step.config
    return config.max_steps * config.batch_size or config.num_train_epochs * epoch(step, data)


def epoch(step: Step, data: Data) -> float:
    """Examples of one: in fine-tuning, every source is one with each of its references."""
    return examples_of(step, data) * (data.references if step.stage == "finetune" else 1)


def _validating(step: Step, data: Data, once: Once) -> float:
    config, examples = step.config, data.examples["validation"]
    times = 1 + seen(step, data) / (config.eval_steps * config.batch_size or epoch(step, data))
    return times * min(config.select_examples or examples, examples) * (once(config.select_num_beams) + once(1))


FLOPS: dict[str, Callable[[Step, Data, Once], float]] = {
    "pretrain": _pretrain,
    "finetune": _finetune,
    "decode": _decode,
    "score": _score,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
}


def seconds(steps: Iterable[Step]) -> dict[str, float]:
    """By place, what each step takes: as measured if it is there, else as finished steps of its stage did.

    Those of this plan count by their FLOPs, others in the same folder by their mean.
    """
    steps = [*steps]
    found = {step.config.output: _measured(Path(step.config.output))[1] for step in steps if is_there(step)}
    elsewhere: dict[str, list[float]] = {}
    for folder in {Path(step.config.output).parent for step in steps}:
        for kind, taken in map(_measured, (file.parent for file in folder.glob(f"*/{store.MANIFEST}"))):
            elsewhere.setdefault(kind, []).append(taken)
    for step in steps:
        wanted = flops(step)
        alike = [(found[each.config.output], flops(each)) for each in steps if each.stage == step.stage and is_there(each)]
        counted = sum(operations for _, operations in alike if operations)
        if step.config.output in found or step.stage not in elsewhere:
            continue
        if wanted and counted:
            found[step.config.output] = wanted * sum(taken for taken, operations in alike if operations) / counted
        else:
            found[step.config.output] = sum(elsewhere[step.stage]) / len(elsewhere[step.stage])
    return found


def _measured(folder: Path) -> tuple[str, float]:
    manifest = json.loads((folder / store.MANIFEST).read_text(encoding="utf-8"))
    return manifest["kind"], manifest["seconds"]


def size_of(step: Step) -> Size | None:
    """Of the model that a step reads, or of the one that it will be made from."""
    place = step.config.model
    made_by = next((need for need in step.needs if need.config.output == place), None)
    if made_by is None or is_there(made_by):
        return size_at(place)
    return size_of(made_by) if hasattr(made_by.config, "model") else _created(made_by)


def _created(step: Step) -> Size:
    """Of a model that `create` will make."""
    vocabulary = next((each.config.vocab_size for each in in_line(step) if each.stage == "tokenizer"), step.config.vocab_size)
    return size_created(step.config, vocabulary)


@cache
def size_created(config: create.Config, vocabulary: int) -> Size:
    return size_by(create.architecture(config, vocabulary))


@cache
def size_at(place: str) -> Size | None:
    """Of a model in a folder or on the Hub, by its config alone; None where it cannot be had."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from transformers import AutoConfig

    folder = next((path for path in (Path(place) / "model", Path(place)) if (path / "config.json").is_file()), None)
    try:
        if folder:
            return size_by(AutoConfig.from_pretrained(folder))
        try:
            return size_by(AutoConfig.from_pretrained(place, local_files_only=True))
        except OSError:  # it was never fetched. Asked once: who downloads tries again for half a minute, and says so each time
            get_hf_file_metadata(hf_hub_url(place, "config.json"), timeout=PATIENCE)
            return size_by(AutoConfig.from_pretrained(place))
    except Exception:  # of a library that has many kinds of them
        return None


def size_by(config: Any) -> Size:
    """Of a model of this config, which need not be anywhere."""
    import torch
    from transformers import AutoModelForSeq2SeqLM

    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)
    encoder, decoder, head = model.get_encoder(), model.get_decoder(), model.get_output_embeddings()
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    attention = config.num_heads * config.d_kv if hasattr(config, "d_kv") else config.hidden_size
    return Size(
        _parameters(encoder), _parameters(decoder), _layers(encoder), _layers(decoder),
        config.hidden_size, attention, config.vocab_size, sum(parameter.numel() for parameter in model.parameters()),
        sum(layer.in_features + layer.out_features for layer in linear),
    )  # fmt: skip


def _parameters(stack: Any) -> int:
    """Without embeddings, of which relative positions are one."""
    import torch

    embeddings = {id(p) for module in stack.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()}
    return sum(parameter.numel() for parameter in stack.parameters() if id(parameter) not in embeddings)


def _layers(stack: Any) -> int:
    return len(stack.block if hasattr(stack, "block") else stack.layers)


def data_of(step: Step) -> Data | None:
    """Of the data that a step reads: as prepared, or as the paper has it. Pretraining fills its sequences."""
    if step.stage == "pretrain":
        return Data({}, step.config.max_source_length, step.config.max_target_length)
    prepared = ancestor(step, "prepare")
    return prepared_data(prepared.config.output) if is_there(prepared) else published_data(prepared.config.task)


@cache
def prepared_data(place: str) -> Data | None:
    try:
        folder = store.read(place, "prepare")
    except CalibeamError:
        return None
    source = target = references = 0
    for example in folder.stream_examples("train"):
        source, target = source + len(example.source), target + len(example.targets[0])
        references += len(example.targets)
    counts = {split: folder.count(split) for split in SPLITS}
    tokens = CHARACTERS_PER_TOKEN * counts["train"]
    return Data(counts, source / tokens, target / tokens, references / counts["train"])


def published_data(task: str) -> Data | None:
    paper = TASKS[task].paper if task else None
    if paper is None:
        return None
    numbers = (text.strip().replace(",", "").replace("K", "000") for text in paper.examples.split("/"))
    counts = dict(zip(SPLITS, map(int, numbers), strict=True))
    return Data(counts, TOKENS_PER_WORD * paper.properties.source_words, TOKENS_PER_WORD * paper.properties.target_words)


def in_line(step: Step) -> Iterable[Step]:
    """The step and all that it comes from."""
    yield step
    for need in step.needs:
        yield from in_line(need)


def ancestor(step: Step, stage: str) -> Step:
    found = next((each for each in in_line(step) if each.stage == stage), None)
    if found is None:
        raise CalibeamError(f"{step.stage} reads what no {stage} of this recipe makes, so what it takes is not known")
    return found

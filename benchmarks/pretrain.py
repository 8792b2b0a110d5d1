"""How fast calibeam pretrains beside the plain Hugging Face loop, in one run on one machine.

    python benchmarks/pretrain.py gpu
    python benchmarks/pretrain.py cpu

Both train the same model from the same random weights on the same examples, with dropout and label smoothing, by the
same optimizer. The plain loop calls the model with labels and takes the mean of its logits' smoothed cross entropy. Prints
a table and one JSON line per row: tokens of sources and targets per second, and which part of the GPU's peak the
products of the model alone make up (6 operations per weight and token, and attention; nothing that is computed twice).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from decode import PEAK_FLOPS, Rows, random_pegasus, timed

from calibeam.seq2seq import Seq2Seq
from calibeam.stages.pretrain import Config
from calibeam.training import Item, Problem, TrainingStep, autocast, batch_of_pairs, encoded, forced, make_optimizer


@dataclass(frozen=True)
class Case:
    size: str
    batch: int
    micro_batch: int
    source_length: int
    target_length: int
    vocabulary: int
    device: str


CASES = {"gpu": Case("LARGE", 128, 32, 512, 128, 96_103, "cuda"), "cpu": Case("SMALL", 4, 2, 128, 32, 16_000, "cpu")}


def flops(case: Case, config: Any) -> float:
    """Of a step: 6 per weight and token, and 12 per pair of tokens and dimension in attention; a third of each is forward."""
    size, source, target = config.d_model, case.source_length, case.target_length
    encoder = config.encoder_layers * (4 * size**2 + 2 * size * config.encoder_ffn_dim)
    decoder = config.decoder_layers * (6 * size**2 + 2 * size * config.decoder_ffn_dim)
    keys_and_values = config.decoder_layers * 2 * size**2
    weights = source * (encoder + keys_and_values) + target * (decoder + size * config.vocab_size)
    pairs = config.encoder_layers * source**2 + config.decoder_layers * (target**2 / 2 + target * source)
    return case.batch * (6.0 * weights + 12.0 * pairs * size)


def config_of(case: Case) -> Config:
    return Config(
        output="unused", model="", files=(), max_steps=1, batch_size=case.batch, micro_batch_size=case.micro_batch,
        max_source_length=case.source_length, max_target_length=case.target_length, warmup_steps=1, optimizer="adamw",
        learning_rate=1e-4,
    )  # fmt: skip


def ours(case: Case, model: Any, examples: list[tuple[list[int], list[int]]]) -> Callable[[], float]:
    """As the stage does it: on a GPU, recorded and replayed."""
    config, tuned = config_of(case), Seq2Seq(model, None)
    problem = Problem(
        batches=None,  # type: ignore[arg-type]  # they are given below
        batch=lambda some, _: batch_of_pairs(tuned, [source for source, _ in some], [target for _, target in some], config),
        loss=lambda batch: {"loss": forced(encoded(model, batch), batch).cross_entropy(config.label_smoothing).sum()},
        validate=dict, save=lambda _: None, dropout=True, shown={},
    )  # fmt: skip
    step = TrainingStep(model.train(), config, problem, make_optimizer(model, config, 1)[0])
    items = [Item(str(number), len(each[0]), len(each[1]), each) for number, each in enumerate(examples)]
    return lambda: step(items, 1)["loss"]


def theirs(case: Case, model: Any, examples: list[tuple[list[int], list[int]]]) -> Callable[[], float]:
    config = config_of(case)
    optimizer, _ = make_optimizer(model.train(), config, 1)

    def run() -> float:
        total = 0.0
        for first in range(0, case.batch, case.micro_batch):
            some = examples[first : first + case.micro_batch]
            source, target = (torch.tensor([each[side] for each in some], device=case.device) for side in (0, 1))
            with autocast(model.device, config):
                logits = model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), target.flatten(), label_smoothing=config.label_smoothing
                )
            (loss * len(some) / case.batch).backward()
            total += float(loss.detach()) * len(some) / case.batch
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    case, rng, rows = CASES[chosen.case], random.Random(0), Rows("tokens")  # noqa: S311
    examples = [
        tuple([rng.randrange(110, case.vocabulary) for _ in range(length)] for length in (case.source_length, case.target_length))
        for _ in range(case.batch)
    ]
    name = f"{case.size}, {case.batch} x {case.source_length} + {case.target_length} tokens"
    tokens = case.batch * (case.source_length + case.target_length)
    for way, make in (("Hugging Face loop", theirs), ("calibeam", ours)):
        drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
        model = random_pegasus(case.size, case.vocabulary, case.device, torch.float32, init_std=0.02, **drops)
        work = make(case, model, examples)  # type: ignore[operator]
        work()
        work()  # the second time records
        seconds, memory, loss = timed(work, chosen.repeat)
        more = (
            {"model_flops_utilisation": round(flops(case, model.config) / seconds / PEAK_FLOPS, 3)}
            if case.device == "cuda"
            else {}
        )
        rows.add(name, way, tokens, seconds, memory, loss=loss, **more)
        del model, work
        if case.device == "cuda":
            torch.cuda.empty_cache()
    rows.show()


if __name__ == "__main__":
    main()

"""How fast and how small calibeam's calibration step and scoring are beside the usual ways, in one run on one machine.

    python benchmarks/step.py cpu
    python benchmarks/step.py gpu

The usual ways, written plainly: BRIO expands the encoder's output once per candidate and builds full logits for all
of them; TRL-style trainers run the encoder once per sequence; scorers loop over pairs. All compute the same loss on
the same candidates; the losses are compared. Prints a table and one JSON line per row.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from decode import PEAK_FLOPS, Rows, profile, random_pegasus, timed
from torch import Tensor

from calibeam import seq2seq
from calibeam.engine.graphs import Batch, Recorded
from calibeam.engine.packing import Source
from calibeam.paper.calibration import CALIBRATION_LOSSES
from calibeam.paper.likelihood import sequence_log_p, token_log_p
from calibeam.paper.regularization import kl
from calibeam.paper.similarity import SIMILARITIES, span_similarity
from calibeam.reference import Remembered, Running
from calibeam.seq2seq import Seq2Seq
from calibeam.stages.calibrate import CalibrationStep, Config
from calibeam.stages.score import outputs
from calibeam.training import Compact, add_gradients, clear_gradients


@dataclass(frozen=True)
class Case:
    size: str
    sources: int
    source_length: int
    length: int
    vocabulary: int
    device: str
    dtype: torch.dtype
    accumulated: int
    """Batches of a step."""


CASES = {
    "gpu": Case("LARGE", 16, 512, 64, 96_103, "cuda", torch.bfloat16, 4),
    "cpu": Case("SMALL", 2, 512, 64, 16_000, "cpu", torch.float32, 1),
}
CANDIDATES = 15


def candidates(case: Case, shared: bool, rng: random.Random) -> list[list[list[int]]]:
    """15 of each source. Shared, as beams on SAMSum: of many lengths, and each begins as an earlier one does, which leaves
    2.3 times fewer distinct prefixes than tokens, and 2.9 times fewer than padded positions."""
    every = []
    for _ in range(case.sources):
        rows: list[list[int]] = []
        for number in range(CANDIDATES):
            length = round(case.length * rng.uniform(0.57, 1.0)) if shared and number else case.length
            begin = rng.choice(rows)[: int(rng.uniform(0.28, 1.0) * length)] if shared and rows else []
            rows.append(begin + [rng.randrange(3, case.vocabulary) for _ in range(length - len(begin))])
        every.append(rows)
    return every


@dataclass(frozen=True)
class Work:
    case: Case
    model: Any
    reference: Any
    sources: list[list[int]]
    targets: list[list[int]]
    candidates: list[list[list[int]]]
    similarity: Tensor

    def tensors(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self.case.device)

    def sequences(self, count: int) -> tuple[Tensor, Tensor]:
        """The first candidates of every source and then its target, padded, and the mask of what is not padding."""
        rows = [row for each, target in zip(self.candidates, self.targets, strict=True) for row in (*each[:count], target)]
        return tuple(each.to(self.case.device).view(len(self.sources), count + 1, -1) for each in seq2seq.pad_rows(rows, 0))

    def remember(self, times: int = 1) -> Remembered:
        """What `calibrate` does once before the first step, for the sources and as many copies of them."""
        rows = Compact(), Compact()
        for compact, own in zip(rows, (self.sources, self.targets), strict=True):
            for row in own * times:
                compact.append(row)
        return Remembered(Seq2Seq(self.reference, None), *rows, Config(data="", model="", scored="", output="unused"))

    def ours(self, loss: str, pair: bool, *, remembered: bool = True) -> Callable[[], Tensor]:
        """As `calibrate` does it: on a GPU, recorded and replayed."""
        settings = {"loss": loss, "beta": 0.01, "reg_weight": 1.0, "pairs": "sampled" if pair else "all"}
        config = Config(data="", model="", scored="", output="unused", **settings)
        frozen = self.remember() if remembered else Running(Seq2Seq(self.reference, None))
        step = CalibrationStep(Seq2Seq(self.model, None), frozen, config)
        rows = [
            {"token_ids": ids, "similarity": s, "log_p": [0.0] * len(ids)}
            for ids, s in zip(self.candidates, self.similarity.tolist(), strict=True)
        ]
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def work(batch: Batch) -> Tensor:
            total = step.loss(batch)["loss"]
            add_gradients(total, parameters)
            return total.detach()[None]

        recorded = Recorded(work, self.model.device)
        every = range(len(rows))
        return lambda: recorded(step.batch(self.sources, self.targets, rows, every, every))

    def brio(self, loss: str) -> Tensor:
        """The encoder once per source; its output, and everything after it, once per sequence."""
        source, (sequences, kept) = self.tensors(self.sources), self.sequences(CANDIDATES)
        mask = torch.ones_like(source)
        logits = seq2seq.force(self.model, seq2seq.encode(self.model, source, mask), mask, sequences)
        return self._finish(loss, logits, sequences, kept)

    def trl(self, loss: str) -> Tensor:
        """The encoder once per sequence."""
        sequences, kept = self.sequences(2)
        source = self.tensors(self.sources).repeat_interleave(3, 0)
        mask = torch.ones_like(source)
        logits = seq2seq.force(self.model, seq2seq.encode(self.model, source, mask), mask, sequences.flatten(0, 1)[:, None])
        return self._finish(loss, logits.view(*sequences.shape, -1), sequences, kept)

    def _finish(self, loss: str, logits: Tensor, sequences: Tensor, kept: Tensor) -> Tensor:
        log_p = sequence_log_p(token_log_p(logits[:, :-1], sequences[:, :-1]), kept[:, :-1])
        source, target = self.tensors(self.sources), sequences[:, -1]
        mask = torch.ones_like(source)
        with torch.no_grad():
            states = seq2seq.encode(self.reference, source, mask)
            reference_logits = seq2seq.force(self.reference, states, mask, target[:, None])[:, 0]
        similarity = self.similarity[:, : log_p.shape[1]].to(log_p.device)
        calibration = CALIBRATION_LOSSES[loss](log_p, similarity, torch.ones_like(similarity, dtype=torch.bool), 0.01)
        total = calibration.sum() + kl(logits[:, -1], reference_logits, target, kept[:, -1]).sum()
        total.backward()
        return total.detach()

    @torch.no_grad()
    def score(self) -> Tensor:
        tuned = Seq2Seq(self.model, None)
        source = Source(self.model, *tuned.batch(self.sources))
        found = outputs(tuned, source, [], self.candidates)
        return SIMILARITIES["decoder"](found, outputs(tuned, source, [], [[row] for row in self.targets]))

    @torch.no_grad()
    def score_by_pairs(self) -> Tensor:
        every = []
        for source, rows, target in zip(self.sources, self.candidates, self.targets, strict=True):
            for row in rows:
                ids = self.tensors([source])
                both, kept = (each.to(self.case.device) for each in seq2seq.pad_rows([row, target], 0))
                mask = torch.ones_like(ids)
                states = seq2seq.force_states(self.model, seq2seq.encode(self.model, ids, mask), mask, both[None])[0]
                every.append(span_similarity(states[0], states[1], kept[0], kept[1]))
        return torch.stack(every).view(len(self.sources), -1)


def flops(work: Work) -> float:
    """Of a step with all candidates the plain way: 6 per weight and token, encoder and decoder, and the reference."""
    case, config = work.case, work.model.config
    encoder = config.encoder_layers * (4 * config.d_model**2 + 2 * config.d_model * config.encoder_ffn_dim)
    decoder = config.decoder_layers * (6 * config.d_model**2 + 2 * config.d_model * config.decoder_ffn_dim)
    head = config.d_model * config.vocab_size
    written = case.sources * case.length * (CANDIDATES + 1) * (decoder + head)
    return 6 * (case.sources * case.source_length * encoder + written)


def run(rows: Rows, case: Case, repeat: int) -> None:
    rng = random.Random(0)  # noqa: S311
    model = random_pegasus(case.size, case.vocabulary, case.device, case.dtype)
    reference = random_pegasus(case.size, case.vocabulary, case.device, case.dtype).requires_grad_(False)
    for shared in (False, True):
        work = Work(
            case, model, reference,
            sources=[[rng.randrange(3, case.vocabulary) for _ in range(case.source_length)] for _ in range(case.sources)],
            targets=[[rng.randrange(3, case.vocabulary) for _ in range(case.length)] for _ in range(case.sources)],
            candidates=candidates(case, shared, rng),
            similarity=torch.rand(case.sources, CANDIDATES, generator=torch.Generator().manual_seed(0)),
        )  # fmt: skip
        if not shared and rows.wants(once := f"remember the reference, {case.size} {case.sources}x{case.source_length}"):
            times = 64 // case.sources
            work.remember(times)
            seconds, memory, _ = timed(partial(work.remember, times), repeat)
            rows.add(once, "calibeam", 1, seconds / times, memory, examples_per_second=round(case.sources * times / seconds, 2))
        kind = "prefixes shared" if shared else "nothing shared"
        name = f"{case.size} {case.sources}x{case.source_length}, {kind}"
        compare(
            rows,
            f"list_rank + KL, {name}",
            work,
            {
                "BRIO's way": lambda work=work: partial(work.brio, "list_rank"),
                "calibeam, reference run": lambda work=work: work.ours("list_rank", False, remembered=False),
                "calibeam": lambda work=work: work.ours("list_rank", False),
            },
            repeat,
        )
        if not shared:
            two = Work(
                **{**vars(work), "candidates": [each[:2] for each in work.candidates], "similarity": work.similarity[:, :2]}
            )
            compare(
                rows,
                f"rank + KL, a pair, {name}",
                two,
                {
                    "TRL's way": lambda two=two: partial(two.trl, "rank"),
                    "calibeam, reference run": lambda two=two: two.ours("rank", True, remembered=False),
                    "calibeam": lambda two=two: two.ours("rank", True),
                },
                repeat,
            )
        scoring = {"pair by pair": lambda work=work: work.score_by_pairs, "calibeam": lambda work=work: work.score}
        compare(rows, f"score, {name}", work, scoring, repeat, at_once=1)


Way = Callable[[], Tensor]


def compare(rows: Rows, case: str, work: Work, ways: dict[str, Callable[[], Way]], repeat: int, at_once: int = 0) -> None:
    """ways: what makes each, one after another, so that none holds the memory of one before it."""
    if not rows.wants(case):
        return
    at_once = at_once or work.case.accumulated
    for name, make in ways.items():
        work.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        way = make()

        def batch(way: Way = way) -> Tensor:
            """As a training loop: several batches one after another, which the host prepares meanwhile, add to the gradients."""
            clear_gradients(list(work.model.parameters()))
            return torch.stack([way() for _ in range(at_once)])

        batch()
        batch()  # a shape is recorded when it comes for the second time
        seconds, memory, result = timed(batch, repeat)
        seconds /= at_once
        more = {"examples_per_second": round(work.case.sources / seconds, 2), "result": float(result.float().mean())}
        if "list_rank" in case and torch.cuda.is_available():
            more["model_flops_utilisation"] = round(flops(work) / seconds / PEAK_FLOPS, 3)
        if torch.cuda.is_available() and name == "calibeam":
            profile(way, case)
        rows.add(case, name, len(work.sources) * len(work.candidates[0]), seconds, memory, **more)
        del way, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="measure the cases whose names have this in them")
    chosen = parser.parse_args()
    rows = Rows(only=chosen.only)
    run(rows, CASES[chosen.case], chosen.repeat)
    rows.show()


if __name__ == "__main__":
    main()

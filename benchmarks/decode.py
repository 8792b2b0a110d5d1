"""How fast `calibeam.decode` is beside its peers, in one run on one machine.

    python benchmarks/decode.py cpu                 # beside generate and CTranslate2, float32
    python benchmarks/decode.py gpu                 # beside generate, bfloat16, random PEGASUS LARGE and SMALL
    python benchmarks/decode.py real --model DIR --sources FILE.jsonl --num-sources 512

Prints a table and one JSON line per row. Speeds of a machine that others use too mean little by themselves:
compare the rows of one run.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PegasusConfig, PegasusForConditionalGeneration

from calibeam import decode

SIZES = {  # layers, size, heads, feed-forward: the paper's
    "SMALL": (8, 512, 8, 1024),
    "LARGE": (16, 1024, 16, 4096),
}
PEAK_FLOPS, PEAK_BYTES = 790e12, 4.8e12  # of an H200 in bfloat16: what matrix products reach there, and its memory


def random_pegasus(size: str, vocabulary: int, device: str, dtype: torch.dtype, **more: Any) -> Any:
    layers, width, heads, inner = SIZES[size]
    torch.manual_seed(0)
    config = PegasusConfig(**{
        "vocab_size": vocabulary, "d_model": width, "encoder_layers": layers, "decoder_layers": layers,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads, "encoder_ffn_dim": inner, "decoder_ffn_dim": inner,
        "max_position_embeddings": 1024, "decoder_start_token_id": 0, "init_std": 0.1, "activation_function": "relu", **more,
    })  # fmt: skip
    with torch.device(device):
        model = PegasusForConditionalGeneration(config)
    model.generation_config.forced_eos_token_id = None
    return model.to(device=device, dtype=dtype).eval()


def generate(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, beams: int, longest: int, shortest: int) -> torch.Tensor:
    found = model.generate(
        input_ids=input_ids, attention_mask=mask, num_beams=beams, num_return_sequences=beams, length_penalty=0.0,
        early_stopping=False, do_sample=False, max_new_tokens=longest, min_new_tokens=shortest,
    )  # fmt: skip
    return found[:, 1:].view(len(input_ids), beams, -1)


def timed(work: Callable[[], Any], repeat: int) -> tuple[float, float | None, Any]:
    """Median seconds, GiB of GPU memory held at the peak (by recorded graphs too), and what came out."""
    cuda, seconds, result = torch.cuda.is_available(), [], None
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeat):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), torch.cuda.max_memory_reserved() / 2**30 if cuda else None, result


class Rows:
    def __init__(self, unit: str = "candidates", only: str = "") -> None:
        self.rows: list[dict[str, Any]] = []
        self._unit, self._only = unit, only

    def wants(self, case: str) -> bool:
        return self._only in case

    def add(self, case: str, engine: str, done: int, seconds: float, memory: float | None, **more: Any) -> None:
        peer = next((row for row in self.rows if row["case"] == case), None)
        row = {
            "case": case,
            "engine": engine,
            f"{self._unit}_per_second": round(done / seconds, 1),
            "seconds": round(seconds, 4),
            "memory_gib": None if memory is None else round(memory, 2),
            "times_first": round(peer["seconds"] / seconds, 2) if peer else 1.0,
            **more,
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def show(self) -> None:
        table = Table("case", "engine", f"{self._unit}/s", "times the first", "GiB")
        for row in self.rows:
            cells = (row["case"], row["engine"], row[f"{self._unit}_per_second"], row["times_first"], row["memory_gib"])
            table.add_row(*map(str, cells))
        Console(width=110).print(table)


def same(found: Any, expected: torch.Tensor) -> float:
    """The share of sources whose candidates are the same tokens in the same order."""
    length = min(found.token_ids.shape[-1], expected.shape[-1])
    equal = found.token_ids[..., :length] == expected[..., :length].to(found.token_ids.device)
    return float(equal.flatten(1).all(1).float().mean())


def cpu(rows: Rows, repeat: int, engine: str | None) -> None:
    """SMALL, 16k vocabulary, 8 sources of 128 tokens, 32 new tokens forced, 15 beams, float32.

    In turns, so that a noisy moment hits all of them, and each in a process of its own: idle threads of
    one library that wait for work take the processor from another's.
    """
    if engine:
        print(json.dumps(cpu_seconds(engine)))
        return
    seconds: dict[str, list[float]] = {name: [] for name in ("generate", "calibeam", "CTranslate2 float32")}
    for _ in range(repeat):
        for name, times in seconds.items():
            command = [sys.executable, __file__, "cpu", "--engine", name]
            output = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            if output.returncode:
                print(f"{name} left out: {output.stderr.strip().splitlines()[-1]}")
            else:
                times.extend(json.loads(output.stdout.splitlines()[-1]))
    case = f"SMALL 8x128->32, {torch.get_num_threads()} threads"
    for name, times in seconds.items():
        if times:
            rows.add(case, name, 8 * 15, statistics.median(times), None, fastest=round(min(times), 3))


def cpu_seconds(engine: str) -> list[float]:
    sources, length, steps, beams, vocabulary = 8, 128, 32, 15, 16_000
    model = random_pegasus("SMALL", vocabulary, "cpu", torch.float32)
    ids = torch.randint(2, vocabulary, (sources, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    with tempfile.TemporaryDirectory() as folder:
        work: Callable[[], Any] = {
            "generate": lambda: lambda: generate(model, ids, mask, beams, steps, steps),
            "calibeam": lambda: (
                lambda: decode(model, ids, mask, num_candidates=beams, max_new_tokens=steps, min_new_tokens=steps)
            ),
            "CTranslate2 float32": lambda: ctranslate2_engine(model, ids, Path(folder), beams, steps),
        }[engine]()
        work()
        return [timed(work, 1)[0] for _ in range(2)]


def ctranslate2_engine(model: Any, ids: torch.Tensor, folder: Path, beams: int, steps: int) -> Callable[[], Any]:
    import ctranslate2
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"t{i}": i for i in range(3, model.config.vocab_size)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    ).save_pretrained(folder / "model")  # fmt: skip
    model.config.normalize_before, model.config.normalize_embedding = True, False  # which its converter asks PEGASUS for
    model.save_pretrained(folder / "model")
    ctranslate2.converters.TransformersConverter(str(folder / "model")).convert(str(folder / "ct2"))
    translator = ctranslate2.Translator(
        str(folder / "ct2"), device="cpu", compute_type="float32", inter_threads=1, intra_threads=torch.get_num_threads()
    )
    names = {index: name for name, index in vocabulary.items()}
    sources = [[names[i] for i in row] for row in ids.tolist()]
    settings = {"beam_size": beams, "num_hypotheses": beams, "length_penalty": 0, "return_scores": True}
    return lambda: translator.translate_batch(sources, max_decoding_length=steps, min_decoding_length=steps, **settings)


def floor(model: Any, sources: int, length: int, steps: int, beams: int) -> dict[str, float]:
    """Milliseconds that a step cannot be faster than: its matrix products, and the bytes that it must read."""
    config, rows = model.config, sources * beams
    weights = config.decoder_layers * (6 * config.d_model**2 + 2 * config.d_model * config.decoder_ffn_dim)
    head = config.d_model * config.vocab_size
    cells = sources * length + rows * steps / 2  # cross cells, and written ones of a search half way
    attention = 4 * config.d_model * config.decoder_layers * (rows * length + rows * steps / 2)
    flops = 2 * rows * (weights + head) + attention
    moved = 2 * (weights + head + cells * 2 * config.d_model * config.decoder_layers + 2 * rows * config.vocab_size)
    return {"floor_ms": round(1e3 * (flops / PEAK_FLOPS + moved / PEAK_BYTES), 2)}


def gpu(rows: Rows, repeat: int) -> None:
    for size, sources in (("LARGE", 64), ("LARGE", 16), ("SMALL", 64)):
        gpu_case(rows, repeat, size, sources)
        torch.cuda.empty_cache()


def gpu_case(rows: Rows, repeat: int, size: str, sources: int) -> None:
    """512 source tokens, 64 new tokens forced, 15 beams, a vocabulary of 96,103, bfloat16."""
    length, steps, beams, vocabulary = 512, 64, 15, 96_103
    case, count = f"{size} {sources}x{length}->{steps}", sources * beams
    model = random_pegasus(size, vocabulary, "cuda", torch.bfloat16)
    ids = torch.randint(2, vocabulary, (sources, length), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    mask = torch.ones_like(ids)

    def theirs() -> torch.Tensor:
        return generate(model, ids, mask, beams, steps, steps)

    def ours(some: slice = slice(None), **settings: Any) -> Any:
        settings |= {"num_candidates": beams, "max_new_tokens": steps, "min_new_tokens": steps}
        return decode(model, ids[some], mask[some], **settings)

    theirs()
    torch.cuda.empty_cache()
    seconds, memory, expected = timed(theirs, max(1, repeat - 1))
    rows.add(case, "generate", count, seconds, memory, ms_per_step=round(1e3 * seconds / steps, 2))
    for name, settings in {
        "beam": {},
        "diverse_beam, 15 groups": {"method": "diverse_beam", "diversity": 0.5},
        "nucleus": {"method": "nucleus", "top_p": 0.9},
    }.items():
        torch.cuda.empty_cache()
        ours(**settings)
        seconds, memory, found = timed(functools.partial(ours, **settings), repeat)
        more = {"ms_per_step": round(1e3 * seconds / steps, 2)}
        if name == "beam":
            alone = torch.cat([ours(slice(i, i + 1)).token_ids for i in range(4)])
            more |= floor(model, sources, length, steps, beams) | {"sources_same_as_generate": same(found, expected)}
            more["candidates_changed_by_batch_mates"] = 1 - float((alone == found.token_ids[:4]).all(-1).float().mean())
        rows.add(case, f"calibeam {name}", count, seconds, memory, **more)
    profile(ours, case)


def profile(work: Callable[[], Any], case: str) -> None:
    """Where the time on the GPU goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    work()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    for event in recorded.key_averages():
        kinds[event.key] = kinds.get(event.key, 0.0) + event.self_device_time_total / 1e3
    print(f"# {case}: milliseconds on the GPU in one call, by kernel; {sum(kinds.values()):.1f} in all")
    for name, spent in sorted(kinds.items(), key=lambda item: -item[1])[:14]:
        print(f"#   {spent:8.1f}  {name[:100]}")


def real(rows: Rows, repeat: int, folder: Path, file: Path, count: int) -> None:
    """A model and sources of one's own, free lengths: calibeam in bfloat16 beside generate."""
    from calibeam import seq2seq
    from calibeam.stages.decode import decode_all

    device = seq2seq.best_device()
    model = seq2seq.load(folder, dtype=seq2seq.dtype_named("auto", device))
    opener = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["source"] for line in lines]
    texts = [text for text in texts if text.strip()][:count]
    sources, _ = model.encode_sources(texts, 512)
    beams, longest, case = 15, 64, f"{folder.name}, {len(sources)} sources"
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))

    def theirs() -> dict[int, torch.Tensor]:
        found = {}
        for start in range(0, len(order), 64):
            some = order[start : start + 64]
            outputs = generate(model.model, *model.batch([sources[i] for i in some]), beams, longest, 0)
            found |= dict(zip(some, outputs.cpu(), strict=True))
        return found

    def ours() -> list[dict[str, Any]]:
        settings = {"num_candidates": beams, "max_new_tokens": longest}
        return decode_all(model, [str(i) for i in range(len(sources))], sources, settings, seed=0, description="decode")

    seconds, memory, expected = timed(theirs, 1)
    rows.add(case, "generate", len(sources) * beams, seconds, memory)
    torch.cuda.empty_cache()
    ours()
    seconds, memory, found = timed(ours, repeat)
    first = [expected[i][0].tolist()[: len(row["token_ids"][0])] == row["token_ids"][0] for i, row in enumerate(found)]
    rows.add(case, "calibeam beam", len(sources) * beams, seconds, memory, first_candidate_same=sum(first) / len(first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("cpu", "gpu", "real"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engine", help="for cpu: time this one alone, and print the seconds")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--num-sources", type=int, default=512)
    chosen = parser.parse_args()
    rows = Rows()
    if chosen.case == "real":
        if not (chosen.model and chosen.sources):
            parser.error("real needs --model and --sources")
        real(rows, chosen.repeat, chosen.model, chosen.sources, chosen.num_sources)
    elif chosen.case == "cpu":
        cpu(rows, chosen.repeat, chosen.engine)
    else:
        gpu(rows, chosen.repeat)
    if rows.rows:
        rows.show()


if __name__ == "__main__":
    main()

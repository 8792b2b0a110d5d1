"""How many outputs of beam search change with what a source is decoded beside, in float32 and in bfloat16, in one run.

    python benchmarks/flips.py [--device cpu|cuda] [--sources 300] [--together 7 32]

The demo's model says in one line what functions of the standard library do, one source at a time and several at once. Rounding
depends on the shapes of a batch, and a search may take another way where two tokens are almost as likely as each other. Prints
the share of sources whose best output differs, and of those where any of the five beams does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import calibeam
from calibeam import display, seq2seq
from calibeam.stages.decode import decode_all
from calibeam.tasks import docstrings

MODEL = Path(calibeam.__file__).parent / "demo/model"
SEARCH = {"num_candidates": 5, "max_new_tokens": 24}


def outputs(dtype: torch.dtype, device: str, texts: list[str], together: int) -> list[list[str]]:
    model = seq2seq.load(MODEL, device=device, dtype=dtype)
    sources, _ = model.encode_sources(texts, 128)
    ids, description = [*map(str, range(len(texts)))], f"{str(dtype).removeprefix('torch.')}, {together} at once"
    return [row["texts"] for row in decode_all(model, ids, sources, SEARCH, seed=0, batch_size=together, description=description)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sources", type=int, default=300)
    parser.add_argument("--together", type=int, nargs="+", default=[7, 32])
    chosen = parser.parse_args()
    texts = [example.source for example in docstrings.load(["stdlib"], fresh=True)["train"][: chosen.sources]]
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        alone = outputs(dtype, chosen.device, texts, 1)
        for together in chosen.together:
            pairs = [*zip(alone, outputs(dtype, chosen.device, texts, together), strict=True)]
            best, lists = (sum(test(a, b) for a, b in pairs) for test in (lambda a, b: a[0] != b[0], lambda a, b: a != b))
            rows.append((dtype, together, f"{best} ({best / len(texts):.1%})", f"{lists} ({lists / len(texts):.1%})"))
    display.table(f"Of {len(texts)} sources", ("dtype", "at once", "best output differs", "any of five differs"), rows, labels=2)


if __name__ == "__main__":
    main()

"""How fast `calibeam.rouge` is beside the package rouge-score, and whether every value is the same.

    python benchmarks/rouge.py                        # random words alone
    python benchmarks/rouge.py FOLDER --pairs 100000  # and FOLDER/DATASET/*.jsonl[.xz], rows with source and target or targets

Speed is that of ROUGE-1, -2 and -Lsum, stemmed, on one core, in turns, so that a noisy moment hits both; rouge-score has a
sample of the pairs that calibeam has all of. Equal means ==, of precision, recall and F, stemmed and not. Prints a table and
one JSON line per row, and fails if any value differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer

from calibeam import rouge

SPEED_KINDS = ("rouge1", "rouge2", "rougeLsum")
EQUAL_KINDS = (*SPEED_KINDS, "rougeL")
CANDIDATES, SCORED_BY_BOTH = 15, 400

Rows = list[tuple[str, list[str]]]  # source and targets
Pair = tuple[str, list[str]]  # prediction and references


def read(folder: Path) -> Rows:
    rows: Rows = []
    for file in sorted(folder.glob("*.jsonl*")):
        with lzma.open(file, "rt", encoding="utf-8") if file.suffix == ".xz" else file.open(encoding="utf-8") as lines:
            rows += [(row["source"], row.get("targets") or [row["target"]]) for row in map(json.loads, lines)]
    return rows


def edited(text: str, words: Sequence[str], rng: random.Random) -> str:
    """Like another candidate for the same source: words dropped, replaced and moved, lines in another order."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        kept = [rng.choice(words) if rng.random() < 0.12 else word for word in line.split(" ") if rng.random() > 0.12]
        turn = rng.randrange(len(kept)) if kept and rng.random() < 0.5 else 0
        lines[place] = " ".join(kept[turn:] + kept[:turn])
    return "\n".join(rng.sample(lines, len(lines)))


def edits(rows: Rows) -> Iterator[Pair]:
    rng = random.Random(0)  # noqa: S311
    words = " ".join(targets[0] for _, targets in rows[:5000]).split()
    return ((edited(targets[0], words, rng), targets) for _, targets in rows for _ in range(CANDIDATES))


def other_targets(rows: Rows) -> Iterator[Pair]:
    return ((other[0], targets) for (_, other), (_, targets) in itertools.pairwise(rows))


def beginnings(rows: Rows) -> Iterator[Pair]:
    """Sentences in lines of their own."""
    return ((source[:500].replace(". ", ".\n"), targets) for source, targets in rows)


PREDICTIONS = {
    f"{CANDIDATES} edits of each target": edits,
    "another row's target": other_targets,
    "the source's beginning": beginnings,
}


def random_pairs() -> Iterator[Pair]:
    """Few different words, so that subsequences tie; lines; several references."""
    rng = random.Random(0)  # noqa: S311
    while True:
        words = rng.choice([["a", "b"], ["a", "b", "c", "d", "e"], ["running", "runs", "cat", "cats", "é", "--", "42"]])
        texts = [
            "".join(rng.choice(words) + rng.choice([" ", " ", " ", "\n"]) for _ in range(rng.choice([0, 1, 4, 12, 30])))
            for _ in range(rng.choice([2, 2, 2, 4]))
        ]
        yield texts[0], texts[1:]


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare_speed(name: str, pairs: list[Pair], repeat: int) -> dict[str, Any]:
    predictions, references = map(list, zip(*pairs, strict=True))
    scorer = RougeScorer([*SPEED_KINDS], use_stemmer=True)
    rouge(predictions, references)
    sample = pairs[:: -(-len(pairs) // SCORED_BY_BOTH)]
    theirs, ours = [], []
    for _ in range(repeat):
        theirs.append(seconds(lambda: [scorer.score_multi(targets, text) for text, targets in sample]))
        ours.append(seconds(lambda: rouge(predictions, references)))
    per_second = len(sample) / statistics.median(theirs), len(pairs) / statistics.median(ours)
    return {
        "case": name,
        "pairs": len(pairs),
        "words": round(statistics.mean(len(text.split()) for text in predictions), 1),
        "rouge_score_per_second": round(per_second[0]),
        "calibeam_per_second": round(per_second[1]),
        "times": round(per_second[1] / per_second[0], 1),
    }


def compare_processes(pairs: list[Pair], processes: int) -> dict[str, Any]:
    predictions, references = map(list, zip(*pairs, strict=True))
    alone = seconds(lambda: rouge(predictions, references))
    shared = seconds(lambda: rouge(predictions, references, processes=processes))
    figures = {"alone_seconds": round(alone, 2), "shared_seconds": round(shared, 2), "times": round(alone / shared, 2)}
    return {"pairs": len(pairs), "processes": processes, **figures}


def count_differences(name: str, pairs: list[Pair]) -> dict[str, Any]:
    predictions, references = map(list, zip(*pairs, strict=True))
    values = differing = 0
    for stem in (True, False):
        found = rouge(predictions, references, kinds=EQUAL_KINDS, stem=stem)
        scorer = RougeScorer([*EQUAL_KINDS], use_stemmer=stem)
        for row, (text, targets) in enumerate(pairs):
            expected = scorer.score_multi(targets, text)
            for kind in EQUAL_KINDS:
                values += 3
                differing += sum(ours != theirs for ours, theirs in zip(found[kind][row].tolist(), expected[kind], strict=True))
    return {"case": name, "pairs": len(pairs), "values": values, "differing": differing}


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of datasets, a folder each")
    parser.add_argument("--pairs", type=int, default=20_000, help="to compare the values of")
    parser.add_argument("--speed-pairs", type=int, default=6_000, help="to measure speed on, in each case")
    parser.add_argument("--shared-pairs", type=int, default=0, help="to share out to several processes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", "ROUGE knows Latin")
    datasets = (
        {folder.name: read(folder) for folder in sorted(chosen.folder.iterdir()) if folder.is_dir()} if chosen.folder else {}
    )
    cases: dict[str, Callable[[], Iterator[Pair]]] = {
        f"{name}, {kind}": partial(predict, rows) for name, rows in datasets.items() for kind, predict in PREDICTIONS.items()
    }
    cases["random words"] = random_pairs

    speeds, compared = [], []
    for name, pairs in [*cases.items()][: len(cases) - 1 or None]:  # random words only if there are no others
        speeds.append(compare_speed(name, [*itertools.islice(pairs(), chosen.speed_pairs)], chosen.repeat))
        print(json.dumps(speeds[-1]), flush=True)
    show("pairs a second, one core", speeds)
    if chosen.shared_pairs:
        every = itertools.chain.from_iterable(pairs() for pairs in cases.values())
        show("seconds", [compare_processes([*itertools.islice(every, chosen.shared_pairs)], chosen.processes)])
    left = chosen.pairs
    for waiting, (name, pairs) in zip(range(len(cases), 0, -1), cases.items(), strict=True):
        compared.append(count_differences(name, [*itertools.islice(pairs(), -(-left // waiting))]))
        left -= compared[-1]["pairs"]
        print(json.dumps(compared[-1]), flush=True)
    show("values compared", compared)
    pairs_compared, values, differing = (sum(row[key] for row in compared) for key in ("pairs", "values", "differing"))
    print(f"{differing} of {values:,} values of {pairs_compared:,} pairs differ")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()

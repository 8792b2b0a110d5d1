"""Write one self-contained page that says what calibration changed.

Reads:   the folders written by evaluate, before and after, and by calibrate
Writes:  report.html, with tables, figures and every example; figures/, the same as SVG and PNG; figures.json behind them
Example: calibeam report out/data.toml
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calibeam
from calibeam import display, explorer, figures, page, significance, stages, store
from calibeam.paper import official
from calibeam.recipe import PLACES, StageConfig, option
from calibeam.records import CalibeamError, Example
from calibeam.rows import HOSTED, HUB
from calibeam.stages.evaluate import ALWAYS, CANDIDATES, OUTPUTS, STATISTICS

if TYPE_CHECKING:
    import numpy as np

BEFORE, AFTER = "fine-tuned", "calibrated"
SIDES = {"before": BEFORE, "after": AFTER}
QUANTILES = 10
MOST_POINTS = 400
"""Of a training curve; of longer ones, the means of so many parts are drawn."""
MOST_BARS = 15
"""Of lengths, for each model."""
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
TABLES = {
    "outputs": (OUTPUTS, OUTPUTS.names[2:]),
    "candidates": (CANDIDATES, ["log_p", "similarity", "rouge", "pieces", "token_log_p"]),
}
NAMED = ("model", "train", "validation", "test", "path")
"""Of what was read, this is told by name, with a digest; where it lies on a disk is not for those whom a report is shown to."""
GENERIC = frozenset({"model", *stages.STAGES})
"""Names of folders that say nothing of the model in them."""


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    before: str = option(help="the folder written by evaluate for the fine-tuned model", identity=False)
    after: str = option(help="the folder written by evaluate for the calibrated model", identity=False)
    calibrated: str = option(help="the folder written by calibrate", identity=False)
    title: str = option("What calibration changed", "of the page")
    max_examples: int = option(10_000, "examples that the page holds to look at", at_least=0)


def run(config: Config, *, force: bool = False) -> Path:
    before, after = store.read(config.before, "evaluate"), store.read(config.after, "evaluate")
    calibrated = store.read(config.calibrated, "calibrate")
    output = store.Output("report", config, {"before": before, "after": after, "calibrated": calibrated}, force=force)
    comparison = compare(before, after)
    if not output.done:
        with output.writing():
            data = before.input("data", "prepare")
            examples = partial(_examples, data, comparison)
            findings = {
                "title": config.title,
                **comparison,
                "unchanged": is_unchanged(calibrated),
                "remarks": remarks(comparison, calibrated),
                "reliability": reliability(comparison, before, after),
                "lengths": lengths(comparison, before, after, examples()),
                **history(data, calibrated, before, after),
            }
            drawn = draw(findings)
            shown = [*itertools.islice(examples(), config.max_examples)]
            output.write_text("report.html", document(findings, drawn, len(shown), _explorer(comparison, before, after, shown)))
            output.write_json("figures.json", findings)
            for name, figure in drawn.items():
                figures.save(figure, output.folder / "figures" / name)
    show(comparison)
    return output.path


def _examples(data: store.Folder, comparison: dict[str, Any]) -> Iterator[Example]:
    """Those that were evaluated."""
    return data.stream_examples(comparison["split"], comparison["examples"])


def document(findings: dict[str, Any], drawn: dict[str, figures.Spec], held: int, data: dict[str, str]) -> str:
    """The page: what was found, the figures, and the data of the examples that it holds."""
    return page.page(
        "report.html",
        drawn=drawn,
        data=data,
        title=findings["title"],
        version=calibeam.__version__,
        found=findings,
        headline=headline(findings["rows"]),
        held=held,
        curve_name=curve_name,
    )


def compare(before: store.Folder, after: store.Folder) -> dict[str, Any]:
    """Both evaluations, setting by setting, with the interval and p-value of every figure's difference."""
    left, right = _results(before), _results(after)
    if before.manifest["origin"]["inputs"]["data"] != after.manifest["origin"]["inputs"]["data"]:
        raise CalibeamError(f"{before.path} and {after.path} evaluate different data")
    by_name = {result["setting"]: result for result in right["settings"]}
    shared = [(result, by_name[result["setting"]]) for result in left["settings"] if result["setting"] in by_name]
    if not shared or any(result["signature"] != other["signature"] for result, other in shared):
        raise CalibeamError(f"{before.path} and {after.path} were not decoded and measured in the same ways")
    if (left["split"], left["examples"]) != (right["split"], right["examples"]):
        raise CalibeamError(f"{before.path} and {after.path} evaluate different examples")
    of_before, of_after = statistics(before), statistics(after)
    rows = []
    for result, other in shared:
        setting, measured = result["setting"], []
        for metric in (metric for metric in result["metrics"] if metric in other["metrics"]):
            if result["metrics"][metric]["signature"] != other["metrics"][metric]["signature"]:
                raise CalibeamError(f"{before.path} and {after.path} were not measured by {metric} in the same way")
            wanted = official.figures_of(metric, list(result["metrics"][metric]["figures"]))
            found = significance.paired(of_before[setting, metric], of_after[setting, metric], wanted)
            measured += [{"metric": metric, "figure": name, **f._asdict(), "verdict": f.verdict} for name, f in found.items()]
        r_m = next(figure for figure in measured if figure["figure"] == "r_m")
        difference = other["r_m"] - result["r_m"]
        rows.append({
            "setting": setting, "before": result, "after": other, "difference": difference,
            "relative": difference / result["r_m"] if result["r_m"] else None,
            "low": r_m["low"] / 100, "high": r_m["high"] / 100, "p": r_m["p"], "verdict": r_m["verdict"], "measured": measured,
        })  # fmt: skip
    return {"split": left["split"], "examples": left["examples"], "before": left, "after": right, "rows": rows}


def show(comparison: dict[str, Any]) -> None:
    display.table(
        f"Before → after on {comparison['examples']:,} held-out examples ({comparison['split']})",
        ("decoder", "R_m", "change", "95%", "p", "rep%", "agree%"),
        [
            (
                row["setting"],
                from_to(row, "r_m", ".2f"),
                f"{100 * row['difference']:+.2f}",
                f"{100 * row['low']:+.1f}…{100 * row['high']:+.1f}",
                f"{row['p']:.3f}",
                from_to(row, "repetition_rate", ".1f"),
                from_to(row, "similarity_agreement", ".1f"),
            )
            for row in comparison["rows"]
        ],
    )
    others = [
        (
            row["setting"],
            f"{figure['metric']} {figure['figure']}",
            f"{figure['before']:.2f} → {figure['after']:.2f}",
            f"{figure['difference']:+.2f} ({figure['low']:+.2f} … {figure['high']:+.2f})",
            f"{figure['p']:.3f}",
            figure["verdict"],
        )
        for row in comparison["rows"]
        for figure in row["measured"]
        if figure["metric"] not in ALWAYS
    ]
    if others:
        display.table("", ("decoder", "figure", "before → after", "change (95%)", "p", "verdict"), others)
    display.say(
        "R_m: cube root of ROUGE-1 x 2 x Lsum. rep%: outputs that repeat words. agree%: share of pairs of "
        "candidates that likelihood orders as similarity to the reference does; 50 is chance.",
        style="dim",
    )


def from_to(row: dict[str, Any], figure: str, form: str) -> str:
    before, after = row["before"][figure], row["after"][figure]
    return "" if before is None or after is None else f"{100 * before:{form}}→{100 * after:{form}}"


# What is found


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The setting to speak of first: the one with most candidates, where calibration matters most."""
    return max(rows, key=lambda row: row["before"]["num_candidates"])


def answer(rows: list[dict[str, Any]]) -> str:
    """Did it help? In one sentence, by significant differences only."""
    verdicts = Counter(row["verdict"] for row in rows)

    def some(verdict: str) -> str:
        return f"{verdicts[verdict]} of {len(rows)} decoders" if len(rows) > 1 else rows[0]["setting"]

    higher, lower = "significantly higher", "significantly lower"
    if verdicts[higher] and verdicts[lower]:
        return f"Mixed: quality rose significantly with {some(higher)} and fell with {some(lower)}."
    if verdicts[higher]:
        return f"Yes: quality rose significantly with {some(higher)}."
    if verdicts[lower]:
        return f"No: quality fell significantly with {some(lower)}."
    return f"Not measurably: no significant difference in quality with {'any decoder' if len(rows) > 1 else rows[0]['setting']}."


def is_unchanged(calibrated: store.Folder) -> bool:
    """Whether calibration gave the fine-tuned model back."""
    return calibrated.manifest["counts"]["best_step"] == 0


def exports_adapter(calibrated: store.Folder) -> bool:
    return calibrated.manifest["settings"].get("lora_save") == "adapter"


def remarks(comparison: dict[str, Any], calibrated: store.Folder) -> list[str]:
    """What nobody should miss who looks at the figures, whether it helped first: said on the page, in the card, and in the
    terminal at the end."""
    if is_unchanged(calibrated):
        outcome = "the adapter changes nothing" if exports_adapter(calibrated) else "the model is exported unchanged"
        pairs = "" if calibrated.manifest["settings"]["pairs"] == "all" else ", pairs=all"
        found = [
            f"Nothing changed: no step was better on validation, so {outcome}. "
            f"Another learning_rate{pairs} or a smaller beta may do better."
        ]
    else:
        found = [answer(comparison["rows"])]
    if heuristics := comparison["before"].get("heuristics_left_out"):
        *others, last = heuristics
        asked = f"{', '.join(others)} and {last}" if others else last
        found.append(
            f"The fine-tuned model's generation config asks for {asked}. Both models were decoded without: "
            "with its own settings the fine-tuned model may do better than it does here."
        )
    return found


def reliability(comparison: dict[str, Any], before: store.Folder, after: store.Folder) -> list[dict[str, Any]]:
    """Quality by quantile of likelihood among the candidates of a source, as its distance from the source's mean.

    Where likelihood is calibrated it rises from the least likely candidates to the most likely ones.
    """
    chosen, columns = headline(comparison["rows"]), ("log_p", "similarity", "rouge")
    quantiles = min(QUANTILES, chosen["before"]["num_candidates"])
    found = []
    for folder, name in ((before, BEFORE), (after, AFTER)):
        parts = {kind: [Sums() for _ in range(quantiles)] for kind in columns[1:]}
        for row in folder.stream("candidates", CANDIDATES, columns=columns, where=("setting", chosen["setting"])):
            count = len(row["log_p"])
            order = sorted(range(count), key=row["log_p"].__getitem__)
            for kind in parts if count > 1 else ():
                mean = math.fsum(row[kind]) / count
                own: dict[int, list[float]] = {}
                for rank, candidate in enumerate(order):  # each in the part in which its middle lies
                    own.setdefault((2 * rank + 1) * quantiles // (2 * count), []).append(row[kind][candidate] - mean)
                for part, values in own.items():  # one value of each source: its candidates are not independent
                    parts[kind][part].add(math.fsum(values) / len(values))
        found += [
            {"kind": kind, "model": name, "quantile": quantile, **sums.mean_with_interval(100 if kind == "rouge" else 1)}
            for kind, by_quantile in parts.items()
            for quantile, sums in enumerate(by_quantile, start=1)
            if sums.count
        ]
    return found


class Sums:
    """Of values around 0, and of their squares."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count, self._sum, self._squares = self.count + 1, self._sum + value, self._squares + value * value

    def mean_with_interval(self, scale: float) -> dict[str, float]:
        """The mean, and where it would lie in 95 of 100 such samples, by the normal distribution."""
        mean = self._sum / self.count
        variance = max(0.0, self._squares - self.count * mean * mean) / max(1, self.count - 1)
        spread = math.sqrt(variance / self.count)
        return {"quality": scale * mean, "low": scale * (mean - 1.96 * spread), "high": scale * (mean + 1.96 * spread)}


def lengths(
    comparison: dict[str, Any], before: store.Folder, after: store.Folder, examples: Iterable[Example]
) -> list[dict[str, Any]]:
    """Which share of outputs, and of references, has how many words."""
    where = ("setting", headline(comparison["rows"])["setting"])
    words = {
        name: Counter(row["words"] for row in folder.stream("outputs", OUTPUTS, columns=["words"], where=where))
        for folder, name in ((before, BEFORE), (after, AFTER))
    }
    words["references"] = Counter(len(target.split()) for example in examples for target in example.targets)
    low, high = min(map(min, words.values())), max(map(max, words.values()))
    most = min(MOST_BARS, math.ceil(2 * math.sqrt(comparison["examples"])))  # of few examples, each bar would be of one or two
    width = math.ceil((high - low + 1) / most)
    found = []
    for name, counts in words.items():
        for start in range(low, high + 1, width):
            share = 100 * sum(counts[length] for length in range(start, start + width)) / counts.total()
            found.append({"of": name, "words": f"{start}-{start + width - 1}" if width > 1 else f"{start}", "share": share})
    return found


def history(
    data: store.Folder, calibrated: store.Folder, before: store.Folder, after: store.Folder
) -> dict[str, list[dict[str, Any]]]:
    """The stages behind the page in the order the data walked, and what training recorded."""
    scored = calibrated.input("scored", "score")
    folders = {"prepare": data, "finetune": _trained(calibrated), "decode": scored.input("candidates", "decode"),
               "score": scored, "calibrate": calibrated, f"evaluate {BEFORE}": before, f"evaluate {AFTER}": after}  # fmt: skip
    there = {name: folder for name, folder in folders.items() if folder is not None}
    return {
        "stages": [{"name": name, **_told(folder.manifest)} for name, folder in there.items()],
        "training": [{"stage": name, **curve} for name, folder in there.items() for curve in curves(folder)],
    }


def _told(manifest: dict[str, Any]) -> dict[str, Any]:
    kept = {key: manifest.get(key) for key in ("seconds", "started", "counts", "notes", "versions")}
    settings, digests = manifest["settings"], manifest["origin"]["inputs"]
    if "learning_rate" in manifest["counts"]:  # of several
        listed = ", ".join(map(str, settings["learning_rate"]))
        settings = {**settings, "learning_rate": f"{manifest['counts']['learning_rate']} of {listed}"}
    made_from = {
        key: (public_name if key == "model" else _place_name)(place)
        + (f", SHA-256 {digests[key][:16]}…" if key in digests else "")
        for key in NAMED
        if (place := settings.get(key))
    }
    return {**kept, "settings": made_from | {key: value for key, value in settings.items() if key not in {"output", *PLACES}}}


def _place_name(place: str) -> str:
    """Of rows: on the Hub as they are called there, and of files the name alone."""
    return place if place.startswith((HUB, HOSTED)) else Path(place).name


def public_name(model: str) -> str:
    """A Hub id as it is; of a folder only a name, for neither card nor page must tell where things lie on a disk."""
    return model if is_hub_id(model) else name_of(Path(model))


def name_of(path: Path) -> str:
    _, *parts = path.resolve().parts
    return next((part for part in reversed(parts) if part not in GENERIC), "model")


def is_hub_id(model: Any) -> bool:
    return str(model).count("/") == 1 and not Path(model).exists()


def _trained(calibrated: store.Folder) -> store.Folder | None:
    """The stage that wrote the fine-tuned model, if it is one of ours and still there."""
    try:
        return store.read(calibrated.input("model").path.parent, "finetune")
    except (CalibeamError, OSError):
        return None


def curves(folder: store.Folder) -> Iterator[dict[str, Any]]:
    """Every figure that a training stage recorded, by its steps."""
    file = folder.path / "log.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for record in map(json.loads, lines):
        for split in ("train", "validation"):
            for name, value in record.get(split, {}).items():
                if isinstance(value, int | float):
                    found.setdefault((split, name), []).append((record["step"], value))
    for (split, name), points in found.items():
        yield {"split": split, "figure": name, "points": _thinned(points)}


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    size = math.ceil(len(points) / MOST_POINTS)
    parts = (points[first : first + size] for first in range(0, len(points), size))
    return [(part[-1][0], math.fsum(value for _, value in part) / len(part)) for part in parts]


def _results(folder: store.Folder) -> dict[str, Any]:
    return json.loads((folder.path / "results.json").read_text(encoding="utf-8"))


def statistics(folder: store.Folder) -> dict[tuple[str, str], np.ndarray]:
    """By setting and metric, of every example, 8 bytes each. [examples, k]"""
    import numpy as np

    found: dict[tuple[str, str], array[float]] = {}
    width: dict[tuple[str, str], int] = {}
    for row in folder.stream("statistics", STATISTICS):
        key, values = (row["setting"], row["metric"]), row["statistics"]
        found.setdefault(key, array("d")).extend(values)
        width[key] = len(values)
    return {key: np.frombuffer(values).reshape(-1, width[key]) for key, values in found.items()}


def _explorer(comparison: dict[str, Any], before: store.Folder, after: store.Folder, examples: list[Example]) -> dict[str, str]:
    def some(folder: store.Folder, table: str, setting: str) -> Iterable[dict[str, Any]]:
        schema, columns = TABLES[table]
        return itertools.islice(folder.stream(table, schema, columns=columns, where=("setting", setting)), len(examples))

    names = [row["setting"] for row in comparison["rows"]]
    settings = [
        explorer.Setting(
            name,
            (some(before, "outputs", name), some(after, "outputs", name)),
            (some(before, "candidates", name), some(after, "candidates", name)),
        )
        for name in names
    ]
    return explorer.pack(examples, settings, names.index(headline(comparison["rows"])["setting"])) if examples else {}


# What is drawn


def draw(found: dict[str, Any]) -> dict[str, figures.Spec]:
    """Every figure of the page, by its name there and in figures/."""
    rows, ends = found["rows"], ("low", "high")
    changes = [{"decoder": row["setting"], **{key: 100 * row[key] for key in ("difference", *ends)}} for row in rows]
    drawn = {
        "change": figures.intervals(changes, "decoder", "difference", interval=ends, title="change in R_m, with its 95% interval")
    }
    for kind, title in (("similarity", "similarity"), ("rouge", "mean ROUGE")):
        if points := [point for point in found["reliability"] if point["kind"] == kind]:
            drawn[f"reliability-{kind}"] = figures.line(
                points, "quantile", "quality", "model", interval=ends,
                x_title="candidates of a source, from least to most likely", y_title=f"{title} above its mean",
            )  # fmt: skip
    if len({row["before"]["num_candidates"] for row in rows}) > 1:
        drawn["candidates"] = figures.line(
            quality(rows), "candidates", "r_m", "model", interval=ends, dash="method",
            x_title="number of candidates", y_title="R_m", log_x=True,
        )  # fmt: skip
    drawn["lengths"] = figures.bars(found["lengths"], "words", "share", "of", title="% of outputs", upright="words")
    unit, size = next(((unit, size) for unit, size in UNITS if max(s["seconds"] for s in found["stages"]) >= 2 * size), UNITS[-1])
    costs = [{"stage": stage["name"], "time": stage["seconds"] / size} for stage in found["stages"]]
    drawn["cost"] = figures.bars(costs, "stage", "time", title=unit)
    for curve in filter(is_drawn, found["training"]):
        points = [{"step": step, "value": value} for step, value in curve["points"]]
        drawn[curve_name(curve)] = figures.line(points, "step", "value", y_title=None, points=len(curve["points"]) <= figures.FEW)
    return drawn


def is_drawn(curve: dict[str, Any]) -> bool:
    """What has one value only is told in words."""
    return len({value for _, value in curve["points"]}) > 1


def curve_name(curve: dict[str, Any]) -> str:
    return f"training-{curve['stage']}-{curve['split']}-{curve['figure']}"


def quality(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """R_m of every setting before and after, with its interval."""
    for side, name in SIDES.items():
        for row in rows:
            alpha, figure = row[side]["length_alpha"], row[side]["metrics"]["rouge"]["figures"]["r_m"]
            yield {
                "model": name, "method": row[side]["method"] + (f", alpha {alpha:g}" if alpha else ""),
                "candidates": row[side]["num_candidates"], "r_m": figure["value"], "low": figure["low"], "high": figure["high"],
            }  # fmt: skip

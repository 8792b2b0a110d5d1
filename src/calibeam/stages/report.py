"""Write one self-contained page that says what calibration changed.

Reads:   the folders written by evaluate, before and after, and by calibrate
Writes:  report.html, with tables, plots and outputs side by side; figures.json behind it
Example: calibeam report out/data.toml
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import calibeam
from calibeam import display, significance, store
from calibeam.paper import official
from calibeam.paper.rouge import ROUGE_KINDS
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError
from calibeam.stages.evaluate import ALWAYS, CANDIDATES, OUTPUTS, STATISTICS

if TYPE_CHECKING:
    import numpy as np

BEFORE, AFTER = "fine-tuned", "calibrated"
COLOURS = {BEFORE: "#8a8f98", AFTER: "#1f8a70"}
SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    before: str = option(help="the folder written by evaluate for the fine-tuned model", identity=False)
    after: str = option(help="the folder written by evaluate for the calibrated model", identity=False)
    calibrated: str = option(help="the folder written by calibrate", identity=False)
    title: str = option("What calibration changed", "of the page")


def run(config: Config, *, force: bool = False) -> Path:
    before, after = store.read(config.before, "evaluate"), store.read(config.after, "evaluate")
    calibrated = store.read(config.calibrated, "calibrate")
    output = store.Output("report", config, {"before": before, "after": after, "calibrated": calibrated}, force=force)
    comparison = compare(before, after)
    if not output.done:
        with output.writing():
            page = render(
                "report.html",
                title=config.title,
                version=calibeam.__version__,
                comparison=comparison,
                plots=_plots(comparison, before, after, calibrated),
                samples=_samples(comparison, before, after),
                stages=_history(calibrated, before, after),
            )
            (output.folder / "report.html").write_text(page, encoding="utf-8")
            output.write_json("figures.json", comparison)
    show(comparison)
    return output.path


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
    statistics, others = _statistics(before), _statistics(after)
    rows = []
    for result, other in shared:
        setting, measured = result["setting"], []
        for metric in (metric for metric in result["metrics"] if metric in other["metrics"]):
            if result["metrics"][metric]["signature"] != other["metrics"][metric]["signature"]:
                raise CalibeamError(f"{before.path} and {after.path} were not measured by {metric} in the same way")
            figures = official.figures_of(metric, list(result["metrics"][metric]["figures"]))
            found = significance.paired(statistics[setting, metric], others[setting, metric], figures)
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
        ("decoder", "R_m", "change", "95%", "p", "rep%", "agreement %"),
        [
            (
                row["setting"],
                _from_to(row, "r_m", ".2f"),
                f"{100 * row['difference']:+.2f}",
                f"{100 * row['low']:+.1f} … {100 * row['high']:+.1f}",
                f"{row['p']:.3f}",
                _from_to(row, "repetition_rate", ".1f"),
                _from_to(row, "similarity_agreement", ".1f"),
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
        "R_m: cube root of ROUGE-1 x 2 x Lsum. rep%: outputs that repeat words. agreement: share of pairs of "
        "candidates that likelihood orders as similarity to the reference does; 50 is chance.",
        style="dim",
    )


def _from_to(row: dict[str, Any], figure: str, form: str) -> str:
    before, after = row["before"][figure], row["after"][figure]
    return "" if before is None or after is None else f"{100 * before:{form}} → {100 * after:{form}}"


def render(template: str, **values: Any) -> str:
    """A template of this folder; what goes into HTML is escaped, in Markdown it is not markup that can run."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _results(folder: store.Folder) -> dict[str, Any]:
    return json.loads((folder.path / "results.json").read_text(encoding="utf-8"))


def _statistics(folder: store.Folder) -> dict[tuple[str, str], np.ndarray]:
    """By setting and metric, of every example. [examples, k]"""
    import numpy as np

    found: dict[tuple[str, str], list[list[float]]] = {}
    for row in folder.stream("statistics", STATISTICS):
        found.setdefault((row["setting"], row["metric"]), []).append(row["statistics"])
    return {key: np.array(rows) for key, rows in found.items()}


def _samples(comparison: dict[str, Any], before: store.Folder, after: store.Folder) -> list[dict[str, Any]]:
    """The outputs that rose most, those that fell most and some in between, for the last setting both have."""
    setting = comparison["rows"][-1]["setting"]
    data = store.read(before.manifest["input_places"]["data"], "prepare")
    before.must_come_from(data=data)  # its place is a path, and may hold another run's by now
    examples = {example.id: example for example in data.examples(comparison["split"])}
    left, right = (
        {row["id"]: row for row in folder.rows("outputs", OUTPUTS) if row["setting"] == setting} for folder in (before, after)
    )

    def change(name: str) -> float:
        return sum(right[name][kind] - left[name][kind] for kind in ROUGE_KINDS) / len(ROUGE_KINDS)

    order = sorted(left, key=change, reverse=True)
    middle = order[SAMPLES:-SAMPLES][:: max(1, len(order) // SAMPLES)][:SAMPLES]
    groups = (("Rose most", order[:SAMPLES]), ("In between", middle), ("Fell most", order[-SAMPLES:]))
    return [
        {
            "kind": kind,
            "setting": setting,
            "rows": [
                {"example": examples[name], "before": left[name], "after": right[name], "change": change(name)}
                for name in dict.fromkeys(names)
            ],
        }
        for kind, names in groups
    ]


def _history(calibrated: store.Folder, before: store.Folder, after: store.Folder) -> list[dict[str, Any]]:
    """The manifests behind the page, in the order the data walked, as far back as they are still there."""
    scored = store.read(calibrated.manifest["input_places"]["scored"], "score")
    decoded = store.read(scored.manifest["input_places"]["candidates"], "decode")
    prepared = store.read(decoded.manifest["input_places"]["data"], "prepare")
    return [folder.manifest for folder in (prepared, decoded, scored, calibrated, before, after)]


def _plots(comparison: dict[str, Any], before: store.Folder, after: store.Folder, calibrated: store.Folder) -> dict[str, str]:
    return {
        "Quality against number of candidates": _plot_candidates(comparison),
        "Likelihood against similarity, before and after": _plot_likelihood(comparison, before, after),
        "Training": _plot_training(calibrated),
    }


def _plot_candidates(comparison: dict[str, Any]) -> str:
    figure, axes = _figure(1)
    methods = dict.fromkeys((row["before"]["method"], row["before"]["length_alpha"]) for row in comparison["rows"])
    for (method, alpha), marker in zip(methods, "os^Dvx" * len(methods), strict=False):
        rows = [row for row in comparison["rows"] if (row["before"]["method"], row["before"]["length_alpha"]) == (method, alpha)]
        for side, name in (("before", BEFORE), ("after", AFTER)):
            axes[0].plot(
                [row[side]["num_candidates"] for row in rows], [100 * row[side]["r_m"] for row in rows],
                marker=marker, color=COLOURS[name], label=f"{name}, {method}" + (f", alpha {alpha:g}" if alpha else ""),
            )  # fmt: skip
    axes[0].set(xlabel="candidates", ylabel="R_m")
    axes[0].legend(frameon=False)
    return _svg(figure)


def _plot_likelihood(comparison: dict[str, Any], before: store.Folder, after: store.Folder) -> str:
    """Candidates of the setting with most of them, each as its distance from its source's mean."""
    import numpy as np

    setting = max(comparison["rows"], key=lambda row: row["before"]["num_candidates"])["setting"]
    figure, axes = _figure(2, sharex=True, sharey=True)
    for axis, folder, name in zip(axes, (before, after), (BEFORE, AFTER), strict=True):
        points = [
            np.stack([np.array(row[key]) - np.mean(row[key]) for key in ("log_p", "similarity")])
            for row in folder.rows("candidates", CANDIDATES)
            if row["setting"] == setting and len(row["log_p"]) > 1
        ]
        axis.set(title=f"{name}, {setting}", xlabel="log P less the source's mean")
        if not points:
            continue
        log_p, similarity = np.concatenate(points, axis=1)
        axis.plot(log_p, similarity, ".", markersize=2, alpha=0.25, color=COLOURS[name], rasterized=True)
        edges = np.unique(np.quantile(log_p, np.linspace(0, 1, 11)))
        places = np.clip(np.searchsorted(edges, log_p, side="right") - 1, 0, max(len(edges) - 2, 0))
        means = [(log_p[places == tenth].mean(), similarity[places == tenth].mean()) for tenth in np.unique(places)]
        axis.plot(*zip(*means, strict=True), "-o", color="#d1495b", markersize=4, label="mean by tenth of likelihood")
        axis.legend(frameon=False)
    axes[0].set_ylabel("similarity less the source's mean")
    return _svg(figure)


def _plot_training(calibrated: store.Folder) -> str:
    lines = (calibrated.path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "train" in record]
    figure, axes = _figure(3)
    for axis, key in zip(axes, ("calibration", "regularization", "agreement"), strict=True):
        axis.plot([record["step"] for record in steps], [record["train"][key] for record in steps], color=COLOURS[AFTER])
        axis.set(title=key, xlabel="step")
    return _svg(figure)


def _figure(columns: int, **options: Any) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns if columns < 3 else 11, 3.4), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _svg(figure: Any) -> str:
    """As a data URI: an image can run nothing, whatever text is in it."""
    import matplotlib

    with io.BytesIO() as stream, matplotlib.rc_context({"svg.hashsalt": "calibeam"}):
        figure.savefig(stream, format="svg", dpi=120, metadata={"Date": None})
        return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()

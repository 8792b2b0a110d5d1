"""The page of a real run over hostile data, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from calibeam import pipeline, seq2seq, significance, store
from calibeam.paper import official
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import evaluate, prepare, report
from conftest import sentence, tiny_encoder, tiny_model

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    '"><svg onload=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "<a href='javascript:alert(1)'>",
]
PLOTS = ["Quality against number of candidates", "Likelihood against similarity, before and after", "Training"]
LENGTHS = {"max_source_length": 24, "max_target_length": 10}
TITLE = f"A title {HOSTILE[0]} {HOSTILE[3]}"
COLUMN = "<b onclick=alert(1)>text"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


def write_rows(path: Path, first: int, count: int, hostile: bool) -> str:
    rows = []
    for i in range(first, first + count):
        bad, source = HOSTILE[i % len(HOSTILE)] if hostile else "", sentence(i, 8)
        target = " ".join(source.split()[:3])
        rows.append({"id": f"row {i} {bad}", COLUMN: f"{source} {bad}", "target": [target, f"{target} {bad}"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def run(work: Path, tokenizer: Any) -> Path:
    """Fine-tuning by heart, so that there are figures to compare, then everything else."""
    seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), work / "start")
    files = {name: write_rows(work / f"{name}.jsonl", first, count, name == "test")
             for name, first, count in (("train", 0, 12), ("validation", 0, 6), ("test", 0, 6))}  # fmt: skip
    pipeline.run({
        "output": str(work / "run"),
        "model": str(work / "start"),
        "prepare": {**files, "source_column": COLUMN},
        "finetune": {"learning_rate": 2e-2, "batch_size": 12, "micro_batch_size": 12, "max_steps": 30, "eval_steps": 30,
                     **LENGTHS},
        "decode": {"num_candidates": 4, "max_new_tokens": 8, "max_source_length": 24},
        "calibrate": {"learning_rate": 1e-2, "batch_size": 6, "max_steps": 16, "select": "perplexity", "loss": "reward",
                      "regularizer": "cross_entropy", "reg_weight": 1.0, **LENGTHS},
        "evaluate": {"num_candidates": [1, 4], "length_alphas": [0.0, 0.5], "max_new_tokens": 8, "metrics": ["squad_qg"],
                     **LENGTHS},
        "report": {"title": TITLE},
    })  # fmt: skip
    return work / "run"


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return run / "report" / "report.html"


def chromium(folder: Path, page: Path, *options: str) -> str:
    """What headless Chromium prints when given the page."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found, "these tests need a browser: install chromium (or chromium-browser, or google-chrome)"
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
             "disable-component-update", "disable-sync", "hide-scrollbars", "disable-dev-shm-usage")  # fmt: skip
    done = subprocess.run(  # noqa: S603
        [found, *(f"--{flag}" for flag in flags), f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000",
         *options, page.as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Elements(HTMLParser):
    """Every element with its attributes, and the text outside of style sheets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in_style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._in_style else data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def dom(work: Path, page: Path) -> Elements:
    """The page as the browser understood it."""
    return Elements(chromium(work, page, "--dump-dom"))


def test_fault_44_hostile_text_is_shown_as_text_and_nothing_else(dom: Elements, run: Path) -> None:
    for bad in HOSTILE:
        assert bad in dom.text
    assert COLUMN in dom.text
    assert TITLE in dom.text
    for example in store.read(run / "prepare", "prepare").examples("test"):
        assert example.id in dom.text
        assert example.source in dom.text
        assert " / ".join(example.targets) in dom.text


def test_fault_44_there_is_nothing_on_the_page_that_can_run_or_load(dom: Elements, page: Path) -> None:
    assert {tag for tag, _ in dom.elements} & {
        "script",
        "svg",
        "iframe",
        "object",
        "embed",
        "a",
        "link",
        "form",
        "b onclick",
    } == set()
    assert not [name for _, attributes in dom.elements for name in attributes if name.startswith("on")]
    assert len(dom.of("img")) == 3
    assert all(str(attributes["src"]).startswith("data:image/svg+xml;base64,") for attributes in dom.of("img"))
    assert not [attributes for _, attributes in dom.elements if "href" in attributes]
    assert not re.search(r"(src|href|url|action)\s*[=(]\s*[\"']?\s*(https?:)?//", page.read_text())
    policy = {str(meta.get("http-equiv")): str(meta.get("content")) for meta in dom.of("meta")}["Content-Security-Policy"]
    assert policy.split("; ") == ["default-src 'none'", "img-src data:", "style-src 'unsafe-inline'"]


def test_the_tables_show_the_figures(dom: Elements, run: Path) -> None:
    for row in json.loads((run / "report" / "figures.json").read_text())["rows"]:
        assert row["setting"] in dom.text
        assert f"{100 * row['difference']:+.2f} ({100 * row['low']:+.2f} to {100 * row['high']:+.2f})" in dom.text
        assert f"{100 * row['before']['r_m']:.2f}" in dom.text
        assert f"{100 * row['after']['r_m']:.2f}" in dom.text
        for found in row["measured"]:
            numbers = [f"{found[key]:+.2f}" for key in ("difference", "low", "high")]
            shown = f"{numbers[0]} ({numbers[1]} to {numbers[2]})", f"{found['p']:.4f}", found["verdict"]
            assert f"{found['metric']} {found['figure']}" in dom.text
            assert re.search(r"\s*".join(map(re.escape, shown)), dom.text)
        assert row["after"]["metrics"]["squad_qg"]["signature"] in dom.text
    assert len(dom.of("table")) == 3


def test_every_figure_of_both_evaluations_is_compared(dom: Elements, run: Path) -> None:
    names = {
        "rouge": ["rouge1", "rouge2", "rougeLsum", "r_m"],
        "repetition": ["rate"],
        "squad_qg": ["coco_rouge_l", "bleu1", "bleu2", "bleu3", "bleu4"],
    }
    kept = []
    for name in ("finetuned", "calibrated"):
        found: dict[tuple[str, str], list[list[float]]] = {}
        for row in store.read(run / "evaluate" / name, "evaluate").rows("statistics", evaluate.STATISTICS):
            found.setdefault((row["setting"], row["metric"]), []).append(row["statistics"])
        kept.append(found)
    for row in json.loads((run / "report" / "figures.json").read_text())["rows"]:
        assert [(found["metric"], found["figure"]) for found in row["measured"]] == [
            (metric, figure) for metric, figures in names.items() for figure in figures
        ]
        for metric in names:
            before, after = (np.array(side[row["setting"], metric]) for side in kept)
            expected = significance.paired(before, after, official.METRICS[metric].figures)
            for found in row["measured"]:
                if found["metric"] == metric:
                    wanted = expected[found["figure"]]
                    assert {key: found[key] for key in wanted._asdict()} == pytest.approx(wanted._asdict())
                    assert found["verdict"] == wanted.verdict
        (r_m,) = (found for found in row["measured"] if found["figure"] == "r_m")
        assert (row["p"], row["verdict"]) == (r_m["p"], r_m["verdict"])
        assert row["difference"] == pytest.approx(r_m["difference"] / 100)
    assert "no significant difference" in dom.text
    assert not re.search(r"\b[Gg]ains?\b", dom.text)


def test_the_three_plots_are_pictures(work: Path, dom: Elements) -> None:
    """A page of the same images, which says how large the browser found them once they were read."""
    assert [attributes["alt"] for attributes in dom.of("img")] == PLOTS
    images = "".join(f'<img src="{attributes["src"]}">' for attributes in dom.of("img"))
    script = "onload = () => document.title = [...document.images].map(i => `${i.naturalWidth}x${i.naturalHeight}`).join()"
    (work / "images.html").write_text(f"<title></title>{images}<script>{script}</script>")
    title = re.search("<title>(.*?)</title>", chromium(work, work / "images.html", "--dump-dom"))
    assert title
    sizes = [tuple(map(int, size.split("x"))) for size in title[1].split(",")]
    assert len(sizes) == 3
    assert all(width > 300 and height > 200 for width, height in sizes)


def test_the_page_as_seen_has_the_plots_in_it(work: Path, page: Path) -> None:
    """The colour of the line of means is in the second plot and nowhere else: the page's own policy lets it through."""
    chromium(work, page, f"--screenshot={work / 'page.png'}", "--window-size=1200,4500")
    pixels = (image.imread(work / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (4500, 1200)
    red = (abs(pixels - [0xD1, 0x49, 0x5B]) <= 2).all(-1)
    assert red.sum() > 50
    rows = red.nonzero()[0]
    assert rows.max() - rows.min() < 600


def test_the_figures_are_those_of_both_evaluations(run: Path) -> None:
    figures = json.loads((run / "report" / "figures.json").read_text())
    before, after = (json.loads((run / "evaluate" / name / "results.json").read_text()) for name in ("finetuned", "calibrated"))
    assert figures["before"] == before
    assert figures["after"] == after
    assert [row["before"] for row in figures["rows"]] == before["settings"]
    assert [row["after"] for row in figures["rows"]] == after["settings"]
    assert any(row["difference"] for row in figures["rows"])
    for row in figures["rows"]:
        assert row["difference"] == row["after"]["r_m"] - row["before"]["r_m"]
        assert row["low"] <= row["difference"] <= row["high"]


# What must not be compared


@pytest.fixture(scope="module")
def before(run: Path) -> store.Folder:
    return store.read(run / "evaluate" / "finetuned", "evaluate")


def evaluated(run: Path, name: str, **settings: Any) -> store.Folder:
    given = {
        "data": str(run / "prepare"),
        "metrics": ("squad_qg",),
        "num_candidates": (1, 4),
        "length_alphas": (0.0, 0.5),
        "max_new_tokens": 8,
        **LENGTHS,
    }
    config = evaluate.Config(**{"model": str(run / "finetune"), "output": str(run / name), **given, **settings})
    return store.read(evaluate.run(config), "evaluate")


def test_evaluations_of_different_data_are_not_compared(run: Path, work: Path, before: store.Folder) -> None:
    rows = write_rows(work / "other.jsonl", 50, 6, False)
    config = prepare.Config(output=str(work / "other"), train=rows, validation=rows, test=rows, source_column=COLUMN)
    after = evaluated(run, "on-other-data", data=str(prepare.run(config)))
    with pytest.raises(CalibeamError, match="different data"):
        report.compare(before, after)


def test_evaluations_of_different_splits_are_not_compared(run: Path, before: store.Folder) -> None:
    """Both splits have 6 rows."""
    after = evaluated(run, "on-validation", split="validation")
    with pytest.raises(CalibeamError):
        report.compare(before, after)


@pytest.mark.parametrize("settings", [{"num_candidates": (2,)}, {"max_examples": 3}, {"max_new_tokens": 4}], ids=str)
def test_outputs_that_were_decoded_in_other_ways_are_not_compared(
    settings: dict[str, Any], run: Path, before: store.Folder
) -> None:
    after = evaluated(run, f"with-{next(iter(settings))}", **settings)
    with pytest.raises(CalibeamError, match=r"not decoded and measured in the same ways|evaluate different examples"):
        report.compare(before, after)


def test_figures_that_were_measured_in_other_ways_are_not_compared(run: Path, work: Path, before: store.Folder) -> None:
    places = [str(tiny_encoder(family, work / "encoders" / family)) for family in ("bert", "roberta")]
    first, second = (evaluated(run, f"by-{Path(place).name}", metrics=("bertscore",), bertscore_model=place) for place in places)
    with pytest.raises(CalibeamError, match="not measured by bertscore in the same way"):
        report.compare(first, second)
    (figures,) = {tuple((f["metric"], f["figure"]) for f in row["measured"]) for row in report.compare(first, first)["rows"]}
    assert [name for metric, name in figures if metric == "bertscore"] == ["precision", "recall", "f1"]
    (figures,) = {tuple(f["metric"] for f in row["measured"]) for row in report.compare(before, second)["rows"]}
    assert set(figures) == {"rouge", "repetition"}  # what both have

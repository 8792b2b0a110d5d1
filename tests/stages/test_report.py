"""The page of a real run over hostile data, in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibeam import compare, explorer, pipeline, seq2seq, significance, store
from calibeam.paper import official
from calibeam.records import CalibeamError, Example
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import evaluate, prepare, report
from conftest import once, sentence, tiny_encoder, tiny_model
from hostile import FOR_FILES, HOSTILE, MARKUP, TEMPLATES
from window import Window

ROWS = 10
LENGTHS = {"max_source_length": 24, "max_target_length": 10}
TITLE = f"A title {MARKUP[0]} {MARKUP[16]}"
COLUMN = "<b onclick=alert(1)>text"
SCROLL = """async () => {
  const list = document.querySelector("#list"), frames = [];
  for (let step = 0; step < 30; step++) {
    const start = performance.now();
    list.scrollTop = (step * 7919 * 58) % list.scrollHeight;
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    if (!list.querySelectorAll(".row").length) throw new Error("nothing in sight");
    frames.push(performance.now() - start);
  }
  return frames;
}"""
FIGURES = ["change", "reliability-similarity", "reliability-rouge", "candidates", "lengths", "cost"]


def write_rows(path: Path, first: int, count: int, hostile: bool) -> str:
    """Of the hostile texts, every row has its share in every field."""
    rows = []
    for i in range(first, first + count):
        bad, source = " ".join(FOR_FILES[i::count]) if hostile else "", sentence(i, 8)
        target = " ".join(source.split()[:3])
        rows.append({"id": f"row {i} {bad}", COLUMN: f"{source} {bad}", "target": [target, f"{target} {bad}"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Fine-tuning by heart, so that there are figures to compare, then everything else."""

    def make(work: Path) -> None:
        work.mkdir()
        seq2seq.save(Seq2Seq(tiny_model("t5", 0, len(tokenizer)), tokenizer), work / "start")
        files = {name: write_rows(work / f"{name}.jsonl", 0, count, name == "test")
                 for name, count in (("train", 12), ("validation", ROWS), ("test", ROWS))}  # fmt: skip
        tables: dict[str, Any] = {
            "output": str(work / "run"),
            "model": str(work / "start"),
            "prepare": {**files, "source_column": COLUMN},
            "finetune": {"learning_rate": 2e-2, "batch_size": 12, "micro_batch_size": 12, "max_steps": 30, "eval_steps": 30,
                         **LENGTHS},
            "decode": {"num_candidates": 4, "max_new_tokens": 8, "max_source_length": 24},
            "calibrate": {"learning_rate": 1e-2, "batch_size": 6, "max_steps": 16, "select": "perplexity", "loss": "reward",
                          "regularizer": "cross_entropy", "reg_weight": 1.0, **LENGTHS},
            "evaluate": {"num_candidates": [1, 4], "max_new_tokens": 8, "metrics": ["squad_qg"], **LENGTHS},
            "report": {"title": TITLE},
        }  # fmt: skip
        pipeline.run(tables)

    return once(tmp_path_factory, "report", make)


@pytest.fixture(scope="module")
def run(work: Path) -> Path:
    return work / "run"


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return run / "report" / "report.html"


@pytest.fixture(scope="module")
def figures(run: Path) -> dict[str, Any]:
    return json.loads((run / "report" / "figures.json").read_text())


@pytest.fixture(scope="module")
def examples(run: Path) -> list[Example]:
    return store.read(run / "prepare", "prepare").examples("test")


@pytest.fixture(scope="module")
def opened(browser: Any, page: Path) -> Iterator[Window]:
    with Window(browser, page) as window:
        yield window


@pytest.fixture
def window(opened: Window) -> Window:
    return opened.anew()


def candidates(run: Path, side: str, setting: str) -> dict[str, dict[str, Any]]:
    rows = store.read(run / "evaluate" / side, "evaluate").rows("candidates", evaluate.CANDIDATES)
    return {row["id"]: row for row in rows if row["setting"] == setting}


# The page


def test_the_page_answers_in_order_with_figures_in_it(window: Window, figures: dict[str, Any]) -> None:
    headings = window.page.locator("h2").all_text_contents()
    assert headings == [
        "Did it help?", "What calibration did to likelihood", "Quality against number of candidates",
        "Lengths and repetitions", "Cost", "Training", "Examples", "How it was made",
    ]  # fmt: skip
    places = window.page.locator("[data-figure]")
    names = [place.get_attribute("data-figure") for place in places.all()]
    assert names[: len(FIGURES)] == FIGURES
    assert {f"training-{stage}-validation-perplexity" for stage in ("finetune", "calibrate")} <= set(names)
    assert window.page.locator("[data-figure] svg .role-mark").count() >= len(names)
    assert window.text("#help .verdict") == report.answer(figures["rows"]) == figures["remarks"][0]
    assert not figures["unchanged"]
    headline = report.headline(figures["rows"])
    for kind, name in (("similarity", "similarity"), ("rouge", "ROUGE")):
        shown = f"Agreement with {name}\n{100 * headline['after'][f'{kind}_agreement']:.1f}%"
        assert shown in re.sub(r"\n+", "\n", window.text("#help .tiles"))
    for stage in ("prepare", "finetune", "decode", "score", "calibrate", "evaluate fine-tuned", "evaluate calibrated"):
        assert stage in window.text("#cost")


def test_every_figure_is_there_as_svg_and_png(run: Path, window: Window) -> None:
    files = {file.name for file in (run / "report" / "figures").iterdir()}
    names = [place.get_attribute("data-figure") for place in window.page.locator("[data-figure]").all()]
    assert files == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}


def test_the_tables_show_the_figures(window: Window, figures: dict[str, Any]) -> None:
    def shown(value: float, form: str) -> str:
        return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")

    window.page.locator("summary", has_text="Every figure").click()
    text = re.sub(r"\s+", " ", window.text("#help"))
    for row in figures["rows"]:
        numbers = [shown(100 * row[side]["r_m"], ".2f") for side in ("before", "after")]
        change = [shown(100 * row[key], "+.2f") for key in ("difference", "low", "high")]
        line = [row["setting"], *numbers, change[0], f"{change[1]} … {change[2]}", f"{row['p']:.3f}", row["verdict"]]
        assert " ".join(line) in text
        for found in row["measured"]:
            change = [shown(found[key], "+.2f") for key in ("difference", "low", "high")]
            assert f"{found['metric']} {found['figure']} " in text
            assert f"{change[0]} {change[1]} … {change[2]} {found['p']:.4f} {found['verdict']}" in text
    assert figures["rows"][0]["after"]["metrics"]["squad_qg"]["signature"] in window.text("#made")


def test_a_tooltip_is_text(window: Window) -> None:
    mark = window.page.locator("[data-figure=change] svg .mark-symbol path").last
    mark.hover()
    assert "beam 4" in window.text("#tip")
    window.elements()


def test_light_and_dark_and_on_paper(window: Window) -> None:
    def brightness(selector: str, kind: str) -> float:
        colour = window.page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{kind}")
        return float(np.mean([int(value) for value in re.findall(r"\d+", colour)][:3]))

    title = "[data-figure=change] svg .role-axis-title text"
    for scheme, media, dark in (("light", "screen", False), ("dark", "screen", True), ("dark", "print", False)):
        window.page.emulate_media(color_scheme=scheme, media=media)
        assert (brightness("body", "backgroundColor") < 60) == (brightness(title, "fill") > 180) == dark
        assert window.page.locator("#list").is_visible() == (media == "screen")
        assert window.page.locator(".candidates").first.is_visible()
    window.page.emulate_media(color_scheme="light", media="screen")


def test_a_phone_shows_all_of_it(window: Window) -> None:
    window.page.set_viewport_size({"width": 360, "height": 740})
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    window.page.locator("#list .row").nth(1).click()
    assert window.page.locator("#detail h3").evaluate(
        "e => new Promise((done) => setTimeout(() => done(e.getBoundingClientRect().top < innerHeight), 800))"
    )
    assert window.page.locator(".candidates td.text").first.evaluate("e => e.getBoundingClientRect().right <= innerWidth")


def test_a_page_with_one_decoder_says_what_it_cannot_show(figures: dict[str, Any]) -> None:
    found = {**figures, "rows": figures["rows"][:1], "reliability": [], "training": []}
    drawn = report.draw(found)
    assert list(drawn) == ["change", "lengths", "cost"]
    text = report.document(found, drawn, 0, {})
    for words in ("there is no order to speak of", "Evaluated with one number of candidates only", "Nothing was recorded"):
        assert words in text
    assert 'id="explorer"' not in text


def test_what_has_one_value_is_told_and_not_drawn(figures: dict[str, Any], browser: Any, tmp_path: Path) -> None:
    """As with one step, or a constant learning rate; and remarks are on the page."""
    curves = [
        {"stage": "calibrate", "split": "train", "figure": "loss", "points": [[1, -2.5]]},
        {"stage": "calibrate", "split": "train", "figure": "regularization", "points": [[1, -3e-11]]},
        {"stage": "calibrate", "split": "train", "figure": "learning_rate", "points": [[1, 1e-5], [2, 1e-5]]},
        {"stage": "calibrate", "split": "validation", "figure": "rouge", "points": [[0, 1.0], [1, 2.0]]},
    ]
    found = {**figures, "training": curves, "unchanged": True, "remarks": ["Nothing changed.", "Another <b>remark</b>."]}
    drawn = report.draw(found)
    assert [name for name in drawn if name.startswith("training")] == ["training-calibrate-validation-rouge"]
    (tmp_path / "page.html").write_text(report.document(found, drawn, 0, {}), encoding="utf-8")
    with Window(browser, tmp_path / "page.html") as window:
        told = "With one value only: loss \N{MINUS SIGN}2.5, regularization 0, learning rate 1e\N{MINUS SIGN}5."
        assert told in window.text("#training")
        assert window.text("#help .verdict") == "Nothing changed."
        assert window.text("#help .remark") == "Another <b>remark</b>."
        assert window.page.locator("#training svg").count() == 1


# The explorer


def test_fault_44_every_example_opens_with_all_its_candidates(window: Window, run: Path, examples: list[Example]) -> None:
    """Every hostile text is an example's, so this also sees that each is shown as it is."""
    sides = [candidates(run, side, "beam 4") for side in ("finetuned", "calibrated")]
    window.page.locator("#list").focus()
    window.page.keyboard.press("Home")
    seen = set()
    for _ in examples:
        name = window.page.locator("#detail h3").text_content()
        (example,) = (example for example in examples if example.id == name)
        seen.add(name)
        assert window.page.locator("#detail .source").text_content() == example.source
        assert window.page.locator("#detail section .text:not(.source)").all_text_contents() == list(example.targets)
        for side, rows in enumerate(sides):
            row = rows[example.id]
            shown = [[cell.replace("\N{MINUS SIGN}", "-") for cell in cells] for cells in window.candidates(side)]
            order = sorted(range(len(row["log_p"])), key=lambda place: -round(row["log_p"][place], 2))
            assert [cells[0] for cells in shown] == [str(rank + 1) for rank in range(len(order))]
            for column, key, scale, within in ((1, "log_p", 1, 0.06), (2, "similarity", 1, 0.006), (3, "rouge", 100, 0.06)):
                wanted = [scale * row[key][place] for place in order]
                assert [float(cells[column]) for cells in shown] == pytest.approx(wanted, abs=within)
            assert [cells[4].removesuffix("</s>").strip() for cells in shown] == [row["texts"][place] for place in order]
        window.page.keyboard.press("ArrowDown")
    assert seen == {example.id for example in examples}
    window.elements()


def test_tokens_are_coloured_by_their_log_p(window: Window, run: Path) -> None:
    name = window.page.locator("#detail h3").text_content()
    log_p = candidates(run, "calibrated", "beam 4")[str(name)]["token_log_p"][0]
    tokens = window.page.locator(".candidates").nth(1).locator("tbody tr").first.locator(".token")
    strengths = [float(token.evaluate("e => e.style.getPropertyValue('--surprise')")) for token in tokens.all()]
    assert strengths == pytest.approx([min(1, -value / 6) for value in log_p], abs=0.011)
    backgrounds = [token.evaluate("e => getComputedStyle(e).backgroundColor") for token in tokens.all()]
    assert len(set(backgrounds)) == len({round(value, 2) for value in strengths})


def test_the_list_sorts(window: Window, run: Path, examples: list[Example]) -> None:
    outputs = {}
    for side in ("finetuned", "calibrated"):
        for row in store.read(run / "evaluate" / side, "evaluate").rows("outputs", evaluate.OUTPUTS):
            if row["setting"] == "beam 4":
                outputs[side, row["id"]] = round(100 * sum(row[k] for k in ("rouge1", "rouge2", "rougeLsum")) / 3, 2)
    places = {example.id: place for place, example in enumerate(examples)}
    change = {name: outputs["calibrated", name] - outputs["finetuned", name] for name in places}
    assert len({round(value, 3) for value in change.values()}) > 2
    orders = {
        "rose most": lambda name: (-round(change[name], 9), places[name]),
        "fell most": lambda name: (round(change[name], 9), places[name]),
        "best after": lambda name: (-outputs["calibrated", name], places[name]),
        "as in the data": lambda name: places[name],
        "id": lambda name: name,
    }
    for name, key in orders.items():
        window.page.select_option("#sort", name)
        window.page.locator("#list").press("Home")
        wanted = sorted(places, key=key)
        assert window.rows() == wanted[: len(window.rows())]


def test_the_list_filters_and_searches(window: Window, examples: list[Example], figures: dict[str, Any]) -> None:
    def count() -> str:
        return window.text("#count")

    assert count() == f"{ROWS} of {ROWS}"
    window.page.fill("#search", "\u2028separator")
    assert count() == f"1 of {ROWS}"
    assert window.rows() == [example.id for example in examples if "\u2028separator" in example.source]
    window.page.fill("#search", MARKUP[0].upper())
    assert count() == f"1 of {ROWS}"
    window.page.fill("#search", "nowhere to be found")
    assert (count(), window.text("#detail")) == (f"0 of {ROWS}", "Nothing matches.")
    window.page.fill("#search", "")
    kept = {}
    for name in ("rose", "fell", "changed"):
        window.page.select_option("#filter", name)
        kept[name] = int(count().split()[0])
        changes = window.page.locator("#list .row .change").all_text_contents()
        assert all(change.startswith("+") == (name == "rose") for change in changes if name != "changed")
    assert 0 < kept["rose"] + kept["fell"] <= kept["changed"] <= ROWS


def test_candidates_rank_by_other_measures_and_of_other_decoders(window: Window) -> None:
    for name, column in (("similarity", 2), ("ROUGE", 3), ("likelihood", 1)):
        window.page.select_option("#rank", name)
        window.page.wait_for_selector(f".candidates th:nth-child({column + 1})[aria-sort=descending]")
        values = [float(cells[column].replace("\N{MINUS SIGN}", "-")) for cells in window.candidates(1)]
        assert values == sorted(values, reverse=True)
    assert len(window.candidates(0)) > 1
    window.page.select_option("#setting", "beam 1")
    window.page.wait_for_selector(".sides > div:first-child tbody tr:only-child")


def test_the_keyboard_is_enough(window: Window) -> None:
    def focused() -> str:
        return window.page.evaluate("document.activeElement.id")

    press, title = window.page.keyboard.press, window.page.locator("#detail h3")
    window.page.select_option("#sort", "as in the data")
    window.page.evaluate("document.activeElement.blur()")
    press("/")
    assert focused() == "search"
    press("ArrowDown")
    assert focused() == "list"
    press("Home")
    last = ROWS - 1
    for key, place in (("ArrowDown", 1), ("j", 2), ("ArrowUp", 1), ("End", last), ("ArrowDown", last), ("Home", 0), ("k", 0)):
        press(key)
        row = window.page.locator("#list [aria-selected=true]")
        assert row.get_attribute("id") == f"row-{place}" == window.page.locator("#list").get_attribute("aria-activedescendant")
        assert (row.get_attribute("aria-posinset"), row.get_attribute("aria-setsize")) == (str(place + 1), str(ROWS))
        assert title.text_content() == row.locator(".id").text_content()
    press("Enter")
    assert focused() == "detail"
    press("Escape")
    assert focused() == "list"
    press("Tab")
    assert window.page.evaluate("document.activeElement !== document.body")


# What a page may do


def test_fault_44_the_policy_lets_nothing_else_run(browser: Any, page: Path) -> None:
    window = Window(browser, page)
    attempts = {
        "eval": "eval('window.ran = 1')",
        "Function": "new Function('window.ran = 1')()",
        "markup": "document.body.innerHTML = '<img src=x onerror=alert(1)>'",
        "insertion": "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "script": "{ const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); }",
        "handler": "document.body.setAttribute('onclick', 'window.ran = 1')",
        "frame": "{ const f = document.createElement('iframe'); f.srcdoc = '<p>'; document.body.append(f); }",
    }
    for name, attempt in attempts.items():  # later, for what the tests themselves run may use eval
        later = f"setTimeout(() => {{ try {{ {attempt}; done('ran') }} catch (error) {{ done(error.name) }} }})"
        assert window.page.evaluate(f"() => new Promise((done) => {later})") in ("EvalError", "TypeError"), name
    fetched = window.page.evaluate("fetch('data:,x').then(() => 'fetched', () => 'refused')")
    assert (fetched, window.page.evaluate("window.ran === undefined")) == ("refused", True)


def test_the_page_is_one_file_with_our_scripts_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<script type=\"module\">", text)) == 2
    assert not re.findall(r"<script\b(?! type=\"application/octet-stream\")", text.split('<script type="module">')[0])
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "unsafe" not in policy[1]
    assert policy[1].startswith("default-src &#39;none&#39;; script-src &#39;sha256-")


def poisoned(value: Any, names: dict[str, str], key: str = "") -> Any:
    """With a hostile text at the end of every string that a user can choose, the same wherever it stands."""
    if isinstance(value, dict):
        return {name: poisoned(each, names, name) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, names, key) for each in value]
    if not isinstance(value, str) or key in ("kind", "verdict", "metric", "figure", "started"):
        return value
    return names.setdefault(value, value + HOSTILE[len(names) % len(HOSTILE)])


def test_fault_44_hostile_names_of_everything_are_text(browser: Any, tmp_path: Path, figures: dict[str, Any]) -> None:
    """Names of decoders, stages, models, metrics and columns, settings and their values, signatures, notes, versions."""
    found = poisoned(json.loads(json.dumps(figures).replace('"squad_qg"', json.dumps(MARKUP[0]))), {})
    for stage in found["stages"]:
        stage["notes"] = HOSTILE
        stage["settings"] |= {text: text for text in HOSTILE}
    examples = [Example(text, text, (text, text)) for text in HOSTILE]
    outputs = [{"output": text, "log_p": -1.0, "rouge1": 0.5, "rouge2": 0.5, "rougeLsum": 0.5, "words": 3, "repeats": True}
               for text in HOSTILE]  # fmt: skip
    rows = [{"log_p": [-1.0, -2.0], "similarity": [1.0, 0.5], "rouge": [0.5, 0.25], "pieces": [[text, "</s>"], [text]],
             "token_log_p": [[-0.5, -0.5], [-2.0]]} for text in HOSTILE]  # fmt: skip
    settings = [explorer.Setting(f"beam 4{text}", (outputs, outputs), (rows, rows)) for text in HOSTILE[:3]]
    drawn = report.draw(found)
    text = report.document(found, drawn, len(examples), explorer.pack(examples, settings))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    with Window(browser, tmp_path / "page.html") as window:
        assert window.page.title().startswith("A title")
        window.page.locator("#list").focus()
        for _ in examples:
            window.page.keyboard.press("ArrowDown")
        window.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        shown = window.page.evaluate("document.body.textContent")
        assert all(text in shown for text in (*MARKUP, *TEMPLATES))
        window.elements()
        assert window.page.locator("[data-figure] svg").count() == len(drawn)


def test_ten_thousand_examples_open_and_scroll(browser: Any, tmp_path: Path, figures: dict[str, Any]) -> None:
    count, texts = 10_000, [sentence(seed, 12) for seed in range(50)]
    examples = [Example(f"example {i}", f"{i} {' '.join(texts[:20])}", (texts[i % 50],)) for i in range(count)]
    pieces, log_p = [f" {word}" for word in texts[0].split()], [-0.5] * 12
    row = {"log_p": [-10.0 - j for j in range(5)], "similarity": [j / 5 for j in range(5)], "rouge": [j / 10 for j in range(5)],
           "pieces": [pieces] * 5, "token_log_p": [log_p] * 5}  # fmt: skip
    rows = [row] * count

    def outputs(seed: int) -> list[dict[str, Any]]:
        return [{"output": texts[(i + seed) % 50], "log_p": -10.0, "rouge1": i * seed % 97 / 97, "rouge2": 0.5, "rougeLsum": 0.5,
                 "words": 12, "repeats": i % 7 == 0} for i in range(count)]  # fmt: skip

    bare = {**figures, "training": []}
    data = explorer.pack(examples, [explorer.Setting("beam 5", (outputs(3), outputs(5)), (rows, rows))])
    (tmp_path / "page.html").write_text(report.document(bare, report.draw(bare), count, data), encoding="utf-8")
    with Window(browser, tmp_path / "page.html") as window:
        window.page.locator("#list").focus()
        window.page.keyboard.press("End")
        window.page.wait_for_selector(f"#list .row[aria-posinset='{count}']")
        assert window.page.locator("#list .row").count() < 60
        frames = window.page.evaluate(SCROLL)
        assert np.median(frames) < 1000  # milliseconds; some 15 on an idle machine
        window.page.fill("#search", "example 9999")
        assert window.text("#count") == "1 of 10,000"
        assert window.text("#detail h3") == "example 9999"


# What is found


def test_every_figure_of_both_evaluations_is_compared(run: Path) -> None:
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


def test_fault_58_nothing_listens(run: Path, tmp_path: Path) -> None:
    """A report is a file: making it, its figures included, opens no socket to anyone."""
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.bind", "socket.connect") and watching:
            opened.append(f"{event} {arguments[1:]}")

    watching = True
    sys.addaudithook(watch)
    sides = {"before": str(run / "evaluate/finetuned"), "after": str(run / "evaluate/calibrated")}
    try:
        report.run(report.Config(**sides, calibrated=str(run / "calibrate"), output=str(tmp_path / "report"), max_examples=2))
        with socket.socket() as one:  # what is looked for would be seen
            one.bind(("127.0.0.1", 0))
    finally:
        watching = False
    assert opened == ["socket.bind (('127.0.0.1', 0),)"]


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


def verdicts(*names: str) -> list[dict[str, Any]]:
    return [{"setting": f"beam {place}", "verdict": name} for place, name in enumerate(names)]


def test_the_answer_goes_by_significant_differences_only() -> None:
    higher, lower, none = "significantly higher", "significantly lower", "no significant difference"
    assert report.answer(verdicts(higher, none)) == "Yes: quality rose significantly with 1 of 2 decoders."
    assert report.answer(verdicts(higher)) == "Yes: quality rose significantly with beam 0."
    assert report.answer(verdicts(lower, none, lower)) == "No: quality fell significantly with 2 of 3 decoders."
    assert report.answer(verdicts(higher, lower)).startswith("Mixed: quality rose significantly with 1 of 2 decoders and fell")
    assert report.answer(verdicts(none, none)).startswith("Not measurably: no significant difference in quality with any decoder")


def test_the_card_has_no_margin_for_a_loss_without_one(run: Path) -> None:
    card = (run / "model/README.md").read_text()
    assert "\n| loss | reward |\n| regularizer | cross_entropy, lambda 1 |\n| learning rate, batch | 0.01; 6 |\n" in card


def test_reliability_is_quality_by_rank_of_likelihood(run: Path, figures: dict[str, Any]) -> None:
    """With as many quantiles as candidates, a source that has all of them gives one to each."""
    for side, model in (("finetuned", "fine-tuned"), ("calibrated", "calibrated")):
        by_rank: list[list[float]] = [[], [], [], []]
        for row in candidates(run, side, "beam 4").values():
            assert len(row["log_p"]) == 4
            for rank, (_, quality) in enumerate(sorted(zip(row["log_p"], row["rouge"], strict=True), key=lambda pair: pair[0])):
                by_rank[rank].append(100 * (quality - np.mean(row["rouge"])))
        found = [point for point in figures["reliability"] if (point["kind"], point["model"]) == ("rouge", model)]
        assert [point["quantile"] for point in found] == [1, 2, 3, 4]
        assert [point["quality"] for point in found] == pytest.approx([np.mean(values) for values in by_rank], abs=1e-6)
        half = [1.96 * np.std(values, ddof=1) / np.sqrt(len(values)) for values in by_rank]
        assert [point["high"] - point["quality"] for point in found] == pytest.approx(half, abs=1e-6)


def test_reliability_takes_one_value_of_each_source(run: Path, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each part: of the less likely half of its four candidates, and of the other, for they are not independent."""
    monkeypatch.setattr(report, "QUANTILES", 2)
    folders = [store.read(run / "evaluate" / side, "evaluate") for side in ("finetuned", "calibrated")]
    found = [p for p in report.reliability(figures, *folders) if (p["kind"], p["model"]) == ("rouge", "calibrated")]
    halves: list[list[float]] = [[], []]
    for row in candidates(run, "calibrated", "beam 4").values():
        quality = [value for _, value in sorted(zip(row["log_p"], row["rouge"], strict=True), key=lambda pair: pair[0])]
        for half, part in zip(halves, (quality[:2], quality[2:]), strict=True):
            half.append(100 * (np.mean(part) - np.mean(quality)))
    assert [point["quality"] for point in found] == pytest.approx([np.mean(values) for values in halves], abs=1e-6)
    half_widths = [1.96 * np.std(values, ddof=1) / np.sqrt(len(values)) for values in halves]
    assert [point["high"] - point["quality"] for point in found] == pytest.approx(half_widths, abs=1e-6)


def test_lengths_are_shares_of_all_outputs(figures: dict[str, Any], examples: list[Example]) -> None:
    for name in ("fine-tuned", "calibrated", "references"):
        assert sum(row["share"] for row in figures["lengths"] if row["of"] == name) == pytest.approx(100)
    assert {row["of"] for row in figures["lengths"]} == {"fine-tuned", "calibrated", "references"}
    parts = [[row["words"] for row in figures["lengths"] if row["of"] == name] for name in ("fine-tuned", "references")]
    assert parts[0] == parts[1]
    assert 1 < len(parts[0]) <= 7  # of 10 examples


def test_training_curves_are_what_was_recorded(run: Path, figures: dict[str, Any]) -> None:
    records = [json.loads(line) for line in (run / "calibrate" / "log.jsonl").read_text().splitlines()]
    for split, name in (("train", "agreement"), ("validation", "perplexity")):
        (curve,) = (c for c in figures["training"] if (c["stage"], c["split"], c["figure"]) == ("calibrate", split, name))
        assert curve["points"] == [[record["step"], record[split][name]] for record in records if split in record]


def test_a_long_curve_is_drawn_by_its_means(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train": {"loss": float(step % 2)}}) for step in range(1, 2001)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    (curve,) = report.curves(store.Folder(tmp_path, "", {}))
    assert len(curve["points"]) == 400
    assert curve["points"][-1] == (2000, 0.4)  # of 1996 to 2000
    assert not [*report.curves(store.Folder(tmp_path / "none", "", {}))]


# What must not be compared


@pytest.fixture(scope="module")
def before(run: Path) -> store.Folder:
    return store.read(run / "evaluate" / "finetuned", "evaluate")


def evaluated(run: Path, name: str, **settings: Any) -> store.Folder:
    given = {
        "data": str(run / "prepare"),
        "metrics": ("squad_qg",),
        "num_candidates": (1, 4),
        "max_new_tokens": 8,
        **LENGTHS,
    }
    config = evaluate.Config(**{"model": str(run / "finetune"), "output": str(run / name), **given, **settings})
    return store.read(evaluate.run(config), "evaluate")


def test_evaluations_of_different_data_are_not_compared(run: Path, work: Path, before: store.Folder) -> None:
    rows = write_rows(work / "elsewhere.jsonl", 50, 6, False)
    config = prepare.Config(output=str(work / "elsewhere"), train=rows, validation=rows, test=rows, source_column=COLUMN)
    after = evaluated(run, "on-other-data", data=str(prepare.run(config)))
    with pytest.raises(CalibeamError, match="different data"):
        report.compare(before, after)


def test_evaluations_of_different_splits_are_not_compared(run: Path, before: store.Folder) -> None:
    """Both splits have as many rows."""
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


def test_the_examples_of_a_page_are_those_that_were_evaluated(run: Path) -> None:
    """Not the first ones of the split, where only some were."""
    folder = evaluated(run, "with-some", max_examples=3)
    found = [example.id for example in report._examples(store.read(run / "prepare", "prepare"), report.compare(folder, folder))]
    assert found == [row["id"] for row in folder.rows("outputs", evaluate.OUTPUTS)][:3]
    assert len(set(found)) == 3


def test_figures_that_were_measured_in_other_ways_are_not_compared(run: Path, work: Path, before: store.Folder) -> None:
    places = [str(tiny_encoder(family, work / "encoders" / family)) for family in ("bert", "roberta")]
    first, second = (evaluated(run, f"by-{Path(place).name}", metrics=("bertscore",), bertscore_model=place) for place in places)
    with pytest.raises(CalibeamError, match="not measured by bertscore in the same way"):
        report.compare(first, second)
    (figures,) = {tuple((f["metric"], f["figure"]) for f in row["measured"]) for row in report.compare(first, first)["rows"]}
    assert [name for metric, name in figures if metric == "bertscore"] == ["precision", "recall", "f1"]
    (figures,) = {tuple(f["metric"] for f in row["measured"]) for row in report.compare(before, second)["rows"]}
    assert set(figures) == {"rouge", "repetition"}  # what both have


# Runs side by side


@pytest.fixture(scope="module")
def runs(work: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The run; one that undoes it; and the first again, moved to a hostile name."""

    def make(place: Path) -> None:
        report.run(report.Config(
            before=str(run / "evaluate" / "calibrated"), after=str(run / "evaluate" / "finetuned"),
            calibrated=str(run / "calibrate"), output=str(place / "undone" / "report"), max_examples=3,
        ))  # fmt: skip
        for name in ("report", "evaluate", "calibrate"):
            shutil.copytree(run / name, place / MOVED / name)

    place = once(tmp_path_factory, "runs", make)
    return [run, place / "undone", place / MOVED]


MOVED = "<img src=x onerror=alert(1)>{{7*7}}\u2028\u202e\x1b[31m" + os.fsdecode(b"\x80")


def test_runs_stand_side_by_side(
    runs: list[Path], browser: Any, tmp_path: Path, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    compare.run(runs, tmp_path / "pages" / "compare.html")
    printed = capsys.readouterr().out
    assert "undone" in printed
    assert "\x1b[31m" not in printed
    with Window(browser, tmp_path / "pages" / "compare.html") as window:
        window.elements()
        assert window.page.locator("[data-figure] svg").count() == 5
        text = [re.sub(r"\s+", " ", line) for line in window.text("#help tbody").splitlines()]
        for row in figures["rows"]:
            numbers = [f"{100 * row[side]['r_m']:.2f}" for side in ("before", "after")]
            assert any(line.startswith(f"run {row['setting']} {' '.join(numbers)} ") for line in text)
            assert any(line.startswith(f"undone {row['setting']} {' '.join(numbers[::-1])} ") for line in text)
        assert sum("<img src=x" in line for line in text) == len(figures["rows"])


def test_a_run_is_tested_against_the_first(runs: list[Path], figures: dict[str, Any]) -> None:
    read = [*map(compare.read, "abc", runs)]
    rows = {(row["run"], row["setting"]): row["against"] for row in compare.table(read)}
    for row in figures["rows"]:
        (r_m,) = (found for found in row["measured"] if found["figure"] == "r_m")
        assert rows["a", row["setting"]] is None
        assert rows["b", row["setting"]]["difference"] == pytest.approx(-r_m["difference"])
        assert rows["b", row["setting"]]["p"] == pytest.approx(r_m["p"])
        assert rows["c", row["setting"]]["difference"] == 0
        assert rows["c", row["setting"]]["verdict"] == "no significant difference"


def test_what_was_done_differently_is_listed(runs: list[Path], figures: dict[str, Any]) -> None:
    first = compare.read("a", runs[0])
    other = json.loads(json.dumps(first.found))
    stage = next(stage for stage in other["stages"] if stage["name"] == "calibrate")
    stage["settings"]["beta"] = 3.5
    second = first._replace(name="b", found=other, data={**first.data, "train": "0" * 64})
    before = next(stage for stage in first.found["stages"] if stage["name"] == "calibrate")["settings"]["beta"]
    assert compare.differences([first, second]) == [
        {"name": "calibrate.beta", "values": [str(before), "3.5"]},
        {"name": "train examples", "values": [f"sha256 {first.data['train'][:12]}", "sha256 000000000000"]},
    ]


def test_what_is_not_compared_with_the_first_says_why(
    runs: list[Path], run: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other rows to train and validate on are no reason; other examples, and other ways to decode, are."""
    first, second, _ = map(compare.read, "abc", runs)

    def said(run: compare.Run) -> list[str]:
        return [row["why_not"] for row in compare.table([first, run]) if row["run"] == "b"]

    assert said(second._replace(data={**second.data, "train": "other", "validation": "other"})) == ["", ""]
    assert said(second._replace(data={**second.data, "test": "other"})) == ["other test examples"] * 2
    assert said(second._replace(data={})) == ["other test examples"] * 2  # which cannot be known
    rows = json.loads(json.dumps(second.found["rows"]))
    rows[0]["setting"], rows[1]["after"]["signature"] = "beam 9", "other"
    changed = second._replace(found={**second.found, "rows": rows})
    assert said(changed) == ["not decoded this way", "measured differently"]
    compare.show(compare.table([first, changed]), [], ["a", "b"])
    assert "measured differently" in capsys.readouterr().out


def test_what_is_not_a_finished_run_is_a_clear_error(runs: list[Path], tmp_path: Path) -> None:
    run = runs[0]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    shutil.copytree(run / "prepare", tmp_path / "half" / "prepare")
    shutil.copytree(run, tmp_path / "damaged")
    (tmp_path / "damaged" / "report" / "figures.json").write_text("{}")
    for name, message in {
        "nowhere": "nowhere is not the folder of a run: it does not exist",
        "file": "file is not the folder of a run: it is a file",
        "empty": "empty is not the folder of a run: no stage",
        "half/prepare": "is one stage of a run, `prepare`: give the folder of the whole run",
        "half": "half is not finished: it has prepare but no report",
        "damaged": "figures.json is damaged",
    }.items():
        with pytest.raises(CalibeamError, match=re.escape(message)):
            compare.run([run, tmp_path / name])
    with pytest.raises(CalibeamError, match="two runs or more"):
        compare.run([run])
    with pytest.raises(CalibeamError, match="the same run twice"):
        compare.run([run, run / "report" / ".."])
    with pytest.raises(CalibeamError, match="is a folder"):
        compare.run(runs, tmp_path)

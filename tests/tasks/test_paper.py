"""The paper's eight tasks: rows of every published form, written by hand, through a real `prepare`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibeam import store
from calibeam.paper.metrics import Properties
from calibeam.records import CalibeamError, Example
from calibeam.stages import prepare
from calibeam.tasks import TASKS, describe
from calibeam.tasks.paper import PAPER_TASKS
from calibeam.tasks.task import split_by_hash

SPLITS = ("train", "validation", "test")
Make = Callable[[Path], None]


def put(path: Path, content: Any) -> None:
    """A file by its ending: Parquet or JSON lines of a list, one JSON document, or text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def prepared(tmp_path: Path, task: str, **settings: Any) -> store.Folder:
    output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    return store.read(prepare.run(prepare.Config(output=str(output), task=task, **settings)), "prepare")


def splits(folder: store.Folder) -> dict[str, list[Example]]:
    return {split: folder.examples(split) for split in SPLITS}


# What each task makes of the forms it is published in


def three(**fields: Callable[[str], Any]) -> dict[str, Any]:
    """One row for each split, with its name in it."""
    return {split: [{key: make(split) for key, make in fields.items()}] for split in SPLITS}


def files(names: str, rows: dict[str, Any]) -> Make:
    """The rows of each split in a file of its own; `names` has {split}, {val} or {dev} for its name."""
    short = {"validation": ("val", "dev")}

    def make(folder: Path) -> None:
        for split, content in rows.items():
            val, dev = short.get(split, (split, split))
            put(folder / names.format(split=split, val=val, dev=dev), content)

    return make


def expected(source: str, *targets: str) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    return {split: [(source.format(split), tuple(target.format(split) for target in targets))] for split in SPLITS}


ARTICLE = three(id=lambda s: f"c-{s}", article=lambda s: f"news of {s}", highlights=lambda s: f"one {s} .\ntwo .")
BBC = three(id=lambda s: f"x-{s}", document=lambda s: f"a town\nin {s}", summary=lambda s: f"town {s}.")
CHAT = three(id=lambda s: f"s-{s}", dialogue=lambda s: f"A: hi {s}\r\nB: yo", summary=lambda s: f"A greets B {s}.")
QUESTION = three(
    question=lambda s: f"Who saw {s}?", paragraph=lambda s: f"Ann saw {s}.", answer=lambda s: "Ann", sentence=lambda s: "x"
)
HUB_QUESTION = three(
    id=lambda s: f"q-{s}", title=lambda s: "T", context=lambda s: f"Ann saw {s}.", question=lambda s: f"Who saw {s}?",
    answers=lambda s: {"text": ["Ann", "Ann herself"], "answer_start": [0, 0]},
)  # fmt: skip
DU = {
    split: [{
        "title": "T",
        "paragraphs": [{
            "context": f"Ann saw {split}.",
            "qas": [{"id": f"q-{split}", "question": f"Who saw {split}?", "answers": [{"text": "Ann", "answer_start": 0}]}],
        }],
    }]
    for split in SPLITS
}  # fmt: skip
TRIPLES = [lambda s: f"A_{s} | is | B", lambda s: "B | has | C"]
GEM_TRIPLES = {
    split: [{
        "gem_id": f"web_nlg_en-{split}-0", "input": [make(split) for make in TRIPLES], "target": f"A {split} is B.",
        "references": [] if split == "train" else [f"A {split} is B.", "B has C."],
    }]
    for split in SPLITS
}  # fmt: skip
WEBNLG_VALUES = {
    split: {"values": [{"input": [make(split) for make in TRIPLES], "target": [f"A {split} is B.", "B has C."],
                        "category": "X", "webnlg-id": "Id1"}]}
    for split in SPLITS
}  # fmt: skip
CONCEPTS = {
    split: [{
        "gem_id": f"common_gen-{split}-0", "concept_set_id": 0, "concepts": ["dog", split], "target": f"The dog can {split}.",
        "references": [] if split == "train" else [f"The dog can {split}.", "A dog."],
    }]
    for split in SPLITS
}  # fmt: skip
SCENES = {split: [{"concept_set": f"dog#{split}", "scene": [f"The dog can {split}.", "A dog."]}] for split in SPLITS}
QUERY = {
    split: [
        {
            "query_id": 7, "query": f"what is {split}", "query_type": "ENTITY", "answers": ["x"],
            "passages": {"is_selected": [0, 1], "passage_text": [f"{split} is x.", "y is z."], "url": ["u", "v"]},
            "wellFormedAnswers": [f"{split} is x.", "It is x."],
        },
        {
            "query_id": 8, "query": "why", "query_type": "ENTITY", "answers": ["No Answer Present."],
            "passages": {"is_selected": [0], "passage_text": ["n"], "url": ["u"]}, "wellFormedAnswers": [],
        },
    ]
    for split in ("train", "validation")
}  # fmt: skip
MARCO_LINES = {
    split: [
        {**row, "passages": [{"is_selected": 0, "passage_text": text, "url": "u"} for text in row["passages"]["passage_text"]],
         "wellFormedAnswers": row["wellFormedAnswers"] or "[]"}
        for row in rows
    ]
    for split, rows in QUERY.items()
}  # fmt: skip
MARCO_COLUMNS = {
    split: {name: {str(i): row[name] for i, row in enumerate(rows)} for name in rows[0]} for split, rows in MARCO_LINES.items()
}

NEWS = expected("news of {}", "one {} .\ntwo .")
TOWN = expected("a town\nin {}", "town {}.")
TALK = expected("A: hi {}\r\nB: yo", "A greets B {}.")
ASKED = expected("answer: Ann context: Ann saw {}.", "Who saw {}?")
VERBALISED = expected("A_{} | is | B && B | has | C", "A {} is B.", "B has C.")
SCENE = expected("dog, {}", "The dog can {}.", "A dog.")
ANSWERED = expected("question: what is {} context: {} is x. y is z.".replace("{}", "{0}"), "{} is x.", "It is x.")
ANSWERED["test"] = ANSWERED["validation"]


def first_only(everything: dict[str, Any]) -> dict[str, Any]:
    """GEM's rows of the training split have one target each."""
    ((source, targets),) = everything["train"]
    return {**everything, "train": [(source, targets[:1])]}


def pairs(everything: dict[str, Any]) -> dict[str, Any]:
    """A training row of several references is a row for each of them."""
    ((source, targets),) = everything["train"]
    return {**everything, "train": [(source, (target,)) for target in targets]}


FORMS: dict[str, tuple[str, Make, dict[str, Any]]] = {
    "cnn_dailymail, the Hub's Parquet": ("cnn_dailymail", files("3.0.0/{split}-00000-of-00001.parquet", ARTICLE), NEWS),
    "xsum, the Hub's Parquet": ("xsum", files("default/xsum-{split}.parquet", BBC), TOWN),
    "xsum, Parquet in folders": ("xsum", files("default/{split}/0000.parquet", BBC), TOWN),
    "samsum, the corpus": ("samsum", files("{val}.json", CHAT), TALK),
    "samsum, Parquet": ("samsum", files("default/{split}/0000.parquet", CHAT), TALK),
    "squad_qg, lmqg": ("squad_qg", files("data/processed/{dev}00.jsonl", QUESTION), ASKED),
    "squad_qg, rows of SQuAD": ("squad_qg", files("{split}.parquet", HUB_QUESTION), ASKED),
    "squad_qg, Du et al.": ("squad_qg", files("raw/{dev}.json", DU), ASKED),
    "msmarco_nlg, the Hub's Parquet": ("msmarco_nlg", files("v2.1/{split}-00000-of-00001.parquet", QUERY), ANSWERED),
    "msmarco_nlg, JSON lines": ("msmarco_nlg", files("{dev}.jsonl", MARCO_LINES), ANSWERED),
    "msmarco_nlg, MS MARCO's document": ("msmarco_nlg", files("{dev}_v2.1.json", MARCO_COLUMNS), ANSWERED),
    "webnlg_en, the Hub's Parquet": ("webnlg_en", files("web_nlg_en/{split}/0000.parquet", GEM_TRIPLES), first_only(VERBALISED)),
    "webnlg_en, GEM's document": ("webnlg_en", files("webnlg_en_{val}.json", WEBNLG_VALUES), pairs(VERBALISED)),
    "commongen, the Hub's Parquet": ("commongen", files("default/{split}/0000.parquet", CONCEPTS), first_only(SCENE)),
    "commongen, its own lines": ("commongen", files("commongen.{dev}.jsonl", SCENES), pairs(SCENE)),
}


@pytest.mark.parametrize(("task", "make", "wanted"), FORMS.values(), ids=FORMS)
def test_every_published_form_gives_the_same_examples(tmp_path: Path, task: str, make: Make, wanted: dict[str, Any]) -> None:
    make(tmp_path / "published")
    folder = prepared(tmp_path, task, path=str(tmp_path / "published"))
    assert {split: [(e.source, e.targets) for e in examples] for split, examples in splits(folder).items()} == wanted


def test_ids_are_those_that_are_published(tmp_path: Path) -> None:
    for task, rows, name, ids in (
        ("samsum", CHAT, "{split}.jsonl", ["s-train"]),
        ("squad_qg", DU, "{dev}.json", ["q-train"]),
        ("webnlg_en", GEM_TRIPLES, "{split}.jsonl", ["web_nlg_en-train-0"]),
        ("msmarco_nlg", QUERY, "{split}.jsonl", ["7"]),
        ("webnlg_en", WEBNLG_VALUES, "{split}.json", ["1", "2"]),  # numbered: its rows have several targets
    ):
        place = tmp_path / f"{task}-{name.format(split='', dev='')}"
        files(name, rows)(place)
        assert [e.id for e in prepared(tmp_path, task, path=str(place)).examples("train")] == ids


@pytest.mark.parametrize("task", [task.name for task in PAPER_TASKS])
def test_every_task_reads_plain_rows_with_one_target_or_several(tmp_path: Path, task: str) -> None:
    one = {split: [{"id": f"{split}-1", "source": f"s {split}", "target": "t", "more": 1}] for split in SPLITS}
    many = {split: [{"id": f"{split}-2", "source": f"z {split}", "targets": ["t", "u"]}] for split in SPLITS}
    rows = {split: one[split] + many[split] for split in SPLITS}
    files("{split}.jsonl", rows)(tmp_path / "plain")
    assert splits(prepared(tmp_path, task, path=str(tmp_path / "plain"))) == {
        split: [Example(f"{split}-1", f"s {split}", ("t",)), Example(f"{split}-2", f"z {split}", ("t", "u"))] for split in SPLITS
    }


def test_shards_are_read_in_their_order(tmp_path: Path) -> None:
    files("{split}.jsonl", CHAT)(tmp_path / "published")
    (tmp_path / "published" / "train.jsonl").unlink()
    for shard in (1, 0, 2):
        row = {"id": f"s{shard}", "dialogue": "d", "summary": "s"}
        put(tmp_path / "published" / f"train-0000{shard}-of-00003.jsonl", [row])
    folder = prepared(tmp_path, "samsum", path=str(tmp_path / "published"))
    assert [e.id for e in folder.examples("train")] == ["s0", "s1", "s2"]
    put(tmp_path / "published" / "train-00001-of-00003.jsonl", [{"id": "s0", "dialogue": "d", "summary": "s"}])
    with pytest.raises(CalibeamError, match=r"train-00001-of-00003\.jsonl has 1 row .*\n  row 1: .*repeats the id 's0' of row 1"):
        prepared(tmp_path, "samsum", path=str(tmp_path / "published"))


def test_what_is_not_a_file_of_a_split_is_left_alone(tmp_path: Path) -> None:
    files("{split}.jsonl", CHAT)(tmp_path / "published")
    for name in ("README.md", "dataset_infos.json", ".cache/train.jsonl", "challenge_train_sample/0.jsonl", "licence.txt"):
        put(tmp_path / "published" / name, [] if name.endswith("jsonl") else "{}")
    assert prepared(tmp_path, "samsum", path=str(tmp_path / "published")).manifest["counts"]["train"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no folder or file at "),
        (lambda folder: folder.mkdir(), "needs files of train and validation and test"),
        (lambda folder: put(folder / "train.jsonl", CHAT["train"]), "needs files of validation and test"),
        (files("{split}.docx", dict.fromkeys(SPLITS, "x")), "needs files of train and validation and test"),
        (lambda folder: put(folder, "[]"), "task=samsum needs a folder"),
        (
            lambda folder: [files(f"{{split}}.{end}", CHAT)(folder) for end in ("jsonl", "parquet")],
            "has the test split in several forms: test.jsonl, test.parquet",
        ),
    ],
    ids=["absent", "empty", "one split", "unreadable", "a file", "two forms"],
)
def test_a_path_that_will_not_do_is_an_error_that_says_what_is_needed(tmp_path: Path, make: Make, message: str) -> None:
    make(tmp_path / "published")
    with pytest.raises(CalibeamError) as error:
        prepared(tmp_path, "samsum", path=str(tmp_path / "published"))
    assert message in str(error.value)
    assert str(tmp_path / "published") in str(error.value)


def test_path_belongs_to_a_published_task(tmp_path: Path) -> None:
    for settings in ({"task": "docstrings"}, {"task": "", "train": "t.jsonl", "validation": "v.jsonl"}):
        with pytest.raises(CalibeamError, match="path is only for a task that is published as files"):
            prepare.run(prepare.Config(output=str(tmp_path / "out"), path=str(tmp_path), **settings))


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    files("{split}.jsonl", CHAT)(tmp_path / "published")
    config = prepare.Config(output=str(tmp_path / "out"), task="samsum", path=str(tmp_path / "published"))
    prepare.run(config)
    prepare.run(config)
    put(tmp_path / "published" / "test.jsonl", CHAT["test"] * 1 + [{"id": "new", "dialogue": "d", "summary": "s"}])
    with pytest.raises(CalibeamError, match=r"\n  .*: other contents\n"):
        prepare.run(config)


# Splits


def posts(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"p{i}", "selftext_without_tldr": f" post {i} ", "tldr": f"short {i}\n" if i % 3 else None, "title": "t"}
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["tifu_all_tokenized_and_filtered.json", ""], ids=["the file", "its folder"])
def test_the_long_posts_of_reddit_are_split_by_a_hash_of_their_id(tmp_path: Path, name: str) -> None:
    text = "".join(json.dumps(row) + "\n" for row in posts(900))
    put(tmp_path / "published" / "tifu_all_tokenized_and_filtered.json", text)
    found = splits(prepared(tmp_path, "reddit_tifu_long", path=str(tmp_path / "published" / name)))
    everything = [example for examples in found.values() for example in examples]
    assert len(everything) == 600
    assert Example("p1", "post 1", ("short 1",)) in everything
    for split, examples in found.items():
        assert all(split_by_hash(example.id) == split for example in examples)
    assert all(40 < len(found[split]) < 80 for split in ("validation", "test"))


def test_the_split_by_hash_is_what_it_always_was() -> None:
    """The first eight bytes of SHA-256, as a share of all: below a tenth test, below two tenths validation."""
    assert [split_by_hash(f"p{i}") for i in (0, 1, 7, 9, 11)] == ["test", "train", "test", "validation", "validation"]
    shares = [split_by_hash(str(i)) for i in range(20_000)]
    assert [round(shares.count(split) / 20_000, 2) for split in SPLITS] == [0.8, 0.1, 0.1]


def test_reddit_rows_of_the_hubs_conversion_have_ids_made_of_their_text(tmp_path: Path) -> None:
    put(tmp_path / "long" / "train" / "0000.parquet", [{"documents": f"post {i}", "tldr": "t", "title": "x"} for i in range(60)])
    found = splits(prepared(tmp_path, "reddit_tifu_long", path=str(tmp_path / "long")))
    ids = [example.id for examples in found.values() for example in examples]
    assert len(set(ids)) == 60
    assert {len(name) for name in ids} == {16}


def test_the_split_of_pegasus_is_taken_where_its_list_lies_beside_the_posts(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in posts(12))
    put(tmp_path / "published" / "posts.json", text)
    put(tmp_path / "published" / "reddit_tifu_long_splits.json", {"train": ["p1", "p2"], "validation": ["p4"], "test": ["p5"]})
    folder = prepared(tmp_path, "reddit_tifu_long", path=str(tmp_path / "published"))
    assert {split: [e.id for e in examples] for split, examples in splits(folder).items()} == {
        "train": ["p1", "p2"], "validation": ["p4"], "test": ["p5"],
    }  # fmt: skip
    assert folder.manifest["counts"]["rows_in_no_split"] == 4  # p7, p8, p10 and p11


def test_the_test_articles_of_du_et_al_are_taken_out_of_squads_training_set(tmp_path: Path) -> None:
    def document(*titles: str) -> dict[str, Any]:
        return {"version": "1.1", "data": [{**DU["train"][0], "title": title} for title in titles]}

    folder = tmp_path / "published"
    for name, titles in (("train-v1.1.json", ("One", "Two")), ("dev-v1.1.json", ("Three",))):
        content = document(*titles)
        for article, title in zip(content["data"], titles, strict=True):
            question = article["paragraphs"][0]["qas"][0]
            article["paragraphs"] = [{"context": "Ann.", "qas": [{**question, "id": f"q-{title}"}]}]
        put(folder / name, content)
    with pytest.raises(CalibeamError, match="task=squad_qg needs files of test"):
        prepared(tmp_path, "squad_qg", path=str(folder))
    for name, title in (("train", "One"), ("dev", "Three"), ("test", "Two")):
        put(folder / f"doclist-{name}.txt", f"{title}\n")
    found = splits(prepared(tmp_path, "squad_qg", path=str(folder)))
    assert {split: [e.id for e in examples] for split, examples in found.items()} == {
        "train": ["q-One"], "validation": ["q-Three"], "test": ["q-Two"],
    }  # fmt: skip


def test_a_list_of_a_split_that_is_none_is_an_error_with_its_name(tmp_path: Path) -> None:
    put(tmp_path / "published" / "posts.json", json.dumps(posts(2)[1]))
    put(tmp_path / "published" / "reddit_tifu_long_splits.json", "[1]")
    with pytest.raises(CalibeamError, match=r"reddit_tifu_long_splits\.json is not a list of what belongs to a split"):
        prepared(tmp_path, "reddit_tifu_long", path=str(tmp_path / "published"))


def test_validation_stands_in_for_a_test_split_without_references(tmp_path: Path) -> None:
    """As GEM published CommonGen, and MS MARCO its test queries."""
    hidden = {**CONCEPTS, "test": [{**CONCEPTS["test"][0], "target": "", "references": []}]}
    files("{split}.jsonl", hidden)(tmp_path / "published")
    folder = prepared(tmp_path, "commongen", path=str(tmp_path / "published"))
    assert folder.examples("test") == folder.examples("validation")
    assert any("validation stands in for it" in note for note in folder.manifest["notes"])
    figures = json.loads((folder.path / "properties.json").read_text())
    assert figures["examples"] == {"train": 1, "validation": 1, "test": 1}


def test_a_test_split_without_references_is_an_error_where_the_paper_had_them(tmp_path: Path) -> None:
    rows = {**GEM_TRIPLES, "test": [{**GEM_TRIPLES["test"][0], "target": "", "references": []}]}
    files("{split}.jsonl", rows)(tmp_path / "published")
    with pytest.raises(CalibeamError, match=r"test\.jsonl has 1 row that cannot be used:\n  row 1: field 'target' is empty"):
        prepared(tmp_path, "webnlg_en", path=str(tmp_path / "published"))


# Rows that cannot be used


def test_one_row_in_a_hundred_of_a_published_set_may_be_unusable(tmp_path: Path) -> None:
    rows = [{"id": str(i), "dialogue": "" if i == 7 else "d", "summary": "s"} for i in range(101)]
    files("{split}.jsonl", {**CHAT, "train": rows})(tmp_path / "published")
    folder = prepared(tmp_path, "samsum", path=str(tmp_path / "published"))
    assert folder.manifest["counts"]["train"] == 100
    assert folder.manifest["counts"]["train_skipped"] == 1
    assert any("row 8: field 'source' is empty" in note for note in folder.manifest["notes"])
    assert json.loads((folder.path / "properties.json").read_text())["examples"]["train"] == 101
    files("{split}.jsonl", {**CHAT, "train": rows[:100]})(tmp_path / "other")
    with pytest.raises(CalibeamError, match="has 1 row that cannot be used"):
        prepared(tmp_path, "samsum", path=str(tmp_path / "other"))
    assert prepared(tmp_path, "samsum", path=str(tmp_path / "other"), bad_rows="skip").manifest["counts"]["train"] == 99


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("samsum", {"id": "1", "text": "d", "summary": "s"}, "no field 'dialogue'; it has 'id', 'text', 'summary'"),
        ("samsum", ["d", "s"], "not an object with fields"),
        ("samsum", {"id": "1", "dialogue": 3, "summary": "s"}, "field 'source' is a number, not text"),
        ("squad_qg", {"question": "q", "paragraph": "p", "answers": {"text": []}}, "not a row of squad_qg as published"),
        ("msmarco_nlg", {"query": "q", "query_id": 1, "passages": "p", "wellFormedAnswers": ["a"]}, "not a row of msmarco_nlg"),
        ("msmarco_nlg", {"query": "q", "passages": [{"passage_text": "p"}], "wellFormedAnswers": ["a"]}, "no field 'query_id'"),
        ("msmarco_nlg", {"queries": "q"}, "no field 'wellFormedAnswers'; it has 'queries'"),
        ("webnlg_en", {"target": "t", "references": []}, "no field 'input'"),
        ("webnlg_en", {"input": [1], "target": "t", "references": ["r"]}, "not a row of webnlg_en as published"),
        ("commongen", {"concepts": None, "target": "t", "references": []}, "not a row of commongen as published"),
        ("reddit_tifu_long", {"documents": 3, "tldr": "t"}, "not a row of reddit_tifu_long as published"),
    ],
)
def test_a_row_of_another_form_is_an_error_with_file_and_row(tmp_path: Path, task: str, row: Any, message: str) -> None:
    plain = {split: [{"source": "s", "target": "t"}] for split in SPLITS}
    files("{split}.jsonl", {**plain, "validation": [*plain["validation"], row]})(tmp_path / "published")
    with pytest.raises(CalibeamError) as error:
        prepared(tmp_path, task, path=str(tmp_path / "published"))
    assert f"validation.jsonl has 1 row that cannot be used:\n  row 2: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("task", "document"),
    [
        ("squad_qg", {"data": [{"title": "T"}]}),
        ("webnlg_en", {"values": 3}),
        ("msmarco_nlg", {"query": {"1": "q"}, "passages": 3}),
    ],
)
def test_a_document_of_another_form_is_an_error_with_its_name(tmp_path: Path, task: str, document: Any) -> None:
    files("{split}.json", dict.fromkeys(SPLITS, document))(tmp_path / "published")
    with pytest.raises(CalibeamError, match=rf"train\.json is not of a form that {task} is published in"):
        prepared(tmp_path, task, path=str(tmp_path / "published"))


def test_one_question_without_an_answer_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    def article(count: int) -> dict[str, Any]:
        questions = [{"id": f"q{i}", "question": "Who?", "answers": [] if i == 50 else [{"text": "Ann"}]} for i in range(count)]
        return {"title": "T", "paragraphs": [{"context": "Ann.", "qas": questions}]}

    files("{dev}.json", {**DU, "train": [article(150)]})(tmp_path / "published")
    folder = prepared(tmp_path, "squad_qg", path=str(tmp_path / "published"))
    assert folder.manifest["counts"]["train"] == 149
    assert any("row 51: not a row of squad_qg" in note for note in folder.manifest["notes"])


def test_a_split_without_a_row_is_an_error_with_its_file(tmp_path: Path) -> None:
    files("{split}.jsonl", {**CHAT, "train": []})(tmp_path / "published")
    with pytest.raises(CalibeamError, match=r"the train split is empty: .*train\.jsonl"):
        prepared(tmp_path, "samsum", path=str(tmp_path / "published"))
    files("{split}.jsonl", {split: [] for split in SPLITS})(tmp_path / "published")
    with pytest.raises(CalibeamError, match=r"the train split is empty: .*train\.jsonl"):
        prepared(tmp_path, "samsum", path=str(tmp_path / "published"))


# From the Hub, of which local files are the nearest thing


def at(folder: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a task's files be those of a folder."""
    monkeypatch.setitem(TASKS, task, replace(TASKS[task], hub=f"file://{folder}"))


def test_the_files_of_the_hub_are_read_and_no_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "xsum"
    files("default/xsum-{split}.parquet", BBC)(hub)
    (hub / "xsum.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    at(hub, "xsum", monkeypatch)
    folder = prepared(tmp_path, "xsum")
    assert {split: [(e.source, e.targets) for e in examples] for split, examples in splits(folder).items()} == TOWN
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("task", "name", "rows", "wanted"),
    [
        ("squad_qg", "data/processed/{dev}00.jsonl", QUESTION, ASKED),
        ("msmarco_nlg", "v2.1/{split}-00000-of-00001.parquet", QUERY, ANSWERED),
        ("webnlg_en", "web_nlg_en/{split}/0000.parquet", GEM_TRIPLES, first_only(VERBALISED)),
        ("commongen", "default/{split}/0000.parquet", CONCEPTS, first_only(SCENE)),
    ],
)
def test_rows_of_other_published_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, name: str, rows: Any, wanted: Any
) -> None:
    files(name, rows)(tmp_path / "hub")
    at(tmp_path / "hub", task, monkeypatch)
    folder = prepared(tmp_path, task)
    assert {split: [(e.source, e.targets) for e in examples] for split, examples in splits(folder).items()} == wanted


def test_reddits_compressed_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hub" / "data" / "tifu_all_tokenized_and_filtered.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in posts(90)).encode()))
    at(tmp_path / "hub", "reddit_tifu_long", monkeypatch)
    found = splits(prepared(tmp_path, "reddit_tifu_long"))
    assert sum(map(len, found.values())) == 60


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match=r"^hf://.*samsum@e9ef8bf.*parquet cannot be loaded: .*\nprepare\.path=FOLDER reads"):
        prepared(tmp_path, "samsum")


# What is said about them


def test_the_properties_are_measured_over_all_splits_and_first_references(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sources of 4, 2 and 2 words; first references of 2, 1 and 1 words.

    "The red" is copied whole: coverage 1, density 4 / 2. "fox" is copied: 1 and 1. "hen" is not: 0 and 0.
    """
    rows = {
        "train": [{"source": "The red-fox ran!", "targets": ["the RED", "unseen words here"]}],
        "validation": [{"source": "a fox", "target": "Fox."}],
        "test": [{"source": "a fox", "target": "hen"}],
    }
    files("{split}.jsonl", rows)(tmp_path / "published")
    folder = prepared(tmp_path, "webnlg_en", path=str(tmp_path / "published"))
    figures = json.loads((folder.path / "properties.json").read_text())
    assert figures.pop("examples") == {"train": 1, "validation": 1, "test": 1}
    assert figures == pytest.approx({"source_words": 8 / 3, "target_words": 4 / 3, "coverage": 2 / 3, "density": 1.0})
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["here", "1", "/", "1", "/", "1", "2.67", "1.33", "66.7%", "1.00"] in said
    assert ["paper", "35K", "/", "1667", "/", "1779", "17.50", "20.51", "48.7%", "1.30"] in said


def test_references_that_were_hidden_from_the_paper_count_as_empty(tmp_path: Path) -> None:
    """Targets of 2 words, 2 words and, in the test split, none: 4 / 3."""
    rows = {split: [{"source": "a b", "target": "a b"}] for split in SPLITS}
    files("{split}.jsonl", rows)(tmp_path / "published")
    folder = prepared(tmp_path, "commongen", path=str(tmp_path / "published"))
    figures = json.loads((folder.path / "properties.json").read_text())
    assert (figures["target_words"], figures["coverage"]) == pytest.approx((4 / 3, 2 / 3))
    assert folder.examples("test")[0].targets == ("a b",)


def test_the_table_says_what_the_paper_says() -> None:
    assert list(TASKS) == [
        "docstrings", "cnn_dailymail", "xsum", "reddit_tifu_long", "samsum", "squad_qg", "msmarco_nlg", "webnlg_en", "commongen",
    ]  # fmt: skip
    said = {task.name: describe(task) for task in PAPER_TASKS}
    assert "R1/R2/RL on test: fine-tuned 53.64/29.21/44.83, calibrated 54.37/29.88/45.89" in said["samsum"]
    assert "R1/R2/RL on validation: fine-tuned -/-/70.73, calibrated -/-/71.06" in said["msmarco_nlg"]
    assert TASKS["commongen"].paper.properties == Properties(3.27, 10.10, 0.220, 0.22)  # type: ignore[union-attr]
    for task in PAPER_TASKS:
        assert task.paper is not None
        assert all(a is None or b is None or a < b for a, b in zip(task.paper.finetuned, task.paper.calibrated, strict=True))


def test_every_address_is_at_a_commit_and_names_no_script() -> None:
    for task in PAPER_TASKS:
        name, _, commit = task.hub.removeprefix("hf://datasets/").partition("@")
        assert len(name.split("/")) == 2
        assert len(commit) == 40
        assert set(commit) <= set("0123456789abcdef")
        for pattern in task.files.values():
            assert pattern.endswith((".parquet", ".jsonl", ".json.gz"))

"""prepare: every kind of file, every kind of mistake, and text as it was."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibeam import store
from calibeam.records import CalibeamError, Example
from calibeam.stages import prepare

GOOD = b'{"source": "s", "target": "t"}\n'
Rows = list[dict[str, Any]]


def rows(count: int, first: int = 0) -> Rows:
    return [{"id": f"r{i}", "source": f"source {i}", "target": f"target {i}"} for i in range(first, first + count)]


def jsonl(path: Path, content: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def examples(content: Rows) -> list[Example]:
    return [Example(row["id"], row["source"], (row["target"],)) for row in content]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., store.Folder]:
    """Prepare into a new folder. Validation and test files are there unless given."""

    def run(train: Path, **settings: Any) -> store.Folder:
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        for split, first in (("validation", 1000), ("test", 2000)):
            settings.setdefault(split, str(jsonl(tmp_path / f"{split}-good.jsonl", rows(2, first))))
        return store.read(prepare.run(prepare.Config(output=str(output), train=str(train), **settings)), "prepare")

    return run


@pytest.fixture
def run_validation(run: Any, tmp_path: Path) -> Callable[..., store.Folder]:
    """Prepare with the default columns for train and test, and the file in question as validation."""
    return lambda file, **settings: run(jsonl(tmp_path / "train-good.jsonl", rows(3)), validation=str(file), **settings)


# Kinds of file


def write_jsonl(path: Path, content: Rows) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
    compress: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
    path.write_bytes(compress.get(path.suffix, bytes)(text))


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def write_json(path: Path, content: Rows) -> None:
    path.write_text(json.dumps(content))


def write_csv(path: Path, content: Rows) -> None:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(content[0]), delimiter="\t" if ".tsv" in path.name.lower() else ",")
        table.writeheader()
        table.writerows(content)


def write_parquet(path: Path, content: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(content), path)


KINDS: dict[str, Callable[[Path, Rows], None]] = {
    "x.jsonl": write_jsonl,
    "x.JSONL": write_jsonl,
    "x.ndjson": write_jsonl,
    "x.jsonl.gz": write_jsonl,
    "x.jsonl.xz": write_jsonl,
    "x.jsonl.zst": write_jsonl,
    "x.json": write_json,
    "x.csv": write_csv,
    "x.csv.gz": write_csv,
    "x.tsv": write_csv,
    "x.TSV": write_csv,
    "x.parquet": write_parquet,
}
AWKWARD = [
    " leading and trailing \n",
    'quotes " and , commas \t and tabs',
    "line\nbreaks\r\nof two kinds",
    "nul \0 inside",
    "emoji 🦊 👩‍🔬, 日本語, e\u0301 and é",
    "\ufeffa byte order mark",
    "right to left \u202e, isolated \u2067, שלום",
    "line separator \u2028 and next line \x85",
    "[bold]markup[/] and \x1b[31mescapes",
]


@pytest.mark.parametrize("name", KINDS)
def test_fault_36_every_kind_of_file_gives_the_same_rows_and_text_as_it_was(tmp_path: Path, run: Any, name: str) -> None:
    content = rows(3) + [{"id": f"awkward {i}", "source": text, "target": text} for i, text in enumerate(AWKWARD)]
    KINDS[name](tmp_path / name, content)
    folder = run(tmp_path / name)
    assert folder.examples("train") == examples(content)
    assert folder.examples("validation") == examples(rows(2, 1000))
    assert folder.examples("test") == examples(rows(2, 2000))
    assert folder.manifest["counts"] == {"train": 12, "validation": 2, "test": 2}


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "unended"])
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("x.jsonl", ['{"source": "a", "target": "ä"}', "", '{"source": "b", "target": "🦊"}']),
        ("x.csv", ["source,target", "a,ä", "", "b,🦊"]),
        ("x.tsv", ["source\ttarget", "a\tä", "b\t🦊"]),
    ],
)
def test_fault_36_byte_order_marks_line_endings_and_blank_lines_do_no_harm(
    tmp_path: Path, run: Any, name: str, lines: list[str], mark: bytes, ending: bytes, last: bool
) -> None:
    (tmp_path / name).write_bytes(mark + ending.join(line.encode() for line in lines) + (ending if last else b""))
    assert run(tmp_path / name).examples("train") == [Example("1", "a", ("ä",)), Example("2", "b", ("🦊",))]


def test_fault_36_escaped_surrogate_pairs_are_the_characters_they_stand_for(tmp_path: Path, run: Any) -> None:
    (tmp_path / "x.jsonl").write_text(r'{"source": "\ud83e\udd8a", "target": "\u0000t"}')
    assert run(tmp_path / "x.jsonl").examples("train") == [Example("1", "🦊", ("\0t",))]


# Columns and ids


def test_columns_are_taken_by_name(tmp_path: Path, run: Any) -> None:
    content = [{"key": "k", "article": "a", "summary": "s", "source": 3, "id": "not this"}]
    names = {"source_column": "article", "target_columns": ("summary",), "id_column": "key"}
    other = str(jsonl(tmp_path / "other.jsonl", content))
    folder = run(jsonl(tmp_path / "x.jsonl", content), validation=other, test=other, **names)
    assert folder.examples("train") == [Example("k", "a", ("s",))]


@pytest.mark.parametrize("kind", ["x.jsonl", "x.parquet"])
def test_references_may_be_a_list_and_in_several_columns(tmp_path: Path, run: Any, kind: str) -> None:
    content = [{"source": "s", "many": ["a", "b"], "one": "c"}, {"source": "s2", "many": ["d"], "one": "e"}]
    KINDS[kind](tmp_path / kind, content)
    files = {"validation": str(tmp_path / kind), "test": str(tmp_path / kind)}
    folder = run(tmp_path / kind, target_columns=("many", "one"), **files)
    assert [example.targets for example in folder.examples("train")] == [("a", "b", "c"), ("d", "e")]
    folder = run(tmp_path / kind, target_columns=("one", "many"), **files)
    assert [example.targets for example in folder.examples("train")] == [("c", "a", "b"), ("e", "d")]


def test_neighbours_with_one_source_become_one_example_if_asked_for(tmp_path: Path, run: Any) -> None:
    texts = [("a", "x"), ("a", "y"), ("a", "x"), ("b", "x"), ("a", "z")]
    train = jsonl(tmp_path / "train.jsonl", [{"id": i, "source": s, "target": t} for i, (s, t) in enumerate(texts)])
    merged = [Example("0", "a", ("x", "y")), Example("3", "b", ("x",)), Example("4", "a", ("z",))]
    assert run(train, merge_sources=True).examples("train") == merged
    assert [example.source for example in run(train).examples("train")] == ["a", "a", "a", "b", "a"]


@pytest.mark.parametrize("group", [1, 4096], ids=["tables of a row", "one table"])
def test_what_is_counted_out_and_split_are_merged_examples(
    group: int, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 sources of 5 references each: all of them stay together, whatever is left out and held out to test on."""
    monkeypatch.setattr(store, "ROW_GROUP", group)
    content = [{"id": 5 * i + j, "source": f"source {i}", "target": f"target {i} {j}"} for i in range(20) for j in range(5)]
    file = str(jsonl(tmp_path / "rows.jsonl", content))
    folder = run(file, validation=file, test="", merge_sources=True, max_train=10)
    found = {split: folder.examples(split) for split in ("train", "validation", "test")}
    assert {split: len(examples) for split, examples in found.items()} == {"train": 10, "validation": 10, "test": 10}
    for example in (example for examples in found.values() for example in examples):
        assert example.targets == tuple(example.source.replace("source", "target") + f" {j}" for j in range(5))
    assert not {example.source for example in found["validation"]} & {example.source for example in found["test"]}


def test_ids_are_given_as_text_or_whole_numbers_or_else_rows_are_numbered(tmp_path: Path, run: Any) -> None:
    content = [{"source": "s", "target": "t", **given} for given in ({"id": "x"}, {"id": 7}, {"id": None}, {})]
    assert [example.id for example in run(jsonl(tmp_path / "x.jsonl", content)).examples("train")] == ["x", "7", "3", "4"]


def test_references_that_rouge_cannot_read_are_counted(tmp_path: Path, run: Any) -> None:
    """Most of the letters decide: digits and a word of another script change nothing."""
    targets = ["Привет 42", "Zażółć gęślą jaźń", "naïve 日本", "日本 na", "plain", "12 % …"]
    content = [{"source": "s", "target": target} for target in targets]
    manifest = run(jsonl(tmp_path / "train.jsonl", content)).manifest
    assert manifest["counts"]["rows_unknown_to_rouge"] == 1 + 1
    assert any(note.startswith("2 rows have references mostly in letters that ROUGE does not know") for note in manifest["notes"])


# Mistakes


def line(**fields: Any) -> bytes:
    return json.dumps({"source": "s", "target": "t", **fields}).encode() + b"\n"


Bad = dict[str, tuple[bytes, str]]


def assert_reported(tmp_path: Path, run_validation: Any, bad: bytes, message: str) -> None:
    """An error with file, row and field; or skipped, counted and noted."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line(id="first") + GOOD + bad + GOOD)
    with pytest.raises(CalibeamError) as error:
        run_validation(file)
    assert str(error.value).startswith(f"{file} has 1 row that cannot be used:\n  row 3: {message}")
    folder = run_validation(file, bad_rows="skip")
    assert [example.id for example in folder.examples("validation")] == ["first", "2", "4"]
    assert folder.manifest["counts"]["validation_skipped"] == 1
    expected = f"{file.name} has 1 row that cannot be used:\n  row 3: {message}"
    assert any(expected in note for note in folder.manifest["notes"])


EMPTY: Bad = {
    "null": (line(source=None), "field 'source' is missing"),
    "empty source": (line(source=""), "field 'source' is empty"),
    "empty target": (line(target=""), "field 'target' is empty"),
    "whitespace": (line(source=" \n\t\u00a0"), "field 'source' is empty"),
    "empty list": (line(target=[]), "field 'target' is empty"),
    "null in list": (line(target=["a", None]), "field 'target' is missing"),
    "empty in list": (line(target=["a", ""]), "field 'target' is empty"),
}


@pytest.mark.parametrize(("bad", "message"), EMPTY.values(), ids=EMPTY)
def test_fault_32_empty_text_is_an_error_or_skipped_and_counted(
    tmp_path: Path, run_validation: Any, bad: bytes, message: str
) -> None:
    assert_reported(tmp_path, run_validation, bad, message)


WRONG_COLUMNS: Bad = {
    "missing field": (b'{"source": "s", "tgt": "t"}\n', "no field 'target'; it has 'source', 'tgt'"),
    "number": (line(target=3), "field 'target' is a number, not text"),
    "object": (line(target={"a": 1}), "field 'target' is an object, not text"),
    "list as source": (line(source=["a"]), "field 'source' is a list, not text"),
    "number in list": (line(target=["a", 3]), "field 'target' is a number, not text"),
    "not an object": (b'["s", "t"]\n', "not an object with fields"),
    "just text": (b'"s"\n', "not an object with fields"),
    "id of another type": (line(id=1.5), "field 'id' is a number, not text or a whole number"),
    "id given twice": (line(id="first"), "field 'id' repeats the id 'first' of row 1"),
}


@pytest.mark.parametrize(("bad", "message"), WRONG_COLUMNS.values(), ids=WRONG_COLUMNS)
def test_fault_35_wrong_columns_types_and_ids_are_errors_with_row_and_column(
    tmp_path: Path, run_validation: Any, bad: bytes, message: str
) -> None:
    assert_reported(tmp_path, run_validation, bad, message)


WRONG_TEXT: Bad = {
    "invalid UTF-8": (b'{"source": "caf\xe9", "target": "t"}\n', "not valid UTF-8"),
    "lone surrogate": (rb'{"source": "\ud800", "target": "t"}' + b"\n", "field 'source' is not valid Unicode"),
    "lone surrogate in id": (rb'{"id": "\ud800", "source": "s", "target": "t"}' + b"\n", "field 'id' is not valid Unicode"),
    "over-long": (line(source="x" * 1_000_001), "field 'source' is over-long: 1,000,001 characters, at most 1,000,000 are taken"),
    "a line of 10 MB": (line(target="x y " * 2_500_000), "field 'target' is over-long: 10,000,000 characters"),
    "a line of 40 MB": (line(more="x" * 40_000_000), "over-long: a line of more than 32 MiB"),
}


@pytest.mark.parametrize(("bad", "message"), WRONG_TEXT.values(), ids=WRONG_TEXT)
def test_fault_36_text_that_is_none_or_too_long_is_reported_with_its_row(
    tmp_path: Path, run_validation: Any, bad: bytes, message: str
) -> None:
    assert_reported(tmp_path, run_validation, bad, message)


BROKEN_LINES: Bad = {
    "invalid JSON": (b'{"source": "s", "target": \n', "not valid JSON"),
    "nested too deep": (b"[" * 200_000 + b"\n", "not valid JSON"),
    "number too long": (b'{"source": "s", "target": ' + b"9" * 5000 + b"}\n", "not valid JSON"),
}


@pytest.mark.parametrize(("bad", "message"), BROKEN_LINES.values(), ids=BROKEN_LINES)
def test_fault_42_a_broken_line_is_reported_with_its_number(
    tmp_path: Path, run_validation: Any, bad: bytes, message: str
) -> None:
    assert_reported(tmp_path, run_validation, bad, message)


def test_fault_42_one_broken_line_of_very_many_has_its_number(tmp_path: Path, run_validation: Any) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD * 11_233 + GOOD[:-4] + b"\n" + GOOD * 8_766, compresslevel=1))
    with pytest.raises(CalibeamError, match=r"has 1 row that cannot be used:\n  row 11234: not valid JSON"):
        run_validation(file)
    assert run_validation(file, bad_rows="skip").manifest["counts"]["validation"] == 19_999


BAD_CSV: dict[str, tuple[bytes, str]] = {
    "too many fields": (b"s,t,u\n", "row 2: 3 fields where the header has 2"),
    "too few fields": (b"s\n", "row 2: 1 fields where the header has 2"),
    "empty": (b"s,\n", "row 2: field 'target' is empty"),
    "whitespace": (b"   ,t\n", "row 2: field 'source' is empty"),
    "invalid UTF-8": (b"caf\xe9,t\n", "row 2: field 'source' is not valid Unicode"),
    "over-long": (b"s," + b"x" * 1_000_001 + b"\n", "row 2: field 'target' is over-long"),
    "far over-long": (b"s," + b"x" * 2_000_001 + b"\n", "line 3"),
    "unclosed quote": (b's,"t\n', "line 4"),
    "text after a quote": (b's,"t"u\n', "line 3"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_CSV.values(), ids=BAD_CSV)
def test_fault_35_a_bad_row_of_a_csv_file_is_an_error_with_file_and_place(
    tmp_path: Path, run_validation: Any, bad: bytes, message: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b"source,target\ns,t\n" + bad + b"s,t\n")
    with pytest.raises(CalibeamError) as error:
        run_validation(file)
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_fault_35_a_bad_row_of_a_parquet_file_is_an_error_with_file_row_and_field(tmp_path: Path, run_validation: Any) -> None:
    write_parquet(tmp_path / "rows.parquet", [{"source": "s", "target": "t"}, {"source": None, "target": "t"}])
    with pytest.raises(CalibeamError, match=r"rows\.parquet has 1 row .*:\n  row 2: field 'source' is missing"):
        run_validation(tmp_path / "rows.parquet")


def test_fault_36_invalid_utf8_in_a_parquet_file_is_an_error_with_its_name(tmp_path: Path, run_validation: Any) -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\4\0\0\0"), pa.py_buffer(b"caf\xe9"))
    pq.write_table(pa.table({"source": broken, "target": ["t"]}), tmp_path / "rows.parquet")
    with pytest.raises(CalibeamError, match=r"rows\.parquet"):
        run_validation(tmp_path / "rows.parquet")


def test_only_the_first_of_many_bad_rows_are_listed(tmp_path: Path, run_validation: Any) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD + b"{}\n" * 8)
    with pytest.raises(CalibeamError) as error:
        run_validation(tmp_path / "rows.jsonl")
    message = str(error.value)
    assert "has 8 rows that cannot be used" in message
    assert "row 6: no field 'source'; it has none" in message
    assert "row 7" not in message
    assert "and 3 more" in message
    assert "bad_rows=skip" in message


def test_rows_skipped_from_files_of_one_name_are_all_counted(tmp_path: Path, run: Any) -> None:
    for folder, bad in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_bytes(GOOD + b"{}\n" * bad)
    folder = run(tmp_path / "a" / "rows.jsonl", validation=str(tmp_path / "b" / "rows.jsonl"), bad_rows="skip")
    assert sum(count for name, count in folder.manifest["counts"].items() if name.endswith("_skipped")) == 3


UNREADABLE: dict[str, tuple[bytes | None, str]] = {
    "absent.jsonl": (None, "no file at "),
    "empty.jsonl": (b"", "the train split is empty: "),
    "empty.csv": (b"", "the train split is empty: "),
    "header.csv": (b"source,target\n", "the train split is empty: "),
    "blank.jsonl": (b"\n \n", "the train split is empty: "),
    "empty.parquet": (b"", " cannot be read: "),
    "notes.docx": (b"PK", "unknown kind of file; known are .jsonl, .json, .csv, .tsv, .parquet and .txt"),
    "rows": (GOOD, "unknown kind of file"),
    "rows.parquet.gz": (gzip.compress(b"PAR1"), "unknown kind of file"),
    "cut.jsonl.gz": (gzip.compress(GOOD * 1000)[:-20], " cannot be read: "),
    "cut.csv.gz": (gzip.compress(b"source,target\n" + b"s,t\n" * 1000)[:-12], " cannot be read: "),
    "cut.jsonl.xz": (lzma.compress(GOOD * 1000)[:-20], " cannot be read: "),
    "broken.jsonl.gz": (gzip.compress(GOOD)[:10] + b"\x07" + gzip.compress(GOOD)[11:], " cannot be read: "),
    "broken.jsonl.xz": (lzma.compress(GOOD)[:30] + b"\xff" * 20, " cannot be read: "),
    "cut.jsonl.zst": (zstd(GOOD * 1000)[:-20], " cannot be read: "),
    "plain.jsonl.zst": (GOOD, " cannot be read: "),
    "plain.jsonl.gz": (GOOD, " cannot be read: "),
    "plain.jsonl.xz": (GOOD, " cannot be read: "),
    "corrupt.parquet": (b"PAR1" + b"\0" * 100 + b"PAR1", " cannot be read: "),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_fault_42_a_file_that_cannot_be_used_is_an_error_with_its_name(tmp_path: Path, run: Any, name: str) -> None:
    content, message = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibeamError) as error:
        run(tmp_path / name)
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out") or path.name.endswith(".partial")]


def test_a_parquet_file_damaged_in_the_middle_is_an_error_with_its_name(tmp_path: Path, run: Any) -> None:
    write_parquet(tmp_path / "x.parquet", rows(500))
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[4:400] = b"\xff" * 396
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(CalibeamError, match=r"x\.parquet cannot be read: "):
        run(tmp_path / "x.parquet")


def test_a_folder_is_not_a_file_of_rows(tmp_path: Path, run: Any) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(CalibeamError, match=r"no file at .*x\.jsonl"):
        run(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "prepare needs either a task or files"),
        ({"train": "x.jsonl"}, "prepare needs a validation file"),
        ({"validation": "x.jsonl"}, "prepare needs a train file"),
        ({"train": "x.jsonl", "task": "docstrings"}, "prepare needs either a task or files"),
    ],
)
def test_the_files_that_are_needed_are_named(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(CalibeamError, match=message):
        prepare.run(prepare.Config(output=str(tmp_path / "out"), **settings))


def test_at_least_one_target_column_is_needed(tmp_path: Path, run: Any) -> None:
    with pytest.raises(CalibeamError, match="target_columns"):
        run(jsonl(tmp_path / "x.jsonl", rows(2)), target_columns=())


def test_a_split_without_a_usable_row_is_an_error_that_says_why(tmp_path: Path, run: Any) -> None:
    (tmp_path / "x.jsonl").write_bytes(line(source="") + line(target=3))
    why = r", as all rows were skipped: x\.jsonl has 2 rows that cannot be used:\n  row 1: field 'source' is empty"
    with pytest.raises(CalibeamError, match=rf"^the train split is empty{why}"):
        run(tmp_path / "x.jsonl", bad_rows="skip")
    one = str(jsonl(tmp_path / "one.jsonl", rows(1)))
    with pytest.raises(CalibeamError, match=r"^the test split is empty: without a test file.* there is only 1\. Give"):
        run(Path(one), validation=one, test="")


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"source_column": "code"}, "'code'; it has 'id', 'source', 'target'. Name the column with prepare.source_column "
                                    "(calibrate-model: --source-column)"),
        ({"target_columns": ("target", "r1, r2")}, "'r1, r2'; it has 'id', 'source', 'target'. Name the column with "
                                                   "prepare.target_columns (calibrate-model: --target-column); several are "
                                                   'written prepare.target_columns=["r1", "r2"]'),
        ({"id_column": "key"}, "'key'; it has 'id', 'source', 'target'. Name the column with prepare.id_column "
                               "(calibrate-model: --id-column)"),
    ],
    ids=["source", "target", "id"],
)  # fmt: skip
def test_a_column_that_no_row_has_goes_by_another_name(
    tmp_path: Path, run: Any, names: dict[str, Any], message: str, bad_rows: str
) -> None:
    train = jsonl(tmp_path / "x.jsonl", rows(12))
    with pytest.raises(CalibeamError) as error:
        run(train, **names, bad_rows=bad_rows)
    assert str(error.value) == f"no row of {train} has a column {message}"


def test_a_prefix_is_put_before_every_source_of_every_split(tmp_path: Path, run: Any) -> None:
    train = jsonl(tmp_path / "x.jsonl", rows(3))
    folder = run(train, source_prefix="summarize: ")
    for split, first, count in (("train", 0, 3), ("validation", 1000, 2), ("test", 2000, 2)):
        wanted = [f"summarize: source {i}" for i in range(first, first + count)]
        assert [example.source for example in folder.examples(split)] == wanted
    with pytest.raises(CalibeamError, match=r"^source_prefix is not valid Unicode$"):
        run(train, source_prefix="\udc80")


# Splits


def test_without_a_test_file_validation_is_halved_reproducibly_and_noted(tmp_path: Path, run: Any) -> None:
    train, content = jsonl(tmp_path / "x.jsonl", rows(3)), rows(41, 100)
    one = run(train, validation=str(jsonl(tmp_path / "v1.jsonl", content)), test="")
    two = run(train, validation=str(jsonl(tmp_path / "v2.jsonl", content[::-1])), test="")
    validation, test = one.examples("validation"), one.examples("test")
    assert sorted([*validation, *test], key=lambda e: e.id) == sorted(examples(content), key=lambda e: e.id)
    assert (len(validation), len(test)) == (21, 20)
    order = [row["id"] for row in content]
    assert [e.id for e in validation] == sorted((e.id for e in validation), key=order.index)
    assert validation not in (examples(content)[:21], examples(content)[-21:])
    assert two.examples("validation") == validation[::-1]  # whatever the order of the file
    assert any("no test file: half of the validation rows" in note for note in one.manifest["notes"])


def test_with_a_test_file_nothing_is_noted(tmp_path: Path, run: Any) -> None:
    assert run(jsonl(tmp_path / "x.jsonl", rows(3))).manifest["notes"] == []


def test_fault_39_sources_of_the_training_split_in_other_splits_are_counted_and_noted(tmp_path: Path, run: Any) -> None:
    validation = jsonl(tmp_path / "v.jsonl", rows(2, 3) + rows(3, 50))
    manifest = run(jsonl(tmp_path / "x.jsonl", rows(5)), validation=str(validation)).manifest
    assert manifest["counts"]["validation_sources_in_train"] == 2
    assert "2 sources of the validation split are also in the training split" in manifest["notes"]
    assert "test_sources_in_train" not in manifest["counts"]


def test_fault_39_references_given_twice_are_counted_and_noted(tmp_path: Path, run: Any) -> None:
    content = [{"source": f"s{i}", "target": ["a", "b", "a"] if i < 2 else ["a", "b"]} for i in range(5)]
    manifest = run(jsonl(tmp_path / "x.jsonl", content)).manifest
    assert manifest["counts"]["rows_with_a_reference_twice"] == 2
    assert "2 rows have the same reference twice" in manifest["notes"]


@pytest.mark.parametrize("token", ["</s>", "<s>", "<pad>", "<unk>", "<mask>", "<extra_id_0>", "<extra_id_99>", "[SEP]"])
def test_fault_40_special_tokens_in_text_are_kept_as_text_and_counted(tmp_path: Path, run: Any, token: str) -> None:
    content = rows(4)
    content[1]["source"] += token
    content[3]["target"] = f"{token} {content[3]['target']}"
    folder = run(jsonl(tmp_path / "x.jsonl", content))
    assert folder.examples("train") == examples(content)
    assert folder.manifest["counts"]["rows_with_special_tokens"] == 2
    assert any(note.startswith("2 rows hold special tokens") for note in folder.manifest["notes"])


def test_at_most_so_many_rows_are_kept_and_always_the_same(tmp_path: Path, run: Any) -> None:
    content = rows(50)
    first = run(jsonl(tmp_path / "x.jsonl", content), max_train=10, max_validation=1).examples("train")
    assert len(first) == 10
    assert first not in (examples(content)[:10], examples(content)[-10:])
    assert [e for e in examples(content) if e in first] == first  # in the order of the file
    turned = run(jsonl(tmp_path / "y.jsonl", content[::-1]), max_train=10)
    assert turned.examples("train") == first[::-1]
    assert {e.id for e in first} < {e.id for e in run(tmp_path / "x.jsonl", max_train=11).examples("train")}
    assert run(tmp_path / "x.jsonl", max_train=99).examples("train") == examples(content)


# Made once


def test_a_second_run_changes_nothing_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    train, validation = jsonl(tmp_path / "x.jsonl", rows(3)), jsonl(tmp_path / "v.jsonl", rows(4, 10))
    config = prepare.Config(output=str(tmp_path / "out"), train=str(train), validation=str(validation))
    manifest = prepare.run(config) / "manifest.json"
    before = manifest.stat()
    prepare.run(config)
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    jsonl(train, rows(2))
    with pytest.raises(CalibeamError, match=r"\n  .*: other contents\n"):
        prepare.run(config)
    assert len(store.read(prepare.run(config, force=True), "prepare").examples("train")) == 2


# Datasets of the Hub, of which a local folder is one


def test_splits_of_a_dataset_are_read_as_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    jsonl(folder / "train.jsonl", rows(5))
    jsonl(folder / "validation.jsonl", rows(4, 10))
    places = {split: f"hub:{folder}:{split}" for split in ("train", "validation")}
    config = prepare.Config(output=str(tmp_path / "out"), **places)
    data = store.read(prepare.run(config), "prepare")
    assert data.examples("train") == examples(rows(5))
    assert len(data.examples("validation")) + len(data.examples("test")) == 4
    jsonl(folder / "train.jsonl", rows(3))
    with pytest.raises(CalibeamError, match=r"\n  .*: other contents\n"):
        prepare.run(config)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hub:no-split", "is not of the form hub:NAME:SPLIT"),
        ("hub::train", "is not of the form hub:NAME:SPLIT"),
        ("hub:nobody/nothing:train", "hub:nobody/nothing:train cannot be loaded"),
    ],
)
def test_a_dataset_that_cannot_be_loaded_is_named(place: str, message: str, tmp_path: Path) -> None:
    validation = str(jsonl(tmp_path / "v.jsonl", rows(4)))
    with pytest.raises(CalibeamError, match=message):
        prepare.run(prepare.Config(output=str(tmp_path / "out"), train=place, validation=validation))
    assert not (tmp_path / "out").exists()


def test_a_row_of_a_dataset_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", [*rows(2), {"source": "a", "target": ""}])
    place = f"hub:{tmp_path}:train"
    with pytest.raises(CalibeamError, match=r"hub:.*:train has 1 row that cannot be used:\n  row 3: field 'target' is empty"):
        prepare.run(prepare.Config(output=str(tmp_path / "out"), train=place, validation=place))

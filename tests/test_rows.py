"""Rows of files: JSON lines and documents, compressed or not, and never more in memory than a line."""

from __future__ import annotations

import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hub
from calibeam import rows
from calibeam.records import CalibeamError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
SOME = [{"a": 1}, {"a": "ä🦊"}, {"a": [None]}]


def lines(content: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in content)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", lines(SOME)),
        ("x.json", lines(SOME)),
        ("x.json", json.dumps(SOME).encode()),
        ("x.json", b"\xef\xbb\xbf" + json.dumps(SOME, indent=2).encode()),
    ],
    ids=["jsonl", "lines in .json", "array", "array over lines"],
)
def test_lines_and_arrays_give_the_same_rows(tmp_path: Path, name: str, content: bytes, ending: str) -> None:
    file = tmp_path / (name + ending)
    file.write_bytes(COMPRESS[ending](content))
    assert list(rows.read(str(file))) == SOME


@pytest.mark.parametrize("indent", [None, 2], ids=["in one line", "over lines"])
def test_an_object_is_one_row(tmp_path: Path, indent: int | None) -> None:
    document = {"data": SOME, "version": "1"}
    (tmp_path / "x.json").write_text(json.dumps(document, indent=indent))
    assert list(rows.read(str(tmp_path / "x.json"))) == [document]


def test_frames_one_after_another_are_one_file(tmp_path: Path) -> None:
    for ending, compress in COMPRESS.items():
        (tmp_path / f"x.jsonl{ending}").write_bytes(compress(lines(SOME)) + compress(lines(SOME)))
        assert list(rows.read(str(tmp_path / f"x.jsonl{ending}"))) == SOME + SOME


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", [lambda c: c[:-9], lambda c: c[: len(c) // 2], lambda c: b"no archive " + c])
def test_fault_42_a_damaged_archive_is_an_error_with_its_name(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes(damage(COMPRESS[ending](lines([{"a": i} for i in range(5000)]))))
    with pytest.raises(CalibeamError, match=rf"x\.jsonl\{ending} cannot be read: "):
        list(rows.read(str(file)))


def test_a_document_that_is_not_json_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"a": 1},\n {"a": ')
    with pytest.raises(CalibeamError, match=r"x\.json is not valid JSON: "):
        list(rows.read(str(tmp_path / "x.json")))


@pytest.mark.parametrize("ending", COMPRESS)
def test_fault_36_a_line_that_is_too_long_is_reported_and_never_held_in_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 MiB in one line, where 64 KiB are allowed: the rows around it are read, within 8 MiB."""
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 16)
    file = tmp_path / f"x.jsonl{ending}"
    file.write_bytes(COMPRESS[ending](lines(SOME[:1]) + b"x" * (1 << 25) + b"\n" + lines(SOME[:1])))
    list(rows.read(str(file)))  # what is imported and cached on the way is not what is measured
    tracemalloc.start()
    found = list(rows.read(str(file)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [SOME[0], "over-long: a line of more than 0 MiB", SOME[0]]
    assert isinstance(found[1], rows.Complaint)
    assert peak < 1 << 23


def test_fault_49_a_small_archive_of_a_large_document_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 20)
    content = b"[" + b"".join(b"%d," % i for i in range(1 << 18)) + b"0]"
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(content))
    with pytest.raises(CalibeamError, match=r"x\.json\.gz expands to a JSON document of more than 1 MiB"):
        list(rows.read(str(tmp_path / "x.json.gz")))
    (tmp_path / "x.json").write_bytes(content)  # as large as it is
    assert len(list(rows.read(str(tmp_path / "x.json")))) == (1 << 18) + 1


@pytest.mark.parametrize("ending", COMPRESS)
def test_fault_49_a_csv_file_of_one_endless_line_is_an_error_and_not_held_in_memory(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 1 << 22)
    file = tmp_path / f"x.csv{ending}"
    file.write_bytes(COMPRESS[ending](b"a,b\n" + b"x" * (1 << 26)))
    tracemalloc.start()
    with pytest.raises(CalibeamError, match=rf"x\.csv{ending}, line 2: field larger than field limit"):
        list(rows.read(str(file)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 25


def test_a_text_file_has_blank_lines_between_documents(tmp_path: Path) -> None:
    text = "\n\ufeffOne\n  two \n \t\n\n\nThree\r\n\r\nfour"
    (tmp_path / "a.txt").write_bytes(text.encode())
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(b"good\n\nba\xff\n\nlast\n")
    assert [row["text"] for row in rows.read(str(tmp_path / "a.txt"))] == ["One\n  two", "Three", "four"]
    assert [*rows.read(str(tmp_path / "b.txt.gz"))] == [{"text": "good"}, "not valid UTF-8", {"text": "last"}]


def test_a_document_of_a_text_file_has_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 20)
    (tmp_path / "a.txt").write_text("0123456789\n0123456789\n\nshort\n\n" + 30 * "x" + "\n\nend")
    found = [*rows.read(str(tmp_path / "a.txt"))]
    assert [row for row in found if isinstance(row, dict)] == [{"text": "short"}, {"text": "end"}]
    assert [str(row)[:9] for row in found if isinstance(row, rows.Complaint)] == ["over-long", "over-long"]


# The Hub


def test_files_of_the_hub_are_fetched_at_a_commit_and_read_within_the_same_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "data/train-0.jsonl": lines(SOME[:2]), "data/train-1.jsonl.gz": gzip.compress(lines(SOME[2:]) + b"\n" * 5000),
        "data/test-0.jsonl": b"{}", "script.py": b"raise SystemExit",
    }  # fmt: skip
    place = f"hf://datasets/some/thing@{hub.COMMIT}/data/train-*"
    with hub.serving(files, tmp_path) as asked:
        assert list(rows.read(place)) == SOME
        assert {path.rpartition("/")[2] for path in asked if "/resolve/" in path} == {"train-0.jsonl", "train-1.jsonl.gz"}
        before = len(asked)
        assert rows.digest(place) == rows.digest(place) != rows.digest(place.replace("train", "test"))
        assert len(asked) == before  # a commit stands for its contents
        assert list(rows.read(place)) == SOME  # again, from the cache
        with pytest.raises(CalibeamError, match="no file matches"):
            list(rows.read(place.replace("train", "other")))
        monkeypatch.setattr(rows, "LEAST_EXPANSION", 10)
        monkeypatch.setattr(rows, "MOST_EXPANSION", 1)
        with pytest.raises(CalibeamError, match="expands to more than"):
            list(rows.read(place))


def test_fault_18_files_that_were_fetched_are_read_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    place = f"hf://datasets/some/thing@{hub.COMMIT}/train.jsonl"
    with hub.serving({"train.jsonl": lines(SOME)}, tmp_path):
        list(rows.read(place))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert list(rows.read(place)) == SOME
    with pytest.raises(CalibeamError, match=r"^hf://datasets/other/thing@\d+/train\.jsonl cannot be loaded: "):
        list(rows.read(place.replace("some", "other")))


@pytest.mark.parametrize("revision", ["refs/convert/parquet", "refs%2Fconvert%2Fparquet"])
def test_a_revision_of_the_hub_may_be_one_of_its_own(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    files = {"train.jsonl": lines(SOME[:1]), "a/b/train.jsonl": lines(SOME[1:])}
    with hub.serving(files, tmp_path) as asked:
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("{revision}", hub.COMMIT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        assert list(rows.read(f"hf://datasets/some/thing@{revision}/**/*.jsonl")) == [*SOME[1:], SOME[0]]
    assert any("/revision/refs%2Fconvert%2Fparquet" in path for path in asked)
    with pytest.raises(CalibeamError, match=r"^hf://datasets/some/thing/train\.jsonl is not of the form hf://datasets/NAME@REV"):
        list(rows.read("hf://datasets/some/thing/train.jsonl"))


def test_a_pattern_names_files_in_folders_of_folders_and_a_name_is_a_name(tmp_path: Path) -> None:
    for number, place in enumerate(("part.jsonl", "x/part.jsonl", "x/y/part[1].jsonl")):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(lines(SOME[number : number + 1]))
    assert list(rows.read(f"file://{tmp_path}/**/part*.jsonl")) == SOME
    assert rows.matching(f"{tmp_path}/x/y/part[1].jsonl") == [f"{tmp_path}/x/y/part[1].jsonl"]


def test_columns_of_parquet_files_by_name_and_of_every_kind_of_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    kinds = [pa.string_view(), pa.binary_view(), pa.list_(pa.string_view()), pa.struct([("x", pa.string_view())])]
    values: list[Any] = ["text", b"bytes", ["a", "b"], {"x": "y"}]
    columns = [pa.array([value] * 3, kind) for value, kind in zip(values, kinds, strict=True)]
    pq.write_table(pa.table(columns, names=[*"abcd"]), file)
    assert list(rows.read(str(file))) == [dict(zip("abcd", values, strict=True))] * 3
    pq.write_table(pa.table(columns[:2], names=["a", "a"]), file)
    with pytest.raises(CalibeamError, match=r"rows\.parquet .*two columns called 'a'"):
        list(rows.read(str(file)))


def test_a_pattern_names_files_of_this_disk_in_order(tmp_path: Path) -> None:
    for number in (1, 0):
        (tmp_path / f"part-{number}.jsonl").write_bytes(lines(SOME[number : number + 1]))
    assert list(rows.read(f"file://{tmp_path}/part-*.jsonl")) == SOME[:2]
    with pytest.raises(CalibeamError, match=r"no file matches .*other-\*"):
        list(rows.read(f"file://{tmp_path}/other-*"))

"""Random input to everything that reads what others wrote: a good answer or a CalibeamError, never anything else.

Three hundred cases each here; `make fuzz` takes 10,000 (`CALIBEAM_FUZZ=10000`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibeam import checkpoint, pipeline, recipe, rows, stages, store
from calibeam.paper.gap_sentences import split_sentences
from calibeam.paper.metrics import _repeats, _repeats_in_long, has_repetition
from calibeam.recipe import StageConfig
from calibeam.records import CalibeamError
from calibeam.stages import prepare

settings.register_profile(
    "calibeam",
    max_examples=int(os.environ.get("CALIBEAM_FUZZ", "300")),
    deadline=None,
    derandomize="CALIBEAM_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("calibeam")

TEXT = st.text(max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({name for stage in ("decode", "calibrate", "prepare") for name in stages.load(stage).Config.__dataclass_fields__})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# Recipes

GIVEN = ['"x"', "1", "-1", "nan", "1e400", "[]", "{}", "true"]
TOML = st.one_of(
    st.text(max_size=200),
    st.text(alphabet='[]{}=."\'#\n\\ \t,abc019-+:TZ_', max_size=80),
    st.lists(st.tuples(st.sampled_from([*KEYS, "output", "model"]), st.sampled_from(GIVEN))).map(
        lambda lines: "".join(f"{key} = {value}\n" for key, value in lines)
    ),
)  # fmt: skip


@given(text=TOML, table=st.sampled_from(["", "[decode]\n", "[calibrate]\n", "[prepare]\n"]))
def test_any_text_as_a_recipe_is_read_or_refused(text: str, table: str, place: Path) -> None:
    file = place / "recipe.toml"
    file.write_bytes((table + text).encode("utf-8", "surrogatepass"))
    try:
        pipeline.plan(recipe.read(file))
    except CalibeamError as error:
        assert str(error)


@given(
    st.lists(
        st.tuples(st.sampled_from(KEYS) | TEXT, TEXT | st.integers().map(str) | st.floats().map(str)).map("=".join), max_size=4
    )
)
def test_any_settings_on_a_command_line_are_taken_or_refused(assignments: list[str]) -> None:
    for stage in ("decode", "calibrate"):
        try:
            values = recipe.override({}, assignments, table=stage).get(stage, {})
            recipe.build(stages.load(stage).Config, stage, values)
        except CalibeamError as error:
            assert str(error)


# Rows

LINES = st.lists(
    st.one_of(
        st.binary(max_size=60),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries({"source": VALUES, "target": VALUES, "id": VALUES}).map(lambda row: json.dumps(row).encode()),
        st.fixed_dictionaries({"source": TEXT, "target": TEXT}).map(lambda row: json.dumps(row).encode()),
    ),
    max_size=8,
).map(b"\n".join)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.tsv", "x.txt", "x.jsonl.gz"])
@given(content=LINES)
def test_any_bytes_as_a_file_of_rows_give_rows_or_complaints(content: bytes, name: str, place: Path) -> None:
    file = place / name
    file.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    try:
        for number, row in enumerate(rows.read(str(file)), start=1):
            example, problem = prepare._example(row, number, prepare.Names())
            assert (example is None) == bool(problem)
            if example:
                assert example.source.strip()
                assert all(target.strip() for target in example.targets)
                json.dumps([example.id, example.source, *example.targets], ensure_ascii=False).encode()
    except CalibeamError as error:
        assert name in str(error)


@pytest.fixture(scope="module")
def damaged(place: Path) -> tuple[Path, dict[str, bytes]]:
    """Files that are right, to be damaged."""
    content = [{"source": f"some words {i}", "target": ["x", "y" * i], "id": i} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(content), place / "x.parquet", compression="zstd")
    others = {"use_dictionary": False, "column_encoding": {"source": "DELTA_BYTE_ARRAY"}, "data_page_version": "2.0"}
    pq.write_table(pa.Table.from_pylist(content), place / "y.parquet", **others)
    whole = {name: (place / name).read_bytes() for name in ("x.parquet", "y.parquet")}
    lines = "".join(json.dumps(row) + "\n" for row in content).encode()
    whole["x.jsonl.gz"], whole["x.jsonl.zst"] = gzip.compress(lines), pa.compress(lines, codec="zstd", asbytes=True)
    return place, whole


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=4)


def changed(content: bytes, changes: list[tuple[int, int]]) -> bytes:
    found = bytearray(content)
    for at, change in changes:
        found[at % len(found)] ^= change
    return bytes(found)


@pytest.mark.parametrize("name", ["x.parquet", "y.parquet", "x.jsonl.gz", "x.jsonl.zst"])
@given(changes=CHANGES, cut=st.integers(0, 40))
def test_damaged_files_give_rows_or_an_error_with_their_name(
    changes: list[tuple[int, int]], cut: int, name: str, damaged: tuple[Path, dict[str, bytes]]
) -> None:
    folder, whole = damaged
    content = changed(whole[name], changes)
    (folder / name).write_bytes(content[: len(content) - cut])
    try:
        assert all(isinstance(row, dict | str | list | int | float | None) for row in rows.read(str(folder / name)))
    except CalibeamError as error:
        assert name in str(error)


# Manifests and stage folders


@pytest.fixture(scope="module")
def stage(place: Path) -> tuple[Path, dict[str, bytes]]:
    output = store.Output("prepare", StageConfig(output=str(place / "stage")), {})
    with output.writing():
        output.write_rows("train", [{"id": "a", "source": "s", "targets": ["t"]}] * 50, store.EXAMPLES)
        output.counts["train"] = 50
    return output.path, {file.name: file.read_bytes() for file in output.path.iterdir()}


@given(content=st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_manifest_are_refused(content: bytes, stage: tuple[Path, dict[str, bytes]]) -> None:
    folder, whole = stage
    (folder / "train.parquet").write_bytes(whole["train.parquet"])
    (folder / store.MANIFEST).write_bytes(content)
    with pytest.raises(CalibeamError, match=r"manifest\.json"):
        store.read(folder, "prepare")


@given(changes=CHANGES, name=st.sampled_from(["train.parquet", store.MANIFEST]))
def test_no_changed_byte_of_a_stage_goes_unnoticed(
    changes: list[tuple[int, int]], name: str, stage: tuple[Path, dict[str, bytes]]
) -> None:
    """Of a manifest, those that change what it says."""
    folder, whole = stage
    for file, content in whole.items():
        (folder / file).write_bytes(content)
    content = changed(whole[name], changes)
    (folder / name).write_bytes(content)
    try:
        says_the_same = json.loads(content) == json.loads(whole[name]) if name == store.MANIFEST else content == whole[name]
    except ValueError:
        says_the_same = False
    try:
        store.read(folder, "prepare").examples("train")
        assert says_the_same
    except CalibeamError as error:
        assert name in str(error)


@given(changes=CHANGES)
def test_a_table_that_was_changed_on_purpose_is_read_or_refused(
    changes: list[tuple[int, int]], stage: tuple[Path, dict[str, bytes]]
) -> None:
    """With a manifest that fits."""
    folder, whole = stage
    content = changed(whole["train.parquet"], changes)
    manifest = json.loads(whole[store.MANIFEST])
    del manifest["seal"]
    manifest["files"]["train.parquet"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "train.parquet").write_bytes(content)
    (folder / store.MANIFEST).write_text(json.dumps({**manifest, "seal": store._seal(manifest)}))
    try:
        assert all(isinstance(example.source, str) for example in store.read(folder, "prepare").examples("train"))
    except CalibeamError as error:
        assert "train.parquet" in str(error)


@given(changes=CHANGES, cut=st.integers(0, 40))
def test_no_changed_byte_of_a_shard_goes_unnoticed(changes: list[tuple[int, int]], cut: int, place: Path) -> None:
    shards = store.Shards(place, "shard", store.EXAMPLES)
    shards.write(0, [{"id": "a", "source": "s", "targets": ["t"]}], {"counts": 1})
    file = place / "shard-00000.parquet"
    content = changed(file.read_bytes(), changes)
    content = content[: len(content) - cut]
    is_whole = content == file.read_bytes()
    file.write_bytes(content)
    assert shards.facts(0, ["a"]) == ({"counts": 1} if is_whole else None)


@given(changes=CHANGES, cut=st.integers(0, 40))
def test_no_changed_byte_of_a_checkpoint_goes_unnoticed(changes: list[tuple[int, int]], cut: int, place: Path) -> None:
    file = place / "checkpoint-000000001.safetensors"
    told, tensors = {"loop": {"step": 1}}, {"model.weight": torch.arange(6.0).view(2, 3), "random.cpu": torch.zeros(5)}
    checkpoint.write(file, told, tensors)
    content = changed(file.read_bytes(), changes)
    file.write_bytes(content[: len(content) - cut])
    try:
        found = checkpoint.read(file)
    except CalibeamError as error:
        assert file.name in str(error)
    else:  # what was changed says nothing, such as a space
        assert found[0] == told
        assert all(torch.equal(found[1][name], tensor) for name, tensor in tensors.items())


# Text

WORDS = st.lists(st.sampled_from("abcd"), max_size=60) | st.lists(st.integers(0, 20).map(str), max_size=60)


@given(st.text(max_size=300) | st.text(alphabet=".!?…'\")\n \u3002aA\u00e9", max_size=80))
def test_sentences_cover_a_text_but_for_white_space(text: str) -> None:
    end = 0
    for start, stop in split_sentences(text):
        assert end <= start < stop
        assert not text[end:start].strip()
        assert text[start:stop].strip() == text[start:stop]
        end = stop
    assert not text[end:].strip()


@given(WORDS)
def test_repetitions_are_those_of_a_search_by_definition(words: list[str]) -> None:
    size = len(words)
    expected = any(words[i : i + n] == words[i + n : i + 2 * n] for n in range(1, size // 2 + 1) for i in range(size - 2 * n + 1))
    assert _repeats(words) == expected
    if size > 3:
        assert _repeats_in_long(words) == expected
    assert has_repetition(" ".join(words)) == expected


@given(TEXT)
def test_any_text_has_repetitions_or_not(text: str) -> None:
    assert has_repetition(text) in (True, False)


def test_the_cases_are_as_many_as_were_asked_for() -> None:
    asked: Any = settings().max_examples
    assert asked == int(os.environ.get("CALIBEAM_FUZZ", "300"))

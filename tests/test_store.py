"""Stage folders: whole or not there at all, and nothing damaged is read."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import calibeam
from calibeam import store
from calibeam.recipe import StageConfig, option
from calibeam.records import CalibeamError, Example

ROWS = [
    {"id": "a", "source": "one", "targets": ["1"]},
    {"id": "b", "source": " two\n", "targets": ["2", "zwei"]},
]


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    width: int = option(1)
    names: tuple[str, ...] = option(("x",))
    speed: int = option(1, identity=False)


def stage(path: Path, *, kind: str = "prepare", inputs: Any = None, force: bool = False, **settings: Any) -> store.Output:
    return store.Output(kind, Config(output=str(path), **settings), inputs or {}, force=force)


def write(path: Path, **how: Any) -> store.Folder:
    output = stage(path, **how)
    with output.writing():
        output.write_rows("train", ROWS, store.EXAMPLES)
        (output.folder / "model").mkdir()
        (output.folder / "model" / "notes.txt").write_text("hello")
        output.counts["train"] = 2
        output.notes.append("a note")
    return store.read(path, how.get("kind", "prepare"))


def everything_under(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((path / store.MANIFEST).read_text())
    change(manifest)
    (path / store.MANIFEST).write_text(json.dumps(manifest))


def reseal(manifest: dict[str, Any]) -> None:
    """The digest and the seal that belong to an edited manifest, as whoever edits on purpose would put them."""
    lines = "".join(f"{name}\0{facts['sha256']}\n" for name, facts in sorted(manifest["files"].items()))
    manifest["digest"] = hashlib.sha256(lines.encode()).hexdigest()
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    manifest["seal"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# Writing


def test_nothing_is_at_the_output_until_all_of_it_is(tmp_path: Path) -> None:
    output = stage(tmp_path / "deep" / "data")
    assert not output.done
    with output.writing():
        output.write_json("facts.json", {"é": 1})
        assert not output.path.exists()
    assert output.done
    assert json.loads((output.path / "facts.json").read_text(encoding="utf-8")) == {"é": 1}
    assert not output.folder.exists()


@pytest.mark.parametrize("error", [ValueError, CalibeamError, KeyboardInterrupt])
def test_an_exception_leaves_neither_the_folder_nor_a_part_of_it(tmp_path: Path, error: type[BaseException]) -> None:
    output = stage(tmp_path / "data")

    def write_some_and_fail() -> None:
        with output.writing():
            output.write_rows("train", ROWS, store.EXAMPLES)
            raise error

    with pytest.raises(error):
        write_some_and_fail()
    assert not output.path.exists()
    assert not output.folder.exists()
    assert not output.done
    assert write(tmp_path / "data").examples("train")


def test_an_exception_while_making_it_again_keeps_the_old_result(tmp_path: Path) -> None:
    write(tmp_path / "data")
    before = everything_under(tmp_path / "data")
    with pytest.raises(ValueError, match="stop"), stage(tmp_path / "data", width=2, force=True).writing():
        raise ValueError("stop")
    assert everything_under(tmp_path / "data") == before


def test_the_seconds_of_a_stage_are_those_of_all_its_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one with other settings."""
    clock = iter([0.0, 5.0, 100.0, 103.0, 1000.0, 1007.0, 0.0, 2.0])
    monkeypatch.setattr(store.time, "monotonic", lambda: next(clock))
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"), stage(tmp_path / "data").writing(resume=True):
            raise ValueError("stop")
    output = stage(tmp_path / "data")
    with output.writing(resume=True):
        output.write_json("facts.json", {})
    found = json.loads((tmp_path / "data" / store.MANIFEST).read_text())
    assert (found["seconds"], list(found["files"])) == (5.0 + 3.0 + 7.0, ["facts.json"])
    output = stage(tmp_path / "data", width=2, force=True)
    with output.writing(resume=True):
        output.write_json("facts.json", {})
    assert json.loads((tmp_path / "data" / store.MANIFEST).read_text())["seconds"] == 2.0


@pytest.mark.parametrize("what", ["rows", "log"])
def test_a_folder_that_is_removed_while_it_is_written(what: str, tmp_path: Path) -> None:
    output = stage(tmp_path / "data")
    removed = re.escape(f"{output.folder} was removed while prepare was writing to it")

    def remove_and_write() -> None:
        with output.writing(resume=True):
            shutil.rmtree(output.folder)
            if what == "rows":
                output.write_rows("train", ROWS, store.EXAMPLES)
            output.append_log({"step": 1})

    with pytest.raises(CalibeamError, match=removed):
        remove_and_write()
    assert write(tmp_path / "data").manifest["counts"] == {"train": 2}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    assert folder.examples("train") == [Example("a", "one", ("1",)), Example("b", " two\n", ("2", "zwei"))]
    assert folder.splits == ["train"]
    with pytest.raises(CalibeamError, match="has no test split; it has train"):
        folder.examples("test")


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match=r"train\.parquet has columns \['id', 'source', 'targets'\], not \['id', 'method'"):
        write(tmp_path / "data").rows("train", store.CANDIDATES)


def test_the_manifest_says_what_was_made_from_what_and_with_what(tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    folder = write(tmp_path / "next", kind="decode", inputs={"data": data}, width=3, names=("p", "q"), speed=9)
    manifest = folder.manifest
    assert manifest["kind"] == "decode"
    assert manifest["settings"] == {"output": str(tmp_path / "next"), "width": 3, "names": ["p", "q"], "speed": 9}
    assert manifest["origin"]["settings"] == {"width": 3, "names": ["p", "q"]}
    assert manifest["origin"]["inputs"] == {"data": data.digest}
    assert manifest["input_places"] == {"data": str(tmp_path / "data")}
    assert manifest["calibeam"] == calibeam.__version__ == manifest["versions"]["calibeam"].partition("+")[0]
    assert {"python", "torch", "transformers", "pyarrow"} <= set(manifest["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", manifest["started"])
    assert 0 <= manifest["seconds"] < 60
    assert (manifest["counts"], manifest["notes"]) == ({"train": 2}, ["a note"])
    files = everything_under(folder.path)
    del files[store.MANIFEST]
    assert set(files) == {"train.parquet", "model/notes.txt"}
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }


def test_the_digest_follows_the_contents_alone(tmp_path: Path) -> None:
    first, again = write(tmp_path / "a"), write(tmp_path / "b", speed=2)
    assert first.digest == again.digest
    other = stage(tmp_path / "c")
    with other.writing():
        other.write_rows("train", ROWS[:1], store.EXAMPLES)
    assert store.read(other.path, "prepare").digest != first.digest


# Done, or made otherwise


def test_what_is_done_is_done_and_settings_that_change_nothing_do_not_count(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert stage(tmp_path / "data").done
    assert stage(tmp_path / "data", speed=5).done


def test_fault_15_a_changed_setting_is_refused_with_what_it_was_and_is(tmp_path: Path) -> None:
    write(tmp_path / "data")
    with pytest.raises(CalibeamError) as error:
        stage(tmp_path / "data", width=2, names=("y",))
    message = str(error.value)
    assert str(tmp_path / "data") in message
    assert "settings.width: 1 before, 2 now" in message
    assert "settings.names: ['x'] before, ['y'] now" in message
    assert "speed" not in message
    assert "--force" in message


def test_fault_15_a_changed_input_or_kind_is_refused(tmp_path: Path) -> None:
    data, other = write(tmp_path / "data"), store.Folder(tmp_path, "0" * 64, {})
    write(tmp_path / "next", kind="decode", inputs={"data": data})
    assert stage(tmp_path / "next", kind="decode", inputs={"data": data}).done
    with pytest.raises(CalibeamError, match=rf"\n  {other.path}: other contents\n"):
        stage(tmp_path / "next", kind="decode", inputs={"data": other})
    with pytest.raises(CalibeamError, match="kind: 'decode' before, 'score' now"):
        stage(tmp_path / "next", kind="score", inputs={"data": data})


def test_force_makes_it_again_without_a_trace_of_the_old(tmp_path: Path) -> None:
    write(tmp_path / "data")
    output = stage(tmp_path / "data", width=2, force=True)
    assert not output.done
    with output.writing():
        output.write_json("only.json", 1)
    assert set(everything_under(tmp_path / "data")) == {"only.json", store.MANIFEST}
    assert store.read(tmp_path / "data", "prepare").manifest["settings"]["width"] == 2


# Links and hostile manifests


@pytest.mark.parametrize("name", [".out.lock", ".out.partial", ".out.partial/.train.partial", ".out.partial/log.jsonl"])
def test_fault_48_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(precious if name == ".out.partial" else precious / "file")
    with pytest.raises(CalibeamError, match=r"is a link, and no stage makes one|out cannot be written: .*\.out\.lock"):
        write(tmp_path / "out")
    assert everything_under(precious) == {"file": b"mine"}
    link.unlink()
    assert write(tmp_path / "out").manifest["counts"] == {"train": 2}


def test_fault_48_what_is_to_be_removed_may_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (tmp_path / ".out.old").symlink_to(tmp_path / "precious")
    write(tmp_path / "out", width=2, force=True)
    assert {file.name for file in tmp_path.iterdir()} == {"out", ".out.lock", "precious"}
    assert everything_under(tmp_path / "precious") == {"file": b"mine"}


def test_an_output_that_is_a_link_is_written_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large" / "data")
    for width in (1, 2, 3):
        write(tmp_path / "out", width=width, force=True)
        assert store.read(tmp_path / "large" / "data", "prepare").manifest["settings"]["width"] == width
    assert stage(tmp_path / "out", width=3).done
    assert (tmp_path / "out").is_symlink()
    assert {file.name for file in tmp_path.rglob("*") if file.parent.name != "data"} >= {"large", "data", ".data.lock", "out"}
    assert not any(file.name.endswith((".old", ".partial")) for file in tmp_path.rglob("*"))


def test_fault_48_a_file_that_is_replaced_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".page.html.partial").symlink_to(tmp_path / "precious")
    store.write_file(tmp_path / "page.html", "page")
    assert (tmp_path / "page.html").read_text() == "page"
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"files":' * 200_000, " " * ((1 << 26) + 1)], ids=["arrays", "objects", "size"]
)
def test_fault_17_a_manifest_that_nests_without_end_or_is_huge_is_damaged(content: str, tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out" / store.MANIFEST).write_text(content)
    with pytest.raises(CalibeamError, match=r"manifest\.json is damaged"):
        store.read(tmp_path / "out", "prepare")
    (tmp_path / ".other.partial").mkdir()
    (tmp_path / ".other.partial" / store.ORIGIN).write_text(content)
    with pytest.raises(CalibeamError, match=r"origin\.json cannot be read"):
        write(tmp_path / "other")


def test_a_manifest_may_be_as_long_as_its_files_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million shards have 140 MB of it. Here, thirty shards and a lower limit."""
    monkeypatch.setattr(store, "LONGEST_MANIFEST", 2000)
    output = stage(tmp_path / "out")
    with output.writing(resume=True):
        pieces = output.shards("pieces", store.EXAMPLES)
        for number in range(30):
            pieces.write(number, [{"id": str(number), "source": "s", "targets": ["t"]}], {})
    assert (tmp_path / "out" / store.MANIFEST).stat().st_size > 2 * store.LONGEST_MANIFEST
    folder = store.read(tmp_path / "out", "prepare")
    table = folder.table("pieces", store.EXAMPLES)
    assert len(pickle.dumps(table)) < 2000  # it goes to every worker
    assert [row["id"] for row in table.between(28, 31)] == ["28", "29"]
    edit(tmp_path / "out", lambda manifest: manifest["notes"].append("x" * 30_000))
    with pytest.raises(CalibeamError, match="are more than the files of its folder need"):
        store.read(tmp_path / "out", "prepare")


# Places that are not for writing


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "files",
    [{"thesis.txt": "years of work"}, {"thesis.txt": "x", "manifest.json": '{"name": "a web app"}'}],
    ids=["no manifest", "another program's manifest"],
)
def test_a_folder_that_is_not_a_stage_is_refused_and_left_alone(tmp_path: Path, files: dict[str, str], force: bool) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    before = everything_under(tmp_path)
    with pytest.raises(CalibeamError, match="mine"):
        write(folder, force=force)
    assert everything_under(tmp_path) == before


def test_a_file_at_the_output_is_refused_even_with_force_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CalibeamError, match="mine is in use: it exists and is not a calibeam stage"):
        stage(tmp_path / "mine", force=True)
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert write(tmp_path / "data").splits == ["train"]


@pytest.mark.parametrize("place", ["", ".", "/"])
def test_a_place_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibeamError, match="output"):
        store.Output("prepare", Config(output=place), {})


def test_fault_06_a_place_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CalibeamError, match="file"):
        write(tmp_path / "file" / "data")


# Damage


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / "train.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "train.parquet").write_bytes(content)


def truncate(path: Path) -> None:
    (path / "train.parquet").write_bytes((path / "train.parquet").read_bytes()[:-1])


def replace_with_a_link(path: Path) -> None:
    (path / "train.parquet").rename(path.parent / "moved.parquet")
    (path / "train.parquet").symlink_to(path.parent / "moved.parquet")


def link_within(path: Path) -> None:
    (path / "train.parquet").rename(path / "moved.parquet")
    (path / "train.parquet").symlink_to("moved.parquet")


def replace_a_folder_with_a_link(path: Path) -> None:
    (path / "model").rename(path.parent / "moved")
    (path / "model").symlink_to(path.parent / "moved")


def name_outside(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path.parent / "x").write_text("secret")
        facts = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
        edit(path, lambda manifest: manifest["files"].update({name.format(parent=path.parent): facts}))
        edit(path, reseal)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (flip_a_byte, r"train\.parquet is damaged"),
    "truncated": (truncate, r"train\.parquet is damaged"),
    "missing": (lambda path: (path / "train.parquet").unlink(), r"train\.parquet is missing, though .*manifest\.json lists it"),
    "link to elsewhere": (replace_with_a_link, r"manifest\.json names a file outside its folder: train\.parquet"),
    "link within": (link_within, r"manifest\.json names a file outside its folder: train\.parquet"),
    "folder linked": (replace_a_folder_with_a_link, r"manifest\.json names a file outside its folder: model/notes\.txt"),
    "file above": (name_outside("../x"), r"manifest\.json names a file outside its folder: \.\./x"),
    "absolute file": (name_outside("{parent}/x"), r"manifest\.json names a file outside its folder: /.*/x"),
    "the folder itself": (name_outside("."), r"manifest\.json names a file outside its folder: \."),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_fault_17_and_48_a_damaged_folder_is_neither_read_nor_taken_as_done(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "data"
    write(path)
    damage(path)
    with pytest.raises(CalibeamError, match=message):
        store.read(path, "prepare")
    with pytest.raises(CalibeamError, match=message):
        stage(path)
    assert write(path, force=True).splits == ["train"]


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "digest": lambda manifest: manifest.update(digest="0" * 64),
    "a file taken off the list": lambda manifest: manifest["files"].pop("model/notes.txt"),
    "list emptied": lambda manifest: manifest.update(files={}),
    "a field removed": lambda manifest: manifest.pop("origin"),
    "a field of another type": lambda manifest: manifest.update(counts=[1]),
    "size removed": lambda manifest: manifest["files"]["train.parquet"].pop("bytes"),
    "facts of another type": lambda manifest: manifest["files"].update({"train.parquet": 3}),
    "a setting": lambda manifest: manifest["settings"].update(width=7),
    "an input": lambda manifest: manifest["origin"].update(inputs={"data": "0" * 64}),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_fault_17_an_edited_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    write(tmp_path / "data")
    edit(tmp_path / "data", change)
    with pytest.raises(CalibeamError, match=r"manifest\.json is damaged"):
        store.read(tmp_path / "data", "prepare")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"text"'])
def test_fault_17_a_manifest_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "data")
    (tmp_path / "data" / store.MANIFEST).write_bytes(content)
    with pytest.raises(CalibeamError, match=r"manifest\.json is damaged"):
        store.read(tmp_path / "data", "prepare")


def test_a_file_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data")
    (folder.path / "test.parquet").write_bytes((folder.path / "train.parquet").read_bytes())
    with pytest.raises(CalibeamError, match="has no test split"):
        store.read(folder.path, "prepare").examples("test")


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data")
    edit(tmp_path / "data", lambda manifest: manifest["origin"].update(format=99))
    edit(tmp_path / "data", reseal)
    with pytest.raises(CalibeamError, match="data was written in format 99; this is format 1"):
        store.read(tmp_path / "data", "prepare")


def test_another_kind_of_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data")
    with pytest.raises(CalibeamError, match="data was written by `prepare`, but `decode` output is needed here"):
        store.read(tmp_path / "data", "decode")


def test_a_folder_that_is_missing_or_unfinished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match="nowhere does not exist: run the stage that writes it first"):
        store.read(tmp_path / "nowhere", "prepare")
    with pytest.raises(CalibeamError, match=r"is not a finished calibeam stage: it has no manifest\.json"):
        store.read(tmp_path, "prepare")


def test_fault_17_a_model_with_a_manifest_of_its_own_is_verified_but_for_its_card(tmp_path: Path) -> None:
    exported = write(tmp_path / "exported", kind="export").path
    (exported / "README.md").write_text("whatever")
    store.read_model(exported)
    (exported / "model" / "notes.txt").write_text("jello")
    with pytest.raises(CalibeamError, match=r"model/notes\.txt is damaged"):
        store.read_model(exported)


def test_fault_15_what_other_versions_made_is_taken_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "data")
    assert stage(tmp_path / "data").done
    assert not caplog.records
    found = store.versions()
    monkeypatch.setattr(store, "versions", lambda: {**found, "torch": "1.13"})
    assert stage(tmp_path / "data").done
    assert "data was made by other versions, and is used as it is: torch: '" in caplog.text


def test_fault_15_a_change_of_the_code_is_another_version(tmp_path: Path) -> None:
    """Of a copy of the package, asked in a process of its own."""
    copied = shutil.copytree(
        Path(calibeam.__file__).parent, tmp_path / "calibeam", ignore=shutil.ignore_patterns("demo", "*.pyc")
    )
    ask = [sys.executable, "-c", "from calibeam import store; print(store.versions()['calibeam'])"]
    seen = []
    for change in ("", "# a change"):
        with (copied / "paper" / "calibration.py").open("a") as file:
            file.write(change)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        seen.append(subprocess.run(ask, env=environment, check=True, capture_output=True, text=True).stdout)  # noqa: S603
    assert seen[0] != seen[1]
    assert seen[0].startswith(f"{calibeam.__version__}+")


def test_a_models_folder_is_verified_by_the_stage_around_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "tuned", kind="finetune")
    before = store.read_model(folder.path / "model")
    (folder.path / "model" / "notes.txt").write_text("jello")
    with pytest.raises(CalibeamError, match=r"model/notes\.txt is damaged"):
        store.read_model(folder.path / "model")
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "notes.txt").write_text("hello")
    (loose / "README.md").write_text("not part of the model")
    assert store.read_model(loose).digest == before.digest
    (loose / "notes.txt").write_text("jello")
    assert store.read_model(loose).digest != before.digest


# Other processes

WRITER = """
import sys
from calibeam import recipe, store
output = store.Output("prepare", recipe.StageConfig(output=sys.argv[1]), {})
with output.writing():
    output.write_json("half.json", 1)
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """A real process in the middle of writing `data`; it finishes when its standard input is closed."""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", WRITER, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


def test_fault_11_a_second_writer_is_refused_while_the_first_is_at_work_and_does_it_no_harm(tmp_path: Path, writer: Any) -> None:
    with pytest.raises(CalibeamError, match="data is in use: another process is writing it"):
        write(tmp_path / "data")
    writer.communicate()
    assert writer.returncode == 0
    folder = store.read(tmp_path / "data", "prepare")
    assert set(folder.manifest["files"]) == {"half.json"}


def test_fault_01_a_killed_process_leaves_no_result_and_the_next_run_succeeds(tmp_path: Path, writer: Any) -> None:
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    folder = write(tmp_path / "data")
    assert set(folder.manifest["files"]) == {"train.parquet", "model/notes.txt"}
    assert "half.json" not in everything_under(tmp_path / "data")


def test_fault_01_a_folder_that_was_finished_and_not_renamed_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between taking the old result away and putting the new one there."""
    write(tmp_path / "data")
    rename = os.replace

    def stopped(source: Path, target: Path) -> None:
        if Path(source).name == ".data.partial":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "data", width=2, force=True)
    assert not (tmp_path / "data").exists()
    shutil.copytree(tmp_path, tmp_path.with_name("again"))
    assert stage(tmp_path.with_name("again") / "data").done  # the old settings: what was to be replaced is there still
    assert stage(tmp_path / "data", width=2).done
    assert store.read(tmp_path / "data", "prepare").manifest["settings"]["width"] == 2
    assert {file.name for file in tmp_path.iterdir()} == {"data", ".data.lock"}


def test_fault_01_what_a_run_goes_on_from_is_kept_until_the_result_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the last of the work, before there is a manifest."""

    def work() -> None:
        output = stage(tmp_path / "data")
        with output.writing(resume=True):
            output.temporary = ("checkpoint-*",)
            (output.folder / "checkpoint-1").touch()
            output.write_json("result.json", 1)

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_seal", stopped)
        with pytest.raises(KeyboardInterrupt):
            work()
    assert (tmp_path / ".data.partial/checkpoint-1").is_file()
    work()
    assert set(store.read(tmp_path / "data", "prepare").manifest["files"]) == {"result.json"}
    assert {file.name for file in (tmp_path / "data").iterdir()} == {"result.json", store.MANIFEST}


# One file


def test_write_file_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "page.html"
    store.write_file(file, "old" * 10_000)
    with file.open(encoding="utf-8") as reader:
        assert reader.read(3) == "old"
        store.write_file(file, "née")
        assert reader.read() == "old" * 9_999  # who was reading the old one reads it to its end
    assert file.read_text(encoding="utf-8") == "née"
    assert [path.name for path in file.parent.iterdir()] == ["page.html"]


def test_write_file_keeps_the_old_file_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    store.write_file(tmp_path / "page.html", "old")
    with pytest.raises(UnicodeEncodeError):
        store.write_file(tmp_path / "page.html", "x" * 100_000 + "\ud800")
    assert (tmp_path / "page.html").read_text() == "old"


def test_rows_by_their_place_from_one_file_and_from_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of 3, and shards of 4, of which the last is short."""
    monkeypatch.setattr(store, "ROW_GROUP", 3)
    rows = [{"id": f"row-{i}", "source": f"s{i}", "targets": [f"t{i}"]} for i in range(10)]
    output = store.Output("prepare", StageConfig(output=str(tmp_path / "out")), {})
    with output.writing(resume=True):
        output.write_rows("train", rows, store.EXAMPLES)
        pieces = output.shards("pieces", store.EXAMPLES)
        for number in range(3):
            pieces.write(number, rows[4 * number : 4 * number + 4], {"counts": {"rows": 4}})
        assert pieces.facts(0, [row["id"] for row in rows[:4]]) == {"counts": {"rows": 4}}
        assert pieces.facts(0, ["row-0"]) is None
        pieces.write(3, rows, {})
        pieces.drop_from(3)
    folder = store.read(tmp_path / "out", "prepare")
    for name in ("train", "pieces"):
        table = folder.table(name, store.EXAMPLES)
        for start, stop in ((0, 3), (2, 9), (4, 8), (9, 20), (10, 12), (0, 10)):
            assert table.between(start, stop) == rows[start:stop], (name, start, stop)


def test_fault_36_a_text_that_is_no_unicode_is_an_error_with_the_file(tmp_path: Path) -> None:
    """By whoever made the table: pyarrow takes the bytes as they are, and trips over them when a row is wanted."""
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<2i", 0, 1)), pa.py_buffer(b"\xf4"))
    targets = pa.array([["t"]], pa.list_(pa.string()))
    table = pa.Table.from_arrays([pa.array(["a"]), broken, targets], schema=store.EXAMPLES)
    file = tmp_path / "train.parquet"
    pq.write_table(table, file)
    for read in (
        lambda: [*store._rows(file, store.EXAMPLES)],
        lambda: store.Table(tmp_path, "train", 0, store.EXAMPLES).between(0, 1),
    ):
        with pytest.raises(CalibeamError, match=r"train\.parquet cannot be read: 'utf-8' codec"):
            read()


@pytest.mark.parametrize("missing", ["id", "source", "targets", "one of targets"])
def test_fault_17_a_table_with_gaps_is_an_error_with_the_file(missing: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": "a", "source": "s", "targets": ["t"]}] * 3
    changed = {"targets": ["t", None]} if missing.startswith("one") else {missing: None}
    pq.write_table(pa.Table.from_pylist([*rows, {**rows[0], **changed}], schema=store.EXAMPLES), tmp_path / "train.parquet")
    with pytest.raises(
        CalibeamError, match=rf"train\.parquet cannot be read: a row has no {missing.split()[-1]}, or only a part"
    ):
        list(store._rows(tmp_path / "train.parquet", store.EXAMPLES))


def test_shards_are_read_by_their_numbers(tmp_path: Path) -> None:
    """The hundred thousandth comes after the one before it, though its name does not."""
    output = store.Output("prepare", StageConfig(output=str(tmp_path / "out")), {})
    with output.writing(resume=True):
        pieces = output.shards("pieces", store.EXAMPLES)
        for number in (100_000, 99_999):
            pieces.write(number, [{"id": str(number), "source": "s", "targets": ["t"]}], {})
    found = store.read(tmp_path / "out", "prepare").rows("pieces", store.EXAMPLES)
    assert [row["id"] for row in found] == ["99999", "100000"]

"""Faults of the machine and hostile files, each real: full, read-only and exhausted disks, odd names, bombs, forged models.

docs/reliability.md lists every fault with its promise and its tests; the numbers are those of that list.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

import calibeam
import forked
from calibeam import distributed, recipe, rows, seq2seq, stages, store
from calibeam import parquet as parquet_module
from calibeam.paper.gap_sentences import split_sentences
from calibeam.paper.metrics import has_repetition
from calibeam.records import CalibeamError
from calibeam.stages import finetune, prepare
from conftest import Disk

Make = Callable[..., Path]


@pytest.fixture
def limit() -> Iterator[Callable[[int, int], None]]:
    """Limits of this process, until the test ends."""
    before: dict[int, tuple[int, int]] = {}

    def set_limit(what: int, most: int) -> None:
        before[what] = resource.getrlimit(what)
        resource.setrlimit(what, (most, before[what][1]))

    yield set_limit
    for what, values in before.items():
        resource.setrlimit(what, values)


@pytest.fixture
def data(tmp_path: Path, rows_file: Make) -> Path:
    return prepared(tmp_path / "data", rows_file)


def prepared(output: Path, rows_file: Make, count: int = 8, **settings: Any) -> Path:
    file = str(rows_file("rows.jsonl", count))
    return prepare.run(prepare.Config(output=str(output), train=file, validation=file, **settings))


TUNED: dict[str, Any] = {
    "batch_size": 4, "max_steps": 2, "eval_steps": 1, "max_source_length": 24, "max_target_length": 8, "device": "cpu",
}  # fmt: skip


def tune(data: Path, model: Path, output: Path, **more: Any) -> Path:
    return finetune.run(finetune.Config(data=str(data), model=str(model), output=str(output), **TUNED, **more))


def complaint(run: Callable[[], Any]) -> str:
    """What a function has against what it is given, if anything."""
    try:
        run()
    except CalibeamError as error:
        return str(error)
    return ""


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != store.MANIFEST)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


# Disks


def test_fault_05_training_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    disk: Disk, tmp_path: Path, data: Path, model_folder: Make
) -> None:
    """Too small for the weights, then for a checkpoint beside them, then large enough."""
    model = model_folder("t5")
    size = sum(file.stat().st_size for file in model.iterdir())
    for room, message in ((size // 2, "No space left on device"), (2 * size, r"needs [\d,]+ bytes, and [\d,]+ are free")):
        place = disk(f"size={room}")
        with pytest.raises(CalibeamError, match=message):
            tune(data, model, place / "out")
        assert not (place / "out").exists()
    disk(f"size={20 * size}")
    assert contents(tune(data, model, place / "out")) == contents(tune(data, model, tmp_path / "whole"))


def test_fault_05_a_table_that_does_not_fit_leaves_what_was_there(disk: Disk, rows_file: Make) -> None:
    place = disk("size=600k")
    before, train = contents(prepared(place / "out", rows_file)), str(rows_file("rows.jsonl", 8))
    with pytest.raises(CalibeamError, match=r"out cannot be written: No space left on device \([\d,]+ bytes are free there\)"):
        prepare.run(prepare.Config(output=str(place / "out"), train=str(wide(rows_file)), validation=train), force=True)
    assert contents(store.read(place / "out", "prepare").path) == before


def test_fault_05_a_page_that_does_not_fit_leaves_what_was_there(disk: Disk) -> None:
    page = disk("size=16k") / "report.html"
    store.write_page(page, "before")
    with pytest.raises(CalibeamError, match=r"report\.html cannot be written: No space left on device"):
        store.write_page(page, "x" * 20_000)
    assert [file.read_text() for file in page.parent.iterdir()] == ["before"]


@pytest.mark.parametrize("fault", ["something in its place", "a full disk"])
def test_fault_19_a_tracker_that_fails_is_left_out_and_training_goes_on(
    fault: str, tmp_path: Path, data: Path, model_folder: Make, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = model_folder("t5"), tmp_path / "run"
    run.mkdir()
    if fault == "a full disk":
        place = disk("size=4k")
        (run / "runs").symlink_to(place)
        (place / "full").write_bytes(bytes(4096))
    else:
        (run / "runs").write_text("no folder")
    told = contents(tune(data, model, run / "out", report_to=("tensorboard",)))
    assert "tensorboard failed and gets no more figures" in capsys.readouterr().out
    assert told == contents(tune(data, model, tmp_path / "whole"))


def wide(rows_file: Make) -> Path:
    """Rows that no compression makes small."""
    file = rows_file("wide.jsonl", 4)
    lines = [{"source": os.urandom(300_000).hex(), "target": "t"} for _ in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_fault_05_a_file_beyond_the_limit_is_said_so(tmp_path: Path, rows_file: Make, limit: Any) -> None:
    """Where no disk can be mounted: the system refuses to let a file grow."""
    file = wide(rows_file)
    rows_file("rows.jsonl", 4)
    limit(resource.RLIMIT_FSIZE, 300_000)
    with pytest.raises(CalibeamError, match="out cannot be written: File too large"):
        prepare.run(prepare.Config(output=str(tmp_path / "out"), train=str(file), validation=str(tmp_path / "rows.jsonl")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("options", "message"), [
    ("ro", "Read-only file system"), ("nr_inodes=3", "No space left on device"),
])  # fmt: skip
def test_fault_06_a_disk_without_leave_or_inodes_is_said_so(options: str, message: str, disk: Disk, rows_file: Make) -> None:
    place = disk(options)
    with pytest.raises(CalibeamError, match=message):
        prepared(place / "out", rows_file)
    assert not (place / "out").exists()


def without_leave(train: str, closed: str, page: str) -> None:
    """As a user who may not do what is asked; what is imported later is not theirs to read either."""

    for module in ("decode", "prepare", "evaluate"):
        stages.load(module)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    for output, file in ((f"{closed}/out", train), (f"{closed}/deep/out", train), ("/dev/shm/out", f"{closed}/secret.jsonl")):
        print(complaint(lambda: prepare.run(prepare.Config(output=output, train=file, validation=train))))  # noqa: B023
    print(complaint(lambda: store.write_page(Path(page), "page")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_fault_06_without_leave_to_write_or_read_the_error_says_so(tmp_path: Path, rows_file: Make) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        place = Path(open_to_all)
        place.chmod(0o755)
        train = shutil.copy(rows_file("rows.jsonl", 8), place)
        (place / "secret.jsonl").touch(0o600)
        with forked.Process(tmp_path, without_leave, train, str(place), str(place / "report.html")) as process:
            assert process.end(60) == 0, process.said()
        said = process.said()[0].splitlines()
        assert len(said) == 4
        wanted = ("out cannot be", "deep/out cannot be created", "secret.jsonl cannot be read", "report.html cannot")
        for line, what in zip(said, wanted, strict=True):
            assert what in line
            assert "Permission denied" in line
        assert sorted(file.name for file in place.iterdir()) == ["rows.jsonl", "secret.jsonl"]


def test_fault_20_without_file_handles_the_error_says_so(tmp_path: Path, data: Path, limit: Any) -> None:
    store.read(data, "prepare").examples("train")  # what is imported on the way needs handles too
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    limit(resource.RLIMIT_NOFILE, highest + 1)
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        with pytest.raises(CalibeamError, match="Too many open files"):
            prepare.run(prepare.Config(output=str(tmp_path / "out"), train=str(tmp_path / "rows.jsonl"), validation="x.jsonl"))
    finally:
        for handle in taken:
            os.close(handle)


def test_fault_20_without_shared_memory_the_error_says_so(tmp_path: Path) -> None:
    """Worker processes take their locks from it."""
    line = f"{sys.executable} -m calibeam prepare output={tmp_path / 'out'} task=docstrings"
    script = f"mount -t tmpfs -o size=4k,nr_inodes=2 tmpfs /dev/shm || exit 77; {line}"
    environment = {**os.environ, "PYTHONPATH": str(Path(calibeam.__file__).parents[1])}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment)  # noqa: S603, S607
    if done.returncode in (1, 77):
        pytest.skip(f"/dev/shm cannot be changed here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert "and /dev/shm, which worker processes need a little of, is full" in " ".join(done.stderr.split())


# Processes that train together


def dying(rank: int, *line: str) -> None:
    """The command line; one of several processes is killed in its second step, while the others wait for its sums."""
    add_up, calls = distributed.add_up, itertools.count(1)

    def killed(tensors: Any) -> None:
        if distributed.rank() == rank and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        add_up(tensors)

    distributed.add_up = killed
    forked.command(*line)


@pytest.mark.parametrize("victim", [1, 0])
def test_fault_07_a_process_that_dies_in_a_sum_ends_the_others_and_what_was_saved_is_kept(
    victim: int, tmp_path: Path, data: Path, model_folder: Make
) -> None:
    """Also the first, with which the store goes where all say things to each other."""
    output, model = tmp_path / "out", model_folder("t5")
    settings = {**TUNED, "data": data, "model": model, "output": output, "micro_batch_size": 2}
    line = ["finetune", *(f"{key}={value}" for key, value in settings.items())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with ExitStack() as stack:
        processes = []
        for rank in ("0", "1"):
            (tmp_path / rank).mkdir()
            environment = {**os.environ, **together, "RANK": rank, "LOCAL_RANK": rank}
            process = forked.Process(tmp_path / rank, dying, victim, *line, environment=environment)
            processes.append(stack.enter_context(process))
        assert processes[victim].end() == -signal.SIGKILL
        assert processes[1 - victim].end(60) == 2
        said = processes[1 - victim].said()[1]
    assert f"\nerror: finetune: process {1 - victim} of 2 has lost touch with another one, which has died" in f"\n{said}"
    assert "Traceback" not in said
    assert [file.name for file in (tmp_path / ".out.partial").glob("checkpoint-*")] == ["checkpoint-000000001.safetensors"]
    log = [json.loads(record) for record in (tune(data, model, output) / "log.jsonl").open()]
    assert [record["step"] for record in log if "train" in record] == [1, 2]


# Names


@pytest.mark.parametrize(
    "name", ["with space", "-rf", "naïve 日本語 🦊", "a'b\"c$(touch x)`;&", ".hidden", "new\nline", "x" * 240, "x" * 300]
)
def test_fault_57_odd_names_work_or_are_an_error(name: str, tmp_path: Path, rows_file: Make) -> None:
    said = complaint(lambda: prepared(tmp_path / name, rows_file))
    if len(name) > 255:
        assert "File name too long" in said
    else:
        assert said == ""
        assert len(store.read(tmp_path / name, "prepare").examples("train")) == 8
    assert not (tmp_path / "x").exists()


# Files of rows


def test_fault_49_a_parquet_file_that_repeats_a_huge_text_is_read_in_little_memory(tmp_path: Path) -> None:
    """8 KB that say: 100,000 times 8 MiB."""
    text = pa.array(["x" * (1 << 23)])
    table = pa.table({"source": pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), text)})
    file = tmp_path / "bomb.parquet"
    pq.write_table(table, file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 20_000
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CalibeamError, match=r"bomb\.parquet expands to more than 100 times its size"):
        list(rows.read(str(file)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert time.process_time() - started < 20


def named_often(text: str | bytes, times: int) -> pa.Array:
    """One text, which a dictionary holds once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([text]))


MUCH = "x" * (1 << 18)
DELTAS = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
BOMBS = {
    "a list": (
        lambda: pa.ListArray.from_arrays(pa.array([0, 1000], pa.int32()), named_often(MUCH, 1000)), {}, "a row is more than",
    ),
    "bytes": (lambda: named_often(MUCH.encode(), 1000), {}, "expands to more than"),
    "a field": (lambda: pa.StructArray.from_arrays([named_often(MUCH, 1000)], ["inner"]), {}, "expands to more than"),
    "like the one before": (lambda: pa.array([MUCH] * 200), DELTAS, "expands to more than"),
    "a list of such": (lambda: pa.array([[MUCH] * 100] * 2), DELTAS, "column source.list.element may expand without end"),
    "a list of nothing": (
        lambda: pa.ListArray.from_arrays(pa.array([0, 1 << 21], pa.int32()), pa.nulls(1 << 21, pa.string())), {},
        "1 rows claim to have 2,097,152 values",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("column", "how", "said"), BOMBS.values(), ids=BOMBS)
def test_fault_49_whatever_a_parquet_file_repeats_is_refused_in_little_memory(
    column: Callable[[], pa.Array], how: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte that says: 50 to 250 MB, where a sixteenth of what is allowed by default is."""
    monkeypatch.setattr(rows, "LEAST_EXPANSION", 1 << 24)
    monkeypatch.setattr(parquet_module, "BATCH", 1 << 22)
    monkeypatch.setattr(parquet_module, "MOST_VALUES", 1 << 20)
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"source": column()}), file, compression="zstd", store_schema=False, **how)
    assert file.stat().st_size < 1 << 12
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert said in complaint(lambda: list(rows.read(str(file))))
        assert pool.max_memory() + tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_honest_parquet_files_are_read_whatever_their_encoding(encoding: str, version: str, tmp_path: Path) -> None:
    table = pa.table({
        "source": [f"a text, number {number}" for number in range(3000)],
        "targets": [[f"one of {number}", "two"][: number % 3] for number in range(3000)],
        "more": pa.array([[("a key", f"{number}")] for number in range(3000)], pa.map_(pa.string(), pa.string())),
        "inner": [{"name": "same", "bytes": b"\xff", "tokens": [number, 7]} for number in range(3000)],
    })  # fmt: skip
    for how in ({"use_dictionary": True}, {"use_dictionary": False, "column_encoding": {"source": encoding}}):
        pq.write_table(table, tmp_path / "x.parquet", data_page_version=version, row_group_size=1100, **how)
        assert list(rows.read(str(tmp_path / "x.parquet"))) == table.to_pylist()


def thrift(*fields: tuple[int, tuple[int, bytes]]) -> tuple[int, bytes]:
    """A struct in Thrift's compact form; every value comes with its type."""
    numbers = itertools.pairwise([0, *(number for number, _ in fields)])
    parts = (_number(*steps, kind) + content for steps, (_, (kind, content)) in zip(numbers, fields, strict=True))
    return 12, b"".join(parts) + b"\0"


def _number(before: int, number: int, kind: int) -> bytes:
    return bytes([number - before << 4 | kind]) if number > before else bytes([kind]) + varint(2 * number)


def whole(number: int) -> tuple[int, bytes]:
    return 6, varint(2 * number)


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def word(text: bytes) -> tuple[int, bytes]:
    return 8, varint(len(text)) + text


def several(*items: tuple[int, bytes]) -> tuple[int, bytes]:
    return 9, bytes([len(items) << 4 | items[0][0]]) + b"".join(content for _, content in items)


def small(number: int) -> tuple[int, bytes]:
    return 5, varint(2 * number)


def data_page(values: int) -> tuple[int, tuple[int, bytes]]:
    return 5, thrift((1, small(values)), (2, small(0)), (3, small(3)), (4, small(3)))


def dictionary_page(values: int) -> tuple[int, tuple[int, bytes]]:
    return 7, thrift((1, small(values)), (2, small(0)))


Field = tuple[int, tuple[int, bytes]]


def parquet(content: bytes, kind: Field, *more: Field, rows: int = 1, size: int | None = None) -> bytes:
    """A file of one page in one column, which says of itself what it is told to say; its contents are compressed by zstd."""
    packed = pa.compress(content, codec="zstd", asbytes=True)
    claimed = len(content) if size is None else size
    header = thrift((1, small(2 if kind[0] == 7 else 0)), (2, small(claimed)), (3, small(len(packed))), kind)
    body = header[1] + packed
    places = [(9, whole(4))] if kind[0] == 5 else [(9, whole(4 + len(body))), (11, whole(4))]
    about = thrift(
        (1, small(6)), (2, several(small(0))), (3, several(word(b"source"))), (4, small(6)), (5, whole(rows)),
        (6, whole(100)), (7, whole(len(body))), *places, *more,
    )  # fmt: skip
    group = thrift((1, several(thrift((2, whole(4)), (3, about)))), (2, whole(100)), (3, whole(rows)))
    column = thrift((1, small(6)), (3, small(0)), (4, word(b"source")), (6, small(0)))
    schema = several(thrift((4, word(b"schema")), (5, small(1))), column)
    footer = thrift((1, small(1)), (2, schema), (3, whole(rows)), (4, several(group)))[1]
    return b"PAR1" + body + footer + struct.pack("<I", len(footer)) + b"PAR1"


HELLO = struct.pack("<I", 5) + b"hello"
LYING = {
    "a trillion rows": (parquet(HELLO, data_page(1), rows=10**12), "group 0 claims 1,000,000,000,000 rows and has 999"),
    "a page of 2 GiB": (parquet(HELLO, data_page(1), size=2**31 - 1), "claims to be 2,147,483,647"),
    "a dictionary of 2 GiB": (parquet(HELLO, dictionary_page(1), size=2**31 - 1), "claims to be 2,147,483,647, of 1 values"),
    "2^31 texts in 9 bytes": (parquet(HELLO, dictionary_page(2**31 - 1)), "claims to be 9, of 2,147,483,647 values"),
    "zeros": (parquet(bytes(1 << 27), dictionary_page(1 << 25)), "claims to be 134,217,728, of 33,554,432 values"),
    "a histogram of another column": (
        parquet(HELLO, data_page(1), (16, thrift((3, several(whole(1), whole(1)))))),
        "histogram size mismatch",
    ),  # at which pyarrow itself ends the process, asked in another way
    "a list without end": (parquet(HELLO, data_page(1), (16, (9, b"\xf1" + varint(1 << 60)))), "a header holds too long a list"),
    "a list for a place": (parquet(HELLO, data_page(1), (11, several(small(1)))), "lacks what every one has"),
    "bytes without end": (parquet(HELLO, data_page(1), (16, (8, varint(1 << 62)))), "a header is cut off"),
    "two places": (parquet(HELLO, data_page(1), (9, whole(4))), "a header says one thing twice"),
    "no page at all": (parquet(HELLO, (5, (12, b"\xff" * 99))), "a header holds what none does"),
}


def test_fault_49_the_parquet_files_forged_here_are_read_where_they_do_not_lie(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(parquet(3 * HELLO, data_page(3), rows=3))
    assert list(rows.read(str(tmp_path / "x.parquet"))) == [{"source": "hello"}] * 3


@pytest.mark.parametrize(("content", "said"), LYING.values(), ids=LYING)
def test_fault_49_a_parquet_file_that_lies_about_its_size_is_refused_on_its_word(
    content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "lying.parquet"
    file.write_bytes(content)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert said in complaint(lambda: list(rows.read(str(file))))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # KiB
    assert time.process_time() - started < 3


def test_fault_49_a_parquet_file_of_a_great_many_rows_of_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LEAST_EXPANSION", 1 << 20)
    file = tmp_path / "nothing.parquet"
    pq.write_table(pa.table({"source": pa.nulls(1_000_000, pa.string())}), file)
    with pytest.raises(CalibeamError, match="expands to more than 100 times its size"):
        list(rows.read(str(file)))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_fault_49_a_compressed_bomb_ends(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LEAST_EXPANSION", 1 << 20)
    file = tmp_path / f"bomb.jsonl{ending}"
    content = b'{"source": "s", "target": "t"}\n' * 300_000
    if ending == ".zst":
        file.write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    else:
        import gzip
        import lzma

        file.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}[ending](content))
    with pytest.raises(CalibeamError, match="expands to more than 100 times its size"):
        list(rows.read(str(file)))


# Recipes

HOSTILE_TOML = {
    "nested": "a = " + "[" * 30_000 + "]" * 30_000,
    "dotted": "a" + ".a" * 30_000 + " = 1",
    "long": "a = 1\n" * 100_000,
    "tags": "a = !!python/object/apply:os.system ['touch it-ran']",
    "digits": "a = " + "1" * 90_000,
}


@pytest.mark.parametrize("text", HOSTILE_TOML.values(), ids=HOSTILE_TOML)
def test_fault_51_hostile_recipes_are_refused_in_little_time(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    started = time.process_time()
    said = complaint(lambda: recipe.read(tmp_path / "recipe.toml"))
    assert "recipe.toml is no" in said
    assert time.process_time() - started < 2
    assert not (tmp_path / "it-ran").exists()


# Text


def square_free(words: int) -> str:
    """Of three words, none of which any sequence is followed by itself."""
    text = "a"
    while len(text) < words:
        text = text.translate({97: "abc", 98: "ac", 99: "b"})
    return " ".join(text[:words])


def least_seconds(function: Callable[[], Any]) -> float:
    """Of a core, of up to three tries, as other work on a machine makes some of them slow."""
    found = []
    for _ in range(3):
        started = time.process_time()
        function()
        found.append(time.process_time() - started)
        if found[-1] < 1:
            break
    return min(found)


LONG = {
    "distinct words": (" ".join(map(str, range(150_000))), False),
    "square-free": (square_free(500_000), False),
    "one repetition of half of it": (f"{square_free(250_000)} {square_free(250_000)}", True),
}


@pytest.mark.parametrize(("text", "expected"), LONG.values(), ids=LONG)
def test_fault_53_repetitions_of_a_megabyte_are_found_within_a_second(text: str, expected: bool) -> None:
    assert has_repetition(text) == expected
    assert least_seconds(lambda: has_repetition(text)) < 1


@pytest.mark.parametrize("piece", [".", ". ", "A. ", "\n", ".)]» ", "... x"])
def test_fault_53_a_megabyte_is_split_into_sentences_within_a_second(piece: str) -> None:
    assert least_seconds(lambda: split_sentences(piece * (1_000_000 // len(piece)))) < 1


# Models


EVIL = "from pathlib import Path\nPath({place!r}).touch()\nclass Evil:\n    pass\n"


@pytest.mark.parametrize("kind", ["config", "unknown type", "tokenizer", "generate"])
def test_fault_47_the_code_of_a_model_is_never_run(kind: str, tmp_path: Path, model_folder: Make) -> None:
    folder, ran = model_folder("t5"), tmp_path / "it-ran"
    evil = EVIL.format(place=str(ran))
    (folder / "evil.py").write_text(evil)
    if kind == "generate":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(evil)
    else:
        file = folder / ("tokenizer_config.json" if kind == "tokenizer" else "config.json")
        facts = json.loads(file.read_text())
        parts = ("AutoConfig", "AutoModelForSeq2SeqLM", "AutoModel") if kind != "tokenizer" else ("AutoTokenizer",)
        facts["auto_map"] = {part: "evil.Evil" if kind != "tokenizer" else ["evil.Evil", "evil.Evil"] for part in parts}
        facts |= {"model_type": "evil"} if kind == "unknown type" else {}
        facts |= {"tokenizer_class": "Evil"} if kind == "tokenizer" else {}
        file.write_text(json.dumps(facts))
    assert complaint(lambda: seq2seq.load(folder, device="cpu")) == "" or kind != "config"
    assert not ran.exists()


def forged(header: dict[str, Any], data: bytes = b"", size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FORGED = {
    "a header of 2^63 bytes": (forged({}, size=1 << 63), "claims to have 9,223,372,036,854,775,808 bytes"),
    "a header of 100 MB": (forged({"a" * (100 << 20): ONE}, bytes(4)), "claims to have 104,857,6.. bytes"),
    "a header cut off": (forged({"a": ONE}, size=1000), "does not load"),
    "overlapping": (forged({"a": ONE, "b": ONE}, bytes(4)), "does not load"),
    "beyond the end": (forged({"a": {**ONE, "data_offsets": [0, 400]}}, bytes(4)), "does not load"),
    "backwards": (forged({"a": {**ONE, "data_offsets": [4, 0]}}, bytes(4)), "does not load"),
    "the wrong size": (forged({"a": {**ONE, "shape": [1 << 40]}}, bytes(4)), "does not load"),
    "an unknown type": (forged({"a": {**ONE, "dtype": "PICKLE"}}, bytes(4)), "does not load"),
    "nothing": (b"", "header of .* is damaged"),
    "no json": (struct.pack("<Q", 8) + b"\xff" * 8, "header of .* is damaged"),
}


@pytest.mark.parametrize(("content", "said"), FORGED.values(), ids=FORGED)
def test_fault_50_forged_safetensors_are_refused(content: bytes, said: str, model_folder: Make) -> None:
    folder = model_folder("t5")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CalibeamError, match=said):
        seq2seq.load(folder, device="cpu")


def test_fault_50_a_tensor_that_is_there_twice_is_refused(model_folder: Make) -> None:
    """The model's own weights, but that one of them stands in the header twice."""
    file = model_folder("t5") / "model.safetensors"
    content = file.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    (name, facts), *_ = [item for item in json.loads(content[8:size]).items() if item[0] != "__metadata__"]
    header = f"{{{json.dumps(name)}: {json.dumps(facts)}, ".encode() + content[9:size]
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[size:])
    with safe_open(file, framework="pt") as opened:
        assert name in opened.keys()  # noqa: SIM118 (it is no dict)
    with pytest.raises(CalibeamError, match="a name stands there twice"):
        seq2seq.load(file.parent, device="cpu")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "sub/model.safetensors"])
def test_fault_48_an_index_of_weights_cannot_name_files_elsewhere(name: str, tmp_path: Path, model_folder: Make) -> None:
    folder = model_folder("t5")
    (tmp_path / "other").mkdir()
    weights = {key: value.clone() for key, value in seq2seq.load(folder, device="cpu").model.state_dict().items()}
    save_file(weights, tmp_path / "other" / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}))
    with pytest.raises(CalibeamError, match=r"index\.json names a file outside its folder: "):
        seq2seq.load(folder, device="cpu")
    index.write_text("[1]")
    with pytest.raises(CalibeamError, match=r"index\.json is not an index of weights"):
        seq2seq.load(folder, device="cpu")


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 64, os.urandom(4096), b'{"version": "1.0", "model": {"type": "BPE"}}', b"[" * 10_000]
)
def test_fault_55_a_tokenizer_of_garbage_is_an_error(content: bytes, model_folder: Make) -> None:
    folder = model_folder("t5")
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CalibeamError, match=r"the tokenizer in .* does not"):
        seq2seq.load(folder, device="cpu")
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(content)
    with pytest.raises(CalibeamError, match=r"the tokenizer in .* does not"):
        seq2seq.load(folder, device="cpu")

"""decode on its way to disk: shards that are written once, whatever happens in between."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import forked
from calibeam import display, seq2seq, store
from calibeam.engine import search
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq
from calibeam.stages import decode, score
from conftest import prepared, sentence, tiny_model

COUNT, SIZE = 14, 4
SHARDS = [f"candidates-0000{shard}.parquet" for shard in range(4)]
SETTINGS: dict[str, Any] = {
    "method": "nucleus", "top_p": 0.5, "num_candidates": 4, "max_new_tokens": 6, "max_source_length": 20, "seed": 3,
    "batch_size": 1, "device": "cpu",
}  # fmt: skip
Config = Callable[..., decode.Config]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    """Prepared rows, some of them too long, and a model that ends some outputs early."""
    folder = tmp_path_factory.mktemp("decode")
    data = prepared(folder, COUNT, words=2)
    model = tiny_model("bart", 4, len(tokenizer))
    model.final_logits_bias[0, tokenizer.eos_token_id] = 5.0
    seq2seq.save(Seq2Seq(model, tokenizer), folder / "model")
    return {"data": data, "model": str(folder / "model")}


@pytest.fixture
def config(tmp_path: Path, places: dict[str, str]) -> Config:
    def make(name: str = "out", **settings: Any) -> decode.Config:
        return decode.Config(output=str(tmp_path / name), **places, **SETTINGS | settings)

    return make


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.shards, "SIZE", SIZE)
        yield


@pytest.fixture(scope="module")
def undisturbed(places: dict[str, str]) -> Path:
    return decode.run(decode.Config(output=str(Path(places["data"]).with_name("undisturbed")), **places, **SETTINGS))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return store.read(folder, "decode").rows("candidates", store.CANDIDATES)


def counts(folder: Path) -> dict[str, Any]:
    return store.read(folder, "decode").manifest["counts"]


def marks(folder: Path, *names: str) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again."""
    return {name: ((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in names}


def partial(config: decode.Config) -> Path:
    return Path(config.output).with_name(f".{Path(config.output).name}.partial")


def shards(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("candidates-*.parquet"))


def interrupt(config: decode.Config, after: int, error: type[BaseException] = KeyboardInterrupt) -> Path:
    """Run until so many sources are done, and stop there, the last of them in no shard yet. The folder that is left."""
    advance, calls = display.Bar.advance, itertools.count(1)

    def failing(bar: display.Bar, *given: Any) -> None:
        advance(bar, *given)
        if next(calls) == after:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display.Bar, "advance", failing)
        with pytest.raises(error):
            decode.run(config)
    assert not Path(config.output).exists()
    return partial(config)


def check_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same but for rounding, which depends on the size of batches."""
    assert [{**row, "log_p": None} for row in found] == [{**row, "log_p": None} for row in expected]
    assert [row["log_p"] for row in found] == [pytest.approx(row["log_p"], abs=1e-4) for row in expected]


def check_is(folder: Path, undisturbed: Path) -> None:
    check_rows(rows_of(folder), rows_of(undisturbed))
    assert counts(folder) == counts(undisturbed)
    assert {file.name for file in folder.iterdir()} == {*SHARDS, store.MANIFEST}
    assert not folder.with_name(f".{folder.name}.partial").exists()


def test_rows_are_in_the_order_of_the_examples_with_method_and_seed(places: dict[str, str], undisturbed: Path) -> None:
    rows = rows_of(undisturbed)
    assert shards(undisturbed) == SHARDS
    assert [row["id"] for row in rows] == [example.id for example in store.read(places["data"], "prepare").examples("train")]
    assert {(row["method"], row["seed"]) for row in rows} == {("nucleus", 3)}
    assert len({len(token_ids) for row in rows for token_ids in row["token_ids"]}) > 2
    found = counts(undisturbed)
    assert found["sources"] == COUNT
    assert 0 < found["sources_cut"] < COUNT
    assert found["candidates"] == sum(len(row["log_p"]) for row in rows)
    assert found["merged_duplicates"] == 4 * COUNT - found["candidates"] > 0


def held_up(settings: dict[str, Any]) -> None:
    """A run that goes no further in the middle of its third shard."""
    advance, calls = display.Bar.advance, iter(range(9))

    def stay(bar: Any, *given: Any) -> None:
        advance(bar, *given)
        if next(calls, None) is None:
            time.sleep(600)

    display.Bar.advance = stay  # type: ignore[method-assign]
    decode.shards.SIZE = SIZE
    decode.run(decode.Config(**settings))


def test_fault_01_a_killed_run_goes_on_where_it_stopped(config: Config, undisturbed: Path, tmp_path: Path) -> None:
    killed = config()
    with forked.Process(tmp_path, held_up, killed.resolved()) as child:
        child.wait_until(lambda: shards(partial(killed)) == SHARDS[:2])
        child.signal(signal.SIGKILL)
        assert child.end() == -signal.SIGKILL
    assert not Path(killed.output).exists()
    before = marks(partial(killed), *SHARDS[:2])
    folder = decode.run(killed)
    assert marks(folder, *SHARDS[:2]) == before
    check_is(folder, undisturbed)


@pytest.mark.parametrize(("after", "batch_size", "error"), [
    (1, 1, KeyboardInterrupt), (6, 1, RuntimeError), (COUNT, 1, KeyboardInterrupt), (6, 5, KeyboardInterrupt),
])  # fmt: skip
def test_an_interrupted_run_goes_on_where_it_stopped(
    after: int, batch_size: int, error: type[BaseException], config: Config, undisturbed: Path
) -> None:
    left = interrupt(config(batch_size=batch_size), after, error)
    whole = shards(left)
    if batch_size == 1:
        assert whole == SHARDS[: (after - 1) // SIZE]
    before = marks(left, *whole)
    folder = decode.run(config(batch_size=batch_size))
    assert marks(folder, *whole) == before
    check_is(folder, undisturbed)


def test_a_run_may_be_interrupted_again_and_again(config: Config, undisturbed: Path) -> None:
    """Every run adds a shard."""
    for done in range(3):
        assert shards(interrupt(config(), SIZE + 1)) == SHARDS[: done + 1]
    check_is(decode.run(config()), undisturbed)


def recount(shard: Path) -> None:
    """Whole, but for what it says of itself."""
    table = pq.read_table(shard)
    told = {store.FACTS: table.schema.metadata[store.FACTS].replace(b'"sources": 4', b'"sources": 5')}
    pq.write_table(table.replace_schema_metadata(told), shard)


DAMAGE: dict[str, Callable[[Path, Path], Any]] = {
    "truncated": lambda shard, other: os.truncate(shard, shard.stat().st_size // 2),
    "without its last byte": lambda shard, other: os.truncate(shard, shard.stat().st_size - 1),
    "with another count": lambda shard, other: recount(shard),
    "rows of another shard": lambda shard, other: shard.write_bytes(other.read_bytes()),
    "missing": lambda shard, other: shard.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_fault_17_a_shard_that_is_not_whole_is_made_again(
    damage: Callable[[Path, Path], Any], config: Config, undisturbed: Path
) -> None:
    left = interrupt(config(), after=9)
    damage(left / SHARDS[0], left / SHARDS[1])
    before = marks(left, SHARDS[1])
    folder = decode.run(config())
    assert marks(folder, SHARDS[1]) == before
    check_is(folder, undisturbed)


def test_a_shard_half_written_at_the_end_of_a_run_is_not_taken_along(config: Config, undisturbed: Path) -> None:
    left = interrupt(config(), after=6)
    for name in (".candidates-00001.partial", ".tmpr1p4dG"):  # the second as safetensors would
        (left / name).write_bytes((left / SHARDS[0]).read_bytes()[:100])
    check_is(decode.run(config()), undisturbed)


@pytest.mark.parametrize("other", [{"seed": 4}, {"max_source_length": 19}])
def test_fault_15_what_a_run_with_other_settings_left_is_refused_and_thrown_away_when_forced(
    other: dict[str, Any], config: Config, undisturbed: Path
) -> None:
    left = interrupt(config(**other), after=COUNT)
    (left / "candidates-00009.parquet").write_bytes((left / SHARDS[0]).read_bytes())
    assert shards(left)[:3] == SHARDS[:3]
    (key, value), now = *other.items(), SETTINGS[next(iter(other))]
    message = rf"by a run that was interrupted, with other .* or versions:\n  settings\.{key}: {value} before, {now} now\n--force"
    with pytest.raises(CalibeamError, match=message):
        decode.run(config())
    assert shards(left)[:3] == SHARDS[:3]
    check_is(decode.run(config(), force=True), undisturbed)


def test_settings_that_change_no_output_do_not_stop_a_run_from_going_on(config: Config, undisturbed: Path) -> None:
    left = interrupt(config(), after=6)
    before = marks(left, SHARDS[0])
    folder = decode.run(config(batch_size=3))
    assert marks(folder, SHARDS[0]) == before
    check_is(folder, undisturbed)


def test_shards_of_another_size_are_not_taken_along(config: Config, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version may have written them: 6 of 2 sources each, where 4 are wanted of 4 each."""
    monkeypatch.setattr(decode.shards, "SIZE", 2)
    assert len(shards(interrupt(config(), after=COUNT))) == 6
    monkeypatch.setattr(decode.shards, "SIZE", SIZE)
    check_is(decode.run(config()), undisturbed)


@pytest.mark.parametrize(("place", "name"), [(store, "_json"), (store.Output, "_put_in_place")])
def test_fault_05_an_error_while_the_folder_is_finished_keeps_the_shards(
    place: Any, name: str, config: Config, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are read once more for their SHA-256, and a disk may be full by then; before there is a manifest, and after."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(place, name, full)
        with pytest.raises(CalibeamError, match="No space left on device"):
            decode.run(config())
    before = marks(partial(config()), *SHARDS)
    folder = decode.run(config())
    assert marks(folder, *SHARDS) == before
    check_is(folder, undisturbed)


def test_samples_are_the_same_in_batches_of_any_size(config: Config, undisturbed: Path) -> None:
    """1, as it was undisturbed, 3 and 16."""
    for size in (3, 16):
        check_is(decode.run(config(f"by-{size}", batch_size=size)), undisturbed)


def test_other_stages_read_all_shards_in_their_order(
    places: dict[str, str], config: Config, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same from one shard, from 4, and from 14, whose numbers have one digit or two."""
    similarities = []
    for size in (1, SIZE, 1024):
        monkeypatch.setattr(decode.shards, "SIZE", size)
        candidates = decode.run(config(f"shards-of-{size}"))
        assert len(shards(candidates)) == -(-COUNT // size)
        check_rows(rows_of(candidates), rows_of(undisturbed))
        monkeypatch.setattr(decode.shards, "SIZE", SIZE)  # scored together as before: rounding depends on that
        output = str(tmp_path / f"score-{size}")
        scored = score.run(score.Config(candidates=str(candidates), output=output, device="cpu", **places))
        similarities.append([row["similarity"] for row in store.read(scored, "score").rows("scored", store.SCORED)])
    assert similarities == [similarities[0]] * 3


@pytest.mark.parametrize("sampled", [False, True])
def test_sources_that_are_alike_are_searched_once(sampled: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for samples, of which each source has its own."""
    tuned = Seq2Seq(tiny_model("bart", 4, len(tokenizer)), tokenizer)
    tokens, _ = tuned.encode_sources([sentence(seed, 6) for seed in (0, 1, 0, 2, 1)], 20)
    sources = [*zip("abcde", tokens, strict=True)]
    searched: list[int] = []

    def watch(task: Any, order: list[int], *others: Any) -> Any:
        searched.extend(order)
        return stream(task, order, *others)

    stream = search.stream
    monkeypatch.setattr(search, "stream", watch)
    settings = {"num_candidates": 3, "max_new_tokens": 6, **({"method": "nucleus", "top_p": 0.9} if sampled else {})}
    how: dict[str, Any] = {"source_length": 20, "seed": 0, "batch_size": 1}
    done: list[int] = []
    found = decode.decode_sources(tuned, sources, settings, lambda: done.append(1), **how)
    assert len(done) == 5
    assert len(searched) == (5 if sampled else 3)
    for source, row in zip(sources, found, strict=True):
        assert row == decode.decode_sources(tuned, [source], settings, lambda: None, **how)[0]
    assert (found[0]["token_ids"] == found[2]["token_ids"]) == (not sampled)

"""Examples of gap-sentence generation from a corpus of any length: made in worker processes, shuffled in a bounded buffer.

What comes out depends on the corpus, the settings and the seed alone, not on the number of workers; and a stream that is given
the position of another goes on as that one does.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np

from calibeam import signals
from calibeam.corpus import CorpusConfig, read
from calibeam.paper.gap_sentences import GAP_SELECTIONS, mask_sentences, mask_tokens, number_of_gaps, split_sentences
from calibeam.records import CalibeamError

CHUNK = 32
"""Documents that a worker takes at a time."""


class Example(NamedTuple):
    """Token ids, each ending with the end token, and the places of those in the source that were masked one by one."""

    name: str
    source: np.ndarray
    target: np.ndarray
    places: np.ndarray
    told: np.ndarray
    """What stood at these places."""


@dataclass(frozen=True)
class Task:
    """How examples are made of a document."""

    tokenizer: str
    """As `tokenizers` writes it down, so that a worker need not import anything larger."""
    eos: int
    mask_sentence: int
    mask_token: int
    ordinary: tuple[int, int]
    """The tokens that may be masked or stand in for others: the first, and one past the last."""
    max_source_length: int
    max_target_length: int
    selection: str
    ratio: float
    highest_ratio: float
    noise: float
    mlm_ratio: float
    seed: int


class Maker:
    """A task at work."""

    def __init__(self, task: Task) -> None:
        from tokenizers import Tokenizer

        self._task, self._tokenizer = task, Tokenizer.from_str(task.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the names of special tokens in text are text

    def __call__(self, epoch: int, documents: Sequence[tuple[int, str | None]]) -> tuple[list[Example], Counter[str]]:
        examples: list[Example] = []
        counts: Counter[str] = Counter()
        for number, text in documents:
            counts["documents" if text is not None else "skipped"] += 1
            if text is not None:
                random = np.random.default_rng((self._task.seed, epoch, number))
                examples += self._examples(f"{epoch}:{number}", text, random, counts)
        counts["examples"] = len(examples)
        return examples, counts

    def _examples(self, name: str, text: str, random: np.random.Generator, counts: Counter[str]) -> Iterator[Example]:
        """A document longer than a source becomes several, of whole sentences each. A sentence that is alone is left out."""
        text = text.strip()
        spans = split_sentences(text)
        if not spans:
            counts["documents_without_sentences"] += 1
            return
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        token_ids, offsets = encoded.ids, encoded.offsets
        ends = [end for _, end in offsets]
        borders = [0, *(bisect_right(ends, end) for _, end in spans)]
        first = 0
        for last in range(1, len(spans) + 1):
            if last == len(spans) or borders[last + 1] - borders[first] >= self._task.max_source_length:
                if last - first < 2:
                    counts["sentences_left_out"] += 1
                else:
                    tokens = slice(borders[first], borders[last])
                    yield self._example(name, text, spans[first:last], token_ids[tokens], offsets[tokens], random, counts)
                first = last

    def _example(
        self,
        name: str,
        text: str,
        spans: list[tuple[int, int]],
        token_ids: list[int],
        offsets: list[tuple[int, int]],
        random: np.random.Generator,
        counts: Counter[str],
    ) -> Example:
        task = self._task
        ratio = random.uniform(task.ratio, task.highest_ratio) if task.highest_ratio > task.ratio else task.ratio
        sentences = [text[start:end] for start, end in spans]
        chosen = GAP_SELECTIONS[task.selection](sentences, number_of_gaps(len(spans), ratio), random, task.noise)
        gaps = [(start - (text[start - 1 : start] == " "), end) for start, end in (spans[index] for index in chosen)]
        source = mask_sentences(token_ids, offsets, gaps, task.mask_sentence)  # with the space before, which some pieces hold
        target = self._tokenizer.encode(" ".join(sentences[index] for index in chosen), add_special_tokens=False).ids
        counts["targets_cut"] += len(target) >= task.max_target_length
        source = [*source[: task.max_source_length - 1], task.eos]
        target = [*target[: task.max_target_length - 1], task.eos]
        masked, places = mask_tokens(source, task.mlm_ratio, random, task.mask_token, range(*task.ordinary))
        told = [source[place] for place in places]
        return Example(name, *(np.array(ids, dtype=np.int32) for ids in (masked, target, places, told)))


class Snapshot(NamedTuple):
    """Where a stream stands: what was read, what waits in the buffer, and the random numbers to come."""

    epoch: int
    documents: int
    random: dict[str, Any]
    counts: dict[str, int]
    waiting: list[Example]
    buffer: list[Example]


class Stream:
    """Batches without end, one made ahead in a thread while the last is trained on. A context manager: it has processes."""

    def __init__(
        self, files: Sequence[str], config: CorpusConfig, task: Task, *, batch_size: int, buffer_size: int, workers: int
    ) -> None:
        self._files, self._config, self._task = files, config, task
        self._batch_size, self._buffer_size, self._workers = batch_size, buffer_size, workers
        self._random = np.random.default_rng(task.seed)
        self._epoch = self._documents = 0
        self._counts: Counter[str] = Counter()
        self._waiting: list[Example] = []
        self._buffer: list[Example] = []
        self._pool: ProcessPoolExecutor | None = None
        self._thread = ThreadPoolExecutor(1, initializer=signals.leave_to_main_thread)
        self._made: Iterator[tuple[int, int, list[Example], Counter[str]]] | None = None
        self._next: Future[tuple[list[Example], Snapshot]] | None = None
        self._closed = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.shutdown(cancel_futures=True)
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def restore(self, snapshot: Snapshot) -> None:
        """Before the first batch."""
        self._epoch, self._documents = snapshot.epoch, snapshot.documents
        self._random.bit_generator.state = snapshot.random
        self._counts = Counter(snapshot.counts)
        self._waiting, self._buffer = [*snapshot.waiting], [*snapshot.buffer]

    def batch(self) -> tuple[list[Example], Snapshot]:
        """The next batch, and where the stream stands after it. A signal ends the wait for the first: nothing is lost."""
        if self._next is None:
            self._next = self._thread.submit(self._batch)
            while wait([self._next], timeout=0.2).not_done:
                signals.heed(signals.asked())
        found = self._next.result()
        self._next = self._thread.submit(self._batch)
        return found

    def _batch(self) -> tuple[list[Example], Snapshot]:
        if self._made is None:
            self._made = self._ordered(self._chunks())
        while len(self._waiting) < self._batch_size:
            self._epoch, self._documents, examples, counts = next(self._made)
            self._counts += counts
            for example in examples:
                if len(self._buffer) < self._buffer_size:
                    self._buffer.append(example)
                else:
                    place = int(self._random.integers(self._buffer_size))
                    self._waiting.append(self._buffer[place])
                    self._buffer[place] = example
        batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        state = dict(self._random.bit_generator.state)
        return batch, Snapshot(self._epoch, self._documents, state, dict(self._counts), [*self._waiting], [*self._buffer])

    def _chunks(self) -> Iterator[tuple[int, list[tuple[int, str | None]]]]:
        """Documents with their numbers, from where the stream stands; the files of every epoch in an order of its own."""
        epoch, done = self._epoch, self._documents
        while True:
            order = np.random.default_rng((self._task.seed, epoch)).permutation(len(self._files))
            number, chunk = 0, []
            for file in (self._files[index] for index in order):
                for text in read(file, self._config):
                    if self._closed:
                        return
                    number += 1
                    if number > done:
                        chunk.append((number, text))
                    if len(chunk) == CHUNK:
                        yield epoch, chunk
                        chunk = []
            if chunk:
                yield epoch, chunk
            if not number:
                raise CalibeamError(f"there is no document in {', '.join(self._files[:3])}")
            epoch, done = epoch + 1, 0

    def _ordered(
        self, chunks: Iterable[tuple[int, list[tuple[int, str | None]]]]
    ) -> Iterator[tuple[int, int, list[Example], Counter[str]]]:
        """The examples of every chunk, in the order of the chunks, whoever makes them."""
        barren = 0
        for epoch, last, examples, counts in self._made_here(chunks) if not self._workers else self._made_elsewhere(chunks):
            barren = 0 if examples else barren + counts["documents"] + counts["skipped"]
            if epoch and barren > last:  # a whole epoch, and more
                raise CalibeamError("no document has two sentences: there is nothing to learn from")
            yield epoch, last, examples, counts

    def _made_here(self, chunks: Iterable[Any]) -> Iterator[tuple[int, int, list[Example], Counter[str]]]:
        make = Maker(self._task)
        for epoch, chunk in chunks:
            yield epoch, chunk[-1][0], *make(epoch, chunk)

    def _made_elsewhere(self, chunks: Iterable[Any]) -> Iterator[tuple[int, int, list[Example], Counter[str]]]:
        self._pool = ProcessPoolExecutor(self._workers, get_context("spawn"), _begin, (self._task,))
        pending: deque[tuple[int, int, Future[Any]]] = deque()
        try:
            for epoch, chunk in chunks:
                pending.append((epoch, chunk[-1][0], self._pool.submit(_make, epoch, chunk)))
                if len(pending) >= 4 * self._workers:
                    first, last, made = pending.popleft()
                    yield first, last, *made.result()
        except BrokenProcessPool:
            raise CalibeamError("a process that prepares data has died; is there too little memory? Try fewer workers") from None


_maker: Maker | None = None


def _begin(task: Task) -> None:
    global _maker
    signals.leave_to_parent()
    _maker = Maker(task)


def _make(epoch: int, chunk: Sequence[tuple[int, str | None]]) -> tuple[list[Example], Counter[str]]:
    assert _maker is not None
    return _maker(epoch, chunk)


def pack(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A snapshot as plain data and arrays."""
    examples = [*snapshot.waiting, *snapshot.buffer]
    facts = {**snapshot._asdict(), "waiting": len(snapshot.waiting), "buffer": [example.name for example in examples]}
    return facts, _columns(examples)


def unpack(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Snapshot:
    examples = _rows(facts["buffer"], arrays)
    waiting = facts["waiting"]
    return Snapshot(**{**facts, "waiting": examples[:waiting], "buffer": examples[waiting:]})


def to_bytes(examples: Sequence[Example]) -> bytes:
    """Examples for another process."""
    file = BytesIO()
    arrays: dict[str, Any] = {"names": np.array([example.name for example in examples]), **_columns(examples)}
    np.savez(file, **arrays)
    return file.getvalue()


def from_bytes(content: bytes) -> list[Example]:
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        return _rows(arrays["names"].tolist(), arrays)


def _columns(examples: Sequence[Example]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for field in Example._fields[1:]:
        rows = [getattr(example, field) for example in examples]
        arrays[f"{field}_lengths"] = np.array([len(row) for row in rows], dtype=np.int64)
        arrays[field] = np.concatenate([np.zeros(0, np.int32), *rows])
    return arrays


def _rows(names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> list[Example]:
    columns = [np.split(arrays[field], np.cumsum(arrays[f"{field}_lengths"])[:-1]) for field in Example._fields[1:]]
    return [Example(*row) for row in zip(names, *columns, strict=False)]


def first_examples(files: Sequence[str], config: CorpusConfig, task: Task, most: int) -> list[Example]:
    """The first examples of some files, always the same."""
    make, examples = Maker(dataclasses.replace(task, mlm_ratio=0.0)), list[Example]()
    for number, text in enumerate((text for file in files for text in read(file, config)), start=1):
        examples += make(0, [(number, text)])[0]
        if most and len(examples) >= most:
            break
    return examples[: most or None]

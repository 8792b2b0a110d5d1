"""The search: beams or samples for every source, by the rules of `paper/decoding.py`.

Every source has a slot. Its state is a row of tensors of fixed shape, so that a step is the same few operations
whatever the sources are up to, and on a GPU one recorded graph. A source leaves when it is done and the
next one takes its slot.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calibeam import families, seq2seq
from calibeam.engine import ops
from calibeam.engine.decoder import Decoder, PlainDecoder
from calibeam.paper.decoding import DECODERS, Search, hamming_penalty, length_normalised
from calibeam.records import Candidates

log = logging.getLogger("calibeam")
NEVER = float("-inf")
CHECK_EVERY = 4  # steps on a GPU between two looks at which sources are done
ROWS = {"cpu": 256, "cuda": 2048}  # that more rows at once would hardly speed up
ENCODE_TOKENS = 1 << 15  # encoded together; more would need memory and gain nothing
MEMORY_SHARE = 0.7  # of what is free, for keys, values and logits

Found = tuple[int, Tensor, Tensor]
"""A source's number, its candidates' token ids [candidates, length] and log P, best first, on the CPU."""


@torch.no_grad()
def decode(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    method: str = "beam",
    num_candidates: int,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    length_alpha: float = 0.0,
    groups: int | None = None,
    diversity: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Candidates:
    """The `num_candidates` best outputs a search finds for every source, best first.

    method: "beam", "diverse_beam" (with `groups` and `diversity`) or "nucleus" (with `top_p`).
    length_alpha: rank outputs by log P / length^alpha; 0, the default, ranks by likelihood.
    generator: for nucleus; one for the batch, or one per source, which makes a source's samples
    independent of its batch mates.

    Beams are distinct; samples are returned as drawn. `log_p` is the plain sum of token log-probs
    whatever was used to rank. Nothing else is applied: penalties, bans and forced tokens in the
    model's generation config are left out, with a note in the log, except the language code that mBART's
    kin must begin with.
    """
    task = Task.of(
        model, method=method, num_candidates=num_candidates, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens,
        length_alpha=length_alpha, groups=groups, diversity=diversity, top_p=top_p,
    )  # fmt: skip
    count = len(input_ids)
    generators = list(generator) if isinstance(generator, Sequence) else [generator] * count
    if len(generators) != count:
        raise ValueError(f"{len(generators)} generators for {count} sources")

    def batch(sources: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(sources, device=input_ids.device)
        return input_ids[index], attention_mask[index]

    noise = [] if task.search.top_p is None else [task.uniform(each, input_ids.device) for each in generators]
    found = {
        number: (tokens, log_p)
        for number, tokens, log_p in stream(task, range(count), count, input_ids.shape[1], batch, noise.__getitem__)
    }
    shape = (count, max(len(log_p) for _, log_p in found.values()))
    token_ids = torch.full((*shape, max(tokens.shape[1] for tokens, _ in found.values())), task.ids.pad)
    every_log_p = torch.full(shape, NEVER)
    for number, (tokens, log_p) in found.items():
        token_ids[number, : tokens.shape[0], : tokens.shape[1]] = tokens
        every_log_p[number, : len(log_p)] = log_p
    return Candidates(token_ids.to(input_ids.device), every_log_p.to(input_ids.device))


@dataclass(frozen=True)
class Task:
    """A model and how to search with it."""

    model: Any
    search: Search
    ids: seq2seq.SpecialIds
    max_new_tokens: int
    min_new_tokens: int
    length_alpha: float

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        method: str = "beam",
        num_candidates: int,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        length_alpha: float = 0.0,
        groups: int | None = None,
        diversity: float = 0.0,
        top_p: float = 1.0,
    ) -> Task:
        if method not in DECODERS:
            raise ValueError(f"method must be one of {', '.join(DECODERS)}, got {method!r}")
        if num_candidates < 1:
            raise ValueError(f"num_candidates must be at least 1, got {num_candidates}")
        if not 0 <= min_new_tokens <= max_new_tokens or max_new_tokens < 1:
            raise ValueError(f"need 0 <= min_new_tokens <= max_new_tokens >= 1, got {min_new_tokens} and {max_new_tokens}")
        search = DECODERS[method](num_candidates, groups, diversity, top_p)
        seq2seq.mention_ignored_heuristics(model)
        return cls(model, search, seq2seq.special_ids(model), max_new_tokens, min_new_tokens, length_alpha)

    @property
    def rows(self) -> int:
        """Outputs under construction for each source."""
        return self.search.groups * self.search.width

    @property
    def identity(self) -> tuple[Any, ...]:
        return (self.search, self.ids, self.max_new_tokens, self.min_new_tokens, self.length_alpha)

    def uniform(self, generator: torch.Generator | None, device: torch.device | None = None) -> Tensor:
        """The random numbers of a source's samples. [samples, steps]"""
        device = generator.device if generator else device
        return torch.rand(self.search.width, self.max_new_tokens, generator=generator, device=device)


@torch.no_grad()
def stream(
    task: Task,
    sources: Iterable[int],
    count: int,
    source_length: int,
    batch: Callable[[Sequence[int]], tuple[Tensor, Tensor]],
    noise: Callable[[int], Tensor],
    slots: int = 0,
) -> Iterator[Found]:
    """Search for the sources with the given numbers, at most `count`; each comes out when it is done.

    source_length: tokens of the longest source.
    batch: the token ids and mask of the sources with the given numbers.
    noise: for samples, the uniform numbers [samples, steps] of a source.
    slots: sources under way at once; 0 to choose by the device's memory. Fewer, if so many do not fit.
    """
    model = task.model
    training = model.training
    model.eval()
    queue, left = _Queue(sources), count
    try:
        while queue:
            bench, anatomy = None, _anatomy(model)
            slots = max(1, min(slots or _fitting_slots(task, anatomy, source_length), left))
            try:
                bench = _bench(task, anatomy, source_length, slots)
                for found in bench.work(model, queue, batch, noise):
                    left -= 1
                    yield found
            except torch.OutOfMemoryError:
                if slots == 1:
                    raise
                if bench:
                    queue.put_back([*bench.under_way.values()])
                log.warning("%d sources at once do not fit into memory: continuing with %d", slots, slots // 2)
                slots //= 2
                bench = _benches.pop(model, None)
                del bench
                torch.cuda.empty_cache()
    finally:
        model.train(training)


class _Queue:
    def __init__(self, sources: Iterable[int]) -> None:
        self._sources = iter(sources)

    def take(self, count: int) -> list[int]:
        return [*itertools.islice(self._sources, count)]

    def put_back(self, sources: list[int]) -> None:
        self._sources = itertools.chain(sources, self._sources)

    def __bool__(self) -> bool:
        first = self.take(1)
        self.put_back(first)
        return bool(first)


_benches: weakref.WeakKeyDictionary[Any, _Bench] = weakref.WeakKeyDictionary()
_fallbacks: weakref.WeakSet[Any] = weakref.WeakSet()


def _anatomy(model: Any) -> families.Anatomy | None:
    """In the type that the search computes in."""
    autocast = torch.is_autocast_enabled(model.device.type)
    anatomy = families.anatomy(model, torch.get_autocast_dtype(model.device.type) if autocast else None)
    if anatomy is not None and all(block.is_plain for block in anatomy.blocks):
        return anatomy
    if model not in _fallbacks:
        _fallbacks.add(model)
        what = "adapters that are not merged, or quantised layers" if anatomy else f"{model.config.model_type} models"
        log.warning("calibeam's fast search does not know %s: using Hugging Face's forward pass", what)
    return None


def _fitting_slots(task: Task, anatomy: families.Anatomy | None, source_length: int) -> int:
    """As many sources at once as are worth while, and as the device's memory is likely to hold."""
    device = task.model.device
    slots = max(1, ROWS.get(device.type, ROWS["cuda"]) // task.rows)
    if anatomy is None or device.type != "cuda":
        return slots
    free, total = torch.cuda.mem_get_info(device)
    own, taken = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    free = min(free + own, int(torch.cuda.get_per_process_memory_fraction(device) * total)) - taken
    each = Decoder.bytes_per_slot(anatomy, task.rows, task.max_new_tokens, source_length)
    each += task.rows * len(anatomy.head_weight) * 8
    return min(slots, max(1, int(MEMORY_SHARE * free) // each))


def _bench(task: Task, anatomy: families.Anatomy | None, source_length: int, slots: int) -> _Bench:
    """A workbench for a task: the model's last one, where it fits, for a recorded graph is worth keeping."""
    model = task.model
    if model.device.type != "cuda" or anatomy is None or torch.is_autocast_enabled("cuda"):
        return _Bench(task, anatomy, slots, source_length)
    key = (task.identity, slots, source_length, tuple(parameter.data_ptr() for parameter in model.parameters()))
    bench = _benches.get(model)
    if bench is None or bench.key != key:
        _benches.pop(model, None)
        del bench
        bench = _benches[model] = _Bench(task, anatomy, slots, source_length, key)
    else:
        bench.refresh()
    return bench


class _Bench:
    """Slots for sources under way, and the step that takes all of them further by one token."""

    def __init__(self, task: Task, anatomy: families.Anatomy | None, slots: int, source_length: int, key: Any = None) -> None:
        self.slots, self.key = slots, key
        self.under_way: dict[int, int] = {}
        """The source in each slot that is taken."""
        self._task = dataclasses.replace(task, model=None)  # a bench must not keep its model alive
        self._device = task.model.device
        self._decoder: Decoder | PlainDecoder = (
            PlainDecoder(task.model, task.rows)
            if anatomy is None
            else Decoder(anatomy, slots, task.rows, task.max_new_tokens, source_length)
        )
        self._state = self._fresh_state()
        self._graph: torch.cuda.CUDAGraph | None = None

    def _fresh_state(self) -> _Beams | _Samples:
        return (_Beams if self._task.search.top_p is None else _Samples)(self._task, self.slots, self._device)

    def refresh(self) -> None:
        """Take over weights that have changed in place."""
        if isinstance(self._decoder, Decoder):
            self._decoder.refresh()

    def work(
        self, model: Any, queue: _Queue, batch: Callable[[Sequence[int]], tuple[Tensor, Tensor]], noise: Callable[[int], Tensor]
    ) -> Iterator[Found]:
        """Take sources from the queue until it is empty; only once where they cannot enter while others are under way."""
        self.under_way.clear()
        self._state.close()
        if not self._decoder.rolling:
            first = queue.take(self.slots)
            queue.put_back(first)
            if len(first) < self.slots:
                self.slots = len(first)
                self._state = self._fresh_state()
        may_enter, ready = True, list[Found]()
        try:
            while may_enter or self.under_way:
                free = [slot for slot in range(self.slots) if slot not in self.under_way]
                if may_enter and len(free) * 8 >= self.slots:
                    entering = dict(zip(free, queue.take(len(free)), strict=False))
                    self.under_way |= entering
                    may_enter = len(entering) == len(free) and self._decoder.rolling
                    if entering:
                        self._enter(model, entering, batch, noise)
                if not self.under_way:
                    break
                for _ in range(CHECK_EVERY if self._device.type == "cuda" and self._decoder.rolling else 1):
                    self._step()
                yield from ready  # while the GPU is at work
                ready = []
                done = self._state.done.tolist()
                finished = [slot for slot in self.under_way if done[slot]]
                tokens, log_p = self._state.best(finished) if finished else ([], [])
                sources = [self.under_way.pop(slot) for slot in finished]
                ready = [*zip(sources, tokens, log_p, strict=True)]
        except torch.OutOfMemoryError:
            yield from ready
            raise
        yield from ready

    def _enter(self, model: Any, entering: dict[int, int], batch: Any, noise: Any) -> None:
        input_ids, mask = batch([*entering.values()])
        slots = torch.tensor([*entering], device=self._device)
        at_once = max(1, ENCODE_TOKENS // input_ids.shape[1]) if self._decoder.rolling else len(slots)
        for places, ids, some in zip(*(t.split(at_once) for t in (slots, input_ids, mask)), strict=True):
            self._decoder.enter(places, seq2seq.encode(model, ids, some), some)
        self._state.enter(slots, [noise(source) for source in entering.values()] if self._task.search.top_p else [])

    def _step(self) -> None:
        if self._device.type != "cuda" or not self._decoder.rolling:
            self._one_step(int(self._state.position.max()) + 1)
            return
        if self._graph is None:
            steps = self._task.max_new_tokens
            saved = self._state.saved()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._one_step(steps)  # compiles kernels and lets libraries take their workspace
            torch.cuda.current_stream().wait_stream(side)
            self._state.restore(saved)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._one_step(steps)
        self._graph.replay()

    def _one_step(self, longest: int) -> None:
        logits = self._decoder.step(self._state.last, self._state.position, longest)
        parents = self._state.advance(logits)
        if parents is not None:
            self._decoder.reorder(parents)


class _State:
    """What both kinds of search keep for every slot. All of it is changed in place."""

    def __init__(self, task: Task, slots: int, device: torch.device) -> None:
        self._task, self._slots = task, slots
        self._eos = torch.tensor(task.ids.eos, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens written so far."""
        self.last = torch.full((slots, task.rows), task.ids.start, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)

    def close(self) -> None:
        """Forget what is under way."""
        self.done.fill_(True)

    def saved(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in vars(self).items() if isinstance(value, Tensor)}

    def restore(self, saved: dict[str, Tensor]) -> None:
        for name, value in saved.items():
            getattr(self, name).copy_(value)

    def _ends(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, self._eos)

    def _move_on(self, is_open: Tensor, tokens: Tensor) -> None:
        """After a step: is_open [slots], and the tokens the rows go on with."""
        self.done.copy_(~is_open)
        self.last.copy_(tokens)
        self.position += is_open


class _Beams(_State):
    """Groups of beams. Each group is a beam search of its own, as `generate` does it: of the best 2 x width
    continuations, the unfinished ones go on and those among the first `width` that end are kept. A group is over
    when `width` outputs are kept and no open beam scores better than the worst of them.
    """

    def __init__(self, task: Task, slots: int, device: torch.device) -> None:
        super().__init__(task, slots, device)
        shape = (slots, task.search.groups, task.search.width)
        self._tokens = torch.full((*shape, task.max_new_tokens), task.ids.pad, device=device)
        self._log_p = torch.zeros(shape, device=device)
        self._score = torch.zeros(shape, device=device)
        """log P less the penalties of diverse groups: what the search ranks by."""
        self._kept_tokens = self._tokens.clone()
        self._kept_log_p, self._kept_score = self._log_p.clone(), self._log_p.clone()
        self._kept_length = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_open = torch.zeros(shape[:2], dtype=torch.bool, device=device)

    def close(self) -> None:
        super().close()
        self._is_open.fill_(False)

    def enter(self, slots: Tensor, noise: list[Tensor]) -> None:
        self.position[slots], self.last[slots], self.done[slots] = 0, self._task.ids.start, False
        self._tokens[slots] = self._kept_tokens[slots] = self._task.ids.pad
        self._log_p[slots] = self._kept_log_p[slots] = self._kept_score[slots] = NEVER
        self._log_p[slots, :, 0] = 0.0  # one empty output to begin with; the other beams do not exist yet
        self._score[slots] = self._log_p[slots]
        self._is_open[slots] = True

    def advance(self, logits: Tensor) -> Tensor:
        """Parents [slots, rows] of the beams that go on."""
        search, ids, alpha = self._task.search, self._task.ids, self._task.length_alpha
        groups, width, vocabulary = search.groups, search.width, logits.shape[-1]
        # Enough that as many go on as end, and at the last step as many as all groups need, lest an earlier one took them;
        # of each row, also enough to replace those that bans and penalties may hit.
        wanted = max(groups * width, (1 + len(ids.eos)) * width)
        hit = len(ids.eos) * (self._task.min_new_tokens > 0) + groups * width * (search.diversity > 0)
        next_log_p, next_token = self._allowed(logits, min(wanted + hit, vocabulary))
        wanted = min(wanted, width * next_token.shape[-1])
        position, length = self.position[:, None], self.position[:, None] + 1
        full = length == self._task.max_new_tokens
        chosen_before = logits.new_zeros(self._slots, vocabulary, dtype=torch.float32) if search.diversity else None
        ended_before: list[Tensor] = []
        parents, following = [], []
        for g in range(groups):
            tokens, kept_tokens, is_open = self._tokens[:, g], self._kept_tokens[:, g], self._is_open[:, g]
            total, token_of = self._score[:, g, :, None] + next_log_p[:, g], next_token[:, g].flatten(1)
            if chosen_before is not None and g:
                counts = chosen_before.gather(1, token_of).view_as(total)
                total = total - hamming_penalty(counts, search.diversity)
            best, index = total.flatten(1).topk(wanted)
            parent, token = index // next_token.shape[-1], token_of.gather(1, index)
            grown = _take(tokens, parent)
            grown.scatter_(2, position[..., None].expand(-1, wanted, 1), token[..., None])
            grown_log_p = self._log_p[:, g].gather(1, parent) + next_log_p[:, g].flatten(1).gather(1, index)

            ends_here = self._ends(token)
            ends = ends_here | full
            repeated = _rows_in(grown, ended_before) & ends
            place = (~repeated).cumsum(-1)
            kept = ends & (best > NEVER) & ~repeated & (place <= width) & is_open[:, None]
            if g + 1 < groups:
                ended_before.append(grown.masked_fill(~kept[..., None], -1))
            new_score = length_normalised(best, length, alpha).masked_fill(~kept, NEVER)
            kept_score, order = torch.cat([self._kept_score[:, g], new_score], 1).topk(width)
            new_log_p = grown_log_p.masked_fill(~kept, NEVER)
            kept_tokens.copy_(_take(torch.cat([kept_tokens, grown], 1), order))
            self._kept_log_p[:, g] = torch.cat([self._kept_log_p[:, g], new_log_p], 1).gather(1, order)
            self._kept_length[:, g] = torch.cat([self._kept_length[:, g], length.expand(-1, wanted)], 1).gather(1, order)
            self._kept_score[:, g] = kept_score

            score, order = best.masked_fill(ends, NEVER).topk(width)
            tokens.copy_(_take(grown, order))
            self._score[:, g], self._log_p[:, g] = score, grown_log_p.gather(1, order)
            parents.append(parent.gather(1, order) + g * width)
            following.append(token.gather(1, order))
            if chosen_before is not None:
                # What later groups avoid: the tokens this group goes on with, or would but for the last step's cut.
                goes_on, chosen = best.masked_fill(ends_here | repeated | ~is_open[:, None], NEVER).topk(width)
                chosen_before.scatter_add_(1, token.gather(1, chosen), (goes_on > NEVER).float())
            best_open = length_normalised(score[:, 0], length[:, 0], alpha)
            is_open &= (best_open > kept_score.amin(-1)) & ~full[:, 0]
        self._move_on(self._is_open.any(1), torch.cat(following, 1))
        return torch.cat(parents, 1)

    def _allowed(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """log P and ids of the best `count` continuations of every beam, -inf for what may not come next."""
        ids, shape = self._task.ids, (self._slots, self._task.search.groups, self._task.search.width, -1)
        log_p, token, log_sum = ops.best_tokens(logits, count)
        log_p, token = log_p.view(shape), token.view(shape)
        if self._task.min_new_tokens:
            too_short = (self.position < self._task.min_new_tokens)[:, None, None, None]
            log_p = log_p.masked_fill(self._ends(token) & too_short, NEVER)
        if ids.forced_first is not None:
            first = (self.position == 0)[:, None, None, None]
            forced_log_p = torch.full_like(log_p, NEVER)
            forced_log_p[..., 0] = (logits[:, ids.forced_first].float() - log_sum).view(shape[:-1])
            log_p = torch.where(first, forced_log_p, log_p)
            token = torch.where(first, torch.full_like(token, ids.forced_first), token)
        return log_p, token

    def best(self, slots: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Token ids and log P of the outputs that these slots kept."""
        return _best_first(
            self._kept_tokens[slots].flatten(1, 2), self._kept_log_p[slots].flatten(1), self._kept_length[slots].flatten(1),
            self._task.length_alpha,
        )  # fmt: skip


class _Samples(_State):
    """Independent samples, as drawn."""

    def __init__(self, task: Task, slots: int, device: torch.device) -> None:
        super().__init__(task, slots, device)
        shape = (slots, task.search.width)
        self._tokens = torch.full((*shape, task.max_new_tokens), task.ids.pad, device=device)
        self._log_p = torch.zeros(shape, device=device)
        self._length = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_open = torch.zeros(shape, dtype=torch.bool, device=device)
        self._noise = torch.zeros(self._tokens.shape, device=device)

    def close(self) -> None:
        super().close()
        self._is_open.fill_(False)

    def enter(self, slots: Tensor, noise: list[Tensor]) -> None:
        self.position[slots], self.last[slots], self.done[slots] = 0, self._task.ids.start, False
        self._tokens[slots], self._log_p[slots], self._length[slots] = self._task.ids.pad, 0.0, 0
        self._is_open[slots] = True
        self._noise[slots] = torch.stack([each.to(self._noise.device) for each in noise])

    def advance(self, logits: Tensor) -> None:
        ids, search, is_open = self._task.ids, self._task.search, self._is_open
        assert search.top_p is not None
        log_sum, position = ops.log_sum_exp(logits), self.position[:, None, None].expand(-1, search.width, 1)
        if self._task.min_new_tokens:
            too_short = (self.position < self._task.min_new_tokens).repeat_interleave(search.width)
            logits.index_copy_(1, self._eos, logits[:, self._eos].masked_fill(too_short[:, None], NEVER))
        token = ops.draw(logits, search.top_p, self._noise.gather(2, position).flatten()).view_as(self._log_p)
        if ids.forced_first is not None:
            token = torch.where(self.position[:, None] == 0, torch.full_like(token, ids.forced_first), token)
        log_p = (logits.gather(1, token.view(-1, 1))[:, 0].float() - log_sum).view_as(self._log_p)
        now = self._tokens.gather(2, position)
        self._tokens.scatter_(2, position, torch.where(is_open[..., None], token[..., None], now))
        self._log_p += log_p.masked_fill(~is_open, 0.0)
        self._length += is_open
        full = self.position[:, None] + 1 == self._task.max_new_tokens
        is_open &= ~self._ends(token) & ~full
        self._move_on(is_open.any(1), token)

    def best(self, slots: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        return _best_first(self._tokens[slots], self._log_p[slots], self._length[slots], self._task.length_alpha)


def _best_first(tokens: Tensor, log_p: Tensor, length: Tensor, alpha: float) -> tuple[list[Tensor], list[Tensor]]:
    """Those that exist, of every source. [sources, rows, steps], [sources, rows] twice"""
    order = length_normalised(log_p, length.clamp(min=1), alpha).argsort(dim=1, descending=True, stable=True)
    tokens, log_p, length = _take(tokens, order).cpu(), log_p.gather(1, order).cpu(), length.gather(1, order).cpu()
    counts = (log_p > NEVER).sum(1).tolist()
    longest = length.masked_fill(log_p == NEVER, 0).amax(1).tolist()
    return (
        [rows[:count, :steps] for rows, count, steps in zip(tokens, counts, longest, strict=True)],
        [values[:count].float() for values, count in zip(log_p, counts, strict=True)],
    )


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [batch, n, length], index [batch, k] -> [batch, k, length]"""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _rows_in(rows: Tensor, others: list[Tensor]) -> Tensor:
    """Whether a row [batch, n, length] stands among the others of the same source. [batch, n]"""
    if not others:
        return torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    return (rows[:, :, None] == torch.cat(others, 1)[:, None]).all(-1).any(-1)

"""The search, written plainly, step by step over one batch: what the engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from calibeam import seq2seq
from calibeam.paper.decoding import DECODERS, Search, draw_from_nucleus, hamming_penalty, length_normalised
from calibeam.paper.likelihood import log_probabilities
from calibeam.records import Candidates

NEVER = float("-inf")


@torch.no_grad()
def plain_decode(
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
    generator: Sequence[torch.Generator] | None = None,
) -> Candidates:
    search = DECODERS[method](num_candidates, groups, diversity, top_p)
    writer = _Writer(model, input_ids, attention_mask, search.groups * search.width, min_new_tokens, max_new_tokens)
    if search.top_p is None:
        found = _beams(writer, search, length_alpha)
    else:
        assert generator is not None
        noise = [torch.rand(num_candidates, max_new_tokens, generator=g) for g in generator]
        found = _samples(writer, search, torch.stack(noise).to(input_ids.device))
    return _best_first(*found, writer.ids.pad, length_alpha)


class _Writer:
    """Rows of outputs under construction, `rows` for every source."""

    def __init__(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, rows: int, min_new_tokens: int, max_new_tokens: int
    ) -> None:
        self.ids = seq2seq.special_ids(model)
        self.sources, self.rows, self.max_new_tokens = input_ids.shape[0], rows, max_new_tokens
        self.device = input_ids.device
        self._min_new_tokens = min_new_tokens
        self._eos = torch.tensor(self.ids.eos, device=self.device)
        states = seq2seq.encode(model, input_ids, attention_mask)
        self._stepper = seq2seq.Stepper(model, states, attention_mask, rows)
        self._last = torch.full((self.sources * rows,), self.ids.start, device=self.device)
        self.length = 0
        """Tokens written so far."""

    def next_log_probabilities(self) -> Tensor:
        """[sources, rows, vocabulary], -inf for what may not come next."""
        log_p = log_probabilities(self._stepper.step(self._last))
        if self.length < self._min_new_tokens:
            log_p[:, self._eos] = NEVER
        if self.length == 0 and self.ids.forced_first is not None:
            log_p[:, torch.arange(log_p.shape[1], device=self.device) != self.ids.forced_first] = NEVER
        self.length += 1
        return log_p.view(self.sources, self.rows, -1)

    def ends(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, self._eos)

    @property
    def full(self) -> bool:
        return self.length == self.max_new_tokens

    def go_on(self, tokens: Tensor, parents: Tensor | None = None) -> None:
        """Write tokens [sources, rows] after what the rows `parents` of the same source wrote."""
        self._last = tokens.flatten()
        if parents is not None:
            first = torch.arange(self.sources, device=self.device)[:, None] * self.rows
            self._stepper.reorder((first + parents).flatten())


def _beams(writer: _Writer, search: Search, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, log P and lengths of the finished beams; empty places have log P = -inf.

    Every group is a beam search of its own, as `generate` does it: of the best 2 x width continuations,
    the unfinished ones go on and those among the first `width` that end are kept. A group is over when
    `width` outputs are kept and no open beam scores better than the worst of them.
    """
    sources, groups, width, steps = writer.sources, search.groups, search.width, writer.max_new_tokens
    shape, device = (sources, groups, width), writer.device
    tokens = torch.full((*shape, steps), writer.ids.pad, device=device)
    log_p = torch.full(shape, NEVER, device=device)
    log_p[..., 0] = 0.0  # one empty output to begin with; the other beams do not exist yet
    score = log_p.clone()  # log P less the penalties of diverse groups: what the search ranks by
    kept_tokens, kept_log_p, kept_score = tokens.clone(), torch.full_like(log_p, NEVER), torch.full_like(log_p, NEVER)
    kept_length = torch.zeros(shape, dtype=torch.int64, device=device)
    is_open = torch.ones(shape[:2], dtype=torch.bool, device=device)

    while bool(is_open.any()):
        next_log_p = writer.next_log_probabilities().view(*shape, -1)
        vocabulary, position = next_log_p.shape[-1], writer.length - 1
        chosen_before = torch.zeros(sources, vocabulary, device=device)
        ended_before: list[Tensor] = []
        parents, following = torch.empty_like(tokens[..., 0]), torch.empty_like(tokens[..., 0])
        for g in range(groups):
            total = score[:, g, :, None] + next_log_p[:, g]
            if g and search.diversity:
                total -= hamming_penalty(chosen_before, search.diversity)[:, None]
            # At the last step as many as all groups together need, lest an earlier one has taken them.
            wanted = groups * width if writer.full else 0
            wanted = min(max(wanted, (1 + len(writer.ids.eos)) * width), total[0].numel())
            best, index = total.flatten(1).topk(wanted)
            parent, token = index // vocabulary, index % vocabulary
            grown = _take(tokens[:, g], parent)
            grown[..., position] = token
            grown_log_p = log_p[:, g].gather(1, parent) + next_log_p[:, g].flatten(1).gather(1, index)

            exists = best > NEVER
            ends = writer.ends(token) | writer.full
            repeated = _rows_in(grown, ended_before) & ends
            place = (~repeated).cumsum(-1)
            kept = ends & exists & ~repeated & (place <= width) & is_open[:, g, None]
            ended_before.append(grown.masked_fill(~kept[..., None], -1))
            all_scores = torch.cat([kept_score[:, g], length_normalised(best, writer.length, alpha).masked_fill(~kept, NEVER)], 1)
            kept_score[:, g], order = all_scores.topk(width)
            kept_tokens[:, g] = _take(torch.cat([kept_tokens[:, g], grown], 1), order)
            kept_log_p[:, g] = torch.cat([kept_log_p[:, g], grown_log_p.masked_fill(~kept, NEVER)], 1).gather(1, order)
            kept_length[:, g] = torch.cat(
                [kept_length[:, g], torch.full_like(token, writer.length)], 1
            ).gather(1, order)  # fmt: skip

            score[:, g], order = best.masked_fill(ends, NEVER).topk(min(width, wanted))
            tokens[:, g], log_p[:, g] = _take(grown, order), grown_log_p.gather(1, order)
            parents[:, g], following[:, g] = parent.gather(1, order) + g * width, token.gather(1, order)
            # What later groups avoid: the tokens this group goes on with, or would but for the last step's cut.
            goes_on = best.masked_fill(writer.ends(token) | repeated | ~is_open[:, g, None], NEVER)
            goes_on, chosen = goes_on.topk(min(width, wanted))
            chosen_before.scatter_add_(1, token.gather(1, chosen), (goes_on > NEVER).float())
            best_open = length_normalised(score[:, g, 0], writer.length, alpha)
            is_open[:, g] &= best_open > kept_score[:, g].amin(-1)
        if writer.full:
            break
        writer.go_on(following.flatten(1), parents.flatten(1))
    return kept_tokens.flatten(1, 2), kept_log_p.flatten(1), kept_length.flatten(1)


def _samples(writer: _Writer, search: Search, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, log P and lengths of independent samples, as drawn."""
    assert search.top_p is not None
    shape = (writer.sources, search.width)
    tokens = torch.full((*shape, writer.max_new_tokens), writer.ids.pad, device=writer.device)
    log_p = torch.zeros(shape, device=writer.device)
    length = torch.zeros(shape, dtype=torch.int64, device=writer.device)
    is_open = torch.ones(shape, dtype=torch.bool, device=writer.device)
    while not writer.full and bool(is_open.any()):
        next_log_p = writer.next_log_probabilities()
        allowed = next_log_p.log_softmax(-1).flatten(0, 1)  # what is left where the end or all but a code are banned
        position = writer.length - 1
        token = draw_from_nucleus(allowed, search.top_p, uniform[..., position].flatten()).view(shape)
        tokens[..., position] = token.where(is_open, tokens[..., position])
        log_p += next_log_p.gather(-1, token[..., None])[..., 0].masked_fill(~is_open, 0.0)
        length += is_open
        is_open &= ~writer.ends(token)
        writer.go_on(token)
    return tokens, log_p, length


def _best_first(tokens: Tensor, log_p: Tensor, length: Tensor, pad: int, alpha: float) -> Candidates:
    order = length_normalised(log_p, length.clamp(min=1), alpha).argsort(dim=1, descending=True, stable=True)
    tokens, log_p, length = _take(tokens, order), log_p.gather(1, order), length.gather(1, order)
    exists = log_p > NEVER
    count, longest = int(exists.sum(1).max()), int(length.masked_fill(~exists, 0).max())
    tokens = tokens.masked_fill(~exists[..., None], pad)
    return Candidates(tokens[:, :count, :longest], log_p[:, :count].float())


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [batch, n, length], index [batch, k] -> [batch, k, length]"""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _rows_in(rows: Tensor, others: list[Tensor]) -> Tensor:
    """Whether a row [batch, n, length] stands among the others of the same source. [batch, n]"""
    if not others:
        return torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    return (rows[:, :, None] == torch.cat(others, 1)[:, None]).all(-1).any(-1)

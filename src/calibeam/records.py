"""What passes between rooms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class CalibeamError(Exception):
    """Something the user can fix. The command line prints the message alone, without a stack trace."""


class DivergedError(CalibeamError):
    """A loss, a gradient or a weight is no number any more."""


@dataclass(frozen=True)
class Example:
    """One row of a prepared dataset: a source and its references."""

    id: str
    source: str
    targets: tuple[str, ...]


def kind_of(value: Any) -> str:
    """What a value of JSON is, in words."""
    words = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return words.get(type(value), f"a {type(value).__name__}")


def hash_of(text: str) -> int:
    """64 bits of it: of two million rows, two have the same by chance once in ten million datasets."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def places_of_some(ids: Iterable[str], most: int) -> list[int]:
    """At most so many, chosen by a hash of their ids. The first ones would not do: files are often sorted."""
    import numpy as np

    hashes = np.fromiter(map(hash_of, ids), np.uint64)
    return sorted(np.argsort(hashes, kind="stable")[:most].tolist())


def some_of(examples: Sequence[Example], most: int) -> Sequence[Example]:
    """At most so many, or all for 0, in their order."""
    if not most or len(examples) <= most:
        return examples
    return [examples[place] for place in places_of_some((example.id for example in examples), most)]


class Candidates(NamedTuple):
    """What `calibeam.decode` returns, best first.

    Where one source of a batch has fewer candidates than another, its last rows are all padding and
    their log_p is -inf.
    """

    token_ids: Tensor
    """int64 [batch, candidates, length], without the start token, padded with the pad id."""
    log_p: Tensor
    """float32 [batch, candidates], the plain sum of token log-probs."""


@dataclass(frozen=True)
class Outputs:
    """Output sequences of a batch of sources, as a similarity function sees them.

    States and embeddings are computed when first asked for.
    """

    texts: list[list[str]]
    mask: Tensor
    """bool [batch, sequences, length]"""
    _decoder_states: Callable[[], Tensor] = field(repr=False)
    _token_embeddings: Callable[[], Tensor] = field(repr=False)

    @cached_property
    def decoder_states(self) -> Tensor:
        """[batch, sequences, length, size]: the decoder's output states, given the source."""
        return self._decoder_states()

    @cached_property
    def token_embeddings(self) -> Tensor:
        """[batch, sequences, length, size]: the model's input embeddings of the tokens."""
        return self._token_embeddings()

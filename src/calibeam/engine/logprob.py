"""log P of given outputs, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from calibeam import seq2seq
from calibeam.engine.packing import Forced, Source, plant


def sequence_log_p(
    model: Any, input_ids: Tensor, attention_mask: Tensor, token_ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """log P(y|x) of token_ids [batch, candidates, length], as `decode` returns them. [batch, candidates]

    Without a mask of the tokens that count, a sequence counts up to its end token, and wholly if it has none.
    """
    if mask is None:
        mask = seq2seq.sequence_mask(token_ids, seq2seq.special_ids(model).eos)
    tree = plant(model, token_ids, mask)
    return Forced(Source(model, input_ids, attention_mask), tree).log_p()

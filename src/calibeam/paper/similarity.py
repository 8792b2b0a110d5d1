"""Section 2.1: how similar a candidate is to the target.

s(y_hat, y_bar; x) = sum_n F_n, with spans of n = 1, 2, 4, 8 tokens matched greedily as in BERTScore.

Our readings: every token's representation is scaled to unit length, and the cosine of two spans is
the mean of their n token cosines (the cosine of the concatenated unit vectors). Where either sequence
is shorter than n, spans of the shorter one's whole length are compared on both sides. An empty
sequence scores 0, and so does an F_n whose P_n or R_n is not positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from calibeam.paper.likelihood import wide
from calibeam.paper.rouge import NEWLINE_MARK, rouge

if TYPE_CHECKING:
    from torch import Tensor

    from calibeam.records import Outputs

SPANS = (1, 2, 4, 8)


def span_similarity(
    candidate: Tensor, target: Tensor, candidate_mask: Tensor, target_mask: Tensor, spans: Sequence[int] = SPANS
) -> Tensor:
    """sum_n F_n of representations [..., length, size] with left-aligned masks [..., length]. [...], float32 or better

    All span sizes come from one length x length product, by summing along its diagonals.
    """
    cosine = _unit(candidate) @ _unit(target).transpose(-1, -2)
    rows, columns = cosine.shape[-2:]
    candidate_length, target_length = candidate_mask.sum(-1), target_mask.sum(-1)
    total = cosine.new_zeros(cosine.shape[:-2])
    for n in spans:
        size = candidate_length.minimum(target_length).clamp(max=n)  # of the spans compared, per pair
        match = cosine.new_zeros(cosine.shape)
        for k in range(min(n, rows, columns)):
            match[..., : rows - k, : columns - k] += cosine[..., k:, k:] * (k < size)[..., None, None]
        match = match / size.clamp(min=1)[..., None, None]
        candidate_starts = _positions(candidate_mask) <= (candidate_length - size)[..., None]
        target_starts = _positions(target_mask) <= (target_length - size)[..., None]
        match = match.masked_fill(~(candidate_starts[..., :, None] & target_starts[..., None, :]), -2.0)
        precision = _masked_mean(match.amax(-1), candidate_starts)
        recall = _masked_mean(match.amax(-2), target_starts)
        defined = (size > 0) & (precision > 0) & (recall > 0)
        f = 2 * precision * recall / (precision + recall).masked_fill(~defined, 1.0)
        total = total + f.masked_fill(~defined, 0.0)
    return total


def decoder(candidates: Outputs, target: Outputs) -> Tensor:
    """s_theta(y_hat, y_bar; x): spans of the decoder's output states given the source. The paper's own."""
    return span_similarity(candidates.decoder_states, target.decoder_states, candidates.mask, target.mask)


def tokens(candidates: Outputs, target: Outputs) -> Tensor:
    """s_tok(y_hat, y_bar): the same on token embeddings, which know neither context nor source."""
    return span_similarity(candidates.token_embeddings, target.token_embeddings, candidates.mask, target.mask)


def rouge_mean(candidates: Outputs, target: Outputs) -> Tensor:
    """The mean of ROUGE-1, -2 and -Lsum F: optimising the evaluation metric itself."""
    import numpy as np
    import torch

    pairs = [(text, reference) for texts, (reference,) in zip(candidates.texts, target.texts, strict=True) for text in texts]
    scores = rouge([text for text, _ in pairs], [reference for _, reference in pairs], newline=NEWLINE_MARK)
    mean = np.mean([values[:, 2] for values in scores.values()], axis=0)
    return torch.as_tensor(mean, dtype=torch.float32, device=candidates.mask.device).view(candidates.mask.shape[:-1])


SIMILARITIES: dict[str, Callable[[Outputs, Outputs], Tensor]] = {
    "decoder": decoder,
    "tokens": tokens,
    "rouge": rouge_mean,
}


def _unit(vectors: Tensor) -> Tensor:
    vectors = wide(vectors)
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def _positions(mask: Tensor) -> Tensor:
    return mask.new_ones(mask.shape).cumsum(-1) - 1


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)

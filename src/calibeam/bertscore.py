"""BERTScore (Zhang et al. 2020): tokens of two texts matched greedily by the cosine of an encoder's states.

The conventions are those of the authors' package `bert-score`, which does not run on transformers 5. The tokens that the
tokenizer adds ([CLS], [SEP], <s>, </s>) have no weight, though others may match them. Texts are stripped, and RoBERTa's begin
with a space. With idf, a token that n of N references hold weighs ln((N + 1) / (n + 1)). Of several references the best P, the
best R and the best F count, each by itself. An empty text scores 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from calibeam.records import Outputs

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from calibeam.paper.official import References

BATCH_SIZE = 64
SPACE_FIRST = frozenset({"roberta", "gpt2"})  # families whose tokens of a word depend on the space before it
NO_LIMIT = 1_000_000  # a tokenizer that knows no longest input says a larger number


def greedy_match(
    candidate: Tensor, reference: Tensor, candidate_weight: Tensor, reference_weight: Tensor
) -> Tensor:  # fmt: skip
    """P, R and F of unit vectors [..., length, size] with weights [..., length], which are negative for padding. [..., 3]

    P = sum_i w_i max_j x_i . y_j / sum_i w_i over the candidate's tokens, R likewise over the reference's, F = 2 P R / (P + R).
    """
    import torch

    exists = (candidate_weight >= 0)[..., :, None] & (reference_weight >= 0)[..., None, :]
    cosine = (candidate @ reference.transpose(-1, -2)).masked_fill(~exists, -1.0)
    weights = candidate_weight.clamp(min=0), reference_weight.clamp(min=0)
    precision, recall = (
        (best * weight).sum(-1) / weight.sum(-1).clamp(min=1e-12)
        for best, weight in zip((cosine.amax(-1), cosine.amax(-2)), weights, strict=True)
    )
    f = torch.nan_to_num(2 * precision * recall / (precision + recall), nan=0.0)
    empty = (weights[0].sum(-1) == 0) | (weights[1].sum(-1) == 0)
    return torch.stack([precision, recall, f], -1).masked_fill(empty[..., None], 0.0)


class _Embedded(NamedTuple):
    states: Tensor
    """[length, size], of unit length"""
    weights: Tensor
    """[length]"""


class BertScore:
    """An encoder, and the weight of every token: 1, or its rarity in the references given for idf."""

    def __init__(
        self,
        folder: Path,
        *,
        layer: int = 0,
        idf_references: Sequence[str] | None = None,
        baseline: Sequence[float] = (),
        device: str = "auto",
    ) -> None:
        from calibeam import seq2seq

        self._model, self._tokenizer = seq2seq.load_encoder(folder, layers=layer, device=device)
        self._baseline = baseline
        self._known: dict[str, _Embedded] = {}
        self._weights: dict[int, float] = defaultdict(lambda: 1.0)
        if idf_references is not None:
            most = math.log(len(idf_references) + 1)
            holding = Counter(token for ids, _ in self._tokens(idf_references) for token in set(ids))
            self._weights = defaultdict(lambda: most, {token: most - math.log(n + 1) for token, n in holding.items()})

    def score(self, candidates: Sequence[str], references: Sequence[str]) -> Tensor:
        """P, R and F of every pair. float32 [pairs, 3]"""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from calibeam.seq2seq import batches_by_length

        known = self._embed([*candidates, *references])
        scores = torch.zeros(len(candidates), 3, device=self._model.device)
        for batch in batches_by_length([known[text].weights for text in candidates], BATCH_SIZE):
            sides = [[known[texts[index]] for index in batch] for texts in (candidates, references)]
            states = [pad_sequence([text.states for text in side], batch_first=True) for side in sides]
            weights = [pad_sequence([text.weights for text in side], batch_first=True, padding_value=-1.0) for side in sides]
            scores[batch] = greedy_match(*states, *weights)
        baseline = torch.tensor(self._baseline or (0.0, 0.0, 0.0), device=scores.device)
        return (scores - baseline) / (1 - baseline)

    def similarity(self, candidates: Outputs, target: Outputs) -> Tensor:
        """F of every candidate. [batch, candidates]"""
        pairs = [(text, wanted) for texts, (wanted,) in zip(candidates.texts, target.texts, strict=True) for text in texts]
        scores = self.score([text for text, _ in pairs], [wanted for _, wanted in pairs])
        return scores[:, 2].to(candidates.mask.device).view(candidates.mask.shape[:-1])

    def statistics(self, predictions: Sequence[str], references: References) -> np.ndarray:
        """100 times the best P, R and F of every prediction: a metric's statistics. float64 [examples, 3]"""
        import numpy as np

        from calibeam.seq2seq import batches_by_length

        best = np.zeros((len(predictions), 3))
        for batch in batches_by_length(predictions, BATCH_SIZE):
            rows = [index for index in batch for _ in references[index]]
            scores = self.score([predictions[row] for row in rows], [text for index in batch for text in references[index]])
            best[batch] = -np.inf
            np.maximum.at(best, rows, 100 * scores.double().cpu().numpy())
        return best

    def _embed(self, texts: Sequence[str]) -> dict[str, _Embedded]:
        """What these texts are, of which the last call's are known: one after another has the same candidates."""
        import torch

        from calibeam.seq2seq import batches_by_length, pad_rows

        known = {text: self._known[text] for text in texts if text in self._known}
        new = [text for text in dict.fromkeys(texts) if text not in known]
        tokens, device = self._tokens(new), self._model.device
        for batch in batches_by_length([ids for ids, _ in tokens], BATCH_SIZE):
            ids, mask = pad_rows([tokens[index][0] for index in batch], self._tokenizer.pad_token_id)
            with torch.no_grad():
                states = self._model(input_ids=ids.to(device), attention_mask=mask.long().to(device)).last_hidden_state
            states = torch.nn.functional.normalize(states, dim=-1)
            for place, index in enumerate(batch):
                weights = torch.tensor(tokens[index][1], device=device)
                known[new[index]] = _Embedded(states[place, : len(weights)], weights)
        self._known = known
        return known

    def _tokens(self, texts: Sequence[str]) -> list[tuple[list[int], list[float]]]:
        """The ids and weights of each text's tokens."""
        if not texts:
            return []
        space = " " if self._model.config.model_type in SPACE_FIRST else ""
        stripped = [space + text.strip() if text.strip() else "" for text in texts]
        longest = self._longest()
        encoded = self._tokenizer(stripped, truncation=longest is not None, max_length=longest, return_special_tokens_mask=True)
        return [
            (ids, [0.0 if added else self._weights[token] for token, added in zip(ids, mask, strict=True)])
            for ids, mask in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
        ]

    def _longest(self) -> int | None:
        """As the tokenizer says, or else what the model has positions for; RoBERTa's begin after the padding id."""
        from calibeam.seq2seq import max_positions

        positions = max_positions(self._model.config)
        if self._tokenizer.model_max_length < NO_LIMIT or positions is None:
            return min(self._tokenizer.model_max_length, positions or NO_LIMIT)
        return positions - self._tokenizer.pad_token_id - 1

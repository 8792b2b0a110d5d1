"""Section 3.2: the evaluation script that goes with each dataset. "Those scripts mainly differ in text tokenization methods."

So each is a metric of its own name, and a figure of one says nothing beside that of another. A metric measures every
example by itself (F-measures, n-gram counts) and makes figures of the sums, so that the figures of any sample of examples
cost one sum: that is what `significance` draws on. BLEU is sacrebleu's, from its own counts to its last digit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from calibeam import functions
from calibeam.paper.metrics import has_repetition
from calibeam.paper.rouge import NEWLINE_MARK, ROUGE_KINDS, rouge
from calibeam.records import CalibeamError

if TYPE_CHECKING:
    import numpy as np

References = Sequence[Sequence[str]]  # of every example, one or more
Figures = Callable[["np.ndarray", int], dict[str, "np.ndarray"]]
BLEU_ORDER = 4
GEM_KINDS = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Metric:
    statistics: Callable[[Sequence[str], References], np.ndarray]
    """Predictions and their references, to float64 [examples, k]."""
    figures: Figures
    """Sums of statistics [..., k] and the number of examples summed, to figures of [...] each, in points of 100."""
    signature: str
    packages: tuple[str, ...] = ()
    """Whose versions a figure depends on."""

    def signed(self) -> str:
        """Everything that a figure depends on, in sacreBLEU's form; an error where a package is missing."""
        try:
            return "|".join([self.signature, *(f"{package}:{version(package)}" for package in self.packages)])
        except PackageNotFoundError as error:
            raise CalibeamError(f"a metric needs {error.name}, which is not installed; msmarco's: calibeam[msmarco]") from None


def means(*names: str) -> Figures:
    """Figures that are the means of the statistics' columns."""
    return lambda sums, examples: {name: sums[..., column] / examples for column, name in enumerate(names)}


def figures_of(metric: str, names: Sequence[str]) -> Figures:
    """The figures of a metric known by name; of any other they are means, in the order of their names."""
    return METRICS[metric].figures if metric in METRICS else means(*names)


def own(function: Callable[[Sequence[str], References], Sequence[float]]) -> Metric:
    """A user's function of predictions and references that gives a number per example; the figure is their mean."""

    def statistics(predictions: Sequence[str], references: References) -> np.ndarray:
        import numpy as np

        values = np.asarray(function(predictions, references), dtype=np.float64)
        if values.shape != (len(predictions),) or not np.isfinite(values).all():
            raise CalibeamError(
                f"metric {functions.name_of(function)} must give a finite number for each of {len(predictions)} examples, "
                f"got {np.isfinite(values).sum()} in an array of shape {list(values.shape)}"
            )
        return values[:, None]

    return Metric(statistics, means("mean"), f"metric:{functions.identity(function)}")


# ROUGE as in the paper's own tables


def rouge_metric(newline: str = NEWLINE_MARK) -> Metric:
    """newline: what separates the sentences besides newlines, for ROUGE-Lsum."""

    def statistics(predictions: Sequence[str], references: References) -> np.ndarray:
        """F of ROUGE-1, -2 and -Lsum by the best reference. [examples, 3]"""
        import numpy as np

        scores = rouge(predictions, references, newline=newline)
        return np.stack([scores[kind][:, 2] for kind in ROUGE_KINDS], axis=1)

    return Metric(
        statistics,
        rouge_figures,
        f"rouge:as rouge-score 0.1.2,F,stemmed,sentences by newline or {newline!r},best reference",
        ("nltk",),
    )


def rouge_figures(sums: np.ndarray, examples: int) -> dict[str, np.ndarray]:
    """Each kind's mean, and R_m, the cube root of their product."""
    import numpy as np

    mean = 100 * sums / examples
    return {**{kind: mean[..., column] for column, kind in enumerate(ROUGE_KINDS)}, "r_m": np.cbrt(mean.prod(-1))}


def repetition_statistics(predictions: Sequence[str], references: References) -> np.ndarray:
    """100 for every output that repeats itself. [examples, 1]"""
    import numpy as np

    return np.array([[100.0 * has_repetition(text)] for text in predictions])


# BLEU


def bleu_counts(
    predictions: Sequence[str], references: References, *, tokenize: str = "none", lowercase: bool = False
) -> np.ndarray:
    """sacrebleu's counts: the prediction's length, the closest reference's, and per order n-grams matched and written.

    [examples, 2 + 2 * BLEU_ORDER]
    """
    import numpy as np
    from sacrebleu.metrics import BLEU

    bleu = BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=True)  # without which it warns of single sentences
    scores = [bleu.sentence_score(text, list(wanted)) for text, wanted in zip(predictions, references, strict=True)]
    counts = [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]
    return np.array(counts, dtype=np.float64).reshape(len(predictions), 2 + 2 * BLEU_ORDER)


def bleu(counts: np.ndarray, order: int = BLEU_ORDER, smooth: str = "none") -> np.ndarray:
    """sacrebleu's score of summed counts [..., 2 + 2 * BLEU_ORDER], with n-grams up to the order. [...]"""
    import numpy as np
    from sacrebleu.metrics import BLEU

    rows = counts.reshape(-1, 2 + 2 * BLEU_ORDER).astype(int).tolist()
    scores = [
        BLEU.compute_bleu(
            matched[:order], written[:order], length, wanted_length, smooth_method=smooth, max_ngram_order=order
        ).score
        for length, wanted_length, matched, written in (
            (*row[:2], row[2 : 2 + BLEU_ORDER], row[2 + BLEU_ORDER :]) for row in rows
        )
    ]
    return np.reshape(scores, counts.shape[:-1])


# ROUGE-L of coco-caption, which the scripts of SQuAD QG and MSMARCO share


def coco_rouge_l(predictions: Sequence[str], references: References, beta: float = 1.2) -> np.ndarray:
    """F = (1 + beta^2) P R / (R + beta^2 P) of the longest common subsequence of tokens between single spaces. [examples]

    P is the best by any reference, and so is R, which may be another's.
    """
    import numpy as np

    scores = np.zeros(len(predictions))
    for row, (prediction, wanted) in enumerate(zip(predictions, references, strict=True)):
        candidate, targets = prediction.split(" "), [text.split(" ") for text in wanted]
        common = [longest_common_subsequence(candidate, target) for target in targets]
        precision = max(common) / len(candidate)
        recall = max(length / len(target) for length, target in zip(common, targets, strict=True))
        if precision and recall:
            scores[row] = (1 + beta**2) * precision * recall / (recall + beta**2 * precision)
    return scores


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Its length, a whole row of the table at a time as the bits of one number (Hyyrö 2004): an unset bit is a step up."""
    places: dict[str, int] = {}
    for place, token in enumerate(first):
        places[token] = places.get(token, 0) | 1 << place
    every = row = (1 << len(first)) - 1
    for token in second:
        matches = row & places.get(token, 0)
        row = ((row + matches) | (row - matches)) & every
    return len(first) - row.bit_count()


# Du et al.'s script for SQuAD question generation, and that of MSMARCO: coco-caption's on two tokenisations


def treebank(text: str) -> str:
    """Lower-cased Penn Treebank tokens, as in the files that Du et al. evaluate on."""
    return " ".join(_treebank_tokenizer().tokenize(text, convert_parentheses=True)).lower()


def spacy_english(text: str) -> str:
    """MSMARCO's normalisation: the tokens of spaCy's rules for English, lower-cased."""
    return " ".join(str(token).strip().lower() for token in _spacy_tokenizer()(text))


def _coco_metric(tokenized: Callable[[str], str], orders: Sequence[int], signature: str, *packages: str) -> Metric:
    def statistics(predictions: Sequence[str], references: References) -> np.ndarray:
        import numpy as np

        outputs, wanted = [*map(tokenized, predictions)], [[*map(tokenized, texts)] for texts in references]
        return np.hstack([coco_rouge_l(outputs, wanted)[:, None], bleu_counts(outputs, wanted)])

    def figures(sums: np.ndarray, examples: int) -> dict[str, np.ndarray]:
        scores = {f"bleu{order}": bleu(sums[..., 1:], order) for order in orders}
        return {"coco_rouge_l": 100 * sums[..., 0] / examples, **scores}

    common = "coco_rouge_l:beta 1.2|bleu:closest length,no smoothing"
    return Metric(statistics, figures, f"{signature}|{common}", ("sacrebleu", *packages))


# GEM's framework, for WebNLG and CommonGen


def gem_statistics(predictions: Sequence[str], references: References) -> np.ndarray:
    """F of ROUGE-1, -2 and -L on NLTK's tokens, and the counts of BLEU. [examples, 3 + 2 + 2 * BLEU_ORDER]"""
    import numpy as np

    counts = bleu_counts(predictions, references, tokenize="13a", lowercase=True)
    texts = [text for text, wanted in zip(map(_nltk_words, predictions), references, strict=True) for _ in wanted]
    scores = rouge(texts, [_nltk_words(text) for wanted in references for text in wanted], kinds=GEM_KINDS)
    pairs = iter(np.stack([scores[kind][:, 2] for kind in GEM_KINDS], axis=1))
    each = [jackknifed(np.stack([*itertools.islice(pairs, len(wanted))])) for wanted in references]
    return np.hstack([np.reshape(each, (-1, len(GEM_KINDS))), counts])


def jackknifed(scores: np.ndarray) -> np.ndarray:
    """The mean, over every choice of a reference to leave out, of the best score by the others. [references, k] -> [k]

    The best of all is left out once, and the second counts then.
    """
    import numpy as np

    if len(scores) == 1:
        return scores[0]
    second, best = np.sort(scores, axis=0)[-2:]
    return ((len(scores) - 1) * best + second) / len(scores)


def gem_figures(sums: np.ndarray, examples: int) -> dict[str, np.ndarray]:
    mean = 100 * sums[..., : len(GEM_KINDS)] / examples
    scores = {kind: mean[..., column] for column, kind in enumerate(GEM_KINDS)}
    return {**scores, "bleu": bleu(sums[..., len(GEM_KINDS) :], smooth="exp")}


def _nltk_words(text: str) -> str:
    """NLTK's words. GEM splits sentences first, with a model to download, which for ROUGE matters before a full stop alone."""
    return " ".join(_nltk_tokenizer().tokenize(re.sub(r"\.(?=\s)", " .", text)))


METRICS: dict[str, Metric] = {
    "rouge": rouge_metric(),
    "repetition": Metric(repetition_statistics, means("rate"), "repetition:any word n-gram followed by itself"),
    "squad_qg": _coco_metric(treebank, (1, 2, 3, 4), "case:lc|tok:treebank|meteor:left out", "nltk"),
    "msmarco": _coco_metric(spacy_english, (1,), "case:lc|tok:spacy-en", "spacy"),
    "gem": Metric(
        gem_statistics,
        gem_figures,
        "rouge:F,stemmed,tok nltk,references jackknifed|bleu:case lc,tok 13a,smooth exp",
        ("nltk", "sacrebleu"),
    ),
}


@cache
def _treebank_tokenizer() -> Any:
    from nltk.tokenize import TreebankWordTokenizer

    return TreebankWordTokenizer()


@cache
def _nltk_tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


@cache
def _spacy_tokenizer() -> Any:
    from spacy.lang.en import English

    return English().tokenizer

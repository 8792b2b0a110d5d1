from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

import calibeam
from calibeam.paper import rouge as module
from calibeam.paper.rouge import ROUGE_KINDS, rouge

EVERY_KIND = (*(f"rouge{n}" for n in range(1, 10)), "rougeL", "rougeLsum")
PIECES = [
    "the", "a", "cat", "cats", "running", "runs", "ran", "flies", "happily", "nationality", "general", "generally",
    "42", "3.14", "don't", "U.S.", "e-mail", "snake_case", "naïve", "café", "Straße", "İstanbul", "ﬁne", "\u212aelvin",
    "日本語", "Привет", "ΣΑΣ", "---", "(", ")", ",", ".", "!", "\n", "\n", "\r\n", "\t", "\0", "\x85", "\u00a0", "\u2028",
    "\ud800",
]  # fmt: skip


def random_texts(count: int, seed: int, pieces: Sequence[str] = PIECES, longest: int = 13) -> list[str]:
    generator = np.random.default_rng(seed)
    rows = [generator.integers(len(pieces), size=generator.integers(longest + 1)) for _ in range(count)]
    return [" ".join(pieces[i] for i in row) for row in rows]


def assert_equal_to_rouge_score(
    predictions: Sequence[str], references: Sequence[str | Sequence[str]], stem: bool = True, kinds: Sequence[str] = EVERY_KIND
) -> None:
    measured = rouge(predictions, references, stem=stem, kinds=kinds)
    scorer = RougeScorer([*kinds], use_stemmer=stem)
    several = [[each] if isinstance(each, str) else [*each] for each in references]
    expected = [scorer.score_multi(some, text) for text, some in zip(predictions, several, strict=True)]
    assert list(measured) == [*kinds]
    for kind in kinds:
        assert measured[kind].dtype == np.float64
        assert measured[kind].tolist() == [list(scores[kind]) for scores in expected]


@pytest.mark.filterwarnings("ignore:ROUGE knows")
@pytest.mark.parametrize("stem", [True, False])
def test_every_value_is_that_of_the_rouge_score_package(stem: bool) -> None:
    assert_equal_to_rouge_score(random_texts(1500, 0), random_texts(1500, 1), stem)


@pytest.mark.parametrize("words", ["a", "ab", "abc", "abcdefgh"])
@pytest.mark.parametrize("newlines", [0, 1, 4])
def test_with_few_different_words_nearly_all_subsequences_tie(words: str, newlines: int) -> None:
    pieces = [*words, *words, *words, *["\n"] * newlines, *"x"]
    predictions = random_texts(400, 2, [*pieces, "y"], 24)
    assert_equal_to_rouge_score(predictions, random_texts(400, 3, [*pieces, "z"], 24), stem=False)


def test_long_sentences_and_many_sentences() -> None:
    predictions = random_texts(12, 4, "abcdefghijklmnopq", 150) + random_texts(12, 5, ["a", "b", "c", "d\n"], 150)
    references = random_texts(12, 6, ["a", "b", "c", "d", "e\n"], 150) + random_texts(12, 7, "abcdefgh", 150)
    assert_equal_to_rouge_score(predictions, references, kinds=(*ROUGE_KINDS, "rougeL"))


@pytest.mark.parametrize("mark", [" ", "\n", " \n \n"])
def test_ten_thousand_words(mark: str) -> None:
    long = mark.join(random_texts(100, 8, "abcdefghijklmnopqrstuvw", 200))
    short = "\n".join(random_texts(2, 9, "abcdefghijklmnopqrstuvw", 30))
    assert len(long.split()) > 9_000
    assert_equal_to_rouge_score([long, short], [short, long], kinds=(*ROUGE_KINDS, "rougeL"))


@pytest.mark.parametrize(
    "text", ["", " ", "\n", " \n\n ", "?!", "a", "a\n", "\na", "a a a a", "a\na\n\na", "A-a_a", "aaaa " * 70]
)
def test_little_and_repeated_text(text: str) -> None:
    others = ["", "\n", "a", "a a", "a\na", "b a\nb\na", "aaaa"]
    assert_equal_to_rouge_score([text] * len(others) + others, others + [text] * len(others))


@pytest.mark.filterwarnings("ignore:ROUGE knows")
def test_the_first_reference_of_highest_f_counts_for_each_kind() -> None:
    """Few short words, so that many have the same F with another precision and recall."""
    references = [random_texts(1 + i % 4, 1000 + i, ["a", "b", "c", "\n"], 6) for i in range(600)]
    assert_equal_to_rouge_score(random_texts(600, 10, ["a", "b", "c", "\n"], 6), references, kinds=(*ROUGE_KINDS, "rougeL"))
    swapped = rouge(["a b"], [["a", "a b c d"]], kinds=["rouge1"])["rouge1"]  # F is 2/3 with either
    assert swapped.tolist() == [[1 / 2, 1.0, 2 * (1 / 2) / (3 / 2)]]


def test_a_score_does_not_depend_on_the_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how much is read or counted at once, or on words that were forgotten."""
    sizes = (1, 3, 8, 30, 100)
    pieces = ["running", "runs", "cat", "cats", "the", "\n"]
    predictions = [text for size in sizes for text in random_texts(20, size, pieces, size)]
    references = [text for size in reversed(sizes) for text in random_texts(20, 50 + size, pieces, size)]
    together = rouge(predictions, references, kinds=EVERY_KIND)
    alone = [rouge([text], [reference], kinds=EVERY_KIND) for text, reference in zip(predictions, references, strict=True)]
    for name, least in (("READ_AT_ONCE", 1), ("COUNTED_AT_ONCE", 1), ("WORDS_REMEMBERED", 0)):
        monkeypatch.setattr(module, name, least)
    in_pieces = rouge(predictions, references, kinds=EVERY_KIND)
    for kind, scores in together.items():
        assert scores.tolist() == in_pieces[kind].tolist() == [each[kind][0].tolist() for each in alone]


def test_rouge_by_hand() -> None:
    """Prediction "a b c", reference "a c": unigrams 2 of 3 and 2 of 2; no shared bigram; LCS "a c"."""
    scores = calibeam.rouge(["a b c"], ["a c"])
    assert scores["rouge1"][0].tolist() == pytest.approx([2 / 3, 1.0, 4 / 5])
    assert scores["rouge2"][0].tolist() == [0.0, 0.0, 0.0]
    assert scores["rougeLsum"][0].tolist() == pytest.approx([2 / 3, 1.0, 4 / 5])


def test_n_grams_by_hand() -> None:
    """ "a b a b c" has ab twice, ba, bc; "a b c a b c" has ab twice, bc twice, ca: 3 shared, of 4 and 5."""
    scores = rouge(["a b a b c"], ["a b c a b c"], kinds=["rouge2", "rouge3", "rouge4"])
    assert scores["rouge2"][0].tolist() == pytest.approx([3 / 4, 3 / 5, 2 / 3])
    assert scores["rouge3"][0].tolist() == pytest.approx([1 / 3, 1 / 4, 2 / 7])  # abc, once in the prediction
    assert not scores["rouge4"].any()


def test_newlines_separate_the_sentences_of_rouge_lsum() -> None:
    """Sentences in another order match one by one, and in one line only in part."""
    assert rouge(["red fox ran\nblue bird sang"], ["blue bird sang\nred fox ran"])["rougeLsum"][0, 2] == 1.0
    assert rouge(["red fox ran blue bird sang"], ["blue bird sang red fox ran"])["rougeLsum"][0, 2] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        # Either sentence has an "a" in common with the reference, and takes the last one: 1 word of 2.
        ("a\na", [1 / 2, 1 / 2]),
        # "x" matches nothing, so the reference's last word is dropped before it is: this "a" takes the first. 2 of 2.
        ("a x\na", [2 / 3, 1.0]),
    ],
)
def test_which_of_equally_long_subsequences_counts(prediction: str, expected: list[float]) -> None:
    assert rouge([prediction], ["a a"])["rougeLsum"][0, :2].tolist() == pytest.approx(expected)


def test_words_of_more_than_three_letters_are_stemmed_unless_told_otherwise() -> None:
    """ "dogs" becomes "dog"; "gas" would become "ga", and is left alone."""
    assert rouge(["dogs", "gas"], ["dog", "ga"], kinds=["rouge1"])["rouge1"][:, 2].tolist() == [1.0, 0.0]
    assert rouge(["dogs", "gas"], ["dog", "ga"], kinds=["rouge1"], stem=False)["rouge1"][:, 2].tolist() == [0.0, 0.0]


def test_fault_38_another_separator_stands_for_a_newline() -> None:
    """And a newline stays one: the references of a dataset may have newlines where PEGASUS writes its mark."""
    predictions = [text.replace("\n", "<n>") for text in random_texts(100, 11, ["a", "b", "c", "\n"])]
    references = random_texts(100, 12, ["a", "b", "c", "\n"])
    marked = rouge(predictions, references, newline="<n>")
    plain = rouge([text.replace("<n>", "\n") for text in predictions], references)
    assert all((marked[kind] == plain[kind]).all() for kind in ROUGE_KINDS)
    dots = rouge(["a b. c d"], ["c d. a b"], newline=". ")["rougeLsum"]
    assert dots[0].tolist() == [1.0, 1.0, 1.0]


def test_a_newline_mark_that_counts_as_a_word_is_noticed() -> None:
    with pytest.warns(UserWarning, match='2 texts hold "<n>"') as caught:
        scores = rouge(["a<n>b", "a"], ["a\nb", ["a", "a<n>"]])
    assert scores["rouge1"][0].tolist() == pytest.approx([2 / 3, 1.0, 4 / 5])  # a, n, b
    assert caught[0].filename == __file__


def test_empty_texts_score_zero_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = rouge(["", "a cat", "", "?!"], ["a cat", "", "", "?!"])
    assert all(not values.any() for values in scores.values())


def test_no_texts_give_no_scores() -> None:
    assert {kind: values.shape for kind, values in rouge([], []).items()} == dict.fromkeys(ROUGE_KINDS, (0, 3))
    assert rouge(["a"], ["a"], kinds=[]) == {}


def test_fault_37_text_without_latin_letters_warns() -> None:
    with pytest.warns(UserWarning, match="3 examples have text without any") as caught:
        scores = rouge(["日本語", "Привет мир", "fine", "fine", ""], ["日本語", "Привет мир", "fine", "よい", ""])
    assert scores["rouge1"][:, 2].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert caught[0].filename == __file__


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="2 predictions but 1 references"):
        rouge(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="example 1 has no reference"):
        rouge(["a", "b"], [["a"], []])
    for kind in ("rouge0", "rouge10", "rougel", "bleu"):
        with pytest.raises(ValueError, match=f"unknown kind '{kind}'; there are rouge1, "):
            rouge(["a"], ["a"], kinds=["rouge1", kind])
    with pytest.raises(ValueError, match="must not be empty"):
        rouge(["a"], ["a"], newline="")
    for given in (("the cat", ["the cat"]), (["the cat"], "the cat")):
        with pytest.raises(TypeError, match=r"write \[text\] for one"):
            rouge(*given)


class _StaysHere(str):
    """A text that no other process can be given."""

    __slots__ = ()

    def __reduce__(self) -> str:
        raise AssertionError("was sent to another process")


def test_work_is_shared_out_to_processes_where_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions, references = random_texts(50, 13, ["running", "the", "\n"]), random_texts(50, 14, ["runs", "the", "\n"])
    here = rouge(predictions, references)
    marked = [_StaysHere(text) for text in predictions]
    little = rouge(marked, references, processes=2)
    monkeypatch.setattr(module, "WORK_OF_A_PROCESS", 1)
    with pytest.raises(AssertionError, match="was sent to another process"):
        rouge(marked, references, processes=2)
    shared = rouge(predictions, references, processes=2)
    for kind in ROUGE_KINDS:
        assert here[kind].tolist() == little[kind].tolist() == shared[kind].tolist()


def _score_in_a_worker(texts: list[str]) -> list[list[float]]:
    module.WORK_OF_A_PROCESS = 1
    assert multiprocessing.current_process().daemon
    return rouge(texts, texts[::-1], processes=2)["rouge1"].tolist()


def test_a_worker_that_may_not_have_children_scores_by_itself() -> None:
    texts = random_texts(20, 15, ["a", "b", "c"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_score_in_a_worker, (texts,)) == rouge(texts, texts[::-1])["rouge1"].tolist()

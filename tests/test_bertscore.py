"""BERTScore against plain loops over the formula, on tiny encoders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM

from calibeam.bertscore import BertScore, greedy_match
from calibeam.records import CalibeamError, Outputs
from conftest import sentence, tiny_encoder

CANDIDATES = [sentence(i, 1 + i % 9) for i in range(30)]
REFERENCES = [[sentence(100 + i + k, 1 + (i + k) % 7) for k in range(1 + i % 3)] for i in range(30)]
EVERY = [text for texts in REFERENCES for text in texts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("encoders")
    return {family: tiny_encoder(family, place / family) for family in ("bert", "roberta")}


def scorer(folder: Path, **options: Any) -> BertScore:
    return BertScore(folder, device="cpu", **options)


def plain(folder: Path, candidate: str, reference: str, layer: int, idf: bool) -> list[float]:
    """P, R and F token by token, one text at a time."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    space = " " if model.config.model_type == "roberta" else ""

    def weight(token: int) -> float:
        if token in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            return 0.0
        holding = sum(token in tokenizer(space + text).input_ids for text in EVERY)
        return math.log((len(EVERY) + 1) / (holding + 1)) if idf else 1.0

    def embedded(text: str) -> tuple[list[int], list[list[float]]]:
        ids = tokenizer(space + text).input_ids
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
        return ids, states.tolist()

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    def share(one: tuple[Any, Any], other: tuple[Any, Any]) -> float:
        """Of each token that counts, its best match among all tokens of the other text, the added ones too."""
        weights = [weight(token) for token in one[0]]
        best = [max(cosine(a, b) for b in other[1]) for a in one[1]]
        return sum(w * value for w, value in zip(weights, best, strict=True)) / sum(weights)

    ours, theirs = embedded(candidate), embedded(reference)
    p, r = share(ours, theirs), share(theirs, ours)
    return [p, r, 2 * p * r / (p + r)]


@pytest.mark.parametrize("idf", [False, True])
@pytest.mark.parametrize("layer", [2, 3])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_are_those_of_plain_loops(family: str, layer: int, idf: bool, folders: dict[str, Path]) -> None:
    pairs = [(CANDIDATES[i], REFERENCES[i][0]) for i in range(0, 30, 5)]
    found = scorer(folders[family], layer=layer, idf_references=EVERY if idf else None).score(*zip(*pairs, strict=True))
    expected = [plain(folders[family], candidate, reference, layer, idf) for candidate, reference in pairs]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5)
    assert len({round(f, 3) for _, _, f in expected}) > 3


def test_matching_by_hand() -> None:
    """Candidate e1 e2, reference e1 v with v = (0.6, 0.8): cosines [1, 0.6], [0, 0.8]; weights 1 3 and 2 2:

    P = (1 * 1 + 3 * 0.8) / 4 = 0.85, R = (2 * 1 + 2 * 0.8) / 4 = 0.9, F = 2 * 0.85 * 0.9 / 1.75.
    """
    candidate, reference = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    found = greedy_match(candidate, reference, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
    assert found.tolist() == pytest.approx([0.85, 0.9, 1.53 / 1.75])


def test_a_token_without_weight_can_be_matched_and_padding_cannot() -> None:
    candidate = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    reference = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with_added = greedy_match(candidate, reference, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert with_added.tolist() == [1.0, 1.0, 1.0]
    with_padding = greedy_match(candidate, reference, torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0]))
    assert with_padding.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_text_is_like_itself_and_like_nothing_when_it_is_empty(family: str, folders: dict[str, Path]) -> None:
    candidates = ["the red fox", " the red fox\n", "", "  ", "", "the"]
    references = ["the red fox", "the red fox", "the red fox", "fox", "", " "]
    found = scorer(folders[family]).score(candidates, references)
    assert found[:2].flatten().tolist() == pytest.approx([1.0] * 6, abs=1e-5)
    assert found[2:].tolist() == [[0.0] * 3] * 4


def test_a_score_does_not_depend_on_batch_mates(folders: dict[str, Path]) -> None:
    references = [texts[-1] for texts in REFERENCES]
    together = scorer(folders["bert"]).score(CANDIDATES, references)
    one = scorer(folders["bert"])
    apart = torch.cat([one.score([text], [wanted]) for text, wanted in zip(CANDIDATES, references, strict=True)])
    assert torch.allclose(together, apart, atol=1e-5)


def test_the_best_reference_counts_for_each_of_the_three(folders: dict[str, Path]) -> None:
    found, alone = scorer(folders["bert"]).statistics(CANDIDATES, REFERENCES), scorer(folders["bert"])
    assert found.shape == (30, 3)
    for row, text, wanted in zip(found, CANDIDATES, REFERENCES, strict=True):
        each = alone.score([text] * len(wanted), wanted)
        assert row.tolist() == pytest.approx((100 * each.amax(0)).tolist(), abs=1e-3)


def test_a_baseline_becomes_0_and_1_stays_1(folders: dict[str, Path]) -> None:
    pairs = ["the red fox", "a blue bird"], ["the red fox", "two dogs sleep"]
    plain_scores = scorer(folders["bert"]).score(*pairs)
    found = scorer(folders["bert"], baseline=tuple(plain_scores[1].tolist())).score(*pairs)
    assert found[0].tolist() == pytest.approx([1.0] * 3, abs=1e-4)
    assert found[1].tolist() == pytest.approx([0.0] * 3, abs=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_texts_longer_than_the_model_has_positions_for_are_cut(family: str, folders: dict[str, Path]) -> None:
    long = sentence(0, 200)
    assert scorer(folders[family]).score([long], [long])[0].tolist() == pytest.approx([1.0] * 3, abs=1e-5)


def test_as_a_similarity_it_is_f_of_every_candidate(folders: dict[str, Path]) -> None:
    texts, targets = [["the red fox", "a bird"], ["two dogs", "two dogs"]], [["the red fox ran"], ["some trees"]]

    def nothing() -> Any:
        raise AssertionError("BERTScore reads texts alone")

    candidates = Outputs(texts, torch.ones(2, 2, 5, dtype=torch.bool), nothing, nothing)
    target = Outputs(targets, torch.ones(2, 1, 5, dtype=torch.bool), nothing, nothing)
    bert = scorer(folders["bert"])
    found = bert.similarity(candidates, target)
    expected = bert.score([text for row in texts for text in row], [wanted for (wanted,) in targets for _ in range(2)])[:, 2]
    assert torch.equal(found, expected.view(2, 2))


def test_a_checkpoint_without_a_pooler_and_the_encoder_of_an_encoder_decoder_will_do(tmp_path: Path, model_folder: Any) -> None:
    folder = tiny_encoder("bert", tmp_path / "masked")
    config = BertConfig.from_pretrained(folder)
    BertForMaskedLM(config).save_pretrained(folder)
    for place in (folder, model_folder("t5"), model_folder("bart")):
        found = BertScore(place, layer=1, device="cpu").score(["the red fox", "a bird"], ["the red fox", "the red fox"])[:, 2]
        assert found[0].item() == pytest.approx(1.0, abs=1e-5)
        assert found[1].item() < 0.999


def test_an_encoder_that_is_not_whole_or_not_safe_is_refused(tmp_path: Path) -> None:
    folder = tiny_encoder("bert", tmp_path / "bert")
    with pytest.raises(CalibeamError, match="has 3 layers, not 4"):
        BertScore(folder, layer=4, device="cpu")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if "layer.1" not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CalibeamError, match="do not fit its config"):
        BertScore(folder, device="cpu")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CalibeamError, match=r"no \.safetensors weights"):
        BertScore(folder, device="cpu")

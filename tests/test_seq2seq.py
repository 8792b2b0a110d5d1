from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

from calibeam import decode, seq2seq
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq, load, locate, save
from conftest import FAMILIES, sentence, tiny_model

EOS = 1
INPUT = {
    "input_ids": torch.tensor([[5, 9, 3, 7], [8, 4, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}


@pytest.fixture
def pair(tokenizer: Any) -> Seq2Seq:
    return Seq2Seq(tiny_model("pegasus", vocabulary=len(tokenizer)), tokenizer)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**INPUT, decoder_input_ids=torch.tensor([[0, 4, 6], [0, 7, 7]])).logits


def plain_checkpoint(model: Any, tokenizer: Any, folder: Path) -> Path:
    """What other tools save: unchecked."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_with_equal_logits_here_and_in_transformers(
    family: str, tokenizer: Any, tmp_path: Path
) -> None:  # fmt: skip
    model = tiny_model(family, vocabulary=len(tokenizer))
    save(Seq2Seq(model, tokenizer), tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu")
    assert not loaded.model.training
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert loaded.ids == seq2seq.special_ids(model)
    assert torch.equal(logits(loaded.model), logits(model))
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()), logits(model))


def test_a_saved_config_tells_a_head_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("t5", vocabulary=len(tokenizer))
    model.config.scale_decoder_outputs = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    save(Seq2Seq(model, tokenizer), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(load(tmp_path / "model", device="cpu").model), logits(model))
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()), logits(model))


def test_fault_23_a_model_loads_in_float32_unless_told_otherwise(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    assert load(folder, device="cpu").model.dtype == torch.float32
    assert load(folder, device="cpu", dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_the_saved_generation_config_has_no_heuristics(pair: Seq2Seq, tmp_path: Path) -> None:
    config = pair.model.generation_config
    config.num_beams, config.length_penalty, config.no_repeat_ngram_size = 8, 0.8, 3
    config.min_length, config.forced_eos_token_id, config.repetition_penalty = 5, EOS, 1.2
    save(pair, tmp_path / "model")
    saved = GenerationConfig.from_pretrained(tmp_path / "model")
    assert saved.length_penalty == 0.0
    assert saved.num_beams == 8
    assert (saved.decoder_start_token_id, saved.pad_token_id, saved.eos_token_id) == (0, 0, EOS)
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert not {"no_repeat_ngram_size", "min_length", "forced_eos_token_id", "repetition_penalty"} & written.keys()
    assert pair.model.generation_config is config  # the model in hand keeps its own
    assert config.no_repeat_ngram_size == 3


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus"])
def test_generate_with_the_saved_config_is_our_beam_search(family: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(family, vocabulary=len(tokenizer))
    save(Seq2Seq(model, tokenizer), tmp_path / "model")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    found = decode(model, *INPUT.values(), num_candidates=5, max_new_tokens=6)
    generated = loaded.generate(**INPUT, max_new_tokens=6)[:, 1:]
    assert generated.tolist() == found.token_ids[:, 0].tolist()


def test_mbart_keeps_its_language_code(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("mbart", vocabulary=len(tokenizer))
    model.generation_config.forced_bos_token_id = 7
    save(Seq2Seq(model, tokenizer), tmp_path / "model")
    assert load(tmp_path / "model", device="cpu").ids.forced_first == 7


def test_a_decoder_only_model_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1, n_positions=16))
    folder = plain_checkpoint(model, tokenizer, tmp_path / "gpt2")
    with pytest.raises(CalibeamError, match="gpt2 model, which is not an encoder-decoder"):
        load(folder, device="cpu")


def test_fault_34_a_tokenizer_with_more_ids_than_embeddings_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    folder = plain_checkpoint(tiny_model("bart", vocabulary=len(tokenizer) - 1), tokenizer, tmp_path / "model")
    with pytest.raises(CalibeamError, match=f"ids up to {len(tokenizer) - 1}, the model {len(tokenizer) - 1} embeddings"):
        load(folder, device="cpu")


def test_a_model_with_spare_embeddings_is_welcome(tokenizer: Any, tmp_path: Path) -> None:
    folder = plain_checkpoint(tiny_model("bart", vocabulary=len(tokenizer) + 20), tokenizer, tmp_path / "model")
    assert load(folder, device="cpu").model.config.vocab_size == len(tokenizer) + 20


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_fault_34_a_tokenizer_with_another_special_id_is_refused(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("bart", vocabulary=len(tokenizer))
    for config in (model.config, model.generation_config):
        setattr(config, f"{name}_token_id", 5)
    folder = plain_checkpoint(model, tokenizer, tmp_path / "model")
    with pytest.raises(CalibeamError, match=rf"its {name} token has id \d, the model's 5"):
        load(folder, device="cpu")


def test_fault_34_a_start_token_that_the_model_has_no_embedding_for_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model("bart", vocabulary=len(tokenizer))
    for config in (model.config, model.generation_config):
        config.decoder_start_token_id = len(tokenizer)
    folder = plain_checkpoint(model, tokenizer, tmp_path / "model")
    message = f"decoder_start_token_id of .* is {len(tokenizer)}, but the model has {len(tokenizer)} embeddings"
    with pytest.raises(CalibeamError, match=message):
        load(folder, device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fault_22_weights_that_are_not_finite_are_refused_at_load_and_save(value: float, pair: Seq2Seq, tmp_path: Path) -> None:
    with torch.no_grad():
        pair.model.get_decoder().layers[1].fc1.weight[3, 2] = value
    with pytest.raises(CalibeamError, match=r"not finite: .*decoder\.layers\.1\.fc1\.weight"):
        save(pair, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    folder = plain_checkpoint(pair.model, pair.tokenizer, tmp_path / "model")
    with pytest.raises(CalibeamError, match=r"not finite: .*decoder\.layers\.1\.fc1\.weight"):
        load(folder, device="cpu")


def test_fault_46_pickled_weights_are_refused(pair: Seq2Seq, tmp_path: Path) -> None:
    folder = plain_checkpoint(pair.model, pair.tokenizer, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save(pair.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(CalibeamError, match=r"no \.safetensors weights"):
        load(folder, device="cpu")


def test_weights_that_do_not_fit_the_config_are_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"decoder_layers": 3}))
    with pytest.raises(CalibeamError, match=r"do not fit its config\.json"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_fault_17_a_damaged_file_is_a_clear_error(name: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(CalibeamError, match="does not load"):
        load(folder, device="cpu")


def test_a_folder_is_found_itself_or_as_the_model_of_a_stage(model_folder: Callable[..., Path]) -> None:
    folder = model_folder(name="stage/model")
    assert locate(folder) == folder
    assert locate(str(folder.parent)) == folder


def test_fault_18_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match=r"no model at .*nowhere: there is no such folder"):
        locate(tmp_path / "nowhere")
    with pytest.raises(CalibeamError, match="nowhere"):
        load(tmp_path / "nowhere", device="cpu")
    with pytest.raises(CalibeamError, match="no model at some/where: not a folder"):
        locate("some/where")


def test_a_folder_without_a_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match=r"is not a model: it has no config\.json"):
        locate(tmp_path)


@pytest.mark.parametrize("max_length", [2, 5, 64])
def test_targets_end_with_exactly_one_end_token(pair: Seq2Seq, max_length: int) -> None:
    rows, _ = pair.encode_targets([sentence(seed, 1 + seed) for seed in range(8)], max_length)
    for row in rows:
        assert row[-1] == EOS
        assert row.count(EOS) == 1
        assert 2 <= len(row) <= max_length


def test_an_empty_target_is_an_end_token(pair: Seq2Seq) -> None:
    assert pair.encode_targets([""], 10) == ([[EOS]], 0)


def test_a_target_without_an_end_token_gets_one(pair: Seq2Seq) -> None:
    """A tokenizer that adds none, as GPT-2's and some T5's do."""
    with_end, _ = pair.encode_targets(["the red fox"], 10)
    bare = pair.tokenizer.__class__(
        tokenizer_object=pair.tokenizer.backend_tokenizer.__class__.from_str(pair.tokenizer.backend_tokenizer.to_str()),
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip
    bare.backend_tokenizer.post_processor = None
    without = Seq2Seq(pair.model, bare)
    assert bare("the red fox")["input_ids"] == with_end[0][:-1]
    assert without.encode_targets(["the red fox"], 10)[0] == with_end
    assert without.encode_targets(["the red fox"], 2)[0] == [[with_end[0][0], EOS]]


def test_fault_33_cut_texts_are_counted(pair: Seq2Seq) -> None:
    """Texts of 1, 2, ... tokens and the end: those of more than 4 in all are cut to 4."""
    texts = [sentence(seed, 1 + seed) for seed in range(6)]
    whole = [len(ids) for ids in pair.tokenizer(texts)["input_ids"]]
    length = sorted(whole)[2]
    expected = sum(n > length for n in whole)
    assert 0 < expected < 6
    for encode in (pair.encode_sources, pair.encode_targets):
        rows, cut = encode(texts, length)
        assert cut == expected
        assert [len(row) for row in rows] == [min(n, length) for n in whole]
        assert encode(texts, max(whole))[1] == 0
        assert encode([], 5) == ([], 0)


def test_text_comes_back_without_special_tokens(pair: Seq2Seq) -> None:
    for text in ("the red fox ran", "naïve 日本語 …"):
        rows, _ = pair.encode_targets([text], 64)
        assert pair.text([*rows[0], 0, 0]) == text


def test_pieces_read_as_the_text_does(pair: Seq2Seq) -> None:
    """Also where a character is several tokens: bytes."""
    text = "the naïve red fox ran 日本語 …"
    (ids,), _ = pair.encode_targets([text], 64)
    pieces = pair.pieces(ids)
    assert len(pieces) == len(ids) > len(text.split()) + 1
    assert "".join(pieces) == text + pair.tokenizer.eos_token
    assert "\ufffd" not in "".join(pieces)
    (japanese,), _ = pair.encode_targets(["日本"], 64)
    assert "".join(pair.pieces(japanese[:-2])) == "日\ufffd"  # cut within a character


def test_a_batch_is_padded_on_the_right(pair: Seq2Seq) -> None:
    ids, mask = pair.batch([[5, 6, 7], [8], []])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]


def test_a_sequence_counts_up_to_its_first_end_token() -> None:
    ids = torch.tensor([[4, EOS, 0, 0], [EOS, EOS, 5, 0], [0, 4, 0, 6], [4, 5, 9, 0]])
    assert seq2seq.sequence_mask(ids, (EOS,)).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert seq2seq.sequence_mask(ids, (EOS, 9)).int().tolist()[3] == [1, 1, 1, 0]


def test_special_ids_come_from_the_generation_config_first() -> None:
    model = tiny_model("bart", vocabulary=20)
    assert seq2seq.special_ids(model) == (1, 0, (1,), None)
    model.generation_config.decoder_start_token_id, model.generation_config.eos_token_id = 3, [1, 4]
    assert seq2seq.special_ids(model) == (3, 0, (1, 4), None)


def test_a_model_without_a_start_token_is_a_clear_error() -> None:
    model = tiny_model("bart", vocabulary=20)
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = None
    with pytest.raises(CalibeamError, match="no decoder_start_token_id"):
        seq2seq.special_ids(model)


def test_ignored_heuristics_are_named() -> None:
    model = tiny_model("t5", vocabulary=20)
    assert seq2seq.ignored_heuristics(model) == []
    model.generation_config.no_repeat_ngram_size, model.generation_config.length_penalty = 3, 2.0
    assert seq2seq.ignored_heuristics(model) == ["length_penalty=2.0", "no_repeat_ngram_size=3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_stepping_gives_the_logits_of_the_whole_sequence_across_reorder(family: str) -> None:
    """Two rows for each of two sources, that go on from each other's outputs."""
    model = tiny_model(family, vocabulary=20)
    first, second, third = torch.tensor([[3, 9, 5, 3], [4, 8, 7, 2], [2, 3, 4, 5]])
    order = torch.tensor([1, 1, 3, 2])
    history = torch.stack([first[order], second[order], third], 1)
    with torch.no_grad():
        states = seq2seq.encode(model, *INPUT.values())
        stepper = seq2seq.Stepper(model, states, INPUT["attention_mask"], rows_per_source=2)
        after_first = stepper.step(first)
        after_second = stepper.step(second)
        stepper.reorder(order)
        after_third = stepper.step(third)
        whole = model(**{key: value.repeat_interleave(2, 0) for key, value in INPUT.items()}, decoder_input_ids=history).logits
    assert torch.allclose(after_first[order], whole[:, 0], atol=1e-4)
    assert torch.allclose(after_second[order], whole[:, 1], atol=1e-4)
    assert torch.allclose(after_third, whole[:, 2], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_states_are_what_the_head_reads(family: str) -> None:
    """The decoder's output states, after its last normalisation: the head makes the logits of them."""
    model = tiny_model(family, vocabulary=20)
    input_ids, mask = INPUT.values()
    token_ids = torch.tensor([[[5, 6, EOS], [7, 8, 9]], [[4, EOS, 0], [3, 3, EOS]]])
    with torch.no_grad():
        encoded = seq2seq.encode(model, input_ids, mask)
        states = seq2seq.force_states(model, encoded, mask, token_ids)
        logits = seq2seq.force(model, encoded, mask, token_ids)
        head = model.lm_head(states)
    if family == "t5":  # T5 with a tied head scales the states by size^-1/2 first
        head = head * 32**-0.5
    assert states.shape == (2, 2, 3, 32)
    assert torch.allclose(head, logits, atol=1e-4)

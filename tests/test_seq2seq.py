from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForSeq2SeqLM,
    ByT5Tokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
)

import hub
from calibeam import decode, seq2seq
from calibeam.records import CalibeamError
from calibeam.seq2seq import Seq2Seq, load, locate, save
from calibeam.stages import export
from conftest import FAMILIES, SIZES, sentence, tiny_model

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


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_fault_23_a_model_loads_in_float32_unless_told_otherwise_and_never_in_float16(
    stored: torch.dtype, model_folder: Callable[..., Path]
) -> None:
    """T5 and PEGASUS overflow in float16, in which many checkpoints are stored."""
    folder = model_folder()
    AutoModelForSeq2SeqLM.from_pretrained(folder).to(stored).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {stored}  # noqa: SIM118 (it is no dict)
    assert {weight.dtype for weight in load(folder, device="cpu").model.parameters()} == {torch.float32}
    assert load(folder, device="cpu", dtype=torch.bfloat16).model.dtype == torch.bfloat16
    with pytest.raises(CalibeamError, match="float16"):
        load(folder, device="cpu", dtype=torch.float16)


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


@pytest.mark.parametrize("family", ["t5", "bart", "pegasus", "mbart", "marian"])
@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)], ids=["nothing", "a config"])
def test_a_model_without_a_tokenizer_is_refused(family: str, left: tuple[str, ...], tokenizer: Any, tmp_path: Path) -> None:
    """transformers makes an empty one for some families, and that of T5 seems to fit."""
    folder = plain_checkpoint(tiny_model(family, vocabulary=len(tokenizer)), tokenizer, tmp_path / "model")
    assert seq2seq.examine(str(folder)).model_type == family
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if file in left:
            (folder / file).write_text("{}")
        else:
            (folder / file).unlink()
    for look in (seq2seq.examine, lambda place: load(Path(place), device="cpu")):
        with pytest.raises(CalibeamError, match=f"^{folder} has no tokenizer files: save the tokenizer beside the model"):
            look(str(folder))


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    folder = plain_checkpoint(tiny_model("t5", vocabulary=400), ByT5Tokenizer(), tmp_path / "model")
    assert load(folder, device="cpu").encode_sources(["ab"], 8)[0] == [[100, 101, 1]]


def test_a_model_with_two_vocabularies_is_exported_with_both(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(sentence(i, 20) for i in range(200)))
    names = ("source", "target")
    for name in names:
        sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / name), vocab_size=40, minloglevel=2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.model"))
    pieces = ["</s>", "<unk>", *(processor.id_to_piece(i) for i in range(3, 40)), "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    files = [str(tmp_path / f"{name}.model") for name in names], str(tmp_path / "vocab.json")
    own = MarianTokenizer(*files[0], files[1], target_vocab_file=files[1], separate_vocabs=True)
    ids = {"pad_token_id": len(pieces) - 1, "eos_token_id": 0, "decoder_start_token_id": len(pieces) - 1}
    two = {"decoder_vocab_size": len(pieces), "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    model = MarianMTModel(MarianConfig(vocab_size=len(pieces), forced_eos_token_id=None, **two, **SIZES, **ids))
    save(Seq2Seq(model.eval(), own), tmp_path / "model")
    (tmp_path / "exported").mkdir()
    export._copy_model(tmp_path / "model", tmp_path / "exported")
    found = load(tmp_path / "exported", device="cpu").tokenizer
    assert found.encode(sentence(1, 5)) == own.encode(sentence(1, 5))


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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder_start_token_id", [0], r"decoder_start_token_id must be a whole number, but is \[0\]"),
        ("decoder_start_token_id", 1.5, r"decoder_start_token_id must be a whole number, but is 1\.5"),
        ("eos_token_id", [1, 100_000], "eos_token_id of .* is 100000, but the model has"),
        ("eos_token_id", [], "have no eos_token_id"),
        ("pad_token_id", -1, "pad_token_id of .* is -1, but the model has"),
    ],
)
def test_fault_34_special_ids_that_no_model_has_are_refused(
    name: str, value: Any, message: str, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("t5")
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
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
    for layers in (3, 10**9):
        (folder / "config.json").write_text(json.dumps(config | {"decoder_layers": layers}))
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


class Hub(BaseHTTPRequestHandler):
    """Knows one model, whose only file breaks off; or nothing."""

    answer = 200

    def do_GET(self) -> None:
        told: Any = {"id": "some/model", "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}
        if "/tree/" in self.path:
            told = [{"type": "file", "path": "config.json", "size": 1000, "oid": "0" * 40}]
        content = json.dumps(told).encode() if "/api/" in self.path else b"{"
        self.send_response(self.answer)
        for name, value in {"ETag": '"0"', "X-Repo-Commit": "0" * 40, "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if "/api/" in self.path else 1000))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("answer", "said"),
    [(429, "429 Too Many Requests"), (500, "500 Internal Server Error"), (200, "closed|incomplete|size|bytes")],
)
def test_fault_18_a_hub_that_fails_is_a_clear_error(
    answer: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server."""
    from huggingface_hub import constants

    monkeypatch.setattr(Hub, "answer", answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        changes = {"ENDPOINT": place, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": True}
        changes["HUGGINGFACE_CO_URL_TEMPLATE"] = place + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in changes.items():
            monkeypatch.setattr(constants, name, value)
        with pytest.raises(
            CalibeamError, match=rf"no model at some/model: not a folder, and the Hugging Face Hub says: .*({said})"
        ):
            seq2seq.locate("some/model")
        server.shutdown()


def test_fault_18_a_model_that_was_fetched_is_found_without_the_hub(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    files = {file.name: file.read_bytes() for file in model_folder("t5").iterdir()}
    with hub.serving({**files, "evil.bin": b"never fetched"}, tmp_path / "cache"):
        found = locate("some/thing")
        assert {file.name for file in found.iterdir()} == set(files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert locate("some/thing") == found
    assert load(found, device="cpu").model.config.model_type == "t5"


def test_fault_18_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CalibeamError, match=r"no model at .*nowhere: there is no such folder"):
        locate(tmp_path / "nowhere")
    with pytest.raises(CalibeamError, match="nowhere"):
        load(tmp_path / "nowhere", device="cpu")
    with pytest.raises(
        CalibeamError, match=r"^no model at some/where: not a folder, and the Hugging Face Hub cannot be reached$"
    ):
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

"""The only door to Hugging Face: find, load and save a model, tokenise and collate, run it.

Every `AutoModelForSeq2SeqLM` goes through the same few calls; what differs by family (a tied head's
scale, a logits bias, kinds of positions) stays inside Hugging Face's own forward pass.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from calibeam.engine.graphs import room
from calibeam.records import CalibeamError

Ids = Sequence[int] | np.ndarray

log = logging.getLogger("calibeam")
_mentioned: weakref.WeakSet[Any] = weakref.WeakSet()

# A first output token that the family's format needs: the code of the language to write in.
LANGUAGE_CODE_FAMILIES = frozenset({"mbart", "m2m_100", "nllb-moe"})
# What a checkpoint's generation config may ask for and our search leaves out, with the values that ask for nothing.
DECODING_HEURISTICS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (0.0, 1.0),  # none, and what generate falls back to
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "min_length": (0,),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
}
DEFAULT_NUM_BEAMS = 5
LONGEST_HEADER = 1 << 24  # bytes: 100,000 tensors
MANY_LAYERS = 1000
LAYERS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "num_hidden_layers")
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.spm", "*.tokenizer")
VOCABULARIES = ("tokenizer.json", "*vocab*", "*.model", "*.spm", "*.tokenizer")
OWN_FILES = (
    "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "merges.txt", *VOCABULARIES,
)  # fmt: skip
"""What of a folder is the model and its tokenizer, whatever else somebody keeps there."""


class SpecialIds(NamedTuple):
    start: int
    pad: int
    eos: tuple[int, ...]
    forced_first: int | None


@dataclass(frozen=True)
class Seq2Seq:
    """A model and the tokenizer that fits it."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def ids(self) -> SpecialIds:
        return special_ids(self.model)

    def encode_sources(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
        """Token ids of the sources, cut to max_length, and how many were cut."""
        return self._encode({"text": list(texts)}, max_length)

    def encode_targets(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], int]:
        """Token ids of the targets as the decoder has to write them: without a start token, ending with one eos."""
        rows, cut = self._encode({"text_target": list(texts)}, max_length)
        return [_end_once(ids, self.ids.eos, max_length) for ids in rows], cut

    def _encode(self, texts: dict[str, list[str]], max_length: int) -> tuple[list[list[int]], int]:
        if not next(iter(texts.values())):
            return [], 0
        rows = self.tokenizer(**texts, truncation=True, max_length=max_length)["input_ids"]
        # Full rows are the only ones that can have been cut; tokenise those again to know.
        full = {key: [t for t, ids in zip(some, rows, strict=True) if len(ids) >= max_length] for key, some in texts.items()}
        whole = self.tokenizer(**full, verbose=False)["input_ids"] if next(iter(full.values())) else []
        return rows, sum(len(ids) > max_length for ids in whole)

    def text(self, token_ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as it reads after another, with its space: together they read as the text does.

        Of tokens that are parts of one character, the last has it and the others nothing.
        """
        found: list[str] = []
        parts: tuple[int, ...] = ()
        for token in token_ids:
            parts = (*parts, token)
            unfinished = self._pieces[parts].endswith("\ufffd") and len(parts) < 4
            found.append("" if unfinished else self._pieces[parts])
            parts = parts if unfinished else ()
        return [*found[:-1], self._pieces[parts]] if parts else found

    @cached_property
    def _pieces(self) -> dict[tuple[int, ...], str]:
        return _Pieces(self.tokenizer)

    def batch(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Token ids, padded, and the mask of those that are not padding. [rows, longest], int64 and bool"""
        ids, mask = pad_rows(rows, self.ids.pad)
        return ids.to(self.device), mask.to(self.device)

    def roomy_batch(self, rows: Sequence[Ids], most: int, per_octave: int = 1) -> tuple[Tensor, Tensor]:
        """The same on the host, as long as fits many batches; `most` is the longest there may be."""
        longest = room(max(map(len, rows)), self.device, per_octave=per_octave, most=most)
        return pad_rows(rows, self.ids.pad, longest)


class _Pieces(dict[tuple[int, ...], str]):
    """How tokens read, found once each: alone, a token may lose the space before it, so it is read after an "a"."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._before = tokenizer.encode("a", add_special_tokens=False)
        self._read = self._decode(self._before)

    def __missing__(self, tokens: tuple[int, ...]) -> str:
        after = self._decode([*self._before, *tokens])
        self[tokens] = after.removeprefix(self._read) if after.startswith(self._read) else self._decode(list(tokens))
        return self[tokens]


def locate(name: str | Path) -> Path:
    """The folder of a model: a local one, the `model` folder inside a stage's, or a snapshot of a Hub repository."""
    path = Path(name)
    if (path / "adapter_config.json").is_file():
        raise CalibeamError(f"{path} is an adapter, not a model: merge it into its model with peft, and save that")
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise CalibeamError(f"{path} is not a model: it has no config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(MODEL_FILES)))
    except HFValidationError:
        raise CalibeamError(f"no model at {name}: there is no such folder") from None
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = f"says: {first}"
        if isinstance(error, LocalEntryNotFoundError) and not isinstance(error.__cause__, HfHubHTTPError):
            reason = "cannot be reached"
        if isinstance(error, RepositoryNotFoundError):
            reason = "has no such model, or shows it only to those who are logged in"
        raise CalibeamError(f"no model at {name}: not a folder, and the Hugging Face Hub {reason}") from error


def load_config(folder: Path) -> Any:
    """Of an encoder-decoder, without the model."""
    config = _load_part(folder, "config.json", AutoConfig)
    if not getattr(config, "is_encoder_decoder", False):
        raise CalibeamError(
            f"{folder} holds a {config.model_type} model, which is not an encoder-decoder: "
            "calibeam calibrates T5, BART, PEGASUS and similar models"
        )
    return config


def load_tokenizer(folder: Path) -> Any:
    """Of a folder without one, transformers makes an empty one, which may even seem to fit."""
    has_vocabulary = any(file for pattern in VOCABULARIES for file in folder.glob(pattern))
    try:
        tokenizer = _load_part(folder, "tokenizer", AutoTokenizer)
    except CalibeamError:
        if has_vocabulary:
            raise
        tokenizer = None
    if not has_vocabulary and (tokenizer is None or tokenizer.vocab_files_names):  # one of bytes needs no vocabulary
        raise CalibeamError(f"{folder} has no tokenizer files: save the tokenizer beside the model, with its save_pretrained")
    return tokenizer


def examine(name: str) -> Any:
    """The config of a model that `load` will take, as far as can be told without loading its weights."""
    folder = locate(name)
    config = load_config(folder)
    _check_files(folder, config)
    load_tokenizer(folder)
    return config


def load(folder: Path, *, device: str = "auto", dtype: torch.dtype | None = None) -> Seq2Seq:
    """Load and check a model. Safetensors only, no remote code; float32 unless told otherwise, and never float16."""
    if dtype == torch.float16:
        raise CalibeamError("T5 and PEGASUS overflow in float16: use bfloat16 or float32")
    config = load_config(folder)
    model = _load_weights(AutoModelForSeq2SeqLM, folder, config, dtype or torch.float32)
    _fix_sinusoids(model)
    tokenizer = load_tokenizer(folder)
    _check_tokenizer(model, tokenizer, folder)
    return Seq2Seq(model.to(best_device(device)).eval(), tokenizer)


def load_encoder(folder: Path, *, layers: int = 0, device: str = "auto") -> tuple[Any, Any]:
    """An encoder in float32, or the encoder of an encoder-decoder, with its first layers alone if told so; its tokenizer."""
    config = _load_part(folder, "config.json", AutoConfig)
    if layers > config.num_hidden_layers:
        raise CalibeamError(f"{folder} has {config.num_hidden_layers} layers, not {layers}")
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = _load_weights(AutoModel, folder, config, torch.float32, unused="pooler")
    tokenizer = load_tokenizer(folder)
    encoder = model.get_encoder() if config.is_encoder_decoder else model
    return encoder.to(best_device(device)).eval(), tokenizer


def save(seq2seq: Seq2Seq, folder: Path) -> None:
    """An ordinary checkpoint: weights, tokenizer, and a generation config free of heuristics."""
    _check_weights(seq2seq.model, folder)
    model = seq2seq.model
    old, ids = model.generation_config, seq2seq.ids
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids.start,
        pad_token_id=ids.pad,
        eos_token_id=ids.eos[0] if len(ids.eos) == 1 else list(ids.eos),
        bos_token_id=old.bos_token_id,
        forced_bos_token_id=ids.forced_first,
        max_new_tokens=old.max_new_tokens,
        max_length=old.max_length if old.max_new_tokens is None else None,
        # The plain sum of log-probs is what calibration ranks by. transformers takes the setting only beside beams.
        num_beams=old.num_beams if (old.num_beams or 1) > 1 else DEFAULT_NUM_BEAMS,
        length_penalty=0.0,
    )
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = old
    _say_whether_tied(model, folder / "config.json")
    seq2seq.tokenizer.save_pretrained(folder)


def _say_whether_tied(model: Any, config: Path) -> None:
    """transformers 5 writes of every T5 that its head is its embedding, and other readers take it at its word."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        told = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps({**told, "tie_word_embeddings": False}, indent=2) + "\n", encoding="utf-8")


def best_device(device: str = "auto") -> torch.device:
    """A GPU if there is one, unless another is asked for."""
    if device == "cuda" and not torch.cuda.is_available():
        raise CalibeamError("device=cuda was asked for, but PyTorch finds no GPU here: `calibeam doctor` says what it finds")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """One of `recipe.DTYPES`. float16 is none of them: T5 and PEGASUS overflow."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def special_ids(model: Any) -> SpecialIds:
    """From the generation config, or the model's own config where that is silent."""

    def find(name: str) -> Any:
        value = getattr(model.generation_config, name, None)
        return getattr(model.config, name, None) if value is None else value

    start, pad, eos = find("decoder_start_token_id"), find("pad_token_id"), find("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    for name, values in (("decoder_start_token_id", (start,)), ("pad_token_id", (pad,)), ("eos_token_id", ends)):
        if values in ((), (None,)):
            raise CalibeamError(f"the model's generation config and config have no {name}")
        if any(type(value) is not int for value in values):
            raise CalibeamError(f"{name} must be a whole number, but is {eos if values is ends else values[0]!r}")
    forced = find("forced_bos_token_id") if model.config.model_type in LANGUAGE_CODE_FAMILIES else None
    return SpecialIds(start, pad, ends, forced)


def ignored_heuristics(model: Any) -> list[str]:
    """What the checkpoint's generation config asks for and `decode` does not apply, as 'name=value'."""
    config = model.generation_config
    return [
        f"{name}={value}"
        for name, neutral in DECODING_HEURISTICS.items()
        if (value := getattr(config, name, None)) is not None
        and value not in neutral
        and not (name == "forced_bos_token_id" and model.config.model_type in LANGUAGE_CODE_FAMILIES)
    ]


def mention_ignored_heuristics(model: Any) -> None:
    """Once per model, in the log."""
    ignored = [] if model in _mentioned else ignored_heuristics(model)
    _mentioned.add(model)
    if ignored:
        log.warning("the model's generation config asks for %s; calibeam's search does not apply this", ", ".join(ignored))


def task_prefixes(config: Any) -> tuple[str, ...]:
    """What a T5's config says that sources of the tasks it was trained on begin with."""
    tasks = getattr(config, "task_specific_params", None)
    found = [task.get("prefix") for task in tasks.values() if isinstance(task, dict)] if isinstance(tasks, dict) else []
    return tuple(prefix for prefix in found if isinstance(prefix, str) and prefix)


def max_positions(config: Any) -> int | None:
    """The longest sequence the model has positions for; None where positions are relative."""
    return getattr(config, "max_position_embeddings", None)


def _fix_sinusoids(model: Any) -> None:
    """Sinusoidal positions are not learnt, which transformers knows of a new model and forgets of one that it loads."""
    for module in model.modules():
        if type(module).__name__.endswith("SinusoidalPositionalEmbedding"):
            module.requires_grad_(False)


def encode(model: Any, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The encoder's output states. [batch, length, size]"""
    return model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def force(model: Any, source_states: Tensor, attention_mask: Tensor, token_ids: Tensor) -> Tensor:
    """Make the decoder write token_ids [batch, sequences, length]: its logits. [batch, sequences, length, vocabulary]"""
    output = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=source_states.repeat_interleave(token_ids.shape[1], 0)),
        attention_mask=attention_mask.repeat_interleave(token_ids.shape[1], 0),
        decoder_input_ids=_decoder_input(model, token_ids),
        use_cache=False,
    )
    return output.logits.view(*token_ids.shape, -1)


def force_states(model: Any, source_states: Tensor, attention_mask: Tensor, token_ids: Tensor) -> Tensor:
    """The same without the output head: the decoder's output states. [batch, sequences, length, size]"""
    output = model.get_decoder()(
        input_ids=_decoder_input(model, token_ids),
        encoder_hidden_states=source_states.repeat_interleave(token_ids.shape[1], 0),
        encoder_attention_mask=attention_mask.repeat_interleave(token_ids.shape[1], 0),
        use_cache=False,
    )
    return output.last_hidden_state.view(*token_ids.shape, -1)


def _decoder_input(model: Any, token_ids: Tensor) -> Tensor:
    """[batch * sequences, length]"""
    return shifted(token_ids, special_ids(model).start).flatten(0, 1)


def shifted(token_ids: Tensor, start: int) -> Tensor:
    """What a decoder reads to write token_ids: the start token, then every token but the last. [..., length]"""
    return torch.cat([token_ids.new_full((*token_ids.shape[:-1], 1), start), token_ids[..., :-1]], -1)


class Stepper:
    """A decoder that writes one token per row and call, keeping the keys and values of what it wrote."""

    def __init__(self, model: Any, source_states: Tensor, attention_mask: Tensor, rows_per_source: int = 1) -> None:
        self._model = model
        self._states = source_states.repeat_interleave(rows_per_source, 0)
        self._mask = attention_mask.repeat_interleave(rows_per_source, 0)
        self._cache: Any = None

    def step(self, tokens: Tensor) -> Tensor:
        """The logits after each row's next token. [rows] -> [rows, vocabulary]"""
        output = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._states),
            attention_mask=self._mask,
            decoder_input_ids=tokens[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Let row i go on from what row rows[i] wrote. All rows of one source share its encoding."""
        self._cache.self_attention_cache.reorder_cache(rows)


def sequence_mask(token_ids: Tensor, eos: tuple[int, ...]) -> Tensor:
    """The tokens of each sequence up to its first end token; all of them where there is none.

    A search cuts off what has no end at its last step, so such a row has no padding, and its pad ids are its own.
    """
    end = torch.isin(token_ids, torch.tensor(eos, device=token_ids.device)).long()
    return end.cumsum(-1) - end == 0


def batches_by_length(rows: Sequence[Sized], size: int) -> list[list[int]]:
    """The rows' indices, those of similar length together, so that little of a batch is padding."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def pad_rows(rows: Sequence[Ids], value: int, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of any length as one tensor, and the mask of what is not padding."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(longest or lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, value, dtype=np.int64)
    padded[mask] = np.concatenate(rows)  # by numpy, which is quick with few numbers and takes its arrays as they are
    return torch.from_numpy(padded), torch.from_numpy(mask)


def _end_once(ids: list[int], eos: tuple[int, ...], max_length: int) -> list[int]:
    """Cut what follows the end token (mBART's language code), or put one where there is none."""
    end = next((i for i, token in enumerate(ids) if token in eos and (i or len(ids) == 1)), None)
    return ids[: end + 1] if end is not None else [*ids[: max_length - 1], eos[0]]


def _load_part(folder: Path, part: str, loader: Any) -> Any:
    try:
        return loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise CalibeamError(f"the {part} in {folder} does not load: {error}") from error


def _load_weights(auto: Any, folder: Path, config: Any, dtype: torch.dtype, unused: str = "") -> Any:
    """A model whose weights are all there, those of an unused part aside."""
    _check_files(folder, config)
    try:
        model, report = auto.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise CalibeamError(f"{folder} does not load as a {config.model_type} model: {error}") from error
    found = {kind: sorted(map(str, report.get(kind) or ())) for kind in ("missing_keys", "mismatched_keys")}
    wrong = {kind: keys for kind, keys in found.items() if any(unused not in key.split(".") for key in keys)}
    if wrong:
        raise CalibeamError(f"the weights in {folder} do not fit its config.json: {wrong}")
    _check_weights(model, folder)
    return model


def _check_files(folder: Path, config: Any) -> None:
    """Weights are safetensors, an index may only name files of its own folder, and no layer is there in name alone."""
    if not any(folder.glob("*.safetensors")):
        raise CalibeamError(
            f"{folder} has no .safetensors weights. Other formats can run code when loaded and are refused: "
            "load the model where you trust it and save it again with save_pretrained"
        )
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CalibeamError(f"{index} is not an index of weights: {error!r}") from error
        if outside := sorted(str(name) for name in names if Path(str(name)).name != name or name == ".."):
            raise CalibeamError(f"{index} names a file outside its folder: {outside[0]}")
    tensors = sum(len(_header(file)) for file in folder.glob("*.safetensors"))
    layers = max(getattr(config, name, 0) or 0 for name in LAYERS)
    if layers > max(tensors, MANY_LAYERS):  # each would be made, to be filled with nothing
        raise CalibeamError(f"the weights in {folder} do not fit its config.json: {layers:,} layers, and {tensors:,} tensors")


def _header(file: Path) -> dict[str, Any]:
    """What is in a file by its names. safetensors takes the last of two with one name; another reader may take the first."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name stands there twice")
        return found

    try:
        with file.open("rb") as stream:
            if (length := int.from_bytes(stream.read(8), "little")) > LONGEST_HEADER:
                raise ValueError(f"it claims to have {length:,} bytes")
            return json.loads(stream.read(length), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise CalibeamError(f"{file.parent} does not load: the header of {file.name} is damaged: {error}") from error


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those that are not."""
    return [name for name, weight in weights if weight.is_floating_point() and not torch.isfinite(weight).all()]


def _check_weights(model: Any, folder: Path) -> None:
    if broken := not_finite(itertools.chain(model.named_parameters(), model.named_buffers())):
        raise CalibeamError(f"weights of {folder} are not finite: {', '.join(broken[:3])} ({len(broken)} tensors)")


def _check_tokenizer(model: Any, tokenizer: Any, folder: Path) -> None:
    ids = special_ids(model)
    rows = model.get_input_embeddings().num_embeddings
    highest = max(tokenizer.get_vocab().values(), default=-1)
    named = {"decoder_start_token_id": (ids.start,), "pad_token_id": (ids.pad,), "eos_token_id": ids.eos}
    for name, some in {**named, "forced_bos_token_id": (ids.forced_first or 0,)}.items():
        for one in some:
            if not 0 <= one < rows:
                raise CalibeamError(f"{name} of {folder} is {one}, but the model has {rows} embeddings")
    if highest >= rows:
        raise CalibeamError(
            f"the tokenizer in {folder} does not fit the model: it has ids up to {highest}, the model {rows} embeddings"
        )
    for name, id_of_tokenizer, ids_of_model in (
        ("pad", tokenizer.pad_token_id, (ids.pad,)),
        ("eos", tokenizer.eos_token_id, ids.eos),
    ):
        if id_of_tokenizer not in ids_of_model:
            raise CalibeamError(
                f"the tokenizer in {folder} does not fit the model: its {name} token has id {id_of_tokenizer}, "
                f"the model's {', '.join(map(str, ids_of_model))}"
            )

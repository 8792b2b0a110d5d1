"""Low-rank adapters, by peft: they alone are trained, and the model without them is the reference, at no cost.

The model stays the object that it is; peft puts a layer of its own around every linear layer that is adapted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibeam.records import CalibeamError

if TYPE_CHECKING:
    from torch import nn

SAVES = ("merged", "adapter")
NAME = "default"  # peft's own, for the first adapter of a model


def check_installed() -> None:
    if find_spec("peft") is None:
        raise CalibeamError("lora_rank needs the peft package: pip install 'calibeam[lora]'")


class Adapter:
    """Turns W x into W x + alpha / rank B A x, in the linear layers named. A is random and B is 0 to begin with."""

    def __init__(self, model: Any, *, rank: int, alpha: float, target_modules: Sequence[str], seed: int) -> None:
        """target_modules: names of layers, or ends of names; all linear layers but the output head if empty."""
        import torch
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        self._targets = _targets(model, target_modules)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=self._targets, task_type="SEQ_2_SEQ_LM")
        torch.manual_seed(seed)
        self._model, self._wrapper = model, get_peft_model(model, config)
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        self.size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was. Only flags are set, for which no GPU is waited for and no recorded graph is spoilt."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The model with the adapter in its weights, an ordinary one, as the fast search and a checkpoint want it.

        Its own layers are put aside meanwhile: adding to their weights and subtracting would leave rounding errors.
        """
        try:
            for name, layer in self._layers.items():
                self._model.set_submodule(name, _merged(layer))
            yield
        finally:
            for name, layer in self._layers.items():
                self._model.set_submodule(name, layer)

    def save(self, folder: Path, base: str) -> None:
        """In peft's own format. base: what to call the model that it belongs to."""
        config = self._wrapper.peft_config[NAME]
        config.base_model_name_or_path, config.target_modules = base, self._targets  # as a list: a set has no order
        self._wrapper.save_pretrained(folder, save_embedding_layers=False)  # else the Hub would be asked for the base
        (folder / "README.md").unlink()  # a card that says nothing


def _merged(layer: Any) -> nn.Module:
    import torch

    plain = copy.deepcopy(layer.base_layer)
    with torch.no_grad():
        plain.weight += layer.get_delta_weight(NAME)
    return plain


def _targets(model: Any, wanted: Sequence[str]) -> list[str]:
    from torch import nn

    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    short = sorted({name.rpartition(".")[2] for name in names})
    for target in wanted:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise CalibeamError(f"lora_target_modules: the model has no {target!r} to adapt; it has {', '.join(short)}")
    return [*wanted] or short

"""What a training run needs to go on as if it had not stopped: one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calibeam.records import CalibeamError
from calibeam.store import sync

NAME = "checkpoint.safetensors"


class Position(NamedTuple):
    """Where a source of batches stands."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def save(folder: Path, facts: dict[str, Any], model: Any, optimizer: Any, schedule: Any, position: Position) -> None:
    """Weights, optimizer, schedule, random numbers, the position in the data, and facts of the loop's own."""
    state = optimizer.state_dict()
    tensors = {f"model.{name}": weight for name, weight in model.named_parameters()}
    tensors |= {f"optimizer.{i}.{key}": value for i, some in state["state"].items() for key, value in some.items()}
    tensors |= {f"data.{name}": value for name, value in position.tensors.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(model.device)
    told = {"loop": facts, "data": position.facts, "groups": state["param_groups"], "schedule": schedule.state_dict()}
    partial = folder / f".{NAME}.partial"
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(contiguous, partial, {"calibeam": json.dumps(told)})
    sync(partial)
    os.replace(partial, folder / NAME)
    sync(folder)


def load(folder: Path, model: Any, optimizer: Any, schedule: Any) -> tuple[dict[str, Any], Position] | None:
    """Put everything back, if there is a checkpoint; the facts of the loop, and the position in the data."""
    file = folder / NAME
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            told = json.loads(opened.metadata()["calibeam"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CalibeamError(f"{file} is damaged: {error}. Remove it to begin anew") from error

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    weights = under("model.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in under("optimizer.").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": told["groups"]})
    schedule.load_state_dict(told["schedule"])
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and model.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], model.device)
    return told["loop"], Position(told["data"], under("data."))

"""What a training run needs to go on as if it had not stopped: one safetensors file, written whole or not at all.

It is named by its step, and holds a digest of all that is in it, so that none that is torn or changed is ever loaded. The one
before it is kept: where the newest is damaged, the run goes on from there. Where both are, it stops and says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calibeam import display
from calibeam.records import CalibeamError
from calibeam.seq2seq import not_finite
from calibeam.store import sync

PATTERN = "checkpoint-*.safetensors"


class Position(NamedTuple):
    """Where a source of batches stands."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def save(folder: Path, facts: dict[str, Any], model: Any, optimizer: Any, schedule: Any, position: Position) -> None:
    """Weights, optimizer, schedule, random numbers, the position in the data, and facts of the loop's own: the step, for one."""
    state = optimizer.state_dict()
    tensors = {f"model.{name}": weight for name, weight in model.named_parameters()}
    if broken := not_finite(tensors.items()):
        raise CalibeamError(
            f"weights are not finite after step {facts['step']}: {', '.join(broken[:3])}. They were not saved; "
            "a lower learning rate may help"
        )
    tensors |= {f"optimizer.{i}.{key}": value for i, some in state["state"].items() for key, value in some.items()}
    tensors |= {f"data.{name}": value for name, value in position.tensors.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(model.device)
    told = {
        "loop": facts, "data": position.facts, "groups": state["param_groups"], "schedule": schedule.state_dict(),
        "device": model.device.type,
    }  # fmt: skip
    older = _found(folder)
    for file in older[:-1]:  # before there is another, so that no more than two ever take up space
        file.unlink()
    write(folder / f"checkpoint-{facts['step']:09}.safetensors", told, tensors)


def write(file: Path, told: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    needed, free = sum(value.nbytes for value in ready.values()), shutil.disk_usage(file.parent).free
    if needed > free:
        raise CalibeamError(f"{file} needs {needed:,} bytes, and {free:,} are free there. The checkpoint before it is kept")
    text = json.dumps(told)
    partial = file.with_name(f".{file.name}.partial")
    save_file(ready, partial, {"calibeam": text, "sha256": _digest(text, ready)})
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)


def load(folder: Path, model: Any, optimizer: Any, schedule: Any) -> tuple[dict[str, Any], Position] | None:
    """Put everything back, if there is a checkpoint; the facts of the loop, and the position in the data."""
    found, problems = _found(folder), list[str]()
    for file in reversed(found):
        try:
            told, tensors = read(file)
        except CalibeamError as error:
            problems.append(str(error))
            display.say(f"  {error}; trying the one before it", style="yellow")
        else:
            _restore(file, told, tensors, model, optimizer, schedule)
            return told["loop"], Position(told["data"], _under(tensors, "data."))
    if problems:
        raise CalibeamError("; ".join(problems) + f". There is no other: remove {folder} to begin anew")
    return None


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What was told, and the tensors, if all of it is as it was written."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            text = metadata["calibeam"]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        if metadata["sha256"] != _digest(text, tensors):
            raise ValueError("its contents do not match their SHA-256")
        return json.loads(text), tensors
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CalibeamError(f"{file} is damaged: {error}") from error


def remove(folder: Path) -> None:
    for file in _found(folder):
        file.unlink()


def _restore(file: Path, told: dict[str, Any], tensors: dict[str, Tensor], model: Any, optimizer: Any, schedule: Any) -> None:
    """Where anything is missing, an error: a run that goes on with a fresh optimizer is another run."""
    weights, moments = _under(tensors, "model."), _under(tensors, "optimizer.")
    missing = [f"the weight {name}" for name, _ in model.named_parameters() if name not in weights]
    missing += [what for what in ("loop", "data", "groups", "schedule") if what not in told]
    missing += [] if moments else ["optimizer"]
    missing += [f"random.{device}" for device in dict.fromkeys(("cpu", model.device.type)) if f"random.{device}" not in tensors]
    if missing:
        raise CalibeamError(f"{file} lacks what is needed to go on: {', '.join(missing[:5])}")
    if told["device"] != model.device.type:
        raise CalibeamError(
            f"{file} was written on {told['device']}, and this is {model.device.type}: go on with device={told['device']}"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in moments.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": told["groups"]})
    schedule.load_state_dict(told["schedule"])
    torch.set_rng_state(tensors["random.cpu"])
    if model.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random.cuda"], model.device)


def _found(folder: Path) -> list[Path]:
    """By their steps, whatever a clock said."""
    return sorted(folder.glob(PATTERN))


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        found.update(f"\0{name} {value.dtype} {[*value.shape]}\0".encode())
        found.update(value.numpy().data)
    return found.hexdigest()

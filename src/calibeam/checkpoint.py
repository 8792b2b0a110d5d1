"""What a training run needs to go on as if it had not stopped: one safetensors file, written whole or not at all.

It is named by its step, and holds a digest of all that is in it, so that none that is torn or changed is ever loaded. The one
before it is kept: where the newest is damaged, the run goes on from there. Where both are, it stops and says so.

Of a model that is shared out among processes each writes its rows into a file of its own, a share. The one file is written when
all of these are there, names them and their digests, and without it they are nothing. They are read by any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from calibeam import display, distributed
from calibeam.engine import sharding
from calibeam.records import CalibeamError, DivergedError
from calibeam.seq2seq import not_finite
from calibeam.store import sync

FILES = PATTERN, SHARES = "checkpoint-*.safetensors", "share-*.safetensors"
OF_EVERY_WEIGHT = ("exp_avg", "exp_avg_sq")
"""What an optimizer knows of every single weight, and is shared out as these are. The rest is little."""


class Position(NamedTuple):
    """Where a source of batches stands."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


class Stored(NamedTuple):
    """A checkpoint that is as it was written."""

    told: dict[str, Any]
    tensors: dict[str, Tensor]
    shares: dict[str, list[tuple[int, Any]]]
    """The tensors that are in shares: from which row on which file has them."""

    def names(self, prefix: str) -> list[str]:
        return [name for name in (*self.tensors, *self.shares) if name.startswith(prefix)]

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Some rows of a tensor, or all of it."""
        if name in self.tensors:
            return self.tensors[name] if last is None else self.tensors[name][first:last]
        found = []
        for begin, file in self.shares[name]:
            part = file.get_slice(name)
            end = begin + part.get_shape()[0]
            start, stop = max(first, begin), end if last is None else min(last, end)
            found += [part[start - begin : stop - begin]] if start < stop else []
        return torch.cat(found)


def save(
    folder: Path, facts: dict[str, Any], model: Any, optimizer: Any, schedule: Any, position: Callable[[], Position]
) -> None:
    """Weights, optimizer, schedule, random numbers, the position in the data, and facts of the loop's own: the step, for one.

    All processes call this. Each writes what it alone has, and the first, who knows the position, the rest.
    """
    state, step = optimizer.state_dict(), f"{facts['step']:09}"
    tensors = {f"model.{name}": weight for name, weight in model.named_parameters()}
    tensors |= {f"optimizer.{i}.{key}": value for i, some in state["state"].items() for key, value in some.items()}
    names = [*tensors]
    own = {name: sharding.own_rows(tensors.pop(name)) for name in [*tensors] if sharding.is_share(tensors[name])}
    rows, first = {name: rows for name, (_, rows) in own.items()}, {name: first for name, (first, _) in own.items()}
    if broken := not_finite((name, value) for name, value in (tensors | rows).items() if name.startswith("model.")):
        raise DivergedError(
            f"weights are not finite after step {facts['step']}: {', '.join(broken[:3])}. They were not saved; "
            "a lower learning rate may help"
        )
    distributed.by_first(lambda: _clear(folder, step))  # before there is another, so that no more than two take up space
    shares: list[list[str]] = []
    if own:
        file = folder / f"share-{step}-{distributed.rank()}-of-{distributed.size()}.safetensors"
        shares = distributed.gather([file.name, write(file, {"first": first}, rows)])
    told = {
        "loop": facts, "groups": state["param_groups"], "schedule": schedule.state_dict(), "device": model.device.type,
        "shares": shares, "holds": names,
    }  # fmt: skip

    def publish() -> None:
        data, of_data = position()
        more = {f"data.{name}": value for name, value in of_data.items()} | {"random.cpu": torch.get_rng_state()}
        if model.device.type == "cuda":
            more["random.cuda"] = torch.cuda.get_rng_state(model.device)
        write(folder / f"checkpoint-{step}.safetensors", {**told, "data": data}, {**tensors, **more})

    distributed.by_first(publish)


def write(file: Path, told: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Whole or not at all; the digest."""
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    needed, free = sum(value.nbytes for value in ready.values()), shutil.disk_usage(file.parent).free
    needed *= distributed.size()  # as much as all write together
    if needed > free:
        raise CalibeamError(f"{file} needs {needed:,} bytes, and {free:,} are free there. The checkpoint before it is kept")
    text = json.dumps(told)
    partial = file.with_name(f".{file.name}.partial")
    digest = _digest(text, ready)
    save_file(ready, partial, {"calibeam": text, "sha256": digest})
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)
    return digest


def load(folder: Path, model: Any, optimizer: Any, schedule: Any) -> tuple[dict[str, Any], Position] | None:
    """Put everything back, if there is a checkpoint; the facts of the loop, and the position in the data."""
    found, problems = _found(folder), list[str]()
    for file in reversed(found):
        try:
            stored = _open(file)
        except CalibeamError as error:
            problems.append(str(error))
            display.say(f"  {error}; trying the one before it", style="yellow")
        else:
            _check(file, stored, model, optimizer, schedule)
            _restore(stored, model, optimizer, schedule)
            return stored.told["loop"], Position(stored.told["data"], _under(stored.tensors, "data."))
    if problems:
        raise CalibeamError("; ".join(problems) + f". There is no other: remove {folder} to start again")
    return None


def drop_after(folder: Path, step: int) -> None:
    """Remove the damaged ones behind the one that was loaded: of what is there before the next, that is to be kept."""
    for file in _found(folder):
        if file.name > PATTERN.replace("*", f"{step:09}"):
            file.unlink()


def _open(file: Path) -> Stored:
    """With its shares, every one of which is looked at."""
    told, tensors = read(file)
    shares: dict[str, list[tuple[int, Any]]] = {}
    try:
        for name, digest in told.get("shares", ()):
            share = file.with_name(name)
            begins, opened = read(share, digest)[0]["first"], safe_open(share, framework="pt")
            for tensor, begin in begins.items():
                shares.setdefault(tensor, []).append((begin, opened))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CalibeamError(f"{file} is damaged: {error}") from error
    return Stored(told, tensors, shares)


def read(file: Path, digest: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What was told, and the tensors, if all of it is as it was written, with this digest if one is known."""
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            text = metadata["calibeam"]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        if metadata["sha256"] != _digest(text, tensors) or digest not in (None, metadata["sha256"]):
            raise ValueError("its contents do not match their SHA-256")
        if not isinstance(told := json.loads(text), dict):
            raise ValueError("it has no description")
        return told, tensors
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CalibeamError(f"{file} is damaged: {error}") from error


def _clear(folder: Path, step: str) -> None:
    """Remove all but the last before a step, what was never finished, and then the shares that belong to none."""
    kept = [file for file in _found(folder) if file.name < f"checkpoint-{step}"][-1:]
    for file in (*_found(folder), *folder.glob(".*.safetensors.partial")):
        if file not in kept:
            file.unlink()
    for share in folder.glob(SHARES):
        if not any(file.stem.endswith(share.name.split("-")[1]) for file in kept):
            share.unlink()


def _check(file: Path, stored: Stored, model: Any, optimizer: Any, schedule: Any) -> None:
    """Where anything is missing, an error: a run that goes on with a fresh optimizer is another run."""
    told, device, own = stored.told, model.device.type, optimizer.state_dict()["param_groups"]
    there = {*stored.tensors, *stored.shares}
    wanted = {"loop": dict, "data": dict, "groups": list, "schedule": dict, "holds": list}
    missing = [what for what, kind in wanted.items() if not isinstance(told.get(what), kind)]
    if not missing:
        missing += [
            str(name)
            for name in (*(f"model.{name}" for name, _ in model.named_parameters()), *told["holds"])
            if name not in there
        ]
        missing += [] if stored.names("optimizer.") else ["optimizer"]
        missing += [f"schedule.{key}" for key in schedule.state_dict() if key not in told["schedule"]]
        missing += [] if [*map(_keys, told["groups"])] == [*map(_keys, own)] else ["groups"]
        missing += [f"random.{kind}" for kind in dict.fromkeys(("cpu", device)) if f"random.{kind}" not in there]
    if missing:
        raise CalibeamError(f"{file} lacks what is needed to resume: {', '.join(missing[:5])}")
    if told.get("device") != device:
        raise CalibeamError(
            f"{file} was written on {told.get('device')}, and this is {device}: resume with device={told.get('device')}"
        )


def _keys(group: Any) -> set[str] | None:
    return {*group} if isinstance(group, dict) else None


def _restore(stored: Stored, model: Any, optimizer: Any, schedule: Any) -> None:
    told, device = stored.told, model.device.type
    parameters, state = [*model.parameters()], dict[int, dict[str, Tensor]]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_own(stored, f"model.{name}", parameter))
    for name in stored.names("optimizer."):
        _, index, key = name.split(".")
        parameter = parameters[int(index)]
        state.setdefault(int(index), {})[key] = _own(stored, name, parameter) if key in OF_EVERY_WEIGHT else stored.rows(name)
    optimizer.load_state_dict({"state": state, "param_groups": told["groups"]})
    schedule.load_state_dict(told["schedule"])
    torch.set_rng_state(stored.tensors["random.cpu"])
    if device == "cuda":
        torch.cuda.set_rng_state(stored.tensors["random.cuda"], model.device)


def _own(stored: Stored, name: str, parameter: Tensor) -> Tensor:
    """A tensor of a parameter's shape, or as much of it as this process has of that."""
    if not sharding.is_share(parameter):
        return stored.rows(name)
    first, own = sharding.own_rows(parameter)
    rows = stored.rows(name, first, first + len(own)) if len(own) else own
    return sharding.share_like(parameter, rows)


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

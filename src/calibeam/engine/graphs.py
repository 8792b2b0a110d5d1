"""Work that a GPU does again and again, recorded once for each shape and replayed.

A step of training is thousands of small operations, and a host that starts them one by one is often slower than
the GPU that does them. A replayed CUDA graph is started at once, and does what the operations would have done.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from calibeam.records import CalibeamError

Batch = Mapping[str, Any]
"""Tensors by name, and plain values that decide what is done with them."""


class Recorded:
    """A function of a batch, recorded when a shape comes for the second time.

    The function must not wait for the GPU, and what it adds to, the gradients, must stay where it is.
    """

    def __init__(self, function: Callable[[Batch], Tensor], device: torch.device, *, enabled: bool = True) -> None:
        self._function, self._device = function, device
        self._enabled = enabled and device.type == "cuda"
        self._seen: dict[Any, _Recording | None] = {}
        self._where: tuple[Any, torch.cuda.Stream] | None = None

    def __call__(self, batch: Batch) -> Tensor:
        if not self._enabled:
            return self._function(_moved(batch, self._device))
        key = tuple((name, (value.shape, value.dtype) if isinstance(value, Tensor) else value) for name, value in batch.items())
        if key not in self._seen:  # the first time compiles, allocates and chooses what a recording must find done
            self._seen[key] = None
            return self._function(_moved(batch, self._device))
        recording = self._seen[key]
        if recording is None:
            recording = self._seen[key] = self._record(batch)
        return recording.replay(batch)

    def _record(self, batch: Batch) -> _Recording:
        if self._where is None:
            torch.cuda.empty_cache()  # what ran unrecorded holds memory that no recording can use
            # Recordings share their memory, which only those on one stream do.
            self._where = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        gc.collect(1)  # garbage holds memory too; what has been there for long is data, of which there is much
        try:
            return _Recording(self._function, _moved(batch, self._device), *self._where)
        except RuntimeError as error:  # after which random numbers cannot be drawn any more
            reason = str(error).strip().splitlines()[0]
            raise CalibeamError(f"a step cannot be recorded as a CUDA graph: {reason}. Pass cuda_graphs=false") from error


class _Recording:
    def __init__(self, function: Callable[[Batch], Tensor], batch: Batch, pool: Any, stream: torch.cuda.Stream) -> None:
        self._inputs, self._graph = batch, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool)
            try:
                self._result = function(batch)
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self, batch: Batch) -> Tensor:
        for name, value in batch.items():
            if isinstance(value, Tensor):
                self._inputs[name].copy_(value, non_blocking=True)
        self._graph.replay()
        return self._result.clone()  # before the memory it shares with other recordings is theirs


def _moved(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def room(length: int, device: torch.device, *, per_octave: int = 2, most: int | None = None) -> int:
    """`length` or somewhat more, on a GPU: with few different lengths, few shapes have to be recorded."""
    if device.type != "cuda":
        return length
    step = max(8, (1 << max(length - 1, 1).bit_length() - 1) // per_octave)
    roomy = -length // step * -step
    return roomy if most is None else max(length, min(roomy, most))

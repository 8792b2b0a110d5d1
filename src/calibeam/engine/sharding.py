"""A model of which every process holds a share: weights, gradients and the optimizer's state, by PyTorch's FSDP2.

FSDP2 gathers the weights of a module before its forward pass, frees them after it, and does so again for the gradients. Our pass
reads the weights of Hugging Face's modules and does not call them. So what is gathered together is a module of our own, which
holds the linear layers of a block, and whose forward pass is whatever is to be done with them. All else, embeddings, norms and
the head, is gathered for a whole pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from calibeam import distributed, families
from calibeam.records import CalibeamError

Found = TypeVar("Found")


class _Unit(nn.Module):
    def __init__(self, *held: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(held)

    def forward(self, function: Callable[..., Any], *inputs: Any) -> Any:
        return function(*inputs)


_units: dict[nn.Module, _Unit] = {}
"""By the last layer of each block, while a sharded model is at work."""


def unit(block: families.Block) -> _Unit | None:
    """What a block has to be computed in, if its weights are gathered for that."""
    return _units.get(block.contract)


class Sharded:
    """A model, and perhaps one that is frozen and at work beside it, with the weights of both shared out.

    dtype: of products, in which the weights of a block are gathered; gradients are added up in float32.
    """

    def __init__(self, model: Any, dtype: torch.dtype, frozen: Any = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # which nobody changes in place
        self._model, models = model, [each for each in (model, frozen) if each is not None]
        if families.anatomy(model) is None:
            raise CalibeamError(f"shard_model needs a model of one of these kinds: {', '.join(families.FAMILIES)}")
        mesh = init_device_mesh(model.device.type, (distributed.size(),))
        narrow = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        blocks = [block for each in models for block in families.blocks(each)]
        self._units: dict[nn.Module, Any] = {block.contract: _Unit(*block.layers) for block in blocks}
        for unit in self._units.values():
            fully_shard(unit, mesh=mesh, mp_policy=narrow)
        self._root: Any = _Unit(*models, *self._units.values())
        theirs = {weight for unit in self._units.values() for weight in unit.parameters()}
        fully_shard(self._root, mesh=mesh, ignored_params=theirs)
        for unit in (self._root, *self._units.values()):  # gradients are sums, not means
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def __call__(self, function: Callable[[], Found]) -> Found:
        """What a function of the models finds: tensors, of which gradients may be asked. All processes must do this together."""
        _units.update(self._units)
        try:
            found: Found = self._root(function)
            return found
        finally:
            _units.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Meanwhile the model has all its weights, in float32, in every process, and is an ordinary one."""
        shares = [
            (module, name, share) for module in self._model.modules() for name, share in module.named_parameters(recurse=False)
        ]
        gathered = {share: nn.Parameter(_gathered(share), share.requires_grad) for share in self._model.parameters()}
        for module, name, share in shares:
            setattr(module, name, gathered[share])
        gathered.clear()
        try:
            yield
        finally:
            for module, name, share in shares:
                setattr(module, name, share)


class Adafactor(torch.optim.Adafactor):
    """Of shares: each parameter is gathered for its update. What is known of it is of rows and of columns, and little."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for share in group["params"]:
                if share.grad is None:
                    continue
                weight = nn.Parameter(_gathered(share))
                weight.grad = _gathered(share.grad)
                alone = torch.optim.Adafactor([{**group, "params": [weight]}])
                alone.state[weight] = self.state[share]
                alone.step()
                first, own = own_rows(share)
                own.copy_(weight[first : first + len(own)])


def is_share(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def own_rows(share: Any) -> tuple[int, Tensor]:
    """Which of a tensor's rows this process has: from which on, and these. FSDP2 deals them out as `chunk` does."""
    own, mesh = share.detach().to_local(), share.device_mesh
    return min(mesh.get_local_rank() * -(-share.shape[0] // mesh.size()), share.shape[0]), own


def share_like(share: Any, rows: Tensor) -> Any:
    """A tensor of which this process has the same rows as of another."""
    from torch.distributed.tensor import DTensor

    layout = {"shape": share.shape, "stride": share.stride(), "run_check": False}
    return DTensor.from_local(rows.to(share.device), share.device_mesh, share.placements, **layout)


def _gathered(share: Any) -> Tensor:
    return share.detach().full_tensor()

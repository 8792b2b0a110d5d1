"""calibeam: sequence likelihood calibration for encoder-decoders.

Names are loaded when first used, those of modules in `calibeam.paper` and `calibeam.stages` too, so that `import calibeam`
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibeam import paper, stages
    from calibeam.engine.logprob import sequence_log_p
    from calibeam.engine.search import decode
    from calibeam.paper.rouge import rouge
    from calibeam.records import CalibeamError, Candidates, Example

__version__ = "0.1.0"
__all__ = ["CalibeamError", "Candidates", "Example", "decode", "paper", "rouge", "sequence_log_p", "stages"]

_HOME = {
    "CalibeamError": "records",
    "Candidates": "records",
    "Example": "records",
    "decode": "engine.search",
    "rouge": "paper.rouge",
    "sequence_log_p": "engine.logprob",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'calibeam' has no attribute {name!r}")
    return getattr(import_module(f"calibeam.{_HOME[name]}"), name) if name in _HOME else import_module(f"calibeam.{name}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

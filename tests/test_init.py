"""What `import calibeam` gives, in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import calibeam.paper

CODE = """
import sys, calibeam
print(sorted(set(dir(calibeam)) - {"__version__"}) == sorted(calibeam.__all__), sorted({"torch", "rich"} & set(sys.modules)))
print(calibeam.paper.calibration.rank.__name__, calibeam.stages.decode.Config.__name__, "rouge" in dir(calibeam.paper))
for module, name in ((calibeam, "decoder"), (calibeam.paper, "nothing"), (calibeam.stages, "nothing")):
    print(hasattr(module, name))
"""


def test_names_are_there_without_being_imported_by_hand() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)  # noqa: S603
    assert done.stdout.splitlines() == ["True []", "rank Config True", "False", "False", "False"], done.stderr


def test_every_module_of_the_paper_is_named() -> None:
    assert calibeam.paper.__all__ == sorted(module.name for module in pkgutil.iter_modules(calibeam.paper.__path__))

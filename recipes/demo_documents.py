"""What the demo's model was pretrained on: the docstrings of installed packages, each with its code, as a line of JSON each.

    python recipes/demo_documents.py recipes/demo-model.toml > out/demo-model/documents.jsonl

Only of names in the training split, and without documents that hold the line of a name in another split.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from calibeam import recipe
from calibeam.tasks import docstrings


def main() -> None:
    packages = recipe.read(Path(sys.argv[1]))["prepare"]["packages"]
    every = [found for package in packages for found in docstrings.documented(package)]
    is_trained = [docstrings.split_of(name) == "train" for name, _, _ in every]
    held_out = {lines(docstring)[0] for (_, _, docstring), own in zip(every, is_trained, strict=True) if not own}
    texts = (
        f"{docstring}\nCode: {code}"  # a sentence of its own, as it does not begin with a small letter
        for (_, code, docstring), own in zip(every, is_trained, strict=True)
        if own and held_out.isdisjoint(lines(docstring))
    )
    for text in dict.fromkeys(texts):
        print(json.dumps({"text": text}))


def lines(docstring: str) -> list[str]:
    return [line.strip(" .").lower() for line in docstring.strip().splitlines()]


if __name__ == "__main__":
    main()

"""Write the calibrated model as an ordinary Hugging Face checkpoint, or its adapter alone, with a model card.

Reads:   the folders written by calibrate and by evaluate, before and after
Writes:  weights, tokenizer, generation config and README.md, which AutoModelForSeq2SeqLM loads without calibeam;
         after lora_save=adapter, what peft loads beside the fine-tuned model
Example: calibeam export out/data.toml output=my-calibrated-model
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibeam import display, page, store
from calibeam.recipe import StageConfig, option
from calibeam.stages.report import compare


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    calibrated: str = option(help="the folder written by calibrate", identity=False)
    before: str = option(help="the folder written by evaluate for the fine-tuned model", identity=False)
    after: str = option(help="the folder written by evaluate for the calibrated model", identity=False)


def run(config: Config, *, force: bool = False) -> Path:
    calibrated = store.read(config.calibrated, "calibrate")
    before, after = store.read(config.before, "evaluate"), store.read(config.after, "evaluate")
    inputs = {"calibrated": calibrated, "before": before, "after": after}
    output = store.Output("export", config, inputs, force=force)
    if output.done:
        return output.path
    with output.writing():
        shutil.copytree(calibrated.path / _kind(calibrated), output.folder, dirs_exist_ok=True)
        (output.folder / "README.md").write_text(card(calibrated, before, after, output.path.name), encoding="utf-8")
    display.say(f"export: {output.path}")
    return output.path


def card(calibrated: store.Folder, before: store.Folder, after: store.Folder, name: str) -> str:
    """What was done, and what it changed."""
    settings = calibrated.manifest["settings"]
    return page.fill(
        "card.md",
        name=name,
        base=public_name(settings["model"]),
        base_is_on_hub=_is_hub_id(settings["model"]),
        kind=_kind(calibrated),
        settings=settings,
        manifest=calibrated.manifest,
        comparison=compare(before, after),
    )


def _kind(calibrated: store.Folder) -> str:
    """Which of its folders is wanted."""
    return "adapter" if calibrated.manifest["settings"].get("lora_save") == "adapter" else "model"


def public_name(model: str) -> str:
    """A Hub id as it is; of a folder only its name, for a card must not tell where things lie on a disk."""
    if _is_hub_id(model):
        return model
    parts = Path(model).resolve().parts
    return parts[-2] if parts[-1] == "model" and len(parts) > 1 else parts[-1]


def _is_hub_id(model: Any) -> bool:
    return str(model).count("/") == 1 and not Path(model).exists()

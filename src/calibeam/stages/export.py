"""Write the calibrated model as an ordinary Hugging Face checkpoint, or its adapter alone, with a model card.

Reads:   the folders written by calibrate and by evaluate, before and after
Writes:  weights, tokenizer, generation config and README.md, which AutoModelForSeq2SeqLM loads without calibeam: the
         fine-tuned model as it was if no step was better; after lora_save=adapter, what peft loads with the fine-tuned model
Example: calibeam export out/data.toml output=my-calibrated-model
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from calibeam import display, page, store
from calibeam.recipe import StageConfig, option
from calibeam.stages.report import compare, exports_adapter, is_hub_id, is_unchanged, name_of, public_name, remarks


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    calibrated: str = option(help="the folder written by calibrate", identity=False)
    before: str = option(help="the folder written by evaluate for the fine-tuned model", identity=False)
    after: str = option(help="the folder written by evaluate for the calibrated model", identity=False)


def run(config: Config, *, force: bool = False) -> Path:
    calibrated = store.read(config.calibrated, "calibrate")
    before, after = store.read(config.before, "evaluate"), store.read(config.after, "evaluate")
    inputs = {"calibrated": calibrated, "before": before, "after": after}
    as_it_was = is_unchanged(calibrated) and not exports_adapter(calibrated)
    if as_it_was:
        inputs["model"] = calibrated.input("model")
    output = store.Output("export", config, inputs, force=force, is_public=True)
    if output.done:
        return output.path
    with output.writing():
        if as_it_was:
            _copy_model(inputs["model"].path, output.folder)
        else:
            kind = "adapter" if exports_adapter(calibrated) else "model"
            shutil.copytree(calibrated.path / kind, output.folder, dirs_exist_ok=True)
            _write_length(output.folder / "generation_config.json", after.manifest["settings"]["max_new_tokens"])
        (output.folder / "README.md").write_text(card(calibrated, before, after, output), encoding="utf-8")
    display.say(f"export: {output.path}")
    return output.path


def _copy_model(model: Path, folder: Path) -> None:
    """With its own generation config and numbers, to the byte."""
    from calibeam.seq2seq import OWN_FILES

    for file in {file for pattern in OWN_FILES for file in model.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, folder / file.name)


def _write_length(generation_config: Path, max_new_tokens: int) -> None:
    """That which was measured; else transformers would stop after 20 tokens. An adapter has no such file."""
    if generation_config.is_file():
        told = json.loads(generation_config.read_text(encoding="utf-8"))
        told.pop("max_length", None)
        generation_config.write_text(json.dumps({**told, "max_new_tokens": max_new_tokens}, indent=2) + "\n", encoding="utf-8")


def card(calibrated: store.Folder, before: store.Folder, after: store.Folder, output: store.Output) -> str:
    """What was done, and what it changed."""
    settings, comparison = calibrated.manifest["settings"], compare(before, after)
    base, name, generation = public_name(settings["model"]), name_of(output.path), output.folder / "generation_config.json"
    return page.fill(
        "card.md",
        name=f"{name}-calibrated" if name == base else name,
        base=base,
        base_is_on_hub=is_hub_id(settings["model"]),
        generation=json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {},
        is_adapter=exports_adapter(calibrated),
        unchanged=is_unchanged(calibrated),
        settings=settings,
        decoding=after.manifest["settings"],
        source_prefix=before.input("data", "prepare").manifest["settings"].get("source_prefix", ""),
        manifest=calibrated.manifest,
        comparison=comparison,
        remarks=remarks(comparison, calibrated),
    )

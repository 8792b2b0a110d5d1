"""What this machine has, and what that means for a run."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.util import find_spec

from calibeam import display, store

EXTRAS = {
    "datasets": (("datasets",), "prepare reads splits of Hub datasets (hub:NAME:SPLIT)"),
    "lora": (("peft",), "calibrate trains LoRA adapters (lora_rank)"),
    "msmarco": (("spacy",), "evaluate measures as MS MARCO does (metrics=msmarco)"),
    "ray": (("ray",), "decode, score and evaluate run on Ray clusters (engine=ray)"),
    "trackers": (("accelerate", "tensorboardX"), "training reports to TensorBoard and others (report_to)"),
}
"""What pip calls them, as in calibeam[lora]; the packages that each brings; and what they are for."""


def run() -> None:
    import torch

    rows = [("calibeam and python", ", ".join(f"{name} {v}" for name, v in list(store.versions().items())[:2]))]
    rows += [(name, version) for name, version in store.versions().items() if name not in ("calibeam", "python")]
    rows += [
        ("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        ("memory", f"{_gib(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} in all"),
        ("disk here", f"{_gib(shutil.disk_usage('.').free)} free"),
    ]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            rows.append(
                (f"GPU {index}", f"{device.name}, {_gib(device.total_memory)}, bf16 {_yes(torch.cuda.is_bf16_supported())}")
            )
    else:
        rows.append(("GPU", "none that torch can use"))
    rows += [(f"extra: {name}", f"{_yes(all(map(find_spec, needs)))}; {purpose}") for name, (needs, purpose) in EXTRAS.items()]
    display.table("This machine", ("what", "here"), rows, figures=False)
    for line in _advice(torch.cuda.is_available(), torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        display.say(line)


def _advice(gpu: bool, bf16: bool) -> list[str]:
    if not gpu:
        return [
            "Everything runs on the CPU in float32. That is fine for the demo and for models of up to about 10 million "
            "parameters and a few thousand examples; a T5-small on a whole dataset needs a GPU.",
        ]
    if not bf16:
        return ["Everything runs on the GPU in float32: it has no bfloat16, and float16 overflows in T5 and PEGASUS."]
    return ["Decoding and scoring run on the GPU in bfloat16; training in bfloat16 with float32 weights."]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"

"""The command line: one verb per stage, `run` for all of them, `calibrate-model` for one's own model.

Nothing heavy is imported before a stage runs, so help and mistakes in a recipe are answered at once.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

import calibeam
from calibeam import display, distributed, functions, pipeline, recipe, signals, stages, store
from calibeam.presets import PRESETS
from calibeam.records import CalibeamError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Calibrate a sequence-to-sequence model so that the likelihood of its outputs ranks them by quality.\n\n"
    "Start with your own model:\n\n"
    "  calibeam calibrate-model --model MODEL --train train.jsonl --validation val.jsonl --output DIR\n\n"
    "or run every stage of a recipe:\n\n"
    "  calibeam run recipe.toml",
)
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="RECIPE.toml KEY=VALUE", show_default=False, help="a recipe, then settings that override it"),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="make stages again that were made with other settings or inputs, or are damaged; what they read is kept"
    ),
]
AllowCode = Annotated[
    bool, typer.Option(functions.FLAG, help="let settings on this command line name functions to run, as KEY=module:function")
]
TOGETHER = stages.TOGETHER | {"run", "study", "calibrate-model"}
"""The verbs that several processes may work on together. All else is the first one's, and the others leave."""
REUSED = ("prepare", "decode", "score")
"""The stages of another run that `calibrate-model --reuse` takes as they are."""
UsageError: Any = typer.BadParameter.__base__  # click's, and click is part of some Typers


def main() -> None:
    quiet()
    together = sys.argv[1:2] != [] and sys.argv[1] in TOGETHER and not {"-h", "--help"} & {*sys.argv}
    if not (together or distributed.is_started_first()):
        return
    with signals.listening():
        try:
            with distributed.joined() if together else nullcontext():
                code = app(standalone_mode=False)
            sys.exit(code or 0)
        except UsageError as error:
            if not display.errors.quiet:
                error.show()
            sys.exit(error.exit_code)
        except CalibeamError as error:
            display.complain(str(error))
            sys.exit(2)
        except signals.Stopped as stop:
            signals.ignore()
            display.complain(f"stopped by {stop}. Nothing half-written is left behind; run the same command again to resume")
            sys.exit(stop.exit_code)


@app.command(short_help="run every stage of a recipe")
def run(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE.toml")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="STAGE.KEY=VALUE")] = None,
    force: Force = False,
    allow_code: AllowCode = False,
) -> None:
    """Run every stage of a recipe in order, skipping what is done and verified.

    Reads:   a recipe, and the files and model it names

    Writes:  a folder per stage under the recipe's output folder, report.html and model/

    Example: calibeam run recipes/demo.toml calibrate.learning_rate=1e-4
    """
    tables = recipe.override(recipe.read(recipe_file), settings or [], allow_code=allow_code)
    pipeline.run(tables, force=force)
    pipeline.finish(tables)


def _stage_command(name: str) -> Any:
    def command(arguments: Arguments = None, force: Force = False, allow_code: AllowCode = False) -> None:
        given = _assignments(arguments or [])
        if given and "=" not in given[0]:
            tables = recipe.override(recipe.read(Path(given[0])), given[1:], table=name, allow_code=allow_code)
            pipeline.run(tables, only=name, force=force)
        else:
            tables = recipe.override({}, given, table=name, allow_code=allow_code)
            values = tables.pop(name, {})
            if tables:
                raise CalibeamError(f"{', '.join(tables)}: without a recipe, only settings of {name} make sense here")
            pipeline.Step(name, recipe.build(stages.load(name).Config, name, values)).run(force=force)

    return command


def _assignments(arguments: list[str]) -> list[str]:
    """`--key value` as `key=value`, and the recipe first."""
    found, given, left = list[str](), set[str](), iter(arguments)
    for one in left:
        key, separator, value = one.removeprefix("--").partition("=")
        if one.startswith("--"):
            value = value if separator else next(left, "")
            if not value:
                raise CalibeamError(f"{one} needs a value")
            if key in given:
                raise CalibeamError(f"--{key} is given twice: write several values as {key.replace('-', '_')}=[...]")
            given.add(key)
            one = f"{key.replace('-', '_')}={value}"
        found.append(one)
    return sorted(found, key=lambda one: "=" in one)


class _StudyHelp(typer.core.TyperCommand):
    """A study's help: what it reads and writes, an example, and the settings of the [study] table."""

    def format_help(self, context: Any, formatter: Any) -> None:
        from calibeam.studies.plan import Config

        self.help = f"{self.help}\n\n\b\nSettings, as study.KEY=VALUE:\n{_settings_help(Config)}"
        super().format_help(context, formatter)


class _StageHelp(typer.core.TyperCommand):
    """A stage's help: what it reads and writes, an example, and every setting with its default."""

    def format_help(self, context: Any, formatter: Any) -> None:
        module = stages.load(str(self.name))
        about = re.sub(r"\n(?=Writes:|Example:)", "\n\n", re.sub(r"\n +", " ", module.__doc__))  # each a paragraph
        self.help = f"{about}\n\b\nSettings:\n\n\b\n{_settings_help(module.Config)}"
        super().format_help(context, formatter)


def _settings_help(config_class: type) -> str:
    width, lines = min(shutil.get_terminal_size().columns, 120) - 4, list[str]()
    for field in sorted(dataclasses.fields(config_class), key=lambda field: field.default is not dataclasses.MISSING):
        required = field.default is dataclasses.MISSING
        default = "required" if required else f"default {_toml(recipe.plain(field.default))}"
        choices = field.metadata["choices"]
        listed = f" ({', '.join(filter(None, choices()))})" if choices else ""
        text = f"  {field.name:24} {field.metadata['help']}{listed}; {default}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 27, break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


@app.command(cls=_StudyHelp, short_help="repeat one of the paper's studies around a recipe")
def study(
    names: Annotated[
        str, typer.Argument(metavar="NAME[,NAME]", help="ablation, decoding, length, scaling, final, or several of them")
    ],
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE.toml")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="STAGE.KEY=VALUE")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the plan and its cost, and do nothing")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="steps at once, each in a process; small models keep no GPU busy alone")] = 1,
    force: Force = False,
    allow_code: AllowCode = False,
) -> None:
    """Run the paper's studies around a recipe: ablation, decoding, length, scaling, final, or several with commas between.

    Reads:   a recipe, with a [study] table of what is tried (docs/studies.md)

    Writes:  OUTPUT/NAME: table.md, table.csv, table.json, figure.svg and figure.png; OUTPUT/steps: a folder for every
    distinct step, kept for the next study

    Example: calibeam study ablation samsum.toml 'study.factors=["loss"]' --dry-run
    """
    from calibeam import studies

    tables = recipe.override(recipe.read(recipe_file), settings or [], allow_code=allow_code)
    if dry_run:
        studies.show(names, tables)
    else:
        studies.run(names, tables, jobs=jobs, force=force)


@app.command(short_help="predict time, memory, storage and cost")
def plan(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE.toml")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="STAGE.KEY=VALUE")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="the number of GPUs")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, or cpu for a machine of two cores")] = "h200",
    sources: Annotated[
        float | None, typer.Option(min=1, help="sources to train on, such as 1e9; as many as the data have if not given")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="what a GPU costs in an hour")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Predict time, memory, storage and cost of every stage of a recipe, and say what limits it.

    Reads:   a recipe, the sizes of its model, and its data where they are prepared

    Writes:  nothing

    Example: calibeam plan samsum.toml --gpus 1024 --gpu h200 --sources 1e9 --price 3
    """
    from calibeam import forecast

    if sources is not None and not math.isfinite(sources):
        raise CalibeamError(f"--sources must be a number of sources, such as 1e9, got {sources}")
    tables = recipe.override(recipe.read(recipe_file), settings or [])
    found = forecast.forecast(tables, gpu=gpu, gpus=gpus, sources=int(sources) if sources else None, price=price)
    if as_json:
        typer.echo(forecast.as_json(found))
    else:
        forecast.show(found, gpu, gpus)


for _name, _summary in stages.STAGES.items():
    app.command(_name, cls=_StageHelp, short_help=_summary, help=_summary, context_settings={"ignore_unknown_options": True})(
        _stage_command(_name)
    )


@app.command("calibrate-model", short_help="calibrate your own model, from files to a checkpoint")
def calibrate_model(
    model: Annotated[str, typer.Option(help="a fine-tuned encoder-decoder: a folder or a Hugging Face Hub id")],
    train: Annotated[str, typer.Option(help="training rows: a JSONL, JSON, CSV, TSV or Parquet file, or hub:NAME:SPLIT")],
    validation: Annotated[str, typer.Option(help="validation rows, likewise")],
    output: Annotated[Path, typer.Option(help="where the calibrated checkpoint goes")],
    test: Annotated[str, typer.Option(help="test rows; without them, half of the validation rows are held out")] = "",
    source_column: Annotated[str, typer.Option(help="the column of the source text")] = "source",
    source_prefix: Annotated[
        str, typer.Option(help="text to put before every source, such as 'summarize: ' for a T5 that was fine-tuned with it")
    ] = "",
    target_column: Annotated[
        list[str] | None, typer.Option(help="a column of references; may be given several times", show_default="target")
    ] = None,
    id_column: Annotated[str, typer.Option(help="the column of the row's id")] = "id",
    bad_rows: Annotated[str, typer.Option(help="error or skip: what to do with rows that cannot be used")] = "error",
    max_source_length: Annotated[
        int | None, typer.Option(help="source tokens; longer sources are cut; 512, or the model's positions, if not given")
    ] = None,
    max_target_length: Annotated[
        int | None, typer.Option(help="target and output tokens; 128, or the model's positions, if not given")
    ] = None,
    num_candidates: Annotated[
        int | None, typer.Option(help="candidates per training source; 15, or the preset's, if not given")
    ] = None,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="of calibration; given several times, the one that does best on validation is kept; the preset's if not given"
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help=f"settings by name: {', '.join(PRESETS)}")] = "all-pairs",
    work: Annotated[Path | None, typer.Option(help="folder of the stages; OUTPUT-work if not given")] = None,
    reuse: Annotated[
        Path | None,
        typer.Option(
            help="the -work folder of another run, whose candidates and scores are taken: to try other calibrate settings"
        ),
    ] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="STAGE.KEY=VALUE", help="any other setting")] = None,
    force: Force = False,
    allow_code: AllowCode = False,
) -> None:
    """Calibrate your own fine-tuned model: decode, score, calibrate, evaluate, and write a checkpoint.

    Reads:   a fine-tuned T5, BART, PEGASUS or other encoder-decoder, and files of source and target rows

    Writes:  OUTPUT, an ordinary Hugging Face checkpoint with tokenizer, generation config and model card,
    which AutoModelForSeq2SeqLM.from_pretrained loads without calibeam; and report.html beside the stages

    Example: calibeam calibrate-model --model my-t5 --train train.jsonl --validation val.jsonl --output my-t5-calibrated
    """
    if not output.name:
        raise CalibeamError(f"--output must name a folder to make, got '{output}'")
    place = work or output.with_name(f"{output.name}-work")
    if reuse and (missing := [name for name in REUSED if not (reuse / name / store.MANIFEST).is_file()]):
        raise CalibeamError(f"--reuse {reuse} is not the -work folder of another run: it has no finished {missing[0]}")
    shared = {name: {"output": str(reuse / name)} if reuse else {} for name in REUSED}
    tables: dict[str, Any] = {
        "output": str(place),
        "model": model,
        "preset": preset,
        "max_source_length": _at_most_positions(512, model) if max_source_length is None else max_source_length,
        "max_target_length": _at_most_positions(128, model) if max_target_length is None else max_target_length,
        "prepare": {
            **shared["prepare"],
            "train": train, "validation": validation, "test": test, "bad_rows": bad_rows, "source_column": source_column,
            "source_prefix": source_prefix, "target_columns": target_column or ["target"], "id_column": id_column,
        },
        "decode": {**shared["decode"], **_given(num_candidates=num_candidates)},
        "score": shared["score"],
        "calibrate": _given(learning_rate=learning_rate),
        "export": {"output": str(output)},
    }  # fmt: skip
    tables = recipe.override(tables, settings or [], allow_code=allow_code)
    pipeline.run(tables, force=force, reused=REUSED if reuse else ())
    pipeline.finish(tables)


def _at_most_positions(length: int, model: str) -> int:
    """A length that nobody chose is none that the model cannot take."""
    from calibeam import seq2seq

    return min(length, seq2seq.max_positions(seq2seq.examine(model)) or length)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command(short_help="put finished runs side by side")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_A RUN_B [...]", help="the output folders of finished runs")],
    out: Annotated[Path | None, typer.Option("--out", help="a page to write, such as compare.html")] = None,
) -> None:
    """Put finished runs side by side: what each gained, whether it beats the first, and what was done differently.

    Reads:   the folders of two runs or more, each with its report

    Writes:  a table to the terminal, and with --out a self-contained page

    Example: calibeam compare out/demo out/other --out compare.html
    """
    from calibeam import compare as comparison

    comparison.run(runs, out)


@app.command(short_help="list the datasets known by name")
def tasks() -> None:
    """List the datasets known by name, for `calibeam prepare task=NAME [path=FOLDER]`, with the paper's figures.

    Reads:   nothing

    Writes:  nothing

    Example: calibeam tasks
    """
    from calibeam.tasks import TASKS, describe

    typer.echo("\n\n".join(map(describe, TASKS.values())))


@app.command(short_help="say what this machine has")
def doctor() -> None:
    """Say what this machine has (torch, GPU, memory, extras) and what that means.

    Reads:   nothing

    Writes:  nothing

    Example: calibeam doctor
    """
    from calibeam import doctor as examination

    examination.run()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"calibeam {calibeam.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    pass


def quiet() -> None:
    """Our own progress bars, not Hugging Face's; errors without their advertisements."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.excepthook = _explain
    handler = logging.StreamHandler()
    handler.setFormatter(_CleanFormatter())
    handler.addFilter(lambda _: distributed.is_first())  # of several processes, all have the same to say
    logging.getLogger("calibeam").addHandler(handler)


class _CleanFormatter(logging.Formatter):
    """What is logged may be text out of a model's files."""

    def format(self, record: logging.LogRecord) -> str:
        return display.printable(super().format(record))


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A mistake of ours, whose message may hold text out of data."""
    if not display.errors.quiet:
        sys.stderr.write(display.printable("".join(traceback.format_exception(kind, error, trace))))

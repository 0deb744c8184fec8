"""The command line: ``shardweave demo``, ``plan``, ``compare``, ``validate``, ``explain`` and ``diff``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shardweave.ir import InputError, ParallelError

if TYPE_CHECKING:
    from torch import nn

    from shardweave.cost_model import Cluster

Factory = Annotated[str, typer.Argument(help="module:function that returns (model, example inputs).")]
Machine = Annotated[str, typer.Option(help="A preset's name, or the path of a cluster file.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes, for a preset.")]
Limit = Annotated[
    str | None, typer.Option(help="Memory limit a device, as 20GB or 20GiB; a number without a unit is in GiB.")
]
MixedPrecision = Annotated[str | None, typer.Option(help="Mixed precision: bf16 or fp16.")]

VERBOSE = "--verbose"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _console() -> Console:
    # A log file has no width of its own, and tables cut at 80 columns lose their figures.
    console = Console()
    return console if console.is_terminal else Console(width=140)


@app.callback()
def _about(
    verbose: Annotated[bool, typer.Option(VERBOSE, help="Show the traceback of an error.")] = False,
) -> None:
    """Plan and compile the training of one PyTorch model on many devices."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    ranks: Annotated[int, typer.Option(min=2, help="Local processes, each standing for a device.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for plan, graphs, timeline and figures.")] = Path("out"),
) -> None:
    """Train a small GPT on local ranks under a memory limit that data parallelism does not meet."""
    # Imported late so that help and errors of the other commands do not wait for torch.
    from shardweave.demo import Recipe, run_demo

    run_demo(Recipe(steps=steps), ranks, out, _console())


@app.command()
def plan(
    factory: Factory,
    cluster: Machine,
    nodes: Nodes = None,
    memory_limit: Limit = None,
    precision: MixedPrecision = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of a batch, one computed after another; else the planner chooses."),
    ] = None,
    sub_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of each, one computing while another sends; else the planner chooses."),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="Of each layer, in the backward: none, full or fine; else the planner chooses."),
    ] = None,
    operator_slices: Annotated[
        int | None, typer.Option(min=1, help="Parts of an op, gathered one after another; else the planner chooses.")
    ] = None,
    keep_gathered: Annotated[
        bool | None,
        typer.Option(help="Gather parameters once for forward and backward; else the planner chooses."),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="Move parameters in int8 and gradients in int4: zero++; it changes numbers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to save the plan (JSON).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Where to save the simulated step (Chrome trace).")] = None,
) -> None:
    """Plan a model for a cluster, without the cluster, and show the plan op by op."""
    import shardweave as sw

    _check_writable(out, trace)
    machine = _machine(cluster, nodes)
    overlap: dict[str, Any] = {"sub_batches": sub_batches, "recompute": recompute}
    overlap |= {"operator_slices": operator_slices or {}, "keep_gathered": keep_gathered, "quantize": quantize}
    options = sw.Options(memory_limit=_bytes(memory_limit), precision=precision, micro_batches=micro_batches, **overlap)
    model, inputs = _built(factory)
    made = sw.plan(model, machine, inputs, options=options)
    _console().print(made.explain())
    if out is not None:
        made.save(out)
    if trace is not None:
        made.timeline().save_trace(trace)


@app.command()
def compare(
    factory: Factory,
    cluster: Machine,
    nodes: Nodes = None,
    memory_limit: Limit = None,
    precision: MixedPrecision = None,
    only: Annotated[str, typer.Option(help="Part of the names of the systems to compare with, as Megatron.")] = "",
    every: Annotated[bool, typer.Option(help="Show every setting of a system, not its fastest alone.")] = False,
) -> None:
    """Show what the planner's plan gains over DDP, ZeRO, FSDP, MiCS, Megatron-LM, AxoNN, Oases, Merak and OSDP."""
    import shardweave as sw

    machine, console = _machine(cluster, nodes), _console()
    options = sw.Options(memory_limit=_bytes(memory_limit), precision=precision)
    chosen = [each for each in sw.baselines.all_for(machine) if only.lower() in str(each).lower()]
    if not chosen:
        raise InputError(f"--only {only!r} names none of the baselines of {machine.name}: try a system's name, as DDP")
    model, inputs = _built(factory)
    found = sw.compare(model, machine, inputs, baselines=chosen, options=options)
    console.print(found.explain(every))


@app.command()
def validate(
    folder: Annotated[Path, typer.Argument(help="Published tables, a YAML or JSON file a paper (docs/validation.md).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    figures: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for a figure of each table.")] = None,
) -> None:
    """Hold published tables against what the compiler predicts, each row built as a forced plan."""
    import json

    from shardweave.validation import load, save_figures, validate, validation_report

    console = _console()
    with Console(stderr=True).status("reading") as status:
        result = validate(load(folder), lambda name: status.update(name))
    if figures is not None:
        save_figures(result, figures)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        console.print(validation_report(result))


@app.command()
def explain(path: Annotated[Path, typer.Argument(help="A saved plan.")]) -> None:
    """Show a saved plan, op by op."""
    from shardweave.planner import Plan

    _console().print(Plan.load(path).explain())


@app.command()
def diff(
    path: Annotated[Path, typer.Argument(help="A saved plan.")],
    other: Annotated[Path, typer.Argument(help="Another saved plan of the same model.")],
) -> None:
    """Show what differs between two saved plans, and what it costs."""
    from shardweave.planner import Plan

    _console().print(Plan.load(path).diff(Plan.load(other)))


def _check_writable(*paths: Path | None) -> None:
    """Make sure before the work that each of these files can be written after it; folders are made."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"{path} is a folder: name a file in it, as {path / 'plan.json'}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            existed = path.exists()
            with path.open("a"):
                pass
            if not existed:
                path.unlink()
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror or error}; name another file") from error


def _bytes(limit: str | None) -> str | None:
    """A memory limit as `Options` takes it: without a unit it is in GiB."""
    try:
        return limit and f"{float(limit)} GiB"
    except ValueError:
        return limit


def _built(factory: str) -> tuple[nn.Module, Any]:
    """The model and its inputs, on no device."""
    import torch
    from torch import nn

    build, wanted = _load(factory), f"{factory} must be a function without arguments that returns (model, inputs)"
    how = "as: def build(): return MyModel(), torch.zeros(32, 128, dtype=torch.long)"
    if isinstance(build, nn.Module) or not callable(build):
        raise InputError(f"{wanted}, got {_called(build)}; write one {how}")
    try:
        required = [each.name for each in inspect.signature(build).parameters.values() if _is_required(each)]
    except (TypeError, ValueError):  # not every callable has a signature
        required = []
    if required:
        raise InputError(f"{wanted}, but it needs {', '.join(required)}; write one {how}")
    try:
        with torch.device("meta"):
            built = build()
    except Exception as error:  # whatever the user's own code raises
        raise InputError(f"{factory} raised {_at(error)}; {_MORE}") from error
    if not (isinstance(built, tuple | list) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise InputError(f"{wanted}, it returned {_called(built)}; return both {how}")
    model, inputs = built
    return model, inputs


_MORE = "--verbose shows the whole traceback"


def _is_required(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not several


def _called(value: object) -> str:
    """What a value is, in a few words.

    >>> _called((1, "a")), _called(None)
    ('a tuple of (int, str)', 'None')
    """
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of ({', '.join(type(each).__name__ for each in value)})"
    return "None" if value is None else f"a {type(value).__name__}"


def _at(error: BaseException) -> str:
    """An error of the user's code in a line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _machine(cluster: str, nodes: int | None) -> Cluster:
    """The preset or the file that is named."""
    from shardweave.cost_model import Cluster

    if nodes is None:
        return Cluster.of(cluster)
    if cluster not in Cluster.presets() and (Path(cluster).suffix or Path(cluster).exists()):
        raise InputError(f"--nodes {nodes} goes with a preset, but {cluster!r} is a file, which has its own levels")
    return Cluster.preset(cluster, nodes=nodes)


def _load(factory: str) -> Any:
    """What ``module:function`` names; modules of the current folder are found too."""
    module_name, _, name = factory.partition(":")
    if not module_name or not name:
        raise InputError(f"expected module:function, got {factory!r}, for example examples.train:build")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"cannot find {factory!r}: {error}; write it as module:function, as seen from the current folder"
        ) from error
    except Exception as error:  # whatever the user's own module raises as it is loaded
        raise InputError(f"{module_name} cannot be imported, it raised {_at(error)}; {_MORE}") from error
    if not hasattr(module, name):
        there = [each for each in vars(module) if not each.startswith("_") and callable(getattr(module, each))]
        close = difflib.get_close_matches(name, there, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(there[:8]) or 'no function'}"
        raise InputError(f"cannot find {factory!r}: module {module_name!r} has no {name!r}{meant}")
    return getattr(module, name)


def main() -> None:
    """Run the command line; an error of shardweave is one line and exit code 1, not a traceback.

    With ``--verbose``, before the command or behind it, the traceback is shown.
    """
    arguments = [each for each in sys.argv[1:] if each != VERBOSE]
    try:
        app(arguments)
    except ParallelError as error:
        if VERBOSE in sys.argv:
            raise
        # Messages hold layouts such as [gpu0 4, 16], which must not be read as markup.
        Console(stderr=True).print(Text(f"{type(error).__name__}: ", "bold red") + Text(str(error)), soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()

"""The results of `benchmarks.zoo`, and the page that they make: docs/zoo.md."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.measure_models import percent, table
from benchmarks.zoo_models import LIBRARIES
from benchmarks.zoo_sizes import BATCH, LAYERS

RANKS, STEPS, LEARNING_RATE, SLOWER = 4, 2, 0.01, 10_000
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Allowed differences, as a part of a tensor's largest element, by the least precise floating dtype of the graph."""


@dataclass
class Result:
    """What is known of one architecture: how far it came, and the cause that ended it."""

    library: str
    group: str
    name: str
    model: str
    stages: dict[str, bool] = field(default_factory=dict)
    """For each stage that was tried: whether it went well."""
    share: float | None = None
    cause: str = ""
    inputs: str = ""
    dtype: str = ""
    ops: int = 0
    unruled: list[str] = field(default_factory=list)
    """Ops without a rule: every device computes them whole."""
    difference: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def key(self) -> str:
        return f"{self.library}:{self.name}"

    def is_done(self, until: str) -> bool:
        """Whether a stage failed, or this one was tried."""
        return bool(self.cause) or until in self.stages


def kind_of(cause: str) -> str:
    """A cause without names and numbers, by which causes are counted.

    >>> kind_of("CaptureError: Bert cannot be captured as one graph: in h.0 (Block), a branch depends on 'x'. More")
    'CaptureError: a branch depends on …'
    """
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", cause)
    text = re.sub(r"\w+ cannot be captured as one graph: (in [\w.]+ \(\w+\), )?", "", text)
    text = re.sub(r"it changes its parameter [\w.]+", "it changes a parameter", text)
    text = re.sub(r"\S*\w/\w+\.py.*", "", text)  # a line of code, of which others are of the same kind
    text = re.sub(r"(?<![\w.])\d+(?![\w.])", "N", text)
    return re.split(r"\. |: [a-z_]+$", text)[0].replace("|", "/").replace("`", "").strip()[:160]


TEXT = """# Zoo

Look up whether an architecture of {libraries} can be compiled.
`make zoo` (`benchmarks/zoo.py`) tries those that can be built small from a config, and writes this page.
{tried} of the {known} architectures that these libraries list were tried, on {dates}, with
{versions}, by

```
{commands}
```

What has a result is not tried again at every commit: results may be of different commits of these dates.

| column | meaning |
| --- | --- |
| runs | a small model of it can be built, and runs forward and backward on one device |
| captured | `shardweave` captures its step, forward and backward |
| planned | a plan for {ranks} GPUs is found: every op has a rule, and the step is generated |
| sharded FLOPs | as in [models.md](models.md): 100 % if no two devices compute the same |
| equal | {steps} steps of SGD on {ranks} ranks that run in one process give the losses and gradients of one device |
| cause | of the first *no*; the time limit is {seconds} CPU seconds for all columns together |

The models have {layers} layers or one a stage, and a batch of {batch}; those of `torchvision` and `timm` whose settings
have no number of layers are as they are. Sizes are made small by the names of settings (`benchmarks/zoo_sizes.py`), and
rates of dropout are zero, as ranks draw other numbers. The loss is the model's own if it has labels, else the mean
square of its outputs. The GPUs are those of `Cluster.preset("dgx-a100")` with {slower:,} times fewer FLOPs a second, so
that FLOPs count in small models. Plans have one micro-batch, one sub-batch, and neither buckets nor recomputation,
which makes planning short. Equal is to {precise:.0e} of each tensor's largest element in float64, and to {rough:.0e}
where the model computes in float32. A dash is what was not tried, or could not be compared; in the summary, what could
not be captured counts as tried.

## Summary

{summary}

Causes among those that run by themselves:

{causes}

Ops without a rule, which every device computes whole:

{unruled}

{rest}
"""


def page(results: Sequence[Result], known: int, seconds: int) -> str:
    """The whole of docs/zoo.md."""
    used = sorted({f"{name} {version}" for result in results for name, version in result.versions.items()})
    dates = sorted({result.date for result in results if result.date})
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in sorted(results, key=lambda each: each.name.lower()):
        if result.stages.get("runs"):
            groups[result.library, result.group].append(result)
    tables = [f"## {library}: {group}\n\n{rows(each)}" for (library, group), each in sorted(groups.items())]
    unbuilt = [result for result in results if not result.stages.get("runs")]
    if unbuilt:
        names = defaultdict(list)
        for result in unbuilt:
            names[result.library].append(result.name)
        listed = [f"{library}: {', '.join(sorted(each, key=str.lower))}." for library, each in sorted(names.items())]
        tables.append(
            "## Not built, or do not run by themselves\n\nThe sizes or the inputs that were tried do not suit them, or "
            f"they need a package that is not installed. Nothing is known of these {len(unbuilt)}.\n\n"
            + "\n\n".join(listed)
        )
    tried = [name for name in LIBRARIES if any(each.library == name for each in results)]
    return TEXT.format(
        libraries=re.sub(", (`[^,]*)$", r" or \1", ", ".join(f"`{name}`" for name in tried)),
        tried=len(results),
        known=known,
        dates=" and ".join(dates),
        versions=", ".join(used),
        commands="\n".join(sorted({result.command for result in results} - {""})),
        ranks=RANKS,
        steps=STEPS,
        seconds=seconds,
        layers=f"1 to {2 * LAYERS}",
        batch=BATCH,
        slower=SLOWER,
        precise=TOLERANCES[torch.float64],
        rough=TOLERANCES[torch.float32],
        summary=summary(results),
        causes=causes(results),
        unruled=unruled(results),
        rest="\n\n".join(tables),
    )


def summary(results: Sequence[Result]) -> str:
    """Counts, by library."""
    lines = []
    libraries = [name for name in LIBRARIES if any(result.library == name for result in results)]
    for name in (*libraries, *(["all"] if len(libraries) > 1 else [])):
        mine = [result for result in results if name in (result.library, "all")]
        running = [result for result in mine if result.stages.get("runs")]
        captured, planned = ([each for each in running if each.stages.get(stage)] for stage in ("captured", "planned"))
        tried = [each for each in running if "planned" in each.stages or not each.stages.get("captured")]
        compared = [each for each in planned if each.difference is not None]
        equal = [each for each in compared if each.stages.get("equal")]
        lines.append(
            (name, str(len(mine)), str(len(running)), of(captured, running), of(planned, tried), of(equal, compared))
        )
    return table(
        (
            "library",
            "tried",
            "run by themselves",
            "captured",
            "captured and planned, of those tried",
            "equal, of those compared",
        ),
        lines,
    )


def of(part: Sequence[Result], whole: Sequence[Result]) -> str:
    return f"{len(part)} of {len(whole)} ({percent(len(part) / len(whole))})" if whole else "–"


def causes(results: Sequence[Result]) -> str:
    """The kinds of causes, the most frequent first, with the architectures."""
    found: dict[str, list[str]] = defaultdict(list)
    for result in results:
        if result.stages.get("runs") and result.cause:
            found[kind_of(result.cause)].append(result.name)
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return table(
        ("cause", "number", "architectures"), [(kind, str(len(names)), ", ".join(names)) for kind, names in ranked]
    )


def unruled(results: Sequence[Result]) -> str:
    """The ops that have no rule, the most frequent first, with the architectures."""
    found: dict[str, list[str]] = defaultdict(list)
    for result in results:
        for op in sorted({each.split(" in ")[0] for each in result.unruled}):
            found[op].append(result.name)
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return table(("op", "architectures"), [(op, ", ".join(names)) for op, names in ranked]) if ranked else "None."


def rows(results: Sequence[Result]) -> str:
    cells = []
    for result in results:
        flags = [mark(result, stage) for stage in ("captured", "planned")]
        share = "–" if result.share is None else percent(result.share)
        cause = re.sub(r"\s+", " ", result.cause).replace("|", "/")
        cells.append((result.name, result.model, *flags, share, mark(result, "equal"), kind_of(cause)))
    return table(("architecture", "class", "captured", "planned", "sharded FLOPs", "equal", "cause"), cells)


def mark(result: Result, stage: str) -> str:
    if stage not in result.stages or result.cause.startswith("not compared") and stage == "equal":
        return "–"
    if stage == "equal" and result.difference is None and not result.stages[stage]:
        return "–"
    return "yes" if result.stages[stage] else "no"

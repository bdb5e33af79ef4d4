"""Draws diagrams of runs over the global step: loss, learning rate, gradient norm, and evaluations.

The log of an interrupted run has one line for each step, so its curves have no gaps; runs that follow each other, such
as the phases of a pre-training, are drawn in one diagram. torch is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from formats.errors import SourceError, UnsupportedError
from train.start.run_folder import EVALUATIONS, LOG, lines_of

Curve = Mapping[int, float]
"""Values by global step."""
PANELS: Mapping[str, str] = {"loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm"}
"""Key in the log of steps: the label of the panel's axis."""
TEXTS = {"rouge": "ROUGE", "bleu": "BLEU"}
"""Prefix of metrics that have a panel of their own, if they were computed: the label of its axis."""
VARYING = ("loss", "grad_norm")
"""Panels of values that vary from step to step: they are smoothed, and may have a logarithmic axis."""
CLIPPED = "grad_norm"
"""The panel in which peaks are cut off."""
PARTS = 40
"""A curve is smoothed over this fraction of its length: one part of 40."""
WIDTH, HEIGHT, DPI = 10.0, 2.6, 160
"""Width of the diagram and height of a panel in inches, and dots per inch."""
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class History:
    """The curves of a run's logs.

    Attributes:
        name: name of the run folder.
        steps: curve by key of `PANELS`.
        scores: for each panel of evaluations, curve by name of the set (and of the metric).
    """

    name: str
    steps: Mapping[str, Curve]
    scores: Mapping[str, Mapping[str, Curve]]


def read_history(run: Path) -> History:
    """Read the logs of a run. Where a step was evaluated twice, the later evaluation counts.

    Raises:
        SourceError: the run has no log, or a damaged one.
    """
    lines = lines_of(run / LOG)
    if not lines:
        raise SourceError(f"{run} has no {LOG} with a step in it", "name a run folder, the save.path of a training")
    steps = {name: {line["global_step"]: line[name] for line in lines if name in line} for name in PANELS}
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for line in lines_of(run / EVALUATIONS):
        for key, value in line.items():
            name, _, metric = key.rpartition("_")
            panel = next((prefix for prefix in ("loss", *TEXTS) if metric.startswith(prefix)), None)
            if name and panel is not None:
                label = name if metric in ("loss", "bleu") else f"{name} {metric}"
                scores.setdefault(panel, {}).setdefault(label, {})[line["global_step"]] = value
    return History(run.resolve().name, steps, scores)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the values around it: over a fortieth of the curve, less at its ends."""
    half = len(values) // (2 * PARTS)
    if half == 0:
        return list(values)
    sums = [0.0, *accumulate(values)]
    ends = ((max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]


def ceiling(values: Sequence[float]) -> float | None:
    """The value at which a panel is cut off, so that a few peaks do not flatten the curve; None for no cut."""
    usual = sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0
    return 1.5 * usual if values and max(values) > 3 * usual > 0 else None


def draw(runs: Sequence[History], out: Path, log: bool = False) -> None:
    """Draw runs into one PNG, with the panels below each other.

    Args:
        runs: the logs of the runs.
        out: the PNG file to write.
        log: whether loss and gradient norm have a logarithmic axis.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UnsupportedError(f"diagrams need matplotlib: {error}", "pip install 'vitruvian[plot]'") from None
    panels = dict(PANELS) | {name: title for name, title in TEXTS.items() if any(name in run.scores for run in runs)}
    figure = Figure((WIDTH, HEIGHT * len(panels)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    named: dict[str, Any] = {}
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for number, run in enumerate(runs):
            _panel(axis, name, run, f"C{number}", len(runs) > 1)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
        if log and name in VARYING:
            axis.set_yscale("log")
        elif name == CLIPPED:
            _clip(axis, [value for run in runs for value in run.steps.get(name, {}).values()])
        handles, labels = axis.get_legend_handles_labels()
        named |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in named}
    if named:
        figure.legend(named.values(), named, loc="outside upper center", ncols=6, fontsize="small", frameon=False)
    axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[-1].set_xlabel("global step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].ticklabel_format(axis="x", style="plain", useOffset=False)
    axes[0].set_title(", ".join(run.name for run in runs))
    figure.align_ylabels(axes)
    figure.savefig(out, format="png")


def _clip(axis: Any, values: Sequence[float]) -> None:
    """Cut the peaks of a panel off, and annotate their number and the largest."""
    top = ceiling(values)
    if top is None:
        return
    above = sum(value > top for value in values)
    axis.set_ylim(0, top)
    text = f"{above} above, up to {max(values):.3g}"
    axis.annotate(text, (0.99, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize="small")


def _panel(axis: Any, name: str, run: History, colour: str, several: bool) -> None:
    """Draw the curves of a run in a panel: every value thin, their mean thick, and the last value as a number."""
    curve_of_steps = run.steps.get(name, {})
    scores = run.scores.get(name, {})
    before = f"{run.name} " if several else ""
    if curve_of_steps:
        label = f"{before}train" if scores or several else None
        steps, values = list(curve_of_steps), list(curve_of_steps.values())
        top = ceiling(values) if name == CLIPPED else None
        means = smoothed([min(value, top) for value in values] if top else values) if name in VARYING else values
        if means != values:
            axis.plot(steps, values, color=colour, linewidth=0.5, alpha=0.4)
        axis.plot(steps, means, color=colour, linewidth=1.3, label=label)
        _number(axis, steps[-1], means[-1], colour)
    for number, (label, curve) in enumerate(scores.items()):
        steps = sorted(curve)
        style = {"linestyle": "--", "linewidth": 1.2, "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        shade = colour if several else f"C{number + bool(curve_of_steps)}"
        axis.plot(steps, [curve[step] for step in steps], label=before + label, color=shade, **style)
        if not several:
            _number(axis, steps[-1], curve[steps[-1]], shade)


def _number(axis: Any, step: int, value: float, colour: str) -> None:
    where: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "annotation_clip": True}
    where["bbox"] = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}  # another curve may be there
    axis.annotate(f"{value:.3g}", (step, value), color=colour, fontsize="x-small", **where)

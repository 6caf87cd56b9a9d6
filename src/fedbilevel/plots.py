"""Pictures of experiments, of influence studies and of the data of each client.

matplotlib draws them; it is an extra: `pip install fedbilevel[plot]`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.errors import ProblemError, SettingError


def available() -> bool:
    return find_spec("matplotlib") is not None


def check() -> None:
    if not available():
        raise SettingError(
            "pictures need matplotlib, which is not installed: pip install 'fedbilevel[plot]', or do without pictures."
        )


def _figure(width: float, height: float, *, shown: bool = False) -> Any:
    """Make a figure.

    shown: use pyplot, which a notebook or a window needs.
    """
    check()
    from matplotlib import figure, pyplot

    make: Any = pyplot.figure if shown else figure.Figure  # a Figure needs no display
    return make(figsize=(width, height), dpi=150, layout="constrained")


def scatter(
    pairs: Sequence[tuple[float, float]], path: Path | str | None, *, title: str, r2: float | None, f1: float | None
) -> Any:
    """Return a figure of predicted against actual changes, and the diagonal on which they are equal."""
    figure = _figure(4.4, 4.4, shown=path is None)
    axes = figure.add_subplot()
    predicted, actual = zip(*pairs, strict=True)
    low, high = min(*predicted, *actual), max(*predicted, *actual)
    margin = 0.06 * (high - low) or 1.0
    axes.plot([low - margin, high + margin], [low - margin, high + margin], color="0.7", linewidth=1, zorder=1)
    axes.axhline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.9", linewidth=0.8, zorder=0)
    axes.scatter(actual, predicted, s=18, alpha=0.75, zorder=2)
    axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin), aspect="equal")
    axes.set_xlabel("actual change of the total validation loss")
    axes.set_ylabel("predicted change")
    axes.locator_params(nbins=7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.3g}")
    axes.set_title(f"{title}\nR2 {_figure_of(r2)}, F1 {_figure_of(f1)}, {len(pairs)} removals", fontsize=10)
    return saved(figure, path)


def sheet(rows: Mapping[str, Sequence[tuple[Any, str]]], path: Path) -> None:
    """Draw rows of images, each image with a caption and each row with a heading."""
    rows = {heading: images for heading, images in rows.items() if images}
    width = max((len(images) for images in rows.values()), default=0)
    figure = _figure(max(4.0, 1.25 * width), 2.05 * max(1, len(rows)))
    for part, (heading, images) in zip(
        figure.subfigures(len(rows), 1, squeeze=False)[:, 0] if rows else (), rows.items(), strict=True
    ):
        part.suptitle(heading, fontsize=10, x=0.01, ha="left")
        for axes, (image, caption) in zip(part.subplots(1, width, squeeze=False)[0], images, strict=False):
            axes.imshow(image, cmap="gray_r", interpolation="nearest")
            axes.set_xlabel(caption, fontsize=8)
            axes.set(xticks=[], yticks=[])
        for axes in part.axes[len(images) :]:
            axes.set_axis_off()
    figure.savefig(path, bbox_inches="tight")


def points(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    path: Path | str | None,
    *,
    x: str,
    y: str,
    title: str,
) -> Any:
    """Return a figure of predicted against actual values and their diagonal, one colour per name."""
    figure = _figure(5.4, 4.8, shown=path is None)
    axes = figure.add_subplot()
    every = [point for some in curves.values() for curve in some for point in curve]
    ends = [min(min(point[x], point[y]) for point in every), max(max(point[x], point[y]) for point in every)]
    axes.plot(ends, ends, color="0.7", linewidth=1, zorder=1)
    for name, repetitions in curves.items():
        mine = [point for curve in repetitions for point in curve]
        axes.scatter([point[x] for point in mine], [point[y] for point in mine], s=16, alpha=0.75, label=name)
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "), aspect="equal")
    axes.set_title(_wrapped(title), fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return saved(figure, path)


def lines(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    path: Path,
    *,
    x: str,
    y: str,
    title: str,
    log: Sequence[str] = (),
) -> None:
    curve(curves, x=x, y=y, title=title, log=log).savefig(path)


def curve(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    *,
    x: str,
    y: str,
    title: str,
    log: Sequence[str] = (),
    shown: bool = False,
) -> Any:
    """Return a figure with one line per name: the mean over its repetitions.

    A band reaches from the lowest to the highest repetition, up to the end of the shortest.
    """
    figure = _figure(7.2, 4.4, shown=shown)
    axes = figure.add_subplot()
    for number, (name, repetitions) in enumerate(curves.items()):
        points = [
            [(point[x], point[y]) for point in one if x in point and y in point and (point[x] > 0 or "x" not in log)]
            for one in repetitions
        ]
        points = [line for line in points if line]
        if not points:
            continue
        grid = np.unique(np.concatenate([[at for at, _ in line] for line in points]))
        grid = grid[grid <= min(line[-1][0] for line in points)]
        values = np.array([np.interp(grid, [at for at, _ in line], [value for _, value in line]) for line in points])
        (drawn,) = axes.plot(
            grid,
            values.mean(0),
            label=name,
            linewidth=1.4,
            color=f"C{number % 10}",
            linestyle=("-", "--", ":", "-.")[number // 10 % 4],
        )
        if len(points) > 1:
            axes.fill_between(grid, values.min(0), values.max(0), color=drawn.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.grid(color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_wrapped(title), fontsize=9)
    figure.legend(fontsize=7, loc="outside right upper", frameon=False)
    return figure


def bars(
    values: Mapping[str, float],
    path: Path | str | None = None,
    *,
    label: str,
    mark: float | Mapping[str, float] | None = None,
) -> Any:
    """Return a figure with one horizontal bar per name, the first on top.

    mark: a value with a dashed line, such as a threshold, or one value with a short line per name.
    path: a file for the figure; None: it is shown in a notebook or a window.
    """
    figure = _figure(6.0, 1.0 + 0.25 * len(values), shown=path is None)
    axes = figure.add_subplot()
    _bars(axes, values, label)
    if isinstance(mark, Mapping):
        axes.scatter([mark[name] for name in values], list(values), marker="|", s=120, color="0.2", zorder=3)
    elif mark is not None:
        axes.axvline(mark, color="0.4", linewidth=1, linestyle="--")
    return saved(figure, path)


def noise(
    transition: np.ndarray, names: Sequence[str], rates: Mapping[str, float], path: Path | str | None, *, title: str
) -> Any:
    """Return a figure of a transition matrix of labels, and of one rate of wrong labels per client."""
    num = len(names)
    figure = _figure(9.0, max(3.6, 1.0 + 0.25 * len(rates)), shown=path is None)
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    image = left.imshow(transition, cmap="Blues", vmin=0, vmax=1)
    some = range(0, num, -(-num // 20))  # more than twenty names of classes would overlap
    left.set_xticks(some, [names[k] for k in some], rotation=90 if max(map(len, names)) > 3 else 0)
    left.set_yticks(some, [names[k] for k in some])
    left.set(xlabel="given label", ylabel="class")
    if num <= 12:
        for (row, column), share in np.ndenumerate(transition):
            colour = "white" if share > 0.5 else "black"
            left.text(column, row, f"{share:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=left, label="share of the class", fraction=0.05, pad=0.01)
    _bars(right, rates, "estimated share of wrong labels")
    figure.suptitle(title, fontsize=10)
    return saved(figure, path)


def predictions(values: Sequence[float], ends: Mapping[str, float], path: Path | str | None, *, title: str) -> Any:
    """Return a figure with the distribution of predicted changes, and the changes with the names of `ends`."""
    figure = _figure(9.0, max(3.6, 1.0 + 0.22 * len(ends)), shown=path is None)
    left, right = figure.subplots(1, 2)
    left.hist(values, bins=40, color="C0", log=True)
    left.axvline(0, color="0.4", linewidth=1, linestyle="--")
    left.set(xlabel="predicted change of the total validation loss by a removal", ylabel="samples")
    left.spines[["top", "right"]].set_visible(False)
    _bars(right, ends, "predicted change")
    right.axvline(0, color="0.4", linewidth=1)
    for axes in (left, right):
        axes.locator_params(axis="x", nbins=5)
    figure.suptitle(title, fontsize=10)
    return saved(figure, path)


def saved(figure: Any, path: Path | str | None) -> Any:
    """Write a figure to a file, if there is one, and return it."""
    if path is not None:
        figure.savefig(path)
    return figure


def _bars(axes: Any, values: Mapping[str, float], label: str) -> None:
    axes.barh(list(values), list(values.values()), color="C0")
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def _wrapped(title: str) -> str:
    return "\n".join(part for line in title.split("\n") for part in textwrap.wrap(line, 62))


def counts_by_client(labels_by_client: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels, and the number of samples by label (rows) and client (columns)."""
    everything = [np.asarray(labels).ravel() for labels in labels_by_client]
    if not sum(map(len, everything)):
        raise ProblemError(
            f"{len(everything)} clients have no samples at all, so there is nothing to draw: "
            "give the labels of every client's samples."
        )
    found, number = np.unique(np.concatenate([labels for labels in everything if len(labels)]), return_inverse=True)
    counts = np.zeros((len(found), len(everything)), np.int64)
    np.add.at(counts, (number, np.repeat(np.arange(len(everything)), [len(labels) for labels in everything])), 1)
    return found, counts


def partition(labels_by_client: Sequence[Any], path: Path, title: str) -> None:
    """Draw the samples by label and client (white: none), and the total of each client."""
    check()
    from matplotlib.ticker import MaxNLocator

    found, counts = counts_by_client(labels_by_client)
    num_labels, num_clients = counts.shape
    width, height = min(14.0, max(4.8, 2.2 + 0.42 * num_clients)), min(10.0, max(2.2, 0.34 * num_labels))
    figure = _figure(width, height + 1.9)
    above, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, height])
    above.bar(np.arange(num_clients), counts.sum(0), width=0.9 if num_clients <= 40 else 1.0, color="0.45")
    above.set_ylabel("samples")
    above.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    above.tick_params(bottom=False)
    above.spines[["top", "right"]].set_visible(False)
    above.set_title(title, fontsize=10)
    most = max(2, int(counts.max()))
    image = axes.imshow(
        np.ma.masked_equal(counts, 0), cmap="viridis_r", vmin=1, vmax=most, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="client", ylabel="label", xlim=(-0.5, num_clients - 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(min(num_clients, 20), integer=True, min_n_ticks=1))
    shown = np.arange(0, num_labels, -(-num_labels // 30))  # more than thirty label names would overlap
    axes.set_yticks(shown, [str(found[i]) for i in shown])
    if num_clients <= 20 and num_labels <= 20 and most < 100_000:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                axes.text(
                    column,
                    row,
                    str(count),
                    ha="center",
                    va="center",
                    fontsize=7 if count < 1000 else 6,
                    color="white" if count > most / 2 else "black",
                )
    figure.colorbar(image, ax=axes, label="samples", pad=0.01, fraction=0.05, ticks=MaxNLocator(5, integer=True))
    figure.savefig(path)


def _figure_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

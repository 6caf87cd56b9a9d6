"""Pictures of a study of influence. Drawn with matplotlib, which is an extra: `pip install fedbilevel[plot]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedbilevel.errors import SettingError


def available() -> bool:
    return find_spec("matplotlib") is not None


def check() -> None:
    if not available():
        raise SettingError("pictures need matplotlib, which is not installed: pip install 'fedbilevel[plot]', or do without pictures.")


def _figure(width: float, height: float) -> Any:
    check()
    from matplotlib.figure import Figure  # needs no display

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def scatter(pairs: Sequence[tuple[float, float]], path: Path, *, title: str, r2: float | None, f1: float | None) -> None:
    """Predicted against actual changes, with the diagonal on which they would be equal."""
    figure = _figure(4.4, 4.4)
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
    figure.savefig(path)


def sheet(rows: Mapping[str, Sequence[tuple[Any, str]]], path: Path) -> None:
    """Rows of images, each with a caption under it and a heading over the row."""
    rows = {heading: images for heading, images in rows.items() if images}
    width = max((len(images) for images in rows.values()), default=0)
    figure = _figure(max(4.0, 1.25 * width), 2.05 * max(1, len(rows)))
    for part, (heading, images) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0] if rows else (), rows.items(), strict=True):
        part.suptitle(heading, fontsize=10, x=0.01, ha="left")
        for axes, (image, caption) in zip(part.subplots(1, width, squeeze=False)[0], images, strict=False):
            axes.imshow(image, cmap="gray_r", interpolation="nearest")
            axes.set_xlabel(caption, fontsize=8)
            axes.set(xticks=[], yticks=[])
        for axes in part.axes[len(images) :]:
            axes.set_axis_off()
    figure.savefig(path, bbox_inches="tight")


def _figure_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""What a user sees of a cleaning: a table of samples, a picture, and a display for notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel import displays, plots

if TYPE_CHECKING:
    from fedbilevel.cleaning.outcome import Cleaning


def table(found: Cleaning, most: int | None) -> list[dict[str, Any]]:
    """Return one row per training sample, the most suspicious first; `Cleaning.suspects` has the flagged ones."""
    places = [(i, j) for i, own in enumerate(found.labels) for j in range(len(own))]
    wrong = np.concatenate([np.zeros(0), *found.wrong])
    chosen = (places[k] for k in np.argsort(-wrong, kind="stable")[:most].tolist())
    clients = [found.client(i) for i in range(len(found.names))]
    return [{**clients[i].suspect(j)._asdict(), "flagged": bool(found.flags[i][j])} for i, j in chosen]


def plot(found: Cleaning, path: Path | str | None, most: int) -> Any:
    """Draw the transition matrix, and the noise of the clients that are estimated to have most of it."""
    return plots.noise(
        found.transition, found.class_names, dict(_noisiest(found)[:most]), path, title=f"cleaning {found.verdict}"
    )


def html(found: Cleaning) -> str:
    """Return noise and flags of every client as HTML, and what cleaning is worth."""
    sizes = dict(zip(found.names, found.flags, strict=True))
    rows = [
        [name, str(len(sizes[name])), str(int(sizes[name].sum())), f"{noise:.1%}"] for name, noise in _noisiest(found)
    ]
    heads = ("client", "samples", "flagged", "estimated noise")
    note = " ".join([found.sentence, *(["The 20 clients with most noise are shown."] if len(rows) > 20 else [])])
    return displays.ranking(f"Cleaning of {len(rows)} clients: {found.verdict}", heads, rows[:20], note)


def _noisiest(found: Cleaning) -> list[tuple[str, float]]:
    return sorted(found.noise.items(), key=lambda one: -one[1])

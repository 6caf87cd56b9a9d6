"""Files of a study of influence: influence.json, findings of a report page, and pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import plots
from fedbilevel.runs.record import write_whole
from fedbilevel.runs.resume import versions
from fedbilevel.studies.influence.result import Instance, Study
from fedbilevel.tasks.findings import images
from fedbilevel.tasks.task import Built


def save(result: Study, built: Built, folder: Path, *, draw: bool) -> None:
    """Write influence.json and, for image data, the most harmful and helpful instances.

    draw: write pictures of predicted against actual changes, and of these instances.
    """
    content = {
        **dataclasses.asdict(result),
        "scores": result.scores._asdict() if result.scores is not None else None,
        "ranked": [one._asdict() for one in result.ranked],
        "versions": versions(),
    }
    write_whole(folder / "influence.json", (json.dumps(content, indent=1) + "\n").encode())
    if result.task["data"] != "mixture":
        write_whole(folder / "findings.json", (json.dumps(_findings(result, built)) + "\n").encode())
    if draw and result.scores is not None:
        pairs = [(one.prediction, one.actual) for one in result.removed if one.actual is not None]
        title = f"{result.task['data']}, {result.task['model']}, {result.method}"
        plots.scatter(pairs, folder / "removals.png", title=title, r2=result.scores.r2, f1=result.scores.f1)
    if draw and result.task["data"] != "mixture":
        rows = {
            "most harmful: removal lowers the loss": result.harmful(10),
            "most helpful: removal raises the loss": result.helpful(10),
        }
        shown = {title: [(_image(built, one), _caption(one)) for one in some] for title, some in rows.items()}
        plots.sheet(shown, folder / "instances.png")


def _findings(result: Study, built: Built) -> list[dict[str, Any]]:
    """Return images of the most harmful and helpful instances, for a report page."""
    found = []
    for kind, does, some in (("harmful", "lowers", result.harmful(12)), ("helpful", "raises", result.helpful(12))):
        if some:
            facts = [
                {
                    "client": one.client,
                    "sample": one.sample,
                    "label": one.label,
                    "predicted": one.prediction,
                    "wrong": one.wrong,
                }
                for one in some
            ]
            title, about = (
                f"The most {kind} instances",
                (f"Removing one of these {does} the validation loss summed over clients, by the predicted amount."),
            )
            found.append(images(title, about, np.stack([_image(built, one) for one in some]), facts))
    return [one for one in found if one is not None]


def _image(built: Built, one: Instance) -> Any:
    return np.asarray(built.clients[one.client]["train"]["input"][one.sample])


def _caption(one: Instance) -> str:
    wrong = " (wrong)" if one.wrong else ""
    return f"label {one.label}{wrong}\nclient {one.client}, no. {one.sample}\npredicted {one.prediction:+.2g}"

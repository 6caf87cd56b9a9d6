"""Which features matter: one penalty per feature, learned on validation samples, with stability.

Every repeat draws training samples anew (bootstrap within clients) and adds a shadow of every
feature: the same column with its values permuted within the client, which says nothing about the
label. One penalty per column is learned by self_tuned (task `regularisation`). A feature is hit if
its weight is larger than 95 % of the weights of shadows; its stability is the share of repeats in
which it is hit. Features that are hit often enough are selected, and the model on these is the guarded
choice between learned penalties and the plain ways (studies/guarded.py).

Shadows follow Kursa and Rudnicki, "Feature Selection with the Boruta Package", 2010; stability
follows Meinshausen and Buehlmann, "Stability selection", 2010. Their error rates are not promised
here: clients differ and the repeats share their data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import displays
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.holdings import check_clients, fields_of
from fedbilevel.runs.endings import whole
from fedbilevel.runs.solve import solve
from fedbilevel.settings import whole_number
from fedbilevel.studies.guarded import Guarded, guarded
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.tasks.task import Built, Shapes

Fields = dict[str, np.ndarray]
_BEATEN = 0.95  # share of shadows that a feature must beat
_VAL = 3  # without validation samples, one of this many training samples becomes one


@dataclasses.dataclass(frozen=True, repr=False)
class SelectedFeatures:
    """Features with their stability, and a model on the selected ones.

    stability: share of repeats in which the feature beats 95 % of the shadows.
    importance: mean of |weight| on standardised inputs over repeats.
    guard: the choice between learned penalties and the best rival, on the selected features; None
        if no feature is selected.
    """

    names: Sequence[str]
    stability: np.ndarray
    importance: np.ndarray
    threshold: float
    centre: np.ndarray
    scale: np.ndarray
    guard: Guarded | None
    prior: float

    @property
    def chosen(self) -> np.ndarray:
        """Return the positions of the selected features, the most stable first."""
        order = np.lexsort((-self.importance, -self.stability))
        return np.array([j for j in order if self.stability[j] >= self.threshold], dtype=int)

    @property
    def selected(self) -> list[str]:
        return [self.names[j] for j in self.chosen]

    def predict_probability(self, inputs: Any) -> np.ndarray:
        """Return the probability of label 1 for every row of inputs."""
        rows = (np.asarray(inputs, dtype=float) - self.centre) / self.scale
        if self.guard is None:
            return np.full(len(rows), self.prior)
        y = {name: leaf.detach().double().numpy() for name, leaf in self.guard.result.y.items()}
        return np.asarray(1 / (1 + np.exp(-(rows[:, np.sort(self.chosen)] @ y["weight"] + y["bias"]))))

    def predict(self, inputs: Any) -> np.ndarray:
        return np.asarray(self.predict_probability(inputs) > 0.5).astype(int)

    def table(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return one row per feature, the most stable first; `pandas.DataFrame` reads it."""
        order = np.lexsort((-self.importance, -self.stability))[:most]
        return [
            {
                "feature": self.names[j],
                "stability": float(self.stability[j]),
                "importance": float(self.importance[j]),
                "selected": bool(self.stability[j] >= self.threshold),
            }
            for j in order
        ]

    def plot(self, path: Path | str | None = None, *, most: int = 20) -> Any:
        """Draw the stability of the most stable features as a matplotlib figure.

        path: a file for the figure; None: it is only returned.
        """
        from fedbilevel import plots  # needs an extra

        rows = self.table(most)
        return plots.bars(
            {row["feature"]: row["stability"] for row in rows}, path, label="stability", mark=self.threshold
        )

    def __repr__(self) -> str:
        first = f"{len(self.chosen)} of {len(self.names)} features selected"
        return f"<{first}; {self.guard.sentence}>" if self.guard is not None else f"<{first}>"

    def _repr_html_(self) -> str:
        rows = [[str(row["feature"]), f"{row['stability']:.2f}", f"{row['importance']:.3g}"] for row in self.table(20)]
        note = "" if self.guard is None else f"{self.guard.sentence}."
        return displays.ranking(repr(self)[1:-1].partition(";")[0], ("feature", "stability", "importance"), rows, note)


def select_features(
    clients: Sequence[Holdings],
    *,
    names: Sequence[str] | None = None,
    num_repeats: int = 10,
    num_rounds: int = 100,
    threshold: float = 0.8,
    num_folds: int = 4,
    seed: int = 0,
    **options: Any,
) -> SelectedFeatures:
    """Select the features of a linear classifier of two classes over all clients.

    clients: `{"train": {"input": rows, "label": 0 or 1}, "val": ...}` each; without validation samples,
        a third of the training samples becomes one.
    names: one name per column of the inputs.
    num_repeats, threshold: a feature is selected if it beats 95 % of the shadows in this share of
        repeats.
    num_rounds: rounds of every run.
    num_folds: parts of the validation samples by which the last model is chosen.
    options: further keywords of `solve`.

    >>> import fedbilevel as fb
    >>> clients = fb.tasks.Regularisation(num_noise=10).build().clients
    >>> found = fb.select_features(clients, num_repeats=4, num_rounds=40, num_folds=2)
    >>> sorted(found.chosen[:5].tolist())
    [0, 1, 2, 3, 4]
    """
    num_repeats = whole_number("num_repeats", num_repeats, 1)
    if not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise SettingError(f"threshold is {threshold!r}, expected a share of repeats above 0 and at most 1.")
    parts = _checked(clients, seed)
    dim = parts[0]["train"]["input"].shape[1]
    if names is not None and (isinstance(names, str) or len(names) != dim):
        raise SettingError(f"names is {names!r:.80}, expected {dim} names, one per column of the inputs.")
    parts, centre, scale = _standardised(parts)
    hits, sizes = np.zeros((num_repeats, dim), bool), np.zeros((num_repeats, dim))
    for r in range(num_repeats):
        rng = np.random.default_rng([seed, 1, r])
        run = solve(
            *_built([_shadowed(client, rng) for client in parts]),
            "self_tuned",
            **{"num_candidates": 1, "residuals": False, "measure_every": num_rounds, **options},
            num_rounds=num_rounds,
            seed=seed + r,
        )
        weights = whole(run).y["weight"].detach().abs().double().numpy()
        sizes[r], hits[r] = weights[:dim], weights[:dim] > np.quantile(weights[dim:], _BEATEN)
    labels = np.concatenate([client["train"]["label"] for client in parts])
    found = SelectedFeatures(
        list(names) if names is not None else [f"feature {j}" for j in range(dim)],
        hits.mean(0), sizes.mean(0), float(threshold), centre, scale, None, float(labels.mean()),
    )  # fmt: skip
    if not len(found.chosen):
        return found
    task, kept = _TASK, [_columns(client, np.sort(found.chosen)) for client in parts]
    built = task.with_built(_built(kept))  # one model, whose weights can be read
    guard = guarded(built, num_rounds=num_rounds, num_folds=num_folds, blend=False, seed=seed, **options)
    return dataclasses.replace(found, guard=guard)


_TASK = Regularisation(parametrisation="sigmoid", upper="shared")


def _built(clients: Sequence[Mapping[str, Fields]]) -> Built:
    return Built(_TASK.problem(Shapes.of(clients[0], num_classes=2)), clients)


def _checked(clients: Any, seed: int) -> list[dict[str, Fields]]:
    """Return arrays of every client in the roles train and val."""
    check_clients(clients)
    found = []
    for i, client in enumerate(clients):
        own = {
            role: {
                name: np.asarray(value) for name, value in fields_of(client[role], f"{role!r} of client {i}").items()
            }
            for role in ("train", "val")
            if role in client
        }
        if not own or not all({"input", "label"} <= set(fields) for fields in own.values()):
            raise ProblemError(f"client {i} has no input and label in 'train': give rows of numbers and labels 0 or 1.")
        if not all(np.isin(fields["label"], (0, 1)).all() for fields in own.values()):
            raise ProblemError(f"client {i} has labels other than 0 and 1: select_features tells two classes apart.")
        own = {role: {name: fields[name] for name in ("input", "label")} for role, fields in own.items()}
        if "val" not in own:
            order = np.random.default_rng([seed, 0, i]).permutation(len(own["train"]["label"]))
            out, rest = np.sort(order[::_VAL]), np.sort(np.delete(order, np.arange(0, len(order), _VAL)))
            own = {
                role: {n: v[rows] for n, v in own["train"].items()} for role, rows in (("train", rest), ("val", out))
            }
        found.append(own)
    return found


def _standardised(clients: list[dict[str, Fields]]) -> tuple[list[dict[str, Fields]], np.ndarray, np.ndarray]:
    """Return clients with inputs of mean 0 and deviation 1 over all training samples.

    The mean and the deviation need two sums over clients; constant columns stay as they are.
    """
    rows = np.concatenate([client["train"]["input"] for client in clients]).astype(float)
    centre, scale = rows.mean(0), rows.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    new = lambda fields: {**fields, "input": ((fields["input"] - centre) / scale).astype(np.float32)}
    return [{role: new(fields) for role, fields in client.items()} for client in clients], centre, scale


def _shadowed(client: Mapping[str, Fields], rng: np.random.Generator) -> dict[str, Fields]:
    """Return a client with training samples drawn anew, and a permuted copy of every column."""
    found = {}
    for role, fields in client.items():
        num = len(fields["label"])
        rows = rng.integers(num, size=num) if role == "train" else np.arange(num)
        inputs = fields["input"][rows]
        shadows = rng.permuted(inputs, axis=0)
        found[role] = {"input": np.hstack([inputs, shadows]), "label": fields["label"][rows]}
    return found


def _columns(client: Mapping[str, Fields], chosen: np.ndarray) -> dict[str, Fields]:
    return {role: {**fields, "input": fields["input"][:, chosen]} for role, fields in client.items()}

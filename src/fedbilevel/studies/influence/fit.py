"""fb.influence: which training samples of any client harm all clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbilevel import displays, plots
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.federation.algorithm import Algorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import AnyNetwork
from fedbilevel.oracle.population import Population
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.studies.influence.plain import NAMES, plain_scores, rank_correlation
from fedbilevel.studies.influence.predict import check_scopes, influences, resolved
from fedbilevel.studies.influence.result import scores
from fedbilevel.studies.influence.retrain import Trained, Training, retrain, train
from fedbilevel.studies.influence.series import Series
from fedbilevel.tasks.task import Built, Task

_HEADINGS = ("client", "sample", "predicted", "gradient", "trajectory", "own loss", "actual")


class Sample(NamedTuple):
    """A training sample, with the predicted change of the total validation loss by its removal.

    actual: the change after training again without it; None where this was not tried.
    """

    client: int
    sample: int
    predicted: float
    gradient_product: float
    trajectory: float
    own_loss: float
    actual: float | None


@dataclass(frozen=True)
class Influences:
    """The influence of every training sample on the total validation loss of all clients.

    samples: all samples; those whose removal lowers the loss most come first.
    y: the trained model.
    residual: relative error of the linear system.
    cost: communication rounds and derivatives of the prediction.
    """

    samples: list[Sample]
    y: dict[str, Tensor]
    method: str
    residual: float | None
    cost: dict[str, int]

    def harmful(self, num: int = 10) -> list[Sample]:
        """Return samples whose removal lowers the loss, the most harmful first."""
        return [one for one in self.samples[:num] if one.predicted < 0]

    def helpful(self, num: int = 10) -> list[Sample]:
        """Return samples whose removal raises the loss, the most helpful first."""
        return [one for one in reversed(self.samples[-num:]) if one.predicted > 0]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per sample, the most harmful first; `pandas.DataFrame` reads it."""
        return [one._asdict() for one in self.samples]

    def listing(self, num: int = 10) -> str:
        """Return the most harmful and the most helpful samples as text.

        Columns beside the prediction are plain scores, see studies/influence/plain.py.
        """
        show = lambda value: "not tried" if value is None else f"{value:+.3g}"
        lines = []
        for title, rows in (("most harmful", self.harmful(num)), ("most helpful", self.helpful(num))):
            cells = [_HEADINGS, *((str(one.client), str(one.sample), *map(show, one[2:])) for one in rows)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines.append(title)
            lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(lines)

    def rank_correlations(self) -> dict[str, float | None]:
        """Return how each score orders the retrained samples, against the actual changes."""
        tried, actual = self._tried()
        found = {name: [getattr(one, name) for one in tried] for name in ("predicted", *NAMES)}
        found["own_loss"] = [-value for value in found["own_loss"]]  # a high loss marks a harmful sample
        return {name: rank_correlation(values, actual) for name, values in found.items()}

    def plot(self, path: Path | str | None = None, *, most: int = 10) -> Any:
        """Draw what is known as a matplotlib figure.

        With `num_removed`, these are predicted against actual changes. Without, they are the
        distribution of predicted changes, and the `most` most harmful and most helpful samples.

        path: a file for the figure; None: it is only returned.
        """
        title = f"influence, {self.method}"
        pairs = [(one.predicted, one.actual) for one in self.samples if one.actual is not None]
        if pairs:
            found = scores(*map(list, zip(*pairs, strict=True)))
            return plots.scatter(pairs, path, title=title, r2=found.r2, f1=found.f1)
        ends = {f"client {i}, no. {j}": change for i, j, change, *_ in self._ends(most)}
        return plots.predictions([one.predicted for one in self.samples], ends, path, title=title)

    def _ends(self, num: int) -> list[Sample]:
        """Return the most harmful samples, and then the most helpful ones, up to the most helpful of all."""
        return [*self.harmful(num), *reversed(self.helpful(num))]

    def _tried(self) -> tuple[list[Sample], list[float]]:
        pairs = [(one, one.actual) for one in self.samples if one.actual is not None]
        if not pairs:
            raise SettingError("no sample was removed, so there are no actual changes: give influence num_removed=50.")
        return [one for one, _ in pairs], [actual for _, actual in pairs]

    def __repr__(self) -> str:
        num = sum(one.predicted < 0 for one in self.samples)
        return f"<influence by {self.method}: {num} of {len(self.samples)} samples harm, {self.cost['rounds']} rounds>"

    def _repr_html_(self) -> str:
        show = lambda value: "not tried" if value is None else f"{value:+.3g}"
        rows = [[str(one.client), str(one.sample), *map(show, one[2:])] for one in self._ends(10)]
        note = "Samples whose removal lowers the total validation loss most, and those whose removal raises it most."
        return displays.ranking(f"I{repr(self)[2:-1]}", _HEADINGS, rows, note)


def influence(
    problem: Problem | Task | Callable[[Any, Any], Tensor],
    clients: Sequence[Holdings] | None = None,
    *,
    y0: Mapping[str, Tensor] | None = None,
    l2: float = 0.01,
    y: Mapping[str, Tensor] | None = None,
    method: str | Algorithm | Series | None = None,
    network: AnyNetwork | None = None,
    averaging: Averaging | None = None,
    num_removed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Influences:
    """Predict how the removal of each training sample changes the total validation loss.

    problem: a function `loss(y, batch)` of the model and a batch with one value per sample, or a
        problem whose private x weights the samples, starting from ones, or a task such as
        fb.tasks.Influence.
    clients: data with the roles train and val; not for a task.
    y0, l2: with a loss, the initial model and the weight of l2/2 |y|^2.
    y: the trained model; None: the lower level is solved by Newton's method, for convex losses.
    method: "cg" (conjugate gradients with a server; one round per product), which is the default,
        or another estimator; with a network or averaging, the default is "hgp". For networks, whose
        curvature may be negative, give their weights y and a `Series` (studies/influence/series.py).
    num_removed: how many samples with the largest predictions are removed, one at a time, to
        compare the prediction with training again.
    options: seed, batch_size, device, strategy and chunk_size.

    >>> import torch
    >>> import fedbilevel as fb
    >>> def loss(y, batch):
    ...     return (batch["a"] * y["w"] - batch["b"]) ** 2
    >>> good = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([1.1, 1.9, 3.0])}
    >>> bad = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([1.0, 2.0, 0.0])}  # the last label is wrong
    >>> clients = [{"train": good, "val": good}, {"train": bad, "val": good}]
    >>> found = fb.influence(loss, clients, y0={"w": torch.tensor(0.0)})
    >>> found
    <influence by cg: 1 of 6 samples harm, 3 rounds>
    >>> found.harmful()[0].client, found.harmful()[0].sample
    (1, 2)
    """
    if num_removed < 0:
        raise SettingError(f"num_removed is {num_removed}, expected at least 0.")
    built = _built(problem, clients, y0, l2)
    check_scopes(built.problem)
    chosen = resolved(method if method is not None else default_method(network=network, averaging=averaging))
    drawn = {name: options.pop(name) for name in ("seed", "batch_size") if name in options}
    computing = {"dtype": dtype, **options}
    population = Population(built.problem, built.clients, **computing)
    base = _trained(built, population, y, computing)
    found = influences(
        built.problem, built.clients, base.y[0], method=chosen, network=network, averaging=averaging, **drawn,
        **computing,
    )  # fmt: skip
    places = [(i, j) for i, row in enumerate(found.changes) for j in range(len(row))]
    places.sort(key=lambda place: -abs(float(found.changes[place[0]][place[1]])))
    again = retrain(built, Training(), base, places[:num_removed], **computing).changes.tolist() if num_removed else []
    actual = dict(zip(places, again, strict=False))
    plain = plain_scores(population, base.y[0, 0])
    at = lambda rows, place: float(rows[place[0]][place[1]])
    samples = [
        Sample(
            client=place[0], sample=place[1], predicted=at(found.changes, place), actual=actual.get(place),
            **{name: at(plain[name], place) for name in NAMES},
        )
        for place in sorted(places, key=lambda place: (at(found.changes, place), *place))
    ]  # fmt: skip
    name = chosen if isinstance(chosen, str) else chosen.name()
    return Influences(samples, population.layout_y.unravel(base.y[0, 0]), name, found.residual, found.cost)


def default_method(*, network: Any = None, averaging: Any = None, convex: bool = True) -> str:
    """Return "hgp" between peers and, with a server, "cg", or "series" for networks.

    Conjugate gradients need positive curvature, which networks lack. With the damping that repairs
    this they underrate changes; the series does not, in as few rounds (series.py).
    """
    if network is not None or averaging is not None:
        return "hgp"
    return "cg" if convex else "series"


def _built(problem: Any, clients: Any, y0: Any, l2: float) -> Built:
    if isinstance(problem, Task):
        return problem.build()
    if clients is None:
        raise ProblemError("clients is None, expected the data of every client with the roles train and val.")
    if isinstance(problem, Problem):
        return Built(problem, clients)
    if not callable(problem) or y0 is None:
        raise ProblemError(
            f"problem is of type {type(problem).__name__} and y0 of type {type(y0).__name__}, expected a Problem, or "
            "a function loss(y, batch) with y0={...}, the initial model."
        )

    def lower(x: Any, y: Any, batch: Any) -> Tensor:
        return x["mask"][batch["index"]] * problem(y, batch) + 0.5 * l2 * sum((leaf**2).sum() for leaf in y.values())

    masked = Problem(
        upper=lambda x, y, batch: problem(y, batch), lower=lower,
        x0=lambda sizes: {"mask": torch.ones(sizes["train"])}, y0=dict(y0), scopes=Scopes(upper="private"),
        name="influence",
    )  # fmt: skip
    return Built(masked, clients)


def _trained(built: Built, population: Population, y: Any, options: Mapping[str, Any]) -> Trained:
    if y is None:
        return train(built, Training(), **options)
    vector = population.layout_y.ravel(y).to(population.y0)
    everyone = torch.arange(len(population))
    with torch.no_grad():
        val = population.data.batch(everyone, "val")
        losses = population.oracle.evaluate(built.problem.upper, population.x0, vector, val)
    return Trained(vector.expand(1, len(population), -1), losses.double().sum()[None].cpu())

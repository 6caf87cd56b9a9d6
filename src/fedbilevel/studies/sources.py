"""How much each source of data should count for one model that is judged on a target.

Every source is a client, and keeps its samples. x holds one logit per source, y a linear classifier:

    g(x, y) = sum_s w_s CE(y; source s) + l2/2 |y|^2,   w = softmax(x)
    f(x, y) = CE(y; target) + kl * KL(w || uniform)

Target samples are dealt to the clients, which all see the same task, or every client has a target of
its own. With `fairness` q > 0, the loss F_i of client i on its target counts as F_i^(1+q) / (1+q), as in
the task `mixing`, so that clients that are served badly count more. x starts at uniform weights. The
answer is the guarded choice (studies/guarded.py) between learned weights and the plain ways: sources
alike (`uniform`), samples alike (`proportional`), both with half of the target samples among the
training samples, or these alone (`target`).

Sources of text, in a folder, are mixed for a language model (studies/texts.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from fedbilevel import displays
from fedbilevel.data.tokens import TARGET
from fedbilevel.errors import ProblemError, SettingError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.holdings import fields_of
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting
from fedbilevel.studies.guarded import Guarded, guarded
from fedbilevel.studies.mixed_texts import MixedTexts, mix_texts
from fedbilevel.tasks.mixing import KL, divergence, served
from fedbilevel.tasks.rival import STOPPED, Rival, Way
from fedbilevel.tasks.task import Built, Task

_LEAST = 4  # target samples of a client; with fairness, in every fold, because means of them are judged


@dataclasses.dataclass(frozen=True, repr=False)
class MixedSources:
    """Weights of the sources, and the model that the guard chose.

    weights: learned weight of every source, whether or not the guard chose them.
    """

    weights: Mapping[str, float]
    sizes: Mapping[str, int]
    guard: Guarded
    centre: np.ndarray
    scale: np.ndarray

    def predict(self, inputs: Any) -> np.ndarray:
        """Return the class of every row of inputs."""
        rows = (np.asarray(inputs, dtype=float) - self.centre) / self.scale
        y = {name: leaf.detach().double().numpy() for name, leaf in self.guard.result.y.items()}
        return np.asarray((rows @ y["weight"].T + y["bias"]).argmax(1))

    def loss(self, table: Mapping[str, Any]) -> float:
        """Return the mean cross-entropy of a table {"input": rows, "label": classes from 0}."""
        given = _fields(table, "the table")
        y = {name: leaf.detach().double() for name, leaf in self.guard.result.y.items()}
        rows = torch.as_tensor((given["input"] - self.centre) / self.scale)
        return float(_entropy(y, {"input": rows, "label": torch.as_tensor(given["label"])}).mean())

    def table(self) -> list[dict[str, Any]]:
        """Return one row per source, the heaviest first; `pandas.DataFrame` reads it."""
        rows = [
            {"source": name, "weight": weight, "samples": self.sizes[name]} for name, weight in self.weights.items()
        ]
        return sorted(rows, key=lambda row: -cast("float", row["weight"]))

    def plot(self, path: Path | str | None = None) -> Any:
        """Draw the weights as a matplotlib figure; the dashed line is the uniform weight.

        path: a file for the figure; None: it is only returned.
        """
        from fedbilevel import plots  # needs an extra

        rows = {row["source"]: row["weight"] for row in self.table()}
        return plots.bars(rows, path, label="weight", mark=1 / len(rows))

    def __repr__(self) -> str:
        return f"<weights of {len(self.weights)} sources; {self.guard.sentence}>"

    def _repr_html_(self) -> str:
        rows = [[row["source"], f"{row['weight']:.3f}", str(row["samples"])] for row in self.table()]
        note = f"{self.guard.sentence[:1].upper()}{self.guard.sentence[1:]}."
        return displays.ranking(f"Weights of {len(rows)} sources", ("source", "weight", "samples"), rows, note)


@overload
def mix_sources(sources: str | Path, **settings: Any) -> MixedTexts: ...
@overload
def mix_sources(sources: Mapping[str, Any] | Sequence[Any], target: Any, **settings: Any) -> MixedSources: ...
def mix_sources(
    sources: Mapping[str, Any] | Sequence[Any] | str | Path,
    target: Any = None,
    *,
    num_rounds: int | None = None,
    l2: float | None = None,
    kl: float | None = None,
    fairness: float | None = None,
    num_folds: int | None = None,
    seed: int = 0,
    **options: Any,
) -> MixedSources | MixedTexts:
    """Learn how much each source counts for a model that serves the target.

    Tables give a linear classifier. A folder of text files gives a language model: it holds one file or
    folder of text per source, and `target.txt`, text of the kind that the model is for; or one such
    folder per client. Its settings are `num_clients` (4), among which files are divided, and those
    of `fedbilevel mix --help`; device and precision are those of `solve`.

    For tables:

    sources: one table `{"input": rows, "label": classes from 0}` per source, in a list or by name.
    target: the same for the target distribution, at least four samples per source; or one table per
        source, in the same order or by the same names, if every client wants to be served itself.
    num_rounds: rounds of every run; 200 by default.
    l2, kl: weights of the squared norm of y (0.001), and of the divergence from uniform weights (0.1).
    fairness: with a target of every client, how much clients that are served badly count; 0: the mean of
        their losses; 1: with the variance; for large values only the worst client counts. Above 0, every
        client needs four target samples per fold.
    num_folds: parts of the target samples by which the answer is chosen; 4 by default.
    options: further keywords of `solve`. If the bilevel run fails, there are no weights, and an error says so.

    >>> import numpy as np
    >>> import fedbilevel as fb
    >>> draw = np.random.default_rng(0)
    >>> def source(num, wrong):
    ...     rows = draw.standard_normal((num, 3))
    ...     label = (rows @ [1.0, -1.0, 0.5] > 0) ^ (draw.random(num) < wrong)
    ...     return {"input": rows, "label": label.astype(int)}
    >>> found = fb.mix_sources({"good": source(200, 0), "bad": source(200, 0.9)}, source(60, 0), num_rounds=60)
    >>> found.table()[0]["source"]
    'good'
    """
    if isinstance(sources, str | Path):
        every = {"num_rounds": num_rounds, "kl": kl, **options}
        given: dict[str, Any] = {name: value for name, value in every.items() if value is not None}
        if target is not None:
            raise SettingError(f"{sources} is a folder, and target is given too: put the target into {TARGET}.txt.")
        for name, value in {"l2": l2, "fairness": fairness, "num_folds": num_folds}.items():
            if value is not None:
                raise SettingError(f"{sources} is a folder, and {name} is a setting for tables: leave it out.")
        names: list[str] = [name for name in ("device", "precision", "strategy") if name in given]
        return mix_texts(sources, seed=seed, options={name: given.pop(name) for name in names}, **given)
    if target is None:
        raise SettingError("mix_sources has tables and no target: give samples of the target.")
    if not options.get("bilevel", True):
        raise SettingError(f"bilevel is {options['bilevel']!r}, but it gives the weights: leave it out.")
    named = dict(sources) if isinstance(sources, Mapping) else {f"source {i}": one for i, one in enumerate(sources)}
    if len(named) < 2:
        raise SettingError(f"there are {len(named)} sources, expected at least two to weigh against one another.")
    tables = {name: _fields(one, f"the source {name!r}") for name, one in named.items()}
    least = _LEAST * (num_folds or _Sources.num_folds) if fairness else _LEAST
    goals = _goals(target, list(tables), fairness, least, seed)
    if len({one["input"].shape[1] for one in (*tables.values(), *goals)}) > 1:
        raise ProblemError("the sources and the target have different numbers of columns: give the same features.")
    rows = np.concatenate([one["input"] for one in tables.values()])
    centre, scale = rows.mean(0), np.where(rows.std(0) > 0, rows.std(0), 1.0)
    scaled = lambda one: {**one, "input": ((one["input"] - centre) / scale).astype(np.float32)}
    clients: list[Holdings] = [
        {"train": {**scaled(own), "source": np.full(len(own["label"]), i)}, "val": scaled(dealt)}
        for i, (own, dealt) in enumerate(zip(tables.values(), goals, strict=True))
    ]
    num_classes = 1 + max(int(one["label"].max()) for one in (*tables.values(), *goals))
    settings = {"l2": l2, "kl": kl, "fairness": fairness}
    task = _Sources(**{name: value for name, value in settings.items() if value is not None})
    problem = task.problem_of(len(tables), num_classes, rows.shape[1])
    built = task.with_built(Built(problem, clients))
    guard = guarded(
        built, num_rounds=200 if num_rounds is None else num_rounds, num_folds=num_folds, seed=seed, **options
    )
    if "bilevel" not in guard.contenders:
        raise ProblemError(
            "the bilevel run failed, so there are no weights of the sources: look for samples with extreme values, or "
            "give a larger l2."
        )
    weights = softmax(guard.contenders["bilevel"].result.x["logit"].double(), 0).tolist()
    sizes = {name: len(one["label"]) for name, one in tables.items()}
    return MixedSources(dict(zip(tables, weights, strict=True)), sizes, guard, centre, scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sources(Task):
    """The task of `mix_sources`; its data are given."""

    l2: float = setting(0.001, "weight of the squared norm of y in the lower level", above=0)
    kl: float = setting(KL, "weight of the divergence from uniform weights in the upper level", least=0)
    fairness: float = setting(0.0, "how much clients that are served badly count", symbol="q", least=0)

    num_folds = 4  # as in the task mixing

    def problem_of(self, num_sources: int, num_classes: int, dim: int) -> Problem:
        return Problem(
            upper=lambda x, y, batch: self._served(y, batch) + self.kl * divergence(x["logit"]),
            lower=lambda x, y, batch: (
                num_sources * softmax(x["logit"], 0)[batch["source"]] * _entropy(y, batch) + self._decay(y)
            ),
            x0={"logit": torch.zeros(num_sources)},
            y0={"weight": torch.zeros(num_classes, dim), "bias": torch.zeros(num_classes)},
            name="mix_sources",
        )

    def judged(self, problem: Problem) -> Problem:
        return dataclasses.replace(problem, upper=lambda x, y, batch: self._served(y, batch))

    def rivals(self) -> dict[str, Rival]:
        """Return the plain ways; every client trains on half of its target samples too."""
        built = self.build()
        clients, sizes = zip(*(_halved(client) for client in built.clients), strict=True)
        own, goal = (np.array([size[i] for size in sizes], dtype=float) for i in (0, 1))
        num, both = len(own), own + goal

        def way(source: np.ndarray, target: np.ndarray) -> Way:
            """Return a run in which samples of client i weigh source[i], and its target samples target[i]."""
            total = (source * own + target * goal).sum()
            each = torch.as_tensor(np.stack([source, target], 1) * (num * both / total)[:, None], dtype=torch.float32)

            def lower(x: Any, y: Any, batch: Any) -> Tensor:
                losses = _entropy(y, batch)
                return each.to(losses)[batch["source"], batch["is_target"]] * losses + self._decay(y)

            return Way(dataclasses.replace(built.problem, lower=lower), clients, settings=STOPPED)

        one, none, alike = np.ones(num), np.zeros(num), np.full(num, 1 / goal.sum())
        return {
            "uniform": Rival(
                "every source counts the same",
                {"sources": way(1 / own, none), "sources and target": way(1 / own, alike)},
            ),
            "proportional": Rival(
                "every sample counts the same", {"sources": way(one, none), "sources and target": way(one, one)}
            ),
            "target": Rival("target samples alone", {"target": way(none, one)}),
        }

    def _served(self, y: Any, batch: Any) -> Tensor:
        return served(_entropy(y, batch), batch, self.fairness)

    def _decay(self, y: Any) -> Any:
        return 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())


def _fields(given: Any, where: str) -> dict[str, np.ndarray]:
    found = {name: np.asarray(value) for name, value in fields_of(given, where).items()}
    if not {"input", "label"} <= set(found) or found["input"].ndim != 2 or found["label"].dtype.kind not in "iub":
        raise ProblemError(f"{where} has no rows 'input' and whole numbers 'label': give both.")
    if found["label"].min(initial=0) < 0:
        raise ProblemError(f"{where} has the label {found['label'].min()}: number the classes from 0.")
    return {"input": found["input"].astype(float), "label": found["label"].astype(np.int64)}


def _goals(
    target: Any, names: Sequence[str], fairness: float | None, least: int, seed: int
) -> list[dict[str, np.ndarray]]:
    """Return the target samples of every client: its own ones, or its part of those of all.

    least: samples that a client needs of its own target.
    """
    if isinstance(target, Mapping) and "input" not in target:
        if set(target) != set(names):
            raise SettingError(
                f"the targets are named {', '.join(map(str, target))}, expected the names of the sources, "
                f"{', '.join(names)}: give every source a target."
            )
        target = [target[name] for name in names]
    if isinstance(target, Mapping):
        if fairness:
            raise SettingError(
                f"fairness is {fairness}, but all clients have the same target, so that none is served worse: give one "
                "target per source, or leave fairness out."
            )
        goal = _fields(target, "the target")
        least = _LEAST * len(names)
        if len(goal["label"]) < least:
            raise SettingError(
                f"the target has {len(goal['label'])} samples, expected at least {least}: four per source."
            )
        return _dealt(goal, len(names), seed)
    if not isinstance(target, Sequence) or len(target) != len(names):
        given = f"{len(target)} targets" if isinstance(target, Sequence) else f"of type {type(target).__name__}"
        raise SettingError(f"target is {given}, expected one table, or one per source, which are {len(names)}.")
    found = []
    for i, (name, one) in enumerate(zip(names, target, strict=True)):
        goal = _fields(one, f"the target of {name!r}")
        if len(goal["label"]) < least:
            why = ", four in every fold because of fairness" if fairness else ""
            raise SettingError(
                f"the target of {name!r} has {len(goal['label'])} samples, expected at least {least}{why}: give more."
            )
        found += _dealt(goal, 1, seed + i)
    return found


def _dealt(goal: Mapping[str, np.ndarray], num: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Return the target samples of every client in the drawn order, because rivals halve them by place."""
    order = np.random.default_rng([seed, 0]).permutation(len(goal["label"]))
    return [{name: value[order[i::num]] for name, value in goal.items()} for i in range(num)]


def _halved(client: Holdings) -> tuple[Holdings, tuple[int, int]]:
    """Return a client that trains on half of its target samples too, and both numbers of samples."""
    train, val = client["train"], client["val"]
    half = max(1, len(val["label"]) // 2)
    joined = {name: np.concatenate([train[name], val[name][:half]]) for name in ("input", "label")}
    joined["source"] = np.full(len(joined["label"]), train["source"][0])
    joined["is_target"] = np.repeat([0, 1], [len(train["label"]), half])
    rest = {name: value[half:] if len(value) > half else value for name, value in val.items()}
    return {**client, "train": joined, "val": rest}, (len(train["label"]), half)


def _entropy(y: Any, batch: Any) -> Tensor:
    return cross_entropy(batch["input"] @ y["weight"].mT + y["bias"], batch["label"], reduction="none")

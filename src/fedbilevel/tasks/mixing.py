"""Mixing: learn how much each source of text counts for one small language model.

Text comes from several sources of different quality. Every client holds text of all sources, and a
little text of the target distribution, by which the model is judged. x holds one logit per source,
shared by all; y is a network that predicts the next character from the characters before it:

    g_i(x, y) = sum_s w_s CE(y; source_is) + l2/2 |y|^2,   w = softmax(x)
    f_i(x, y) = CE(y; target_i) + kl * KL(w || uniform)

Every client has equally many samples of each source, so the uniform weights at the start x = 0 give
plain training on all text. A lower level with little weight on good sources may still look good on
a few target samples; the KL term keeps weights on several good sources, because one good source
alone gives a worse model than all of them.

The network has an embedding of each character, a hidden layer with GELU on the embeddings of the
context, and a linear layer. Its lower level is not convex: y*(x) is the minimum that is found. A
good start matters: with an untrained y and long steps of x, all weight may fall on a bad source.

Data: in `chains`, characters follow a random Markov chain, which is also the target. The first
`num_good` sources come from the same chain, and all others from chains of their own. In
`shakespeare`, the good sources are the longest roles, and the target is the text of all other
roles. A bad source is the text of a role, corrupted in one of four ways: with its characters in
random order, backwards, with half of its characters replaced by random ones, or with its first line
repeated over and over. In `python`, the good sources and the target are groups of topics of
Python's manual, and a bad source is the code of a module, as it is: programs or tables.

With `fairness` q > 0 the upper level minds clients that are served badly: F_i = CE(y; target_i) is
replaced by F_i^(1+q) / (1+q), as in q-fair federated learning (Li et al., ICLR 2020). The mean over
clients of F^2 is the squared mean plus the variance, so q = 1 penalises the variance between
clients; for large q only the worst client counts. `worst_test_loss` is then a figure too.

Rivals: sources weighted alike (`uniform`) or by characters (`proportional`), with and without half of
the target samples among the training samples, and these alone (`target`). The other half stops
training early and chooses. `fb.guarded` starts x at the better of the first two, and trains y once
more with the learned weights, likewise with and without half of the target samples.

Figures: test_loss is the cross-entropy per character of target text, and good_weight the sum of the
weights of the good sources.

Compare the reweighting of domains in Xie et al., "DoReMi", NeurIPS 2023, and Fan et al., "DoGE",
ICML 2024. Choices of this project: the bilevel form, the corruptions and the size of the network.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu, linear, log_softmax, softmax

from fedbilevel.data.sets import python_texts
from fedbilevel.data.sets.shakespeare import samples, shakespeare, vocabulary
from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.problem import Problem
from fedbilevel.settings import setting
from fedbilevel.tasks.findings import Finding, by_client, counted, of_client, ranking, share
from fedbilevel.tasks.initial import uniform
from fedbilevel.tasks.rival import STOPPED, Rival, Way
from fedbilevel.tasks.task import Built, Shapes, Task

KL = 0.1  # with a tenth of it, one of several good sources got nearly all weight on Shakespeare's roles
_SYMBOLS = "abcdefghijkl"  # of the chains
_CORRUPTIONS = ("shuffled", "backwards", "half random", "repeated line")


class _Texts(NamedTuple):
    """Texts of the sources and of the target, and the characters of which they consist."""

    sources: Sequence[str]
    target: str
    characters: str


@dataclass(frozen=True, kw_only=True)
class Mixing(Task):
    data: Literal["chains", "python", "shakespeare"] = setting(
        "chains",
        "synthetic Markov chains, texts that every Python has, or plays of Shakespeare by role, which must be on disk",
    )
    data_dir: str | None = setting(
        None, "folder of the file; None: $FEDBILEVEL_DATA, or shared/data beside the checkout"
    )
    num_clients: int = setting(4, "clients", symbol="m", least=1)
    num_good: int = setting(3, "sources like the target", least=1)
    num_bad: int = setting(5, "sources unlike the target, or corrupted", least=0)
    num_train: int = setting(50, "training samples of every source at each client", least=1)
    num_val: int = setting(50, "validation samples of the target at each client", least=1)
    num_test: int = setting(250, "test samples of the target at each client", least=1)
    context: int = setting(3, "characters from which the next one is predicted", least=1)
    num_embedding: int = setting(8, "numbers per character of the embedding", least=1)
    num_hidden: int = setting(32, "units of the hidden layer", least=1)
    l2: float = setting(0.001, "weight of the squared norm of y in the lower level", above=0)
    kl: float = setting(KL, "weight of the divergence from uniform weights in the upper level", least=0)
    fairness: float = setting(
        0.0, "how much clients that are served badly count; 0: the mean, 1: with the variance", symbol="q", least=0
    )
    data_seed: int = setting(0, "seed of the texts, of the split and of the initial weights", least=0)

    suggested = {
        "*": {"lr_lower": 0.5, "lr_system": 0.3, "lr_upper": 1.0, "num_local_steps": 1},
        "fedavg": {"num_local_steps": 5},
        "fbo_aggitd": {"lr_upper": 5.0, "num_lower_rounds": 5},
        "fednest": {"lr_upper": 5.0, "num_lower_rounds": 3, "num_terms": 5},
        "lfednest": {"num_lower_rounds": 3},
    }
    suggested_iterations = {"*": 200, "fbo_aggitd": 60, "fednest": 60, "lfednest": 100}
    num_folds = 4  # with few target samples, runs without half of them are no guide to the answer
    avoid = "all sources are like the target: uniform weights are then right, and nothing is left to learn"
    headline = ("test_loss", "good_weight")
    needs = {
        "train": {
            "context": "numbers of the characters before, one row per sample",
            "label": "number of the next character from 0",
            "source": "number of its source from 0",
        },
        "val": {"context": "as in train, of the target", "label": "number of the next character"},
    }
    measures = {"test": {"context": "as in val", "label": "number of the next character: for test_loss"}}

    def build(self) -> Built:
        rng = np.random.default_rng([self.data_seed, 0])
        texts = {"chains": self._chains, "python": self._manual, "shakespeare": self._plays}[self.data](rng)
        dealt = [self._dealt(text, texts.characters, {"train": self.num_train}, rng) for text in texts.sources]
        target = self._dealt(texts.target, texts.characters, {"val": self.num_val, "test": self.num_test}, rng)
        clients: list[Holdings] = []
        for i in range(self.num_clients):
            train = {name: np.concatenate([own[i]["train"][name] for own in dealt]) for name in ("context", "label")}
            train["source"] = np.repeat(np.arange(len(dealt)), self.num_train)
            clients.append({"train": train, **target[i]})
        return Built(self.problem(Shapes.of(clients[0], len(texts.characters))), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        shapes.sample("label", "train", "val", "test", kinds=("int",), ndim=0)
        shapes.sample("source", "train", kinds=("int",), ndim=0)
        (context,) = shapes.sample("context", "train", "val", "test", kinds=("int",), ndim=1)
        num_sources, tested = self.num_good + self.num_bad, shapes.has("test", "context", "label")
        return Problem(
            upper=lambda x, y, batch: self._served(_entropy(y, batch), batch) + self.kl * divergence(x["logit"]),
            lower=lambda x, y, batch: (
                num_sources * softmax(x["logit"], 0)[batch["source"]] * _entropy(y, batch) + self._decay(y)
            ),
            x0={"logit": torch.zeros(num_sources)},
            y0=self._weights(context, shapes.classes()),
            statistics={"test": _tested(self.num_good)} if tested else {},
            metrics=_metrics if tested else lambda sums: {},
            across=_worst if tested and self.fairness else None,
            name="mixing",
        )

    def _served(self, losses: Tensor, batch: Any) -> Tensor:
        """Return the losses of a client's samples or, with fairness, one number for the client."""
        return served(losses, batch, self.fairness)

    def rivals(self) -> dict[str, Rival]:
        problem, clients = self.build()
        num_sources = self.num_good + self.num_bad
        counts = torch.as_tensor(_counts([_halved(client, num_sources) for client in clients], num_sources))
        each, no_target = torch.ones(num_sources + 1), torch.ones(num_sources + 1)
        no_target[-1] = 0.0
        way = lambda weights: self._trained(problem, clients, weights)
        start = lambda shares: lambda label, run: {"x0": {"logit": (shares.log() - shares.log().mean()).float()}}
        return {
            "uniform": Rival(
                "every source counts the same",
                {"sources": way(no_target), "sources and target": way(each)},
                start=start(each[:-1]),
            ),
            "proportional": Rival(
                "every character counts the same",
                {"sources": way(counts * no_target), "sources and target": way(counts * each)},
                start=start(counts[:-1].clamp(min=1)),
            ),
            "target": Rival("target samples alone", {"target": way(1 - no_target)}),
        }

    def judged(self, problem: Problem) -> Problem:
        return replace(problem, upper=lambda x, y, batch: self._served(_entropy(y, batch), batch))

    def refits(self, problem: Problem, clients: Sequence[Holdings], x: Mapping[str, Tensor]) -> dict[str, Way]:
        """Return training from the start with learned weights, without the target and with it as one source more."""
        weights, one = softmax(x["logit"].double(), 0), torch.zeros(1).double()
        own = replace(self.judged(problem), x0=x)
        found = {
            "sources": torch.cat([weights, one]),
            "sources and target": torch.cat([weights, one + 1 / len(weights)]),
        }
        return {label: self._trained(own, clients, mixture) for label, mixture in found.items()}

    def _trained(self, problem: Problem, clients: Sequence[Holdings], weights: Tensor) -> Way:
        """Return a run of y on sources, the last of which is half of the target, with these shares of the loss.

        The other half of the target chooses the state.
        """
        halves = [_halved(client, len(weights) - 1) for client in clients]
        counts = torch.as_tensor(_counts(halves, len(weights) - 1))
        each = torch.where(counts > 0, weights.double(), 0.0)  # a source without samples has no share
        each = each / each.sum() * counts.sum() / counts.clamp(min=1)

        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            losses = _entropy(y, batch)
            return each.to(losses)[batch["source"]] * losses + self._decay(y)

        return Way(replace(problem, lower=lower), halves, settings=STOPPED)

    def _decay(self, y: Any) -> Any:
        return 0.5 * self.l2 * sum((leaf**2).sum() for leaf in y.values())

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        """Return the learned weight of every source, and the test loss of every client."""
        found = counted(problem, clients, result, "test")
        served = [
            by_client(
                "Test loss of every client",
                "On the target text that the client itself holds.",
                {"test_loss": [share(one["loss"], one["tested"]) for one in found]},
            )
        ]
        if not isinstance(result.x, Mapping):  # every peer has its own x, or x never left the sites
            return served if found else []
        weights = softmax(of_client(result.x, 0)["logit"].double(), 0).tolist()
        rows = [[source, "good" if source < self.num_good else "bad", weight] for source, weight in enumerate(weights)]
        about = f"Weights sum to one and start at {1 / len(weights):.3g} each."
        table = ranking("Sources", about, ("source", "kind", "weight"), sorted(rows, key=lambda row: -row[2]))
        return [table, *(served if found else [])]

    def _chains(self, rng: np.random.Generator) -> _Texts:
        """Return the texts of the good chain and of one bad chain per bad source."""
        good, num = chain(rng), self.num_clients * self.num_train + self.context
        rest = self.num_clients * (self.num_val + self.num_test) + self.context
        chains = [good] * self.num_good + [chain(rng) for _ in range(self.num_bad)]
        return _Texts([walk(one, num, rng) for one in chains], walk(good, rest, rng), _SYMBOLS)

    def _plays(self, rng: np.random.Generator) -> _Texts:
        roles = shakespeare(self.data_dir)
        longest = sorted(roles, key=lambda role: -len(roles[role]))[: self.num_good + self.num_bad]
        characters = vocabulary(roles)
        sources = [
            roles[role]
            if place < self.num_good
            else corrupted(roles[role], _CORRUPTIONS[(place - self.num_good) % len(_CORRUPTIONS)], characters, rng)
            for place, role in enumerate(longest)
        ]
        return _Texts(sources, "".join(roles[role] for role in roles if role not in longest), characters)

    def _manual(self, rng: np.random.Generator) -> _Texts:
        """Return groups of the manual's topics, the last of which is the target, and code of random modules."""
        modules, groups = python_texts.MODULES, self.num_good + 1
        if self.num_bad > len(modules):
            raise ProblemError(f"there are {len(modules)} modules for {self.num_bad} bad sources: use fewer of them.")
        topics = list(python_texts.topics().values())
        order = rng.permutation(len(topics))
        *good, target = ["".join(topics[i] for i in order[group::groups]) for group in range(groups)]
        bad = [python_texts.module(modules[i]) for i in rng.permutation(len(modules))[: self.num_bad]]
        return _Texts([*good, *bad], target, python_texts.CHARACTERS)

    def _dealt(
        self, text: str, characters: str, sizes: Mapping[str, int], rng: np.random.Generator
    ) -> list[dict[str, dict[str, np.ndarray]]]:
        """Return samples of a text for every client and role; no sample is dealt twice."""
        contexts, labels = samples(text, characters, self.context)
        need = self.num_clients * sum(sizes.values())
        if len(labels) < need:
            raise ProblemError(
                f"a text has {len(labels)} samples, but {need} are needed for {self.num_clients} clients: use fewer "
                "clients, sources or samples per client."
            )
        chosen = rng.permutation(len(labels))[:need].reshape(self.num_clients, -1)
        cuts = np.cumsum(list(sizes.values()))[:-1]
        return [
            {
                role: {"context": contexts[places], "label": labels[places]}
                for role, places in zip(sizes, np.split(own, cuts), strict=True)
            }
            for own in chosen
        ]

    def _weights(self, context: int, num_characters: int) -> dict[str, Tensor]:
        """Return initial weights, uniform on +-1/sqrt(inputs of a unit), with a unit embedding."""
        draw = torch.Generator().manual_seed(self.data_seed)
        layers = {"hidden": (self.num_hidden, context * self.num_embedding), "out": (num_characters, self.num_hidden)}
        embedding = torch.randn(num_characters, self.num_embedding, generator=draw)
        return {"embedding": embedding, **uniform(layers, draw)}


def served(losses: Tensor, batch: Any, fairness: float) -> Tensor:
    """Return the losses of a client's samples, or F^(1 + q) / (1 + q) of their mean F with q = fairness > 0."""
    if not fairness:
        return losses
    power = 1 + fairness
    return (batch["weight"] * losses).sum() ** power / power


def _counts(clients: Sequence[Holdings], last: int) -> np.ndarray:
    """Return the number of training samples of every source up to `last`, over all clients."""
    return np.sum([np.bincount(one["train"]["source"], minlength=last + 1) for one in clients], 0)


def _halved(client: Holdings, source: int) -> Holdings:
    """Return a client that trains on half of its target samples too, as a source of their own.

    The other half stays for validation; a single sample serves both ends.
    """
    train, val = client["train"], client["val"]
    half = max(1, len(val["label"]) // 2)
    joined = {name: np.concatenate([train[name], val[name][:half]]) for name in ("context", "label")}
    joined["source"] = np.concatenate([train["source"], np.full(half, source)])
    rest = {name: value[half:] if len(value) > half else value for name, value in val.items()}
    return {**client, "train": joined, "val": rest}


def _logits(y: Any, batch: Any) -> Tensor:
    z = y["embedding"][batch["context"]].flatten(1)
    z = gelu(linear(z, y["hidden.weight"], y["hidden.bias"]))
    return linear(z, y["out.weight"], y["out.bias"])


def _entropy(y: Any, batch: Any) -> Tensor:
    return cross_entropy(_logits(y, batch), batch["label"], reduction="none")


def divergence(logit: Tensor, prior: Tensor | None = None) -> Tensor:
    """Return KL(softmax(logit) || prior); the prior is uniform unless its weights are given."""
    logs = log_softmax(logit, 0)
    log_prior = -math.log(len(logit)) if prior is None else prior.to(logs).log()
    return (logs.exp() * (logs - log_prior)).sum()


def _tested(num_good: int) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
    def tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        losses = _entropy(y, batch)
        good = softmax(x["logit"], 0)[:num_good].sum()
        return {"loss": losses, "good": good * torch.ones_like(losses), "tested": torch.ones_like(losses)}

    return tested


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients."""
    return {"test_loss": sums["loss"] / sums["tested"], "good_weight": sums["good"] / sums["tested"]}


def _worst(sums: Any) -> dict[str, float]:
    """Return the test loss of the client that is served worst."""
    return {"worst_test_loss": float((sums["loss"] / sums["tested"]).max())}


def chain(rng: np.random.Generator) -> np.ndarray:
    """Return transition probabilities (symbols, symbols), of which a few are large in each row."""
    return rng.dirichlet(np.full(len(_SYMBOLS), 0.2), len(_SYMBOLS)) * 0.95 + 0.05 / len(_SYMBOLS)


def walk(transitions: np.ndarray, length: int, rng: np.random.Generator) -> str:
    steps, draws = transitions.cumsum(1), rng.random(length)
    places = [0]
    for draw in draws[1:]:
        places.append(min(int(np.searchsorted(steps[places[-1]], draw)), len(_SYMBOLS) - 1))
    return "".join(_SYMBOLS[place] for place in places)


def corrupted(text: str, how: str, characters: str, rng: np.random.Generator) -> str:
    if how == "words backwards":
        return " ".join(word[::-1] for word in text.split(" "))
    if how == "other letters":  # the same words in another alphabet
        return codecs.encode(text, "rot13")
    letters = np.array(list(text))
    if how == "shuffled":
        return "".join(rng.permutation(letters))
    if how == "backwards":
        return text[::-1]
    if how == "half random":
        hit = rng.random(len(letters)) < 0.5
        letters[hit] = rng.choice(np.array(list(characters)), hit.sum())
        return "".join(letters)
    line = text.split("\n", 1)[0] + "\n"
    return (line * (len(text) // len(line) + 1))[: len(text)]

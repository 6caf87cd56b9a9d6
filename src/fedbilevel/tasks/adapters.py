"""Adapters: a frozen language model, a shared low-rank adapter and an adapter of each client's own.

All clients hold the same frozen weights W. x holds a low-rank adapter of every linear layer and is
the same for all; y_i holds a thinner adapter and never leaves its client:

    W h + up_x down_x h + up_i down_i h                          in every linear layer

    g_i(x, y_i) = CE(x, y_i; train_i) + l2/2 |y_i - y_0|^2      f_i(x, y_i) = CE(x, y_i; val_i)

So the shared adapter is judged by samples that own adapters have not seen: it learns what helps all
clients after each has adapted. y_0 has up = 0 and a random down; without the distance to y_0, a
product of two factors has no isolated minimum.

The model is a small GPT. It is trained on public text when the task is built, by a fixed seed, and
then frozen. All losses read the same tensors, and rows of clients hold adapters only.

Texts are Markov chains. The chain of the public text is known to the model. The chain of the clients
has other successors for `num_common` of the symbols, and each client has successors of its own for
`num_own` of the symbols. `num_own` = 0 makes all clients alike.

Use it when a model is too large to be trained or sent, and clients share a domain but differ, with
`fb.guarded`. It begins where the plain way ends: x is the shared adapter of the rival `fine_tuned`, and
l2 the one that it chose. Every client takes part twice, the second time with training and validation
texts exchanged (`crossed`), so that x learns from all texts, each judged by own adapters that have
not seen it. Own adapters are then trained once more on all texts (`refits`), and held-out texts
choose between both answers. `fine_tuned` alone is cheaper.

Compare PF2LoRA, arXiv 2503.03920: the two adapters and the two levels, not written from the paper's
text. Choices of this project: the data, the model, the distance to y_0, and validation samples above.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.modules import Frozen
from fedbilevel.problem.problem import Problem, Scopes
from fedbilevel.settings import setting
from fedbilevel.tasks import gpt
from fedbilevel.tasks.findings import Finding, accuracies
from fedbilevel.tasks.personal_rivals import across_clients
from fedbilevel.tasks.rival import Rival, Way, with_validation
from fedbilevel.tasks.task import Built, Shapes, Task

_PUBLIC, _COMMON, _OWN = range(3)  # addresses of draws
_BATCH, _LR = 64, 0.01  # of the training on public text
_STEPS, _LENGTHS, _MORE = (0.3, 1.0), (0.01, 0.03), (0.3, 1.0, 3.0)  # of rivals: steps, those of Adam, factors of l2
_LIGHT = 0.03  # factor of l2 for a shared adapter, which all texts determine
_OWN_STEP = 0.3  # longer steps never won on data seed 0
_NEAR_STEP = 0.1  # of x near a trained adapter; the longer step of a start at zero does not stay there
_UNUSED = {"unused": torch.zeros(1)}
_LAYERS = {"qkv": (1, 3), "mixed": (1, 1), "wide": (1, 4), "back": (4, 1)}  # inputs and outputs, in widths

Predict = Callable[[Any, Any, Tensor], Tensor]  # (x, y, tokens) -> scores


@dataclass(frozen=True, kw_only=True)
class Adapters(Task):
    num_clients: int = setting(16, "clients", symbol="m", least=1)
    rank: int = setting(4, "rank of the shared adapter", least=1)
    own_rank: int = setting(2, "rank of each client's own adapter", least=1)
    num_symbols: int = setting(16, "symbols of the texts", least=2)
    num_common: int = setting(
        10, "symbols with other successors than in the public text, at all clients alike", least=0
    )
    num_own: int = setting(4, "symbols with other successors at each client alone", least=0)
    num_train: int = setting(8, "training texts of each client", least=1)
    num_val: int = setting(8, "validation texts of each client", least=1)
    num_test: int = setting(40, "test texts of each client", least=1)
    width: int = setting(16, "numbers per position in the model", least=1)
    layers: int = setting(1, "layers of the model", least=1)
    heads: int = setting(2, "heads of attention; a divisor of width", least=1)
    context: int = setting(16, "symbols from which the next one is predicted, at most", least=1)
    num_pretraining: int = setting(300, "steps on public text before the model is frozen", least=0)
    l2: float = setting(0.1, "weight of the squared distance of an own adapter from its start", above=0)
    data_seed: int = setting(0, "seed of the texts, of the model and of initial adapters", least=0)

    suggested = {
        "*": {"lr_lower": 0.3, "lr_system": 0.2, "lr_upper": 0.3, "num_local_steps": 5},
        "fedbio_local": {"u": "local"},
    }
    suggested_iterations = {"*": 40}
    automatic = "fedbio_local"
    avoid = "a shared adapter that every client tunes further is good enough: `fb.guarded` trains it too and costs more"
    headline = ("test_loss", "test_accuracy")
    needs = {
        "train": {"text": "numbers of symbols from 0, one row per sample"},
        "val": {"text": "as in train"},
    }
    measures = {"test": {"text": "as in train: for test_loss and test_accuracy"}}

    def build(self) -> Built:
        clients: list[Holdings] = []
        for i in range(self.num_clients):
            rng = np.random.default_rng([self.data_seed, _OWN, i])
            chain = self._changed(self._chain_of_clients(), self.num_own, rng)
            sizes = {"train": self.num_train, "val": self.num_val, "test": self.num_test}
            clients.append({role: {"text": texts(chain, num, self.context + 1, rng)} for role, num in sizes.items()})
        return Built(self.problem(Shapes.of(clients[0])), clients)

    def problem(self, shapes: Shapes) -> Problem:
        self.check(shapes)
        (length,) = shapes.sample("text", "train", "val", "test", kinds=("int",), ndim=1)
        if not 2 <= length <= self.context + 1:
            raise ProblemError(
                f"texts have {length} symbols, expected 2 to {self.context + 1}, as the context is {self.context}: cut "
                "texts, or set another context."
            )
        x0, y0 = self._start(self.rank, 0), self._start(self.own_rank, 1)
        return self._modelled(x0, y0, Scopes(lower="local"), tested=shapes.has("test", "text"))

    def rivals(self) -> Mapping[str, Rival]:
        """Return plain ways, tuned by validation texts and then trained on all texts.

        An adapter that stands alone has both ranks together.
        """
        own, clients = self.build()
        assert isinstance(own.x0, Mapping)
        again, tested = with_validation(clients), "test" in own.statistics
        alone, stiff = self._start(self.rank + self.own_rank, 0), [replace(self, l2=more * self.l2) for more in _MORE]
        made = lambda task, y0, lower: task._modelled(_UNUSED, y0, Scopes(lower=lower), tested=tested)
        light = replace(self, l2=_LIGHT * self.l2)
        one, thin = made(light, alone, "global"), made(light, own.x0, "global")
        apart = {task.l2: made(task, alone, "local") for task in stiff}
        both = {task.l2: task._modelled(own.x0, own.y0, own.scopes, tested=tested) for task in stiff}
        sgd, slow = _sgd, ("fedavg", _sgd(_OWN_STEP))
        shared: dict[str, tuple[str, dict[str, Any]]] = {f"fedavg, lr_lower {lr}": ("fedavg", sgd(lr)) for lr in _STEPS}
        shared |= {f"fedadam, server_lr {lr}": ("fedadam", {**sgd(0.3), "server_lr": lr}) for lr in _LENGTHS}
        plans = {f"l2 {l2:g}": l2 for l2 in both}

        def tuned(label: str, clients: Sequence[Holdings]) -> Way:
            then = lambda run: Way(replace(both[plans[label]], x0=_plain(run.y)), clients, *_fixed(slow))
            return Way(thin, clients, *_fixed(("fedavg", sgd(1.0))), then)

        def alone_at(label: str, clients: Sequence[Holdings]) -> Way:
            return Way(apart[plans[label]], clients, *_fixed(slow))

        def jointly(label: str, clients: Sequence[Holdings]) -> Way:
            settings = {**sgd(_OWN_STEP), "lr_upper": _OWN_STEP, "num_head_steps": 5}
            return Way(both[plans[label]], clients, *_fixed(("fedrep", settings)))

        alone_shared = lambda label, clients: Way(one, clients, *_fixed(shared[label]))
        rival = lambda title, labels, way: _rival(title, labels, way, clients, again)
        found = {
            "shared": rival("one shared adapter", shared, alone_shared),
            "own": rival("own adapters alone", plans, alone_at),
            "fine_tuned": rival("a shared adapter, then own adapters", plans, tuned),
            "joint": rival("both adapters trained on the same texts, as FedRep", plans, jointly),
        }
        start = lambda label, run: {
            "x0": _plain(run.x), "lower": both[plans[label]].lower, "clients": crossed(clients),
            "settings": {"lr_upper": _NEAR_STEP},
        }  # fmt: skip
        return found | {"fine_tuned": found["fine_tuned"]._replace(start=start)}

    def refits(self, problem: Problem, clients: Sequence[Holdings], x: Mapping[str, Tensor]) -> Mapping[str, Way]:
        """Return own adapters on all texts, trained as rivals train them."""
        again = with_validation(_once(clients))
        return {"refitted": Way(replace(problem, x0=x), again, "fedavg", _sgd(_OWN_STEP))}

    def findings(self, problem: Problem, clients: Sequence[Holdings], result: Any) -> list[Finding]:
        return accuracies(problem, clients, result, role="test", right="test_right", of="test_samples")

    def frozen(self) -> Mapping[str, Tensor]:
        """Return the weights of the model; tasks with the same model hold the same tensors."""
        if self.width % self.heads:
            raise ProblemError(f"width is {self.width}, expected a multiple of heads ({self.heads}): change either.")
        shape = gpt.Shape(self.width, self.layers, self.heads, self.context)
        return pretrained(shape, self.num_symbols, self.num_pretraining, self.data_seed)

    def _modelled(self, x0: Mapping[str, Tensor], y0: Mapping[str, Tensor], scopes: Scopes, *, tested: bool) -> Problem:
        """Return the problem of the frozen model with an adapter in y, and in x unless it is unused."""
        weights, shape = Frozen(self.frozen()), gpt.Shape(self.width, self.layers, self.heads, self.context)
        start = Frozen(y0)

        def predict(x: Any, y: Any, tokens: Tensor) -> Tensor:
            fixed = weights.like(next(iter(y.values())), ())
            layer = adapted(gpt.dense(fixed), [y] if x0 is _UNUSED else [x, y])
            return gpt.scores(fixed, tokens, shape, gpt.plain_causal, layer)

        loss = lambda x, y, batch: gpt.following(predict(x, y, batch["text"][:, :-1]), batch["text"])

        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            first = start.like(next(iter(y.values())), ())
            return loss(x, y, batch) + 0.5 * self.l2 * sum(((y[name] - first[name]) ** 2).sum() for name in y)

        return Problem(
            upper=loss,
            lower=lower,
            x0=x0,
            y0=y0,
            scopes=scopes,
            statistics={"test": _tested(predict)} if tested else {},
            metrics=_metrics if tested else lambda sums: {},
            across=across_clients if tested else None,
            name="adapters",
        )

    def _start(self, rank: int, address: int) -> dict[str, Tensor]:
        """Return an adapter that adds nothing yet."""
        draw, found = torch.Generator().manual_seed(2 * self.data_seed + address), {}
        for i in range(self.layers):
            for name, (enters, leaves) in _LAYERS.items():
                num = enters * self.width
                found[f"{i}.{name}.down"] = torch.randn(rank, num, generator=draw) * num**-0.5
                found[f"{i}.{name}.up"] = torch.zeros(leaves * self.width, rank)
        return found

    def _chain_of_clients(self) -> np.ndarray:
        rng = np.random.default_rng([self.data_seed, _COMMON])
        return self._changed(public_chain(self.num_symbols, self.data_seed), self.num_common, rng)

    def _changed(self, chain: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
        """Return a chain with other successors for some symbols."""
        if num > self.num_symbols:
            raise ProblemError(
                f"{num} symbols cannot have other successors, as there are {self.num_symbols}: use at most num_symbols."
            )
        chain, rows = chain.copy(), rng.permutation(self.num_symbols)[:num]
        chain[rows] = successors(num, self.num_symbols, rng)
        return chain


def adapted(layer: gpt.Layer, adapters: Sequence[Mapping[str, Tensor]]) -> gpt.Layer:
    """Add low-rank products to linear layers, without making a matrix of the layer's size."""

    def sum_of_all(h: Tensor, name: str) -> Tensor:
        added = layer(h, name)
        for own in adapters:
            added = added + (h @ own[f"{name}.down"].mT) @ own[f"{name}.up"].mT
        return added

    return sum_of_all


def crossed(clients: Sequence[Holdings]) -> list[Holdings]:
    """Return every client twice, the second time with training and validation texts exchanged.

    Roles other than train, val and test are empty there: their samples judge the first one.
    """
    swapped = {"train": "val", "val": "train", "test": "test"}

    def other(client: Holdings) -> Holdings:
        rest = {role: {name: value[:0] for name, value in own.items()} for role, own in client.items()}
        return {**rest, **{role: client[of] for role, of in swapped.items() if of in client}}

    return [*clients, *map(other, clients)]


def _once(clients: Sequence[Holdings]) -> Sequence[Holdings]:
    """Return the clients that `crossed` was given."""
    num = len(clients) // 2
    return clients[:num] if num and clients[num]["train"] is clients[0]["val"] else clients


@functools.lru_cache(maxsize=8)
def pretrained(shape: gpt.Shape, num_symbols: int, num_steps: int, seed: int) -> Mapping[str, Tensor]:
    """Return weights trained by Adam on public text, with a step that falls to zero."""
    rng, chain = np.random.default_rng([seed, _PUBLIC, 1]), public_chain(num_symbols, seed)
    weights = {name: leaf.requires_grad_() for name, leaf in gpt.weights(shape, seed, num_symbols).items()}
    optimiser = torch.optim.Adam(weights.values(), lr=_LR)
    for step in range(num_steps):
        optimiser.param_groups[0]["lr"] = _LR * (1 - step / num_steps)
        text = torch.as_tensor(texts(chain, _BATCH, shape.context + 1, rng))
        optimiser.zero_grad()
        gpt.entropy(weights, text, shape).mean().backward()
        optimiser.step()
    return MappingProxyType({name: leaf.detach() for name, leaf in weights.items()})


def public_chain(num_symbols: int, seed: int) -> np.ndarray:
    return successors(num_symbols, num_symbols, np.random.default_rng([seed, _PUBLIC, 0]))


def successors(num: int, num_symbols: int, rng: np.random.Generator) -> np.ndarray:
    """Return probabilities of the next symbol (num, symbols), of which a few are large in each row."""
    return rng.dirichlet(np.full(num_symbols, 0.2), num) * 0.95 + 0.05 / num_symbols


def texts(chain: np.ndarray, num: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return texts of a chain (num, length)."""
    steps, found = chain.cumsum(1), np.zeros((num, length), dtype=np.int64)
    found[:, 0] = rng.integers(len(chain), size=num)
    for place in range(1, length):
        above = steps[found[:, place - 1]] < rng.random((num, 1))
        found[:, place] = np.minimum(above.sum(1), len(chain) - 1)
    return found


def _rival(
    title: str,
    labels: Iterable[str],
    way: Callable[[str, Sequence[Holdings]], Way],
    clients: Sequence[Holdings],
    again: Sequence[Holdings],
) -> Rival:
    return Rival(title, {label: way(label, clients) for label in labels}, lambda label: way(label, again))


def _sgd(lr: float) -> dict[str, Any]:
    return {"lr_lower": lr, "num_local_steps": 5}


def _fixed(how: tuple[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    return how[0], MappingProxyType(dict(how[1]))


def _plain(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.detach().cpu().clone() for name, leaf in tree.items()}


def _tested(predict: Predict) -> Callable[[Any, Any, Any], dict[str, Tensor]]:
    def tested(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        text = batch["text"]
        scores = predict(x, y, text[:, :-1])
        losses = gpt.following(scores, text)
        right = (scores.argmax(-1) == text[:, 1:]).to(losses).mean(1)
        return {"test_loss": losses, "test_right": right, "test_samples": torch.ones_like(losses)}

    return tested


def _metrics(sums: Any) -> dict[str, float]:
    """Divide sums over all clients."""
    return {
        "test_loss": sums["test_loss"] / sums["test_samples"],
        "test_accuracy": sums["test_right"] / sums["test_samples"],
    }

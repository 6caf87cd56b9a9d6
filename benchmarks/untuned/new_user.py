"""Three problems as a new user writes them, without a task and without a step size.

    python -m benchmarks.untuned.new_user [NAME ...] [--algorithm NAME] [--rounds 200]

Each function returns a problem and its clients, which `fb.solve(problem, clients)` takes. Data are
read by the library's readers and sub-sampled, so that each run takes less than a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import fedbilevel as fb
from fedbilevel.data.corruption import flip_labels
from fedbilevel.data.partition import iid
from fedbilevel.data.sets.adult import adult
from fedbilevel.data.sets.cifar10 import cifar10, num_images
from fedbilevel.data.sets.shakespeare import samples, shakespeare, vocabulary
from fedbilevel.problem.client_data import Holdings
from fedbilevel.tasks.task import Built


def accuracy(sums: Any) -> dict[str, float]:
    return {"test_accuracy": sums["right"] / sums["tested"]}


def adult_penalties(num_each: int = 300, seed: int = 0) -> Built:
    """Learn a penalty for every feature of a logistic model; clients are seven work classes."""
    data, rng = adult(), np.random.default_rng(seed)
    columns = [i for i, name in enumerate(data.names) if name.startswith("workclass=")]
    common = sorted(columns, key=lambda i: -data.train_x[:, i].sum())[:7]
    clients: list[Holdings] = []
    for column in common:
        own = rng.permutation(np.flatnonzero(data.train_x[:, column]))
        test = rng.permutation(np.flatnonzero(data.test_x[:, column]))[:400]
        train, val = own[:num_each], own[num_each : 2 * num_each]
        clients.append(
            {
                "train": {"person": data.train_x[train], "rich": data.train_y[train]},
                "val": {"person": data.train_x[val], "rich": data.train_y[val]},
                "test": {"person": data.test_x[test], "rich": data.test_y[test]},
            }
        )

    def score(y: Any, batch: Any) -> Tensor:
        return batch["person"] @ y["weight"] + y["bias"]

    def loss(x: Any, y: Any, batch: Any) -> Tensor:
        return binary_cross_entropy_with_logits(score(y, batch), batch["rich"].to(y["bias"].dtype), reduction="none")

    def penalised(x: Any, y: Any, batch: Any) -> Tensor:
        return loss(x, y, batch) + (x["log_penalty"].exp() * y["weight"] ** 2).sum()

    def right(x: Any, y: Any, batch: Any) -> dict[str, Tensor]:
        hit = (score(y, batch) > 0) == (batch["rich"] == 1)
        return {"right": hit, "tested": torch.ones_like(hit)}

    num_features = data.train_x.shape[1]
    problem = fb.Problem(
        upper=loss,
        lower=penalised,
        x0={"log_penalty": torch.full((num_features,), -4.0)},
        y0={"weight": torch.zeros(num_features), "bias": torch.zeros(1)},
        statistics={"test": right},
        metrics=accuracy,
        name="adult_penalties",
    )
    return Built(problem, clients)


def cifar10_weights(num_clients: int = 4, num_train: int = 150, num_clean: int = 50, seed: int = 0) -> Built:
    """Learn a private weight for every training image, half of whose labels are wrong; y is a CNN."""
    rng = np.random.default_rng(seed)
    num, num_test = num_clients * (num_train + num_clean), 1000
    found = cifar10("train", which=rng.permutation(num_images("train"))[:num])
    tests = cifar10("test", which=rng.permutation(num_images("test"))[:num_test])
    pixels, test_pixels = ((part.images / np.float32(255) - 0.5) * 4 for part in (found, tests))
    clients: list[Holdings] = []
    for own, test in zip(iid(num, num_clients, rng), iid(num_test, num_clients, rng), strict=True):
        train, clean = np.split(rng.permutation(own), [num_train])
        noisy, wrong = flip_labels(found.label[train], 0.5, 10, rng)
        clients.append(
            {
                "train": {"image": pixels[train], "label": noisy, "wrong": wrong},
                "val": {"image": pixels[clean], "label": found.label[clean]},
                "test": {"image": test_pixels[test], "label": tests.label[test]},
            }
        )
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=2),
        nn.GELU(),
        nn.Conv2d(6, 12, 5, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(12 * 5 * 5, 10),
    )

    def loss(x: Any, net: Any, batch: Any) -> Tensor:
        return cross_entropy(net(batch["image"]), batch["label"], reduction="none")

    def weighted(x: Any, net: Any, batch: Any) -> Tensor:
        penalty = 0.005 * sum((leaf**2).sum() for leaf in net.parameters.values())
        return torch.sigmoid(x["logit"][batch["index"]]) * loss(x, net, batch) + penalty

    def right(x: Any, net: Any, batch: Any) -> dict[str, Tensor]:
        hit = net(batch["image"]).argmax(-1) == batch["label"]
        return {"right": hit, "tested": torch.ones_like(hit)}

    problem = fb.Problem.from_modules(
        y_module=network,
        x0=lambda sizes: {"logit": torch.zeros(sizes["train"])},
        upper=loss,
        lower=weighted,
        scopes=fb.Scopes(upper="private"),
        statistics={"test": right},
        metrics=accuracy,
        name="cifar10_weights",
    )
    return Built(problem, clients)


def shakespeare_biases(num_clients: int = 10, num_each: int = 200, seed: int = 0) -> Built:
    """Learn private biases of characters for each role, on top of a shared embedding model."""
    roles, context, rng = shakespeare(), 4, np.random.default_rng(seed)
    characters = vocabulary(roles)
    clients: list[Holdings] = []
    for role in sorted(roles, key=lambda name: -len(roles[name]))[:num_clients]:
        before, after = samples(roles[role], characters, context)
        chosen = np.split(rng.permutation(len(after))[: 4 * num_each], [num_each, 2 * num_each])
        clients.append(
            {
                part: {"before": before[places], "next": after[places]}
                for part, places in zip(("train", "val", "test"), chosen, strict=True)
            }
        )
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(len(characters), 8),
        nn.Flatten(),
        nn.Linear(8 * context, 32),
        nn.GELU(),
        nn.Linear(32, len(characters)),
    )

    def scores(x: Any, net: Any, batch: Any) -> Tensor:
        found: Tensor = net(batch["before"]) + x["bias"]
        return found

    def loss(x: Any, net: Any, batch: Any) -> Tensor:
        return cross_entropy(scores(x, net, batch), batch["next"], reduction="none")

    def lower(x: Any, net: Any, batch: Any) -> Tensor:
        return loss(x, net, batch) + 0.001 * sum((leaf**2).sum() for leaf in net.parameters.values())

    def right(x: Any, net: Any, batch: Any) -> dict[str, Tensor]:
        hit = scores(x, net, batch).argmax(-1) == batch["next"]
        return {"right": hit, "tested": torch.ones_like(hit)}

    problem = fb.Problem.from_modules(
        y_module=model,
        x0=lambda sizes: {"bias": torch.zeros(len(characters))},
        upper=loss,
        lower=lower,
        scopes=fb.Scopes(upper="private"),
        statistics={"test": right},
        metrics=accuracy,
        name="shakespeare_biases",
    )
    return Built(problem, clients)


PROBLEMS: dict[str, Callable[[], Built]] = {
    "adult_penalties": adult_penalties,
    "cifar10_weights": cifar10_weights,
    "shakespeare_biases": shakespeare_biases,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned.new_user")
    parser.add_argument("names", nargs="*", default=[], choices=[*PROBLEMS, []], metavar="NAME")
    parser.add_argument("--algorithm", default="self_tuned")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    for name in given.names or PROBLEMS:
        problem, clients = PROBLEMS[name]()
        began = time.process_time()
        result = fb.solve(problem, clients, given.algorithm, num_rounds=given.rounds, baseline=True)
        print(result)
        if result.baseline is not None:
            print(result.baseline.sentence)
        print(f"{name}: {time.process_time() - began:.1f} s of processor time")


if __name__ == "__main__":
    main()

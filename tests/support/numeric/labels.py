"""Small data with wrong labels, and label EM on them in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import log_softmax, logsumexp, softmax

from fedbilevel.detectors.label_em import HEATS, LabelEM
from fedbilevel.problem.draws import Stream
from fedbilevel.tasks import soft_labels
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.task import Built, Shapes

CENTRES = np.array([[2.0, 0.0, 1.0, 0.0], [-1.0, 2.0, 0.0, 0.0], [0.0, -2.0, 0.0, 1.0]])
SHARES = ((0.6, 0.2, 0.2), (0.1, 0.5, 0.4), (0.3, 0.1, 0.6))
SIZES, CLEAN, CLASSES, NOISE = (31, 44, 26), (9, 4, 6), 3, (0.1, 0.5, 0.3)


def small(**settings: Any) -> Built:
    """Three clients with other classes, sizes and noise; one feature hardly varies."""
    rng = np.random.default_rng(3)
    clients = []
    for size, clean, share, noise in zip(SIZES, CLEAN, SHARES, NOISE, strict=True):
        roles = {}
        for role, num in (("train", size), ("val", clean), ("test", 12)):
            label = rng.choice(CLASSES, num, p=share)
            image = CENTRES[label] + rng.standard_normal((num, 4)) * [1.0, 1.0, 3.0, 1e-3]
            roles[role] = {"image": image, "label": label}
        train = roles["train"]
        true = train["label"]
        train["label"] = np.where(rng.random(size) < noise, rng.integers(0, CLASSES, size), true)
        train["wrong"] = train["label"] != true
        clients.append(roles)
    task = DataCleaning(**{"learn": "labels", **settings})
    return Built(task.problem(Shapes.of(clients[0], CLASSES)), clients)


class ByHand:
    """Label EM on pooled samples, sample by sample where that is plainer than a product."""

    def __init__(self, built: Built, em: LabelEM, seed: int = 0) -> None:
        self.em = em
        train = [client["train"] for client in built.clients]
        image, self.label = (np.concatenate([one[name] for one in train]) for name in ("image", "label"))
        self.owner = np.repeat(range(len(train)), [len(one["label"]) for one in train])
        centre, variance = image.mean(0), image.var(0)
        scale = np.sqrt(variance + 0.01 * variance.mean())
        rows = lambda values: np.concatenate([(values - centre) / scale, np.ones((len(values), 1))], axis=1)
        self.z = rows(image)
        used, held = [], []
        for i, client in enumerate(built.clients):
            order = Stream(seed).order("held", i, len(client["val"]["label"]), iteration=0).numpy()
            num = round(0.5 * len(order))
            for some, numbers in ((held, np.sort(order[:num])), (used, np.sort(order[num:]))):
                some.append((rows(client["val"]["image"][numbers]), client["val"]["label"][numbers]))
        self.half = np.concatenate([np.arange(len(label)) % 2 for _, label in used])  # of the clean samples
        self.zc, self.yc = (np.concatenate(part) for part in zip(*used, strict=True))
        self.zh, self.yh = (np.concatenate(part) for part in zip(*held, strict=True))
        self.gram = self.z.T @ self.z + self.zc.T @ self.zc
        self.A = np.linalg.inv(self.gram + em.ridge * len(self.z) * np.eye(5))
        self.B = self.zc.T @ np.eye(CLASSES)[self.yc]
        self.heat, self.T = 1.0, np.full((CLASSES, CLASSES), 0.5 / CLASSES) + 0.5 * np.eye(CLASSES)
        self.own = [self.T for _ in train]

    def matrices(self) -> list[np.ndarray]:
        return self.own if self.em.transition == "own" else [self.T for _ in self.own]

    def joint(self, S: np.ndarray, heat: float) -> np.ndarray:
        T = [self.matrices()[i][:, label] for i, label in zip(self.owner, self.label, strict=True)]
        return log_softmax(heat * S, axis=1) + np.log(np.array(T))

    def posterior(self, S: np.ndarray) -> np.ndarray:
        return softmax(self.joint(S, self.heat), axis=1)

    def heated(self, copies: list[float], sums: np.ndarray) -> None:
        """Choose b by clean samples, each scored by a regression from which it is removed."""
        if len(self.zc) < self.em.least_clean:
            return
        gram, S = self.gram + self.em.ridge * len(self.z) * np.eye(5), []
        for z, y in zip(self.zc, self.yc, strict=True):
            own = np.outer(z, np.eye(CLASSES)[y] * copies[y])
            S.append(z @ np.linalg.solve(gram - np.outer(z, z), sums - own))
        every = range(len(S))
        self.heat = max(HEATS, key=lambda b: log_softmax(b * np.array(S), axis=1)[every, self.yc].sum())

    def steps(self, S: np.ndarray) -> None:
        for _ in range(self.em.num_steps):
            q, fits = self.posterior(S), [logsumexp(self.joint(S, heat), axis=1).sum() for heat in HEATS]
            N = np.zeros((len(self.own), CLASSES, CLASSES))
            for i, label, row in zip(self.owner, self.label, q, strict=True):
                N[i, :, label] += row
            self.own = [normed(N[i] + self.em.pull * self.T) for i in range(len(self.own))]
            old = self.heat, self.T
            few = len(self.zc) < self.em.least_clean
            self.heat = HEATS[int(np.argmax(fits))] if few else self.heat
            self.T = normed(N.sum(0) + self.em.prior)
            self.taken += 1
            if self.heat == old[0] and np.abs(self.T - old[1]).max() < self.em.tolerance:
                break

    def passes(self) -> np.ndarray:
        many = [(self.label == c).sum() / (self.yc == c).sum() for c in range(CLASSES)]
        S = self.z @ (self.A @ self.B * many)
        self.taken = 0
        self.heated(many, self.B * many)
        self.steps(S)
        for _ in range(self.em.num_passes):
            q = self.q_before = self.posterior(S)
            S = np.stack([self.refit_without(j, q) for j in range(len(q))])
            self.heated([1.0] * CLASSES, self.z.T @ q + self.B)
            self.steps(S)
        self.W = self.A @ (self.z.T @ q + self.B)
        return self.posterior(S)

    def refit_without(self, j: int, q: np.ndarray) -> np.ndarray:
        """The score of sample j by a ridge regression that is fitted again without it."""
        rest = np.arange(len(q)) != j
        gram = self.z[rest].T @ self.z[rest] + self.zc.T @ self.zc + self.em.ridge * len(q) * np.eye(5)
        return self.z[j] @ np.linalg.solve(gram, self.z[rest].T @ q[rest] + self.B)


def normed(N: np.ndarray) -> np.ndarray:
    return N / N.sum(1, keepdims=True)


def posteriors(fed: Any, state: Any, built: Built) -> np.ndarray:
    rows = fed.host.trees(fed.collect(state.x), upper=True)
    labels = [client["train"]["label"] for client in built.clients]
    q = [soft_labels.posterior(tree["logit"], torch.tensor(label)) for tree, label in zip(rows, labels, strict=True)]
    return torch.cat(q).numpy()

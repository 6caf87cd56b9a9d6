"""Attacks of simulated clients, for experiments with robust means.

References: little is enough, Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses
for distributed learning", NeurIPS 2019; inner product, Xie, Koyejo, Gupta, "Fall of empires:
breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import base_of
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Sparse
from fedbilevel.problem.client_data import Holdings
from fedbilevel.problem.draws import SERVER, Stream
from fedbilevel.settings import Settings, setting

Kind = Literal["none", "scaling", "sign_flip", "little", "inner_product", "label_flip"]
_STRENGTH = {"scaling": 10.0, "sign_flip": 10.0, "inner_product": 0.5}
_LABEL, _ROLES = "label", ("train", "val")


@dataclass(frozen=True, kw_only=True)
class Attack(Settings):
    """Attack of a share of the clients, in a simulation with a server.

    Attackers are drawn once per run. They change every row that they send, as a difference to what
    they received; the layer then treats it like any row, because a server checks the bounds.

    scaling: the difference times `strength` (10).
    sign_flip: the difference times minus `strength` (10).
    little: the honest clients' mean minus `strength` standard deviations, by entry; by default as
        many as a majority of the clients has room for, which is none for 2 of 10 clients.
    inner_product: the honest clients' mean times minus `strength` (0.5).
    label_flip: an honest client with wrong labels, c - 1 - label, in the roles train and val.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> attack = fb.Attack(kind="inner_product", share=0.2)
    >>> runs = [fb.solve(*Quadratic().build(), "fedbio", num_rounds=3, attack=a) for a in (None, attack)]
    >>> runs[0].final["upper_loss"] < runs[1].final["upper_loss"]
    True
    """

    kind: Kind = setting("none", "what attackers do")
    share: float = setting(0.2, "share of the clients that attack", least=0, most=0.99)
    strength: float | None = setting(None, "factor of the attack (None: as described)", above=0)

    def attackers(self, num_clients: int, seed: int) -> list[int]:
        """Return the numbers of the clients that attack."""
        num = 0 if self.kind == "none" else round(self.share * num_clients)
        first = Stream(seed).order("attackers", SERVER, num_clients, iteration=0, first=num) if num else torch.empty(0)
        return sorted(int(number) for number in first)

    def changed(
        self, answers: Mapping[str, Any], sent: Mapping[str, Any], kept: set[str], ids: Tensor, attackers: Sequence[int]
    ) -> dict[str, Any]:
        """Return the answers of a phase after the attack.

        sent: the values that the server sent with the call.
        ids: numbers of the clients that answered.
        """
        bad = torch.isin(ids, torch.tensor(attackers, dtype=ids.dtype))
        if self.kind in ("none", "label_flip") or not bool(bad.any()):
            return {**answers}
        found = {}
        for name, value in answers.items():
            if value is None or name in kept:
                found[name] = value
                continue
            rows = value.rows if isinstance(value, Sparse) else value
            base = base_of(name, rows.shape[1], sent)
            base = torch.zeros_like(rows[0]) if base is None else base
            rows = rows.clone()
            rows[bad] = base + self._differences(rows - base, bad, ids)
            found[name] = value._replace(rows=rows) if isinstance(value, Sparse) else rows
        return found

    def _differences(self, rows: Tensor, bad: Tensor, ids: Tensor) -> Tensor:
        strength = self.strength or _STRENGTH.get(self.kind, 0.0)
        if self.kind in ("scaling", "sign_flip"):
            return rows[bad] * (strength if self.kind == "scaling" else -strength)
        honest = rows[~bad][ids[~bad].argsort()] if bool((~bad).any()) else rows
        mean = honest.mean(0)
        if self.kind == "inner_product":
            return -strength * mean
        return mean - (self.strength or room(len(rows), int(bad.sum()))) * honest.std(0, correction=0)

    def poisoned(self, clients: Sequence[Holdings], ids: Sequence[int], seed: int) -> Sequence[Holdings]:
        """Return the clients, with wrong labels at attackers if the attack flips labels."""
        if self.kind != "label_flip":
            return clients
        labels = [
            torch.as_tensor(fields[_LABEL]) for client in clients for fields in client.values() if _LABEL in fields
        ]
        if not labels or any(one.is_floating_point() or one.ndim != 1 for one in labels):
            raise SettingError(
                f"attack.kind is 'label_flip', and the clients have no field {_LABEL!r} of classes: choose another "
                "attack."
            )
        last, bad = max(int(one.max()) for one in labels if len(one)), set(self.attackers(len(clients), seed))
        return [
            _flipped(client, last) if number in bad else client for client, number in zip(clients, ids, strict=True)
        ]


def room(num: int, num_attackers: int) -> float:
    """Return the standard deviations by which attackers can stay within a majority of all rows."""
    honest = num - num_attackers
    supporters = num // 2 + 1 - num_attackers
    return NormalDist().inv_cdf(min(0.999, max(0.5, (honest - supporters) / max(1, honest))))


def _flipped(client: Holdings, last: int) -> Holdings:
    return {
        role: {name: last - torch.as_tensor(value) if name == _LABEL and role in _ROLES else value
               for name, value in fields.items()}
        for role, fields in client.items()
    }  # fmt: skip

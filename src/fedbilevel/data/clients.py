"""The data of the clients hosted in this process: one flat tensor per field with offsets, gathered by index, never padded in store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError

Holdings = Mapping[str, Mapping[str, Any]]  # one client: role -> field -> array with one row per sample
REQUIRED = ("train", "val")


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of k clients. A batch is a value: evaluating it twice uses the same samples."""

    role: str
    fields: dict[str, Tensor]  # (k, b, ...), with `index` and `weight`
    counts: Tensor  # (k,) samples that are not padding
    data: ClientData
    positions: Tensor  # (k,) rows of `data`
    active: Tensor | None = None  # (k,) bool; rows that pay for an evaluation; None: all

    def __len__(self) -> int:
        return len(self.positions)

    def row(self, i: int) -> dict[str, Tensor]:
        """One client's samples without padding, so that a loop over clients sums exactly what that client would sum alone."""
        n = int(self.counts[i])
        return {name: value[i, :n] for name, value in self.fields.items()}

    def whole(self) -> Batch:
        return self.data.batch(self.positions, self.role)


class ClientData:
    """k clients, roles `train` (lower level), `val` (upper level) and any others (`test`, ...), each with named fields."""

    def __init__(self, clients: Sequence[Holdings], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        if not isinstance(clients, Sequence) or not all(
            isinstance(one, Mapping) and all(isinstance(role, Mapping) for role in one.values()) for one in clients
        ):
            raise ProblemError("clients must be a sequence with one dict per client, {'train': {field: array, ...}, 'val': {...}}.")
        if not clients:
            raise ProblemError("there are no clients: give a sequence with one entry per client.")
        self.dtype, self.device = dtype, torch.device(device)
        self.num_clients = len(clients)
        self.positions = torch.arange(self.num_clients)  # positions, sizes and counts stay on the host: reading them never waits for a device
        self.fields: dict[str, dict[str, Tensor]] = {}
        self.sizes: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        for role in clients[0]:
            self._join(role, clients)
        for role in REQUIRED:
            if role not in self.fields:
                raise ProblemError(
                    f"client 0 has no {role!r} data (it has {', '.join(map(repr, clients[0])) or 'none'}): every client needs the roles 'train' and 'val'."
                )
        self._whole: dict[str, tuple[Tensor, Batch]] = {}

    def _join(self, role: str, clients: Sequence[Holdings]) -> None:
        parts: dict[str, list[Tensor]] = {}
        sizes = []
        for i, client in enumerate(clients):
            if set(client) != set(clients[0]):
                raise ProblemError(f"client {i} has the roles {sorted(client)}, client 0 has {sorted(clients[0])}: every client needs the same roles.")
            fields = {name: self._tensor(value, role, name, i) for name, value in client[role].items()}
            lengths = {name: len(value) for name, value in fields.items()}
            if len(set(lengths.values())) > 1:
                raise ProblemError(f"client {i} has fields of different lengths in {role!r} ({lengths}): every field needs one row per sample.")
            size = next(iter(lengths.values()), 0)
            if size == 0 and role in REQUIRED:
                raise ProblemError(f"client {i} has no {role!r} samples: give it at least one, or leave that client out.")
            reserved = {"index", "weight", "features"} & set(fields)
            if reserved:
                raise ProblemError(f"client {i} has a field named {reserved.pop()!r} in {role!r}; that name is filled in by the library: rename the field.")
            sizes.append(size)
            for name, value in fields.items():
                parts.setdefault(name, []).append(value)
                first = parts[name][0]
                if value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
                    raise ProblemError(
                        f"client {i} has {role}/{name} samples of shape {tuple(value.shape[1:])} and type {value.dtype}, client 0 has "
                        f"{tuple(first.shape[1:])} and {first.dtype}: all clients need the same."
                    )
        for name, values in parts.items():
            if len(values) != len(clients):
                raise ProblemError(f"only {len(values)} of {len(clients)} clients have the field {role}/{name}: all clients need the same fields.")
        self.fields[role] = {name: torch.cat(values).to(self.device) for name, values in parts.items()}
        self.sizes[role] = torch.tensor(sizes)
        self.offsets[role] = (self.sizes[role].cumsum(0) - self.sizes[role]).to(self.device)

    def _tensor(self, value: Any, role: str, name: str, client: int) -> Tensor:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise ProblemError(f"client {client} has {role}/{name} as an array of Python objects: give numbers.")
        try:
            tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))  # a copy: views may run backwards or be read-only
        except (TypeError, ValueError) as error:
            raise ProblemError(f"client {client} has {role}/{name} that is no array of numbers ({error}): give one row of numbers per sample.") from error
        if tensor.ndim == 0:
            raise ProblemError(f"client {client} has a single number as {role}/{name}: give one row per sample.")
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
            if not torch.isfinite(tensor).all():
                raise ProblemError(f"client {client} has a value in {role}/{name} that is not finite in {self.dtype}: clean or drop those samples.")
        return tensor

    def batch(self, positions: Tensor, role: str, index: Tensor | None = None, active: Tensor | None = None) -> Batch:
        """The samples `index` (k, b) of the clients at `positions`, or all of them, padded to the longest and weighted by 1/n_i."""
        if index is None:
            return self._all(positions, role, active)
        weight = torch.full(index.shape, 1.0 / max(1, index.shape[1]), dtype=self.dtype, device=self.device)
        counts = torch.full((len(positions),), index.shape[1])
        return self._gather(positions, role, index, weight, counts, active)

    def _gather(self, positions: Tensor, role: str, index: Tensor, weight: Tensor, counts: Tensor, active: Tensor | None) -> Batch:
        flat = self.offsets[role][positions.to(self.device), None] + index
        flat = flat.clamp(max=max(0, int(self.sizes[role].sum()) - 1))  # padding of a client that has none of this role
        fields = {"index": index, "weight": weight, **{name: value[flat] for name, value in self.fields[role].items()}}
        return Batch(role, fields, counts, self, positions, active)

    def _all(self, positions: Tensor, role: str, active: Tensor | None) -> Batch:
        kept = self._whole.get(role)
        if kept is None or not (kept[0] is positions or torch.equal(kept[0], positions)):
            counts = self.sizes[role][positions]
            width = int(counts.max()) if len(counts) else 0
            place = torch.arange(width, device=self.device).expand(len(positions), width)
            on_device = counts.to(self.device)[:, None]
            inside = place < on_device
            index = torch.where(inside, place, torch.zeros_like(place))
            weight = inside.to(self.dtype) / on_device.clamp(min=1).to(self.dtype)
            kept = (positions, self._gather(positions, role, index, weight, counts, None))
            self._whole[role] = kept  # gathering everything is a copy of the data: keep the last one
        batch = kept[1]
        return batch if active is None else Batch(role, batch.fields, batch.counts, self, positions, active)

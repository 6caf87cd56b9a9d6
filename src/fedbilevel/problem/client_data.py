"""Data of the clients hosted in this process: one flat tensor per field with offsets.

Batches are gathered by index; the stored data have no padding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbilevel.errors import ProblemError
from fedbilevel.problem.holdings import Holdings as Holdings
from fedbilevel.problem.holdings import check_clients, fields_of
from fedbilevel.problem.windows import Windows

REQUIRED = ("train", "val")
RESERVED = ("index", "weight", "features", "draw")  # filled in by the library


class Gathered(Mapping[str, Tensor]):
    """Fields of a batch, copied from the clients' data on first access.

    A loss that reads only features never copies images.
    """

    def __init__(
        self, stored: Mapping[str, Tensor], flat: Tensor, ready: Mapping[str, Tensor], plain: Gathered | None = None
    ) -> None:
        self._stored, self._flat, self._ready, self._plain = stored, flat, dict(ready), plain

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._ready and self._plain is not None:
            self._ready[name] = self._plain[name]  # a batch of all samples is kept, and copies once for all steps
        if name not in self._ready:
            stored = self._stored[name]
            self._ready[name] = stored.index_select(0, self._flat.reshape(-1)).view(
                *self._flat.shape, *stored.shape[1:]
            )
        return self._ready[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._ready, **self._stored})

    def __len__(self) -> int:
        return len(self._ready.keys() | self._stored.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._ready or name in self._stored

    def sample_bytes(self) -> int:
        """Return the bytes of one sample, including fields that are not copied yet."""
        tails = {name: (value.shape[1:], value.element_size()) for name, value in self._stored.items()}
        tails |= {name: (value.shape[2:], value.element_size()) for name, value in self._ready.items()}
        return sum(math.prod(tail) * size for tail, size in tails.values())

    def plus(self, **more: Tensor) -> Gathered:
        return Gathered(self._stored, self._flat, {**self._ready, **more}, self)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of k clients; two evaluations of the same batch use the same samples."""

    role: str
    fields: Gathered  # (k, b, ...), with `index` and `weight`
    counts: Tensor  # (k,) samples that are not padding
    data: ClientData
    positions: Tensor  # (k,) rows of `data`
    active: Tensor | None = None  # (k,) bool; rows that pay for an evaluation; None: all
    size: int | None = None  # samples of every client, where all have the same number

    def __len__(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """The role, the shape and the fields that are not stored: what an evaluation depends on."""
        shape = tuple(self.fields["index"].shape)
        return (self.role, shape, self.size, "features" in self.fields, "draw" in self.fields)

    def row(self, i: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return one client's samples without padding.

        A loop over clients then computes the same sums as each client alone.
        """
        n = int(self.counts[i])
        return {name: self.fields[name][i, :n] for name in (self.fields if names is None else names)}

    def drawn(self, draw: Tensor) -> Batch:
        """Return this batch with the field `draw`, random numbers (k, b, n) for its samples."""
        return replace(self, fields=self.fields.plus(draw=draw))

    def whole(self) -> Batch:
        return self.data.batch(self.positions, self.role)


class ClientData:
    """Named fields of k clients by role: `train` (lower level), `val` (upper level) and others."""

    def __init__(
        self, clients: Sequence[Holdings], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        check_clients(clients)
        self.dtype, self.device = dtype, torch.device(device)
        self.num_clients = len(clients)
        # positions, sizes and counts stay on the host: reading them never waits for a device
        self.positions = torch.arange(self.num_clients)
        self.fields: dict[str, dict[str, Tensor]] = {}
        self.sizes: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        for role in clients[0]:
            self._join(role, clients)
        for role in REQUIRED:
            if role not in self.fields:
                raise ProblemError(
                    f"client 0 has no {role!r} data (it has {', '.join(map(repr, clients[0])) or 'none'}): every "
                    "client needs the roles 'train' and 'val'."
                )
        self._prepare()

    def _prepare(self) -> None:
        self._whole: dict[str, tuple[Tensor, Batch]] = {}
        self._begin: dict[str, tuple[Tensor, Tensor]] = {}
        self._here: tuple[Tensor, Tensor] | None = None
        self.elsewhere = False  # whether only the device knows the clients at the positions
        self.room: Mapping[str, int] = {}  # by role: samples to which a captured batch is padded
        self._sizes = {role: sizes.to(self.device) for role, sizes in self.sizes.items()}
        self._range = {role: (int(sizes.min()), int(sizes.max())) for role, sizes in self.sizes.items() if len(sizes)}
        self._alike: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # weights and counts of minibatches, by shape

    def part(self, role: str, picks: Sequence[Tensor], name: str) -> ClientData:
        """Return copies of some samples of one role.

        picks: numbers of the samples of each client.
        name: role of the copies.
        """
        found = copy.copy(self)
        flat = torch.cat([self.offsets[role][i].cpu() + own for i, own in enumerate(picks)]).to(self.device)
        found.fields = {name: {field: rows.index_select(0, flat) for field, rows in self.fields[role].items()}}
        found.sizes = {name: torch.tensor([len(own) for own in picks])}
        found.offsets = {name: (found.sizes[name].cumsum(0) - found.sizes[name]).to(self.device)}
        found._prepare()
        return found

    def _join(self, role: str, clients: Sequence[Holdings]) -> None:
        parts: dict[str, list[Any]] = {}  # tensors, or windows into long arrays
        sizes = []
        for i, client in enumerate(clients):
            if set(client) != set(clients[0]):
                raise ProblemError(
                    f"client {i} has the roles {sorted(map(str, client))}, client 0 has "
                    f"{sorted(map(str, clients[0]))}: every client needs the same roles."
                )
            given = fields_of(client[role], f"{role!r} of client {i}")
            fields = {name: self._tensor(value, role, name, i) for name, value in given.items()}
            lengths = {name: len(value) for name, value in fields.items()}
            if len(set(lengths.values())) > 1:
                raise ProblemError(
                    f"client {i} has fields of different lengths in {role!r} ({lengths}): every field needs one row "
                    "per sample."
                )
            size = next(iter(lengths.values()), 0)
            if size == 0 and role in REQUIRED:
                raise ProblemError(
                    f"client {i} has no {role!r} samples: give it at least one, or leave that client out."
                )
            reserved = set(RESERVED) & set(fields)
            if reserved:
                raise ProblemError(
                    f"client {i} has a field named {reserved.pop()!r} in {role!r}; that name is filled in by the "
                    "library: rename the field."
                )
            sizes.append(size)
            for name, value in fields.items():
                parts.setdefault(name, []).append(value)
                first = parts[name][0]
                if value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
                    raise ProblemError(
                        f"client {i} has {role}/{name} samples of shape {tuple(value.shape[1:])} and type "
                        f"{value.dtype}, client 0 has "
                        f"{tuple(first.shape[1:])} and {first.dtype}: all clients need the same."
                    )
        for name, values in parts.items():
            if len(values) != len(clients):
                raise ProblemError(
                    f"only {len(values)} of {len(clients)} clients have the field {role}/{name}: all clients need "
                    "the same fields."
                )
        join: Any = lambda values: Windows.joined(values) if isinstance(values[0], Windows) else torch.cat(values)
        self.fields[role] = {name: join(values).to(self.device) for name, values in parts.items()}
        self.sizes[role] = torch.tensor(sizes)
        self.offsets[role] = (self.sizes[role].cumsum(0) - self.sizes[role]).to(self.device)

    def _tensor(self, value: Any, role: str, name: str, client: int) -> Any:
        if isinstance(value, Windows):
            return value
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise ProblemError(f"client {client} has {role}/{name} as an array of Python objects: give numbers.")
        try:
            tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(_plain(value))
        except (TypeError, ValueError) as error:
            reason = str(error).split(". ", 1)[0].rstrip(".")  # the rest concerns numpy
            raise ProblemError(
                f"client {client} has {role}/{name} that is no array of numbers ({reason}): give one row of numbers "
                "per sample."
            ) from error
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise ProblemError(
                f"client {client} has {role}/{name} as {tensor.dtype} in the layout {tensor.layout}: give dense rows "
                "of real numbers."
            )
        if tensor.ndim == 0:
            raise ProblemError(f"client {client} has a single number as {role}/{name}: give one row per sample.")
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
            if not torch.isfinite(tensor).all():
                raise ProblemError(
                    f"client {client} has a value in {role}/{name} that is not finite in {self.dtype}: clean or drop "
                    "those samples."
                )
        return tensor

    def batch(self, positions: Tensor, role: str, index: Tensor | None = None, active: Tensor | None = None) -> Batch:
        """Return b samples for each of the k clients at `positions`; `index` has the shape (k, b).

        Without `index`, return all samples of these clients with the weights 1/n_i, padded to the
        number of samples of the largest client.
        """
        if index is None:
            return self._all(positions, role, active)
        size, shape = index.shape[1], tuple(index.shape)
        if shape not in self._alike:
            self._alike[shape] = (
                torch.full(shape, 1.0 / max(1, size), dtype=self.dtype, device=self.device),
                torch.full(shape[:1], size),
            )
        weight, counts = self._alike[shape]
        flat = self._starts(role, positions) + index
        return Batch(
            role,
            Gathered(self.fields[role], flat, {"index": index, "weight": weight}),
            counts,
            self,
            positions,
            active,
            size,
        )

    def is_cut(self, role: str) -> bool:
        """Return whether samples are windows into long arrays, of which measurements see a part."""
        return any(isinstance(value, Windows) for value in self.fields[role].values())

    def spread(self, positions: Tensor, role: str, most: int) -> Tensor:
        """Return the numbers (k, n) of evenly spread samples, n = `most` or all of the largest client."""
        sizes = self.num_samples(positions, role)[:, None]
        num = min(most, int(self.sizes[role][positions].max()))
        return torch.arange(num, device=self.device) * sizes // max(1, num)

    def samples(self, positions: Tensor, role: str, at_once: int) -> Iterator[dict[str, Tensor]]:
        """Yield all samples of these clients without padding, `at_once` samples at a time.

        The samples are in the order of the clients.
        """
        sizes, total = self.num_samples(positions, role), int(self.sizes[role][positions].sum())
        spread = lambda values: values.repeat_interleave(sizes, output_size=total)
        index = torch.arange(total, device=self.device) - spread(sizes.cumsum(0) - sizes)
        flat = spread(self._starts(role, positions)[:, 0]) + index
        weight = spread(1 / sizes.to(self.dtype))
        for part in torch.arange(len(flat), device=self.device).split(at_once):
            fields = {name: value.index_select(0, flat[part]) for name, value in self.fields[role].items()}
            yield {"index": index[part], "weight": weight[part], **fields}

    def _starts(self, role: str, positions: Tensor) -> Tensor:
        """Return the offsets (k, 1) of the clients' samples, cached for the steps of a phase."""
        kept = self._begin.get(role)
        if kept is None or kept[0] is not positions:
            kept = (positions, self.offsets[role].index_select(0, self.on_device(positions))[:, None])
            self._begin[role] = kept
        return kept[1]

    def on_device(self, positions: Tensor) -> Tensor:
        """Return positions on the device of the data, cached for the steps of a phase."""
        if self._here is None or self._here[0] is not positions:
            self._here = (positions, positions.to(self.device))
        return self._here[1]

    def num_samples(self, positions: Tensor, role: str) -> Tensor:
        """Return the clients' numbers of samples (k,) on the device."""
        return self._sizes[role].index_select(0, self.on_device(positions))

    def equal(self, positions: Tensor, role: str) -> bool:
        """Return whether all of these clients have the same number of samples."""
        if self.elsewhere:
            return self.alike(role)
        sizes = self.sizes[role][positions]
        return bool((sizes == sizes[:1]).all())

    def alike(self, role: str) -> bool:
        """Return whether all clients have the same number of samples."""
        least, most = self._range.get(role, (0, 0))
        return least == most

    def largest(self, role: str) -> int:
        """Return the number of samples of the largest client."""
        return self._range[role][1]

    @contextmanager
    def addressed(self, positions: Tensor, here: Tensor, rooms: Mapping[str, int]) -> Iterator[None]:
        """Read positions from the device tensor `here` and bypass the cache within this context.

        rooms: by role, the number of samples to which batches of all samples are padded.
        """
        before = self._whole, self._begin, self._here, self.elsewhere, self.room
        self._whole, self._begin, self._here, self.elsewhere, self.room = {}, {}, (positions, here), True, rooms
        try:
            yield
        finally:
            self._whole, self._begin, self._here, self.elsewhere, self.room = before

    def look(self, positions: Tensor, role: str) -> Batch:
        """Return all samples for a single use, without replacing the cached copy.

        Adjacent clients with equal numbers of samples need no copy.
        """
        kept = self._whole.get(role)
        if kept is not None and (kept[0] is positions or torch.equal(kept[0], positions)):
            return kept[1]
        counts = self.sizes[role][positions]
        k, width = len(positions), int(counts[0])
        if width == 0 or bool((counts != width).any()) or bool((positions.diff() != 1).any()):
            return self._padded(positions, role)
        start = int(self.sizes[role][: int(positions[0])].sum())
        flat = torch.arange(start, start + k * width, device=self.device).view(k, width)
        ready = {
            name: value[start : start + k * width].unflatten(0, (k, width)) for name, value in self.fields[role].items()
        }
        ready |= {
            "index": flat - flat[:, :1],
            "weight": torch.full((k, width), 1 / width, dtype=self.dtype, device=self.device),
        }
        return Batch(role, Gathered(self.fields[role], flat, ready), counts, self, positions, None, width)

    def _all(self, positions: Tensor, role: str, active: Tensor | None) -> Batch:
        kept = self._whole.get(role)
        if kept is None or not (kept[0] is positions or torch.equal(kept[0], positions)):
            self._whole.pop(role, None)  # never two copies of all data at once
            kept = (positions, self._padded(positions, role))
            self._whole[role] = kept  # gathering all samples copies the data: keep the last copy
        batch = kept[1]
        return batch if active is None else replace(batch, positions=positions, active=active)

    def _padded(self, positions: Tensor, role: str) -> Batch:
        counts = self.sizes[role][positions]
        width = self.room[role] if self.elsewhere else int(counts.max()) if len(counts) else 0
        place = torch.arange(width, device=self.device).expand(len(positions), width)
        on_device = self.num_samples(positions, role)[:, None]
        inside = place < on_device
        weight = inside.to(self.dtype) / on_device.clamp(min=1).to(self.dtype)
        ready = {"index": torch.where(inside, place, torch.zeros_like(place)), "weight": weight}
        flat = self._starts(role, positions) + ready["index"]
        # the padding of a client without samples in this role lies inside the data
        flat = flat.clamp(max=max(0, int(self.sizes[role].sum()) - 1))
        equal = len(counts) > 0 and self.equal(positions, role)
        if equal and width and len(counts) == self.num_clients:  # all clients, equally large: no copy
            ready |= {
                name: value.view(len(counts), width, *value.shape[1:]) for name, value in self.fields[role].items()
            }
        return Batch(
            role, Gathered(self.fields[role], flat, ready), counts, self, positions, None, width if equal else None
        )


def _plain(value: Any) -> np.ndarray:
    """Return an array that torch can read; joining clients copies it."""
    kept = isinstance(value, np.ndarray) and value.flags.writeable and value.flags.aligned and value.dtype.isnative
    return value if kept and all(stride >= 0 for stride in value.strides) else np.array(value)

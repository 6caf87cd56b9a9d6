"""Clients hosted in this process, and the only executor of phases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fedbilevel.errors import NonFiniteError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Sparse
from fedbilevel.federation.clients import HELD, OUTSIDE, BatchSize, Bill, Clients, Sampling
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.store import Store
from fedbilevel.oracle import portions
from fedbilevel.oracle.population import Population
from fedbilevel.privacy.noisy_oracle import ExampleNoise
from fedbilevel.problem.client_data import ClientData, Holdings
from fedbilevel.problem.draws import Stream
from fedbilevel.problem.once import Once
from fedbilevel.problem.problem import Problem


class Host(Population):
    """Clients hosted in this process: their data, oracle, memory and kept values.

    Every engine runs phases through a host.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        clients: Sequence[Holdings],
        *,
        ids: Sequence[int] | None = None,
        num_clients: int | None = None,
        seed: int = 0,
        batch_size: BatchSize = None,
        sampling: Sampling = "replacement",
        **options: Any,
    ) -> None:
        second = algorithm.uses_products or bool(algorithm.auto_names())
        super().__init__(problem, clients, second=second, **options)
        if sampling not in get_args(Sampling):
            raise SettingError(f"sampling is {sampling!r}, expected {' or '.join(map(repr, get_args(Sampling)))}.")
        self.sampling = sampling
        self.algorithm = algorithm
        self.ids = torch.arange(len(clients)) if ids is None else torch.tensor(list(ids))
        self.num_clients = len(clients) if num_clients is None else num_clients
        self.stream = Stream(seed)
        self.batch_size = _checked_batch_size(batch_size, self.data.sizes)
        self.limit = self._limit()
        self.memory, self.scratch, self.kept = (Store(len(clients)) for _ in range(3))
        self.feedback = Store(len(clients))  # what compression has not sent yet, see `aggregation`
        self.ledger = Ledger(self.num_clients)
        self.parts = self._parts(algorithm.held_share())
        self._alike: dict[int, Tensor] = {}  # equal shares, by their number
        self._full: dict[tuple[int, int], Tensor] = {}
        self._sizes_at: dict[str, Once[Tensor]] = {}
        self._numbers = Once(lambda ids, positions: ids[positions])
        self._shares_of = Once(self._shares)
        self.before_derivative: Callable[[], None] | None = None  # raises an error when a limit is reached
        self._features: dict[tuple[str, int], Tensor] = {}  # by role and position
        self.noise: ExampleNoise | None = None  # an engine puts example-level privacy here
        self.captures: Any = None  # an engine puts `cuda_graphs.Captures` here, or without a GPU `planned.Refusals`
        self._fits: int | None = None
        if self.at_once is not None:
            self.limit_clients(self.at_once)

    @property
    def at_once(self) -> int | None:
        """Return how many clients may work at a time; None: all of a cohort."""
        if self._fits is not None:
            return self._fits
        return self.oracle.chunk_size if self.oracle.strategy == "loop" else None

    def limit_clients(self, num: int) -> None:
        """Let at most `num` clients work at a time, and keep rows of clients in the memory of the CPU."""
        self._fits, self.captures = num, None  # a captured phase holds its memory for the whole run
        if self.device.type != "cpu":
            for store in (self.memory, self.scratch, self.kept):
                store.move_to_cpu()

    def _parts(self, share: float) -> dict[str, ClientData]:
        """Divide the validation samples of every client into samples to fit x and held-out samples.

        share: share of held-out samples; 0 divides nothing. A client with one or two samples uses
            them for both, and so does every client if the upper loss reads the numbers of samples.
        """
        if not share:
            return {}
        sizes = self.data.sizes["val"].tolist()
        if self.reads_index():
            return {HELD: self.data.part("val", [torch.arange(size) for size in sizes], HELD)}
        parts = [
            self.stream.divided("held", client, size, share)
            for client, size in zip(self.ids.tolist(), sizes, strict=True)
        ]
        return {
            "val": self.data.part("val", [fitted for fitted, _ in parts], "val"),
            HELD: self.data.part("val", [held if len(held) else fitted for fitted, held in parts], HELD),
        }

    @property
    def has_long_rows(self) -> bool:
        """Return whether rows of clients outweigh samples in memory."""
        return self.x0.shape[-1] + len(self.y0) >= portions.LARGE

    def _limit(self) -> int | None:
        """Return how many samples a measurement evaluates at once; None: as many as memory allows.

        A run of a large model with minibatches measures minibatches.
        """
        sizes = [self.batch_size] * 2
        if isinstance(self.batch_size, Mapping):
            sizes = [self.batch_size.get(role) for role in ("train", "val")]
        known = [size for size in sizes if isinstance(size, int)]
        return max(known) if self.has_long_rows and len(known) == len(sizes) else None

    def data_of(self, role: str) -> ClientData:
        """Return the data that phases see in this role."""
        return self.parts.get(role, self.data)

    def samples_of(self, role: str, position: int) -> dict[str, Tensor]:
        """Return the samples of one client, with the problem's features if it has any.

        The features must not depend on x; they are computed once for every role.
        """
        data = self.data_of(role)
        start, size = int(data.offsets[role][position]), int(data.sizes[role][position])
        fields = {name: rows[start : start + size] for name, rows in data.fields[role].items()}
        if self.problem.features is None:
            return fields
        if (role, position) not in self._features:
            x = self.layout_x.unravel(self._own_x(position))
            self._features[role, position] = self.problem.features(x, fields)
        return {**fields, "features": self._features[role, position]}

    def numbers(self, positions: Tensor) -> Tensor:
        """Return the numbers of the clients at `positions`."""
        return self._numbers(self.ids, positions)

    def sizes_at(self, role: str, positions: Tensor) -> Tensor:
        """Return the numbers of samples of the clients at `positions`."""
        if role not in self._sizes_at:
            self._sizes_at[role] = Once(lambda sizes, positions: sizes[positions])
        return self._sizes_at[role](self.data_of(role).sizes[role], positions)

    def full(self, num: int, value: int) -> Tensor:
        """Return a column (num, 1) of one value on the device; it must not be changed."""
        found = self._full.get((num, value))
        if found is None:
            found = torch.full((num, 1), value, dtype=self.dtype, device=self.device)
            if self.device.type == "cpu":  # memory of a captured phase belongs to that phase
                self._full[num, value] = found
        return found

    def width(self, name: str) -> int:
        space = self.algorithm.space(name)
        if space is not None:
            return self.algorithm.lengths.get(name, self.x0.shape[-1] if space == "upper" else len(self.y0))
        raise KeyError(f"{self.algorithm.name()} declares {name!r} neither in upper_space nor in lower_space.")

    def run_phase(
        self,
        name: str,
        values: Mapping[str, Any],
        positions: Tensor,
        iteration: int,
        call: int,
        weights: Tensor | None = None,
        *,
        pays: bool = True,
    ) -> dict[str, Tensor | Sparse | None]:
        """Run a phase and check its results; all engines use this method.

        weights: weights of the clients, if only means weighted by them are needed.
        pays: whether the phase is charged; False if it is run again to find an error.
        """
        method = getattr(self.algorithm, name, None)
        if not getattr(method, "__is_phase__", False):
            raise ValueError(f"{self.algorithm.name()} has no phase named {name!r}.")
        shares = self._shares_of(weights) if weights is not None and getattr(method, "__is_linear__", False) else None
        with torch.no_grad():
            if self.captures is not None:
                replayed: dict[str, Tensor | Sparse | None] | None = self.captures.run(
                    method, values, positions, iteration, call, shares
                )
                if replayed is not None:  # its shapes were checked at the capture; `check` looks at its values
                    return replayed
            bill = Bill()
            result: dict[str, Tensor | Sparse | None] = method(
                Clients(self, positions, iteration, call, shares, bill), **values
            )  # type: ignore[misc]
            if pays:
                bill.pay(self, positions)
        found = self._suspect(name, result, positions)
        if found is None:
            return result
        if shares is not None:  # a mean does not tell which client is at fault
            return self.run_phase(name, values, positions, iteration, call, pays=False)
        key, client = found
        raise NonFiniteError(
            f"client {client} returned a value of {key!r} that is not finite in phase {name!r} of outer iteration "
            f"{iteration}: the steps are too long (lower the step sizes) or the data of that client are extreme."
        )

    def _suspect(
        self, name: str, result: Mapping[str, Tensor | Sparse | None], positions: Tensor
    ) -> tuple[str, int] | None:
        """Check the shapes of a result; return the name and client of a non-finite value, or None."""
        is_finite = self._is_finite(result)
        for key, value in result.items():
            if value is None:
                continue
            rows = value.rows if isinstance(value, Sparse) else value
            if key in ("x", "y") and rows.ndim == 2 and rows.shape[1] != self.width(key):
                raise ValueError(
                    f"phase {name!r} returned {key!r} with {rows.shape[1]} entries per client, expected "
                    f"{self.width(key)}."
                )
            if rows.ndim != 2 or rows.shape[0] != positions.shape[0]:
                raise ValueError(
                    f"phase {name!r} returned {key!r} of shape {tuple(rows.shape)} for {len(positions)} "
                    "clients: one row per client is needed."
                )
            if not is_finite:
                bad = ~torch.isfinite(rows).all(1)
                if bool(bad.any()):
                    return key, int(self.ids[positions[bad.cpu()][0]])
        return None

    @staticmethod
    def _is_finite(result: Mapping[str, Tensor | Sparse | None]) -> bool:
        """Return whether a result is finite; where its sum overflows, the answer may be no."""
        rows = [value.rows if isinstance(value, Sparse) else value for value in result.values() if value is not None]
        sums = [one[:1].sum() if one.ndim == 2 and one.stride(0) == 0 else one.sum() for one in rows]
        return all(math.isfinite(one.item()) for one in sums)

    def check(self) -> None:
        """Raise an error if a replayed phase returned a value that is not finite.

        Engines call this once per outer iteration, because it waits for the device.
        """
        if self.captures is not None:
            suspect = self.captures.suspect()
            if suspect is not None:
                captures, self.captures = self.captures, None
                try:
                    self.run_phase(*suspect, pays=False)  # without graphs, client by client: this names the client
                finally:
                    self.captures = captures

    def _shares(self, weights: Tensor) -> Tensor:
        """Return weights that sum to one, on the device of the data."""
        k = len(weights)
        if bool((weights != 1).any()) or k == 0:
            return (weights.double() / weights.sum()).to(self.device, self.dtype)
        if k not in self._alike:
            self._alike[k] = torch.full((k,), 1 / k, dtype=self.dtype, device=self.device)
        return self._alike[k]


def _checked_batch_size(size: BatchSize, roles: Mapping[str, Any]) -> BatchSize:
    for role in size if isinstance(size, Mapping) else ():
        if role != OUTSIDE and role not in roles:
            raise SettingError(
                f"batch_size names the role {role!r}, the clients have {', '.join(roles)}; {OUTSIDE!r} is for "
                "batches outside local steps."
            )
    for value in size.values() if isinstance(size, Mapping) else (size,):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise SettingError(
                f"batch_size is {value!r}, expected at least 1 sample, or None for all of a client's samples."
            )
    return size

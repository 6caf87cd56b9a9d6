"""Server for clients anywhere: cohorts, means, held arrays, kept values and costs.

Held arrays are the server's arrays that clients hold; kept values stay at the clients. An engine
adds the calls of clients. All behaviour that must be the same in a simulation and between
organisations is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import Encoded, Layer
from fedbilevel.aggregation.validity import check_aggregation, check_gather
from fedbilevel.engines import layered
from fedbilevel.engines.held import Held
from fedbilevel.engines.layered_means import Answers, LayeredMeans
from fedbilevel.engines.ranks import Group
from fedbilevel.errors import CheckpointError, FedBilevelError, SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, Kept, Sparse, Value
from fedbilevel.federation.ledger import Ledger
from fedbilevel.federation.sampling import Sampler
from fedbilevel.oracle.portions import total
from fedbilevel.problem.draws import SERVER, Stream
from fedbilevel.problem.once import Once
from fedbilevel.problem.problem import Problem


class Server(LayeredMeans):
    """Server that implements `Federation`, except for the calls of clients.

    The place of a client is its position in the given list. Its number identifies the client in
    draws, the ledger and checkpoints.

    ids: numbers of the clients, by place.
    weights: weight of each client in a mean over all clients, by place.
    layer: what happens to the rows that clients send; None averages them as they are.
    """

    group: Group = Group()

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        *,
        seed: int,
        cohort: Cohort,
        ids: Tensor,
        weights: Tensor,
        ledger: Ledger,
        stream: Stream,
        layer: Layer | None = None,
    ) -> None:
        self.algorithm, self.problem, self.seed, self.stream = algorithm, problem, seed, stream
        self.layer, self.account = layer, layered.account_of(layer)
        self.ids, self.num_clients, self.ledger = ids, len(ids), ledger
        self.place_of = ids.argsort()  # by number
        self._in_order = bool((self.place_of == torch.arange(len(ids))).all())
        self.cohort = cohort.checked()
        self._set_weights(weights)
        if algorithm.needs_everyone and (cohort.size(self.num_clients) < self.num_clients or cohort.replacement):
            raise SettingError(
                f"{algorithm.name()} needs every client in every round, but the cohort is {cohort!r}: run it "
                "with all clients, Cohort()."
            )
        self.kept_names = algorithm.kept_names(problem.scopes)
        self._versions: dict[str, int] = {}
        self._kept_in: dict[str, Tensor] = {}  # the outer iteration in which each client last wrote its row
        self._held = Held(self.num_clients)
        self._numbers_of = Once(lambda ids, places: ids[places])
        self._counts_of = Once(lambda times, weights, ids, places: times * weights[ids[places]])
        self.iteration = self.call = self._draws = self.num_answers = 0
        self._draw_cohort()
        if layer is not None:
            check_aggregation(layer.settings, algorithm, cohort, self.num_clients, self.largest_weight)

    # ---- what an engine says --------------------------------------------------------------------------------------

    def place(self, name: str, value: Tensor) -> Any:
        """Store a value at the clients or at the server, as its scope says, without a round."""
        raise NotImplementedError

    def _ask(
        self, phase: str, broadcast: Mapping[str, Value], places: Tensor, times: Tensor, means: bool
    ) -> tuple[Answers, Tensor, Tensor]:
        """Run a phase at the clients at `places` and store kept results there.

        Return the answers, and the places and times of the clients that answered.

        means: whether only means of the results are needed.
        """
        raise NotImplementedError

    def _absent(self) -> Iterable[int]:
        """Return the numbers of clients that cannot answer the next call."""
        return ()

    def _summed(self, sent: Mapping[str, Tensor], places: Tensor, weights: Tensor) -> Sequence[Tensor]:
        """Return weighted sums of the rows of all clients at `places`, in float64."""
        alike = self._are_ones(weights)
        return [total(rows, weights, alike=alike) for rows in sent.values()]

    def _of_all(self, rows: Tensor) -> Tensor:
        """Return rows of all clients by place, from the rows of this process."""
        return rows

    # ---- verbs ----------------------------------------------------------------------------------------------------

    def mean(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        return self._round(phase, broadcast, self._means)

    def gather(self, phase: Callable[..., Any], /, **broadcast: Value) -> SimpleNamespace:
        if self.layer is not None:
            check_gather(self.layer.settings)
        return self._round(phase, broadcast, self._by_client)

    def _means(self, sent: Mapping[str, Tensor], places: Tensor, times: Tensor) -> dict[str, Tensor]:
        """Return weighted means, each from a sum that is divided once."""
        weights = self._counts(places, times)
        whole = self._sum_of_weights(weights)
        totals = self._summed(sent, places, weights)
        return {name: (one / whole).to(rows.dtype) for (name, rows), one in zip(sent.items(), totals, strict=True)}

    def _by_client(self, sent: Mapping[str, Tensor], places: Tensor, _times: Tensor) -> dict[str, Tensor]:
        if len(places) < self.num_clients:
            missing = sorted({*range(self.num_clients)} - {*self.ids[places].tolist()})
            raise FedBilevelError(
                f"client {missing[0]} did not answer, but {self.algorithm.name()} needs one row from every "
                "client: run it with all clients."
            )
        return {name: self._of_all(rows)[self.place_of.to(rows.device)] for name, rows in sent.items()}

    def _round(
        self,
        phase: Callable[..., Any],
        broadcast: Mapping[str, Value],
        join: Callable[[Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]],
    ) -> SimpleNamespace:
        before = self.ledger.enter(phase.__name__)
        try:
            return self._called(phase.__name__, broadcast, join)
        finally:
            self.ledger.leave(before)

    def _called(
        self,
        phase: str,
        broadcast: Mapping[str, Value],
        join: Callable[[Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]],
    ) -> SimpleNamespace:
        self.call += 1
        means = join == self._means and self.layer is None
        asked = self._ask(phase, broadcast, *self._present(broadcast.values()), means)
        answers, places, times = self._whole_groups(*asked)
        self.num_answers = places.shape[0]
        gathered: dict[str, Any] = dict.fromkeys(answers)
        sent: dict[str, Tensor] = {}
        encoded: dict[str, Encoded] = {}
        for name, value in answers.items():
            if name in self.kept_names and value is not None:
                gathered[name] = self._keep(name, places)
            elif isinstance(value, Encoded):
                for column, paid in (("floats_up", value.floats), ("bytes_up", value.num_bytes)):
                    self.ledger.charge(column, self._numbers_at(places), paid)
                encoded[name], sent[name] = value, value.rows
            elif value is not None:
                rows = value.rows if isinstance(value, Sparse) else value
                kept, places_of = (value.num_kept, 4) if isinstance(value, Sparse) else (rows.shape[1], 0)
                self.ledger.charge_message("up", self._numbers_at(places), kept, rows.element_size() + places_of)
                sent[name] = rows
        if encoded and join == self._means:
            gathered.update(self._layered_means(encoded, places, times))
        else:
            sent |= {name: one.absolute() for name, one in encoded.items()}
            gathered.update(join(sent, places, times))
        if sent:
            self.ledger.count_round()
        return SimpleNamespace(**gathered)

    def resample(self) -> None:
        """Draw a new cohort, except with a local lower level.

        With a local lower level, values of this outer iteration belong to the clients that computed
        them.
        """
        if self.cohort.redraw == "per_factor" and self.problem.scopes.lower == "global":
            self._draw_cohort()

    def draw(self, purpose: str, high: int) -> int:
        return self.stream.integer(purpose, SERVER, high, iteration=self.iteration, call=self.call)

    # ---- what the run loop uses -----------------------------------------------------------------------------------

    def begin(self, iteration: int, algorithm: Algorithm | None = None) -> None:
        """Begin an outer iteration with a new cohort and the step sizes of `algorithm`."""
        if algorithm is not None:
            self.adopt(algorithm)
        self.iteration, self.call, self._draws = iteration, 0, 0
        self._draw_cohort()

    def adopt(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def client_of(self, row: int) -> int:
        """Return the number of the client of a row of the state, whose rows are ordered by number."""
        return row

    # ---- checkpoint: everything the next outer iteration depends on -----------------------------------------------

    def state_dict(self, state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of the state as tensors, with rows by client number, and plain values."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        seen: dict[int, str] = {}
        for name, value in state._asdict().items():
            if isinstance(value, Tensor) and id(value) in seen:
                plain[name] = {"same_as": seen[id(value)]}
            elif isinstance(value, Tensor):
                seen[id(value)] = name
                tensors[f"state.{name}"], tensors[f"held.{name}"] = value.clone(), self._held.mask(value)[self.place_of]
            else:
                plain[name] = {"kept": value.name} if isinstance(value, Kept) else {"value": value}
        return tensors, plain

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], state_type: Any) -> Any:
        self.ledger.load_state_dict({name: tensors[f"ledger.{name}"] for name in below(tensors, "ledger.")})
        values: dict[str, Any] = {}
        for name in below(tensors, "state."):
            values[name] = self._received(tensors[f"state.{name}"])
            self._held.mask(values[name]).copy_(tensors[f"held.{name}"][self.ids])
        for name, entry in plain.items():
            if "kept" in entry:
                values[name] = Kept(entry["kept"], self._versions.get(entry["kept"], 0))
            else:
                values[name] = values[entry["same_as"]] if "same_as" in entry else entry["value"]
        if set(values) != set(state_type._fields):
            raise CheckpointError(
                f"the checkpoint holds {', '.join(values)}, the algorithm needs "
                f"{', '.join(state_type._fields)}: resume with the version that wrote it."
            )
        return state_type(**values)

    def _received(self, stored: Tensor) -> Tensor:
        """Return a tensor of a checkpoint on the server's device."""
        return stored.clone()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _set_weights(self, weights: Tensor) -> None:
        """Set the weight of each client in a mean over all clients, by place."""
        self.weights_by_place, self.weights = weights, weights[self.place_of]
        self._sampler = Sampler(self.cohort, self.weights)
        self._all_places: tuple[Tensor, Tensor] | None = None  # the cohort, if it is the same in every round
        self._sum_of_weights = Once(lambda weights: float(weights.sum()))
        self._are_ones = Once(lambda weights: bool((weights == 1).all()))

    def _draw_cohort(self) -> None:
        self._draws += 1
        if self._all_places is not None:
            self._positions, self._times = self._all_places
            return
        numbers, times = self._sampler.draw(self.stream, self.iteration, self._draws)
        if self._in_order:
            self._positions, self._times = numbers, times
        else:
            self._positions, sorting = self.place_of[numbers].sort()
            self._times = times[sorting]
        if self._sampler.is_everyone:
            self._all_places = self._positions, self._times

    def _present(self, values: Collection[Value]) -> tuple[Tensor, Tensor]:
        """Return the places and times of the cohort members that can answer.

        Absent clients are excluded, and so are clients that missed a call of this outer iteration
        whose result they need now.
        """
        absent = sorted(self._absent())
        if not absent and not any(isinstance(value, Kept) and value.iteration == self.iteration for value in values):
            return self._positions, self._times
        here = torch.ones(len(self._positions), dtype=torch.bool)
        if absent:
            here &= ~torch.isin(self.ids[self._positions], torch.tensor(absent, dtype=torch.int64))
        for value in values:
            if isinstance(value, Kept) and value.iteration == self.iteration:
                here &= self._kept_in[value.name][self._positions] == self.iteration
        if not bool(here.any()):
            raise self._nobody()
        return self._positions[here], self._times[here]

    def _nobody(self) -> FedBilevelError:
        return FedBilevelError(
            f"no client of the cohort answered call {self.call} of outer iteration {self.iteration}: wait for "
            "clients to return and resume."
        )

    def _keep(self, name: str, places: Tensor, iteration: int | None = None) -> Kept:
        """Return a placeholder with this name for the last rows of these clients.

        iteration: outer iteration that wrote them; None: this one.
        """
        when = self.iteration if iteration is None else iteration
        self._versions[name] = self._versions.get(name, 0) + 1
        self._kept_in.setdefault(name, torch.full((self.num_clients,), -1))[places] = when
        return Kept(name, self._versions[name], when)

    def _check_kept(self, kept: Kept) -> None:
        if kept.version != self._versions.get(kept.name, 0):
            raise ValueError(f"clients no longer hold that version of {kept.name!r}: a later phase returned a new one.")

    def _lacking(self, value: Tensor, places: Tensor) -> Tensor:
        """Return the places of clients that do not hold the array yet.

        The array is recorded as held by them from now on, and sending it is charged.
        """
        lacks = self._held.lacking(value, places)
        if lacks.shape[0]:
            ids = self._numbers_at(places) if lacks is places else self.ids[lacks]
            self.ledger.charge_message("down", ids, value.shape[-1], value.element_size())
        return lacks

    def _numbers_at(self, places: Tensor) -> Tensor:
        """Return the numbers of the clients at `places`."""
        return self._numbers_of(self.ids, places)


def below(tensors: Mapping[str, Tensor], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

"""The same algorithm source at one-row sites that exchange bytes: what a real federation will do, against the simulator.

Every site is a `Host` with one client, its own memory and its own kept values. The server here knows names of phases and arrays, nothing else.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedbilevel.algorithms.adafbio import AdaFBiO
from fedbilevel.algorithms.clustered_fl import ClusteredFL
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedavg_plus import FedAvgPlus
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fednest import FedNest
from fedbilevel.algorithms.pfedme import PFedMe
from fedbilevel.clients import Host
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation import Cohort, Sparse
from fedbilevel.tasks.data_cleaning import DataCleaning
from fedbilevel.tasks.quadratic import Quadratic
from yardstick import drive

ONLY = torch.tensor([0])


class Kept:
    def __init__(self, name: str) -> None:
        self.name = name


def over_the_wire(array: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(array.numpy().tobytes()), dtype=array.numpy().dtype)).view(array.shape)


class Sites:
    """A federation of single clients. Who takes part is drawn as the simulator draws it."""

    def __init__(self, algorithm: Any, built: Any, *, cohort: Cohort, **options: Any) -> None:
        n = len(built.clients)
        self.sites = [Host(algorithm, built.problem, [client], ids=[i], num_clients=n, strategy="loop", **options) for i, client in enumerate(built.clients)]
        self.server = Simulation(algorithm, *built, cohort=cohort, **options)
        self.num_clients, self.kept_names = n, algorithm.kept_names(built.problem.scopes)
        self.weights = self.server.weights
        self.iteration = self.call = 0

    def begin(self, iteration: int) -> None:
        self.server.begin(iteration)
        self.iteration, self.call = iteration, 0
        for site in self.sites:
            site.scratch.clear()

    def initial(self) -> tuple[Any, Any]:
        return self._place("x", [site.x0 for site in self.sites]), self._place("y", [site.y0 for site in self.sites])

    def zeros(self, name: str) -> Any:
        return self._place(name, [torch.zeros(site.width(name), dtype=site.dtype) for site in self.sites])

    def start(self, name: str) -> Any:
        return self._place(name, [site.x0 if name in site.algorithm.upper_space else site.y0 for site in self.sites])

    def _place(self, name: str, values: list[torch.Tensor]) -> Any:
        if name not in self.kept_names:
            return values[0]
        for site, value in zip(self.sites, values, strict=True):
            site.kept.write(name, ONLY, value.reshape(1, -1))
        return Kept(name)

    def resample(self) -> None:
        self.server.resample()

    def draw(self, purpose: str, high: int) -> int:
        self.server.call = self.call
        return self.server.draw(purpose, high)

    def mean(self, phase: Any, /, **broadcast: Any) -> SimpleNamespace:
        return self._round(phase, broadcast, self.sites[0].average)

    def gather(self, phase: Any, /, **broadcast: Any) -> SimpleNamespace:
        return self._round(phase, broadcast, lambda rows, _weights: rows)

    def _round(self, phase: Any, broadcast: Any, join: Any) -> SimpleNamespace:
        self.call += 1
        here, times = self.server._positions, self.server._times
        replies = []
        for i in here.tolist():
            site = self.sites[i]
            mine = {name: value[i : i + 1] if isinstance(value, torch.Tensor) and value.ndim == 2 else value for name, value in broadcast.items()}
            values = {name: over_the_wire(value) if isinstance(value, torch.Tensor) else value for name, value in mine.items()}
            for name, value in values.items():
                if isinstance(value, Kept):
                    values[name] = site.kept.read(value.name, ONLY, torch.zeros(1, site.width(value.name), dtype=site.dtype))
            reply = site.run_phase(phase.__name__, values, ONLY, self.iteration, self.call)
            replies.append({name: value.rows if isinstance(value, Sparse) else value for name, value in reply.items()})
            for name, rows in replies[-1].items():
                if rows is not None and name in self.kept_names:
                    site.kept.write(name, ONLY, rows)
        result: dict[str, Any] = {}
        for name, first in replies[0].items():
            if first is None or name in self.kept_names:
                result[name] = None if first is None else Kept(name)
            else:
                rows = torch.cat([over_the_wire(reply[name]) for reply in replies])
                result[name] = join(rows, times * self.server.host.weights(here))
        return SimpleNamespace(**result)


def drive_sites(algorithm: Any, built: Any, num_iterations: int, **options: Any) -> tuple[Sites, Any]:
    fed = Sites(algorithm, built, **options)
    state = algorithm.init(fed)
    for iteration in range(1, num_iterations + 1):
        fed.begin(iteration)
        state = algorithm.round(fed, state)
    return fed, state


ALGORITHMS = [
    FedBiO(lr_upper=0.02, num_local_steps=(1, 3, 2, 2)),
    FBOAggITD(lr_lower=0.1, lr_system=0.1, num_lower_rounds=3, num_local_steps=(2, 1, 3, 1), estimator="sampled"),
    FedNest(lr_lower=0.1, lr_system=0.1, num_local_steps=2),
    FedBiOAcc(num_local_steps=3, delta=10.0, offset=1e3),
    AdaFBiO(num_local_steps=2),
    AdaFBiO(num_local_steps=2, hypergradient="shared-u"),
    CommFedBiO(num_kept=2, num_local_steps=2),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name())
def test_one_row_sites_follow_the_simulator_bit_for_bit(algorithm, dtype):
    """Under the loop strategy with gathered means: minibatches, cohorts, unequal local steps."""
    built, options = Quadratic(num_clients=4).build(), {"cohort": Cohort(0.75), "batch_size": 3, "dtype": dtype, "seed": 5}
    _, sites = drive_sites(algorithm, built, 3, **options)
    _, simulated = drive(algorithm, built, 3, strategy="loop", **options)
    for name, value in simulated._asdict().items():
        assert value is None or torch.equal(getattr(sites, name), value), name


@pytest.mark.parametrize("algorithm", [ALGORITHMS[1], ALGORITHMS[3]], ids=lambda algorithm: algorithm.name())
def test_private_weights_of_unequal_length_are_the_same_at_sites_of_their_own_width(algorithm):
    built = DataCleaning(num_clients=4, num_clean=12, test_share=0.8).build()
    ragged = [
        {role: {name: value[: len(value) - 3 * i] for name, value in fields.items()} for role, fields in client.items()}
        for i, client in enumerate(built.clients)
    ]
    options = {"cohort": Cohort(1.0), "batch_size": 4, "dtype": torch.float64}
    fed, sites = drive_sites(algorithm, built._replace(clients=ragged), 2, **options)
    simulation, simulated = drive(algorithm, built._replace(clients=ragged), 2, strategy="loop", **options)
    assert len({site.x0.shape[1] for site in fed.sites}) == 4
    assert torch.equal(sites.y, simulated.y)
    for site, tree in zip(fed.sites, simulation.trees(simulated.x, upper=True), strict=True):
        assert torch.equal(site.kept.rows["x"][0], tree["logit"])
        assert bool(tree["logit"].any())


@pytest.mark.parametrize(
    ("algorithm", "personal"), [(FedAvgPlus(num_local_steps=2), "tuned"), (PFedMe(num_local_steps=(2, 1, 3, 1)), "theta")], ids=["fedavg_plus", "pfedme"]
)
def test_personal_models_stay_at_their_sites_and_are_those_of_the_simulator(algorithm, personal):
    built, options = Quadratic(num_clients=4).build(), {"cohort": Cohort(0.75), "batch_size": 3, "dtype": torch.float64, "seed": 5}
    fed, sites = drive_sites(algorithm, built, 3, **options)
    simulation, simulated = drive(algorithm, built, 3, strategy="loop", **options)
    assert sites.y.name == personal
    assert torch.equal(torch.cat([site.kept.rows[personal] for site in fed.sites]), simulation.collect(simulated.y))
    assert torch.equal(sites[2], simulated[2])  # what travels


def test_clusters_of_sites_are_those_of_the_simulator():
    algorithm = ClusteredFL(num_local_steps=2, tolerance_mean=10.0, tolerance_max=1e-6)
    built, options = Quadratic(num_clients=4).build(), {"cohort": Cohort(), "batch_size": 3, "dtype": torch.float64, "seed": 5}
    _, sites = drive_sites(algorithm, built, 2, **options)
    _, simulated = drive(algorithm, built, 2, strategy="loop", **options)
    assert len(set(simulated.cluster.tolist())) > 2
    assert torch.equal(sites.cluster, simulated.cluster)
    assert torch.equal(sites.y, simulated.y)

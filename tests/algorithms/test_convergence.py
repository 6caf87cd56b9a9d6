"""Convergence of every algorithm that claims to be exact, in every scope that it accepts.

The clients differ, and the upper level couples x and y."""

import numpy as np
import pytest

from fedbilevel import discovery
from fedbilevel.algorithms.commfedbio import CommFedBiO
from fedbilevel.algorithms.fbo_aggitd import FBOAggITD
from fedbilevel.algorithms.fedbio import FedBiO
from fedbilevel.algorithms.fedbio_local import FedBiOLocal
from fedbilevel.algorithms.fedbioacc import FedBiOAcc
from fedbilevel.algorithms.fedmsa import FedMSA
from fedbilevel.algorithms.shrofbo import ShroFBO
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.tasks.quadratic import Quadratic
from support.numeric.yardstick import fixed_point, relative

LR = {"lr_upper": 0.03, "lr_lower": 0.15, "lr_system": 0.15}
EXACT = [
    FedBiO(**LR, num_local_steps=1),
    SimFBO(**LR),
    ShroFBO(**LR),
    FedBiOAcc(**LR, num_local_steps=1, delta=10.0, offset=1e3),
    FedMSA(**LR, num_local_steps=3),
    FedBiOLocal(**LR, num_local_steps=1, u="local"),
    CommFedBiO(**LR, compression="none", num_local_steps=1),
    FBOAggITD(**LR, num_lower_rounds=70, num_local_steps=1),
]
SCOPES = [("global", "shared"), ("global", "private"), ("local", "shared"), ("local", "private")]
CASES = [(algorithm, *scopes) for algorithm in EXACT for scopes in SCOPES if not {*scopes} & {*algorithm.refuses}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "lower", "upper"),
    CASES,
    ids=[f"{algorithm.name()}-{lower}-{upper}" for algorithm, lower, upper in CASES],
)
def test_the_limit_is_the_solution(algorithm, lower, upper):
    task = Quadratic(num_clients=3, dim_upper=2, dim_lower=3, cross=0.3, lower=lower, upper=upper)
    closed = task.closed_form()
    limit, contraction = fixed_point(algorithm, task.build())
    assert contraction < 1
    solution = closed.solution()
    assert relative(limit["x"], solution) < 1e-8
    assert relative(limit["y"], closed.lower_solution(solution)) < 1e-8
    if "u" in limit:
        assert relative(limit["u"], closed.system_solution(solution)) < 1e-8
    assert np.abs(closed.hypergradient(solution)).max() < 1e-12


def test_every_refusal_states_its_reason():
    assert all(
        isinstance(reason, str) and len(reason) > 20
        for kind in discovery.algorithms().values()
        for reason in kind.refuses.values()
    )

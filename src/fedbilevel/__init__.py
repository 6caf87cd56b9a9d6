"""fedbilevel: federated bilevel optimisation.

import fedbilevel as fb

problem = fb.Problem(upper=..., lower=..., x0={...}, y0={...})
result = fb.run("fedbio", problem, clients, num_iterations=100)
"""

__version__ = "0.1.0"

from fedbilevel.averaging import Averaging
from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation import Cohort
from fedbilevel.network import Network
from fedbilevel.problem import Problem, Scopes
from fedbilevel.run import Result, run
from fedbilevel.steps import Schedule, check_timescales, curvature, projection_radius, suggest

__all__ = [
    "Averaging",
    "Cohort",
    "FedBilevelError",
    "Network",
    "Problem",
    "Result",
    "Schedule",
    "Scopes",
    "check_algorithm",
    "check_hypergradient",
    "check_problem",
    "check_timescales",
    "curvature",
    "projection_radius",
    "run",
    "suggest",
]

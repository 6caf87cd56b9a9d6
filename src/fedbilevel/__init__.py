"""fedbilevel: federated bilevel optimisation.

import fedbilevel as fb

problem = fb.Problem(upper=..., lower=..., x0={...}, y0={...})
result = fb.solve(problem, clients, "fedbio", num_rounds=100)
"""

from fedbilevel._version import __version__ as __version__
from fedbilevel.averaging import Averaging
from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
from fedbilevel.data.folders import read_folders
from fedbilevel.errors import FedBilevelError
from fedbilevel.federation import Cohort
from fedbilevel.network import Network
from fedbilevel.problem import Problem, Scopes
from fedbilevel.run import EarlyStopping, Progress, Result, run, solve
from fedbilevel.steps import Schedule, check_timescales, curvature, projection_radius, suggest

__all__ = [
    "Averaging",
    "Cohort",
    "EarlyStopping",
    "FedBilevelError",
    "Network",
    "Problem",
    "Progress",
    "Result",
    "Schedule",
    "Scopes",
    "check_algorithm",
    "check_hypergradient",
    "check_problem",
    "check_timescales",
    "curvature",
    "projection_radius",
    "read_folders",
    "run",
    "solve",
    "suggest",
]

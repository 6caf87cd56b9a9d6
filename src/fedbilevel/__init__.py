"""fedbilevel: federated bilevel optimisation.

import fedbilevel as fb

problem = fb.Problem(upper=..., lower=..., x0={...}, y0={...})
result = fb.solve(problem, clients, "fedbio", num_rounds=100)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedbilevel._version import __version__ as __version__

if TYPE_CHECKING:
    from fedbilevel import tasks
    from fedbilevel.aggregation.attacks import Attack
    from fedbilevel.aggregation.settings import Aggregation
    from fedbilevel.checks import check_algorithm, check_hypergradient, check_problem
    from fedbilevel.cleaning.clean import clean_labels
    from fedbilevel.cleaning.outcome import Cleaning
    from fedbilevel.data.folders import read_folders
    from fedbilevel.engines.contract import check_engine
    from fedbilevel.errors import FedBilevelError
    from fedbilevel.federation.algorithm import Cohort
    from fedbilevel.federation.averaging import Averaging
    from fedbilevel.federation.network import Network
    from fedbilevel.federation.schedule import Schedule
    from fedbilevel.federation.stragglers import Stragglers
    from fedbilevel.personal.fit import personalise
    from fedbilevel.personal.outcome import Personalised
    from fedbilevel.problem.adapters import lora
    from fedbilevel.problem.problem import Problem, Scopes
    from fedbilevel.report.page import write_report
    from fedbilevel.runs.callbacks import EarlyStopping
    from fedbilevel.runs.result import Progress, Result
    from fedbilevel.runs.solve import solve
    from fedbilevel.runs.step_sizes import curvature, projection_radius, suggest_steps
    from fedbilevel.studies.compare import compare
    from fedbilevel.studies.features import SelectedFeatures, select_features
    from fedbilevel.studies.guarded import Guarded, guarded
    from fedbilevel.studies.influence.fit import influence
    from fedbilevel.studies.mixed_texts import MixedTexts
    from fedbilevel.studies.search import tune
    from fedbilevel.studies.sources import MixedSources, mix_sources

_PLACES = {  # imported when they are asked for: the parent processes of a federation do not compute, and need no torch
    "aggregation.attacks": ["Attack"],
    "aggregation.settings": ["Aggregation"],
    "checks.algorithm": ["check_algorithm"],
    "checks.hypergradient": ["check_hypergradient"],
    "checks.problem": ["check_problem"],
    "cleaning.clean": ["clean_labels"],
    "cleaning.outcome": ["Cleaning"],
    "data.folders": ["read_folders"],
    "engines.contract": ["check_engine"],
    "errors": ["FedBilevelError"],
    "federation.algorithm": ["Cohort"],
    "federation.averaging": ["Averaging"],
    "federation.network": ["Network"],
    "federation.schedule": ["Schedule"],
    "personal.fit": ["personalise"],
    "personal.outcome": ["Personalised"],
    "federation.stragglers": ["Stragglers"],
    "problem.adapters": ["lora"],
    "problem.problem": ["Problem", "Scopes"],
    "runs.callbacks": ["EarlyStopping"],
    "runs.result": ["Progress", "Result"],
    "runs.solve": ["solve"],
    "report.page": ["write_report"],
    "runs.step_sizes": ["curvature", "projection_radius", "suggest_steps"],
    "studies.compare": ["compare"],
    "studies.features": ["SelectedFeatures", "select_features"],
    "studies.guarded": ["Guarded", "guarded"],
    "studies.influence.fit": ["influence"],
    "studies.mixed_texts": ["MixedTexts"],
    "studies.search": ["tune"],
    "studies.sources": ["MixedSources", "mix_sources"],
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

_NAMESPACES = ("algorithms", "detectors", "tasks")  # fb.tasks.DataCleaning, fb.algorithms.FedBiO

__all__ = [
    "Aggregation",
    "Attack",
    "Averaging",
    "Cleaning",
    "Cohort",
    "EarlyStopping",
    "FedBilevelError",
    "Guarded",
    "MixedSources",
    "MixedTexts",
    "Network",
    "Personalised",
    "Problem",
    "Progress",
    "Result",
    "Schedule",
    "Scopes",
    "SelectedFeatures",
    "Stragglers",
    "check_algorithm",
    "check_engine",
    "check_hypergradient",
    "check_problem",
    "clean_labels",
    "compare",
    "curvature",
    "guarded",
    "influence",
    "lora",
    "mix_sources",
    "personalise",
    "projection_radius",
    "read_folders",
    "select_features",
    "solve",
    "suggest_steps",
    "tasks",
    "tune",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"fedbilevel.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedbilevel' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"fedbilevel.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

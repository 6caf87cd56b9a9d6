"""Warnings before a run about problems whose solution means nothing."""

from __future__ import annotations

import warnings

from fedbilevel.errors import ProblemError, ProblemWarning
from fedbilevel.oracle.dependence import dependence_faults
from fedbilevel.oracle.population import Population
from fedbilevel.problem.data_faults import data_faults


def warn_of_faults(population: Population, learns_x: bool) -> None:
    """Warn of a meaningless problem, and raise if x cannot be learned.

    learns_x: whether the algorithm learns x; the others need no dependence between the levels.
    """
    for fault in dependence_faults(population) if learns_x else []:
        if fault.is_fatal:
            raise ProblemError(f"{fault.text}.")
        warnings.warn(fault.text, ProblemWarning, stacklevel=3)
    for text in data_faults(population.problem, population.data):
        warnings.warn(text, ProblemWarning, stacklevel=3)

"""Checks that users can run on a problem, a hypergradient estimator or an algorithm."""

from fedbilevel.checks.algorithm import check_algorithm as check_algorithm
from fedbilevel.checks.hypergradient import check_hypergradient as check_hypergradient
from fedbilevel.checks.problem import check_problem as check_problem
from fedbilevel.verdict import Report as Report

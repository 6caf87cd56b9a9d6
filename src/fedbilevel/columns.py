"""Columns of a measurement by name: costs, figures, their better direction, and their meanings."""

from __future__ import annotations

import math
from collections.abc import Iterable

CALLS = ("gy", "gx", "fx", "fy", "hvp", "jvp", "samples")
COLUMNS = ("floats_up", "floats_down", "bytes_up", "bytes_down", *CALLS)  # of the ledger, one count per client
# position in the run and, between peers, membership
BESIDE = ("iteration", "seconds", "megabytes", "rounds", "messages", "members", "num_peers", "seen", "epsilon")
DIAGNOSTICS = ("hypergradient", "residual", "lower_gradient")  # of the method, not of the model
_RISING = {"accuracy", "f1", "precision", "recall", "auc", "r2", "pearson"}  # words of figures where more is better

TERMS: dict[str, str] = {  # one sentence each, for tooltips of the report page and of notebook displays
    "iteration": "One outer iteration is one update of x as the algorithm defines it; it may take several rounds.",
    "rounds": "A communication round is one aggregation up and the broadcast that follows; between peers, one step "
    "in which messages pass.",
    "megabytes": "Megabytes sent in both directions, summed over clients.",
    "calls": "Gradients and products together, summed over clients.",
    "gradients": "Evaluations of first derivatives of f and g (fx, fy, gx, gy), summed over clients.",
    "products": "Products of a second derivative of g with a vector (hvp: H v, jvp: J v), summed over clients.",
    "seconds": "Wall-clock time of the run; measuring time is excluded.",
    "samples": "Number of samples; in the ledger, samples evaluated, where one evaluation counts its samples once.",
    "messages": "Messages between peers, each charged to its sender and to its edge.",
    "epsilon": "Privacy spent so far on what clients sent, at the delta of the run. Lower is more private.",
    "floats_up": "Numbers sent by clients.",
    "floats_down": "Numbers sent to clients.",
    "bytes_up": "Bytes sent by clients.",
    "bytes_down": "Bytes sent to clients.",
    "bytes": "Bytes sent in both directions, summed over clients.",
    "gy": "Gradients of the lower objective g with respect to y.",
    "gx": "Gradients of the lower objective g with respect to x.",
    "fx": "Gradients of the upper objective f with respect to x.",
    "fy": "Gradients of the upper objective f with respect to y.",
    "hvp": "Products of the lower Hessian H (second derivative of g with respect to y) with a vector.",
    "jvp": "Products of the mixed second derivative J of g (with respect to x and y) with a vector.",
    "upper_loss": "The upper objective f at the current x and y. Lower is better. It misleads while y is far from "
    "y*(x): see lower gradient.",
    "lower_loss": "The lower objective g at the current x and y. Lower is better.",
    "hypergradient": "Norm of the gradient of the upper objective at x: y is solved to y*(x) and the linear system of "
    "the hypergradient is solved too, both over all data. Zero where x is stationary. Empty where the lower level is "
    "not strongly convex, or is not solved in reasonable time.",
    "hypergradient_norm": "Norm of the gradient of the upper objective at x. Zero where x is stationary.",
    "residual": "|mean(H u - f_y)| / |mean f_y|: the error of u in the linear system of the hypergradient "
    "(with a local lower level: root mean squares over clients).",
    "lower_gradient": "|mean g_y|: the distance of y from y*(x), measured by the gradient. Zero at y*(x).",
    "distance": "Distance to the known solution. Lower is better.",
    "exact_upper_loss": "Upper loss at x and the exact solution of the lower level. Lower is better.",
    "disagreement": "Largest relative distance of a peer's y from the mean over peers.",
    "test_accuracy": "Share of test samples that are classified correctly. Higher is better.",
    "train_accuracy": "Share of training samples that are classified correctly. Higher is better.",
    "val_accuracy": "Share of validation samples that are classified correctly. Higher is better.",
    "validation_accuracy": "Share of validation samples that are classified correctly. Higher is better.",
    "validation_error": "Share of clean validation samples that are classified wrongly. Lower is better.",
    "query_accuracy": "Share of query samples of the few-shot tasks that are classified correctly. Higher is better.",
    "balanced_test_accuracy": "Mean over classes of the share of test samples classified correctly. Higher is better.",
    "rarest_test_accuracy": "Test accuracy on the rarest classes. Higher is better.",
    "good_weight": "Sum of the learned weights of the sources that are like the target. Higher is better.",
    "test_accuracy_mean_client": "Mean over clients of the test accuracy of each client. Higher is better.",
    "test_accuracy_bottom_decile": "Test accuracy of the client below which a tenth of the clients lie.",
    "bottom_decile": "Test accuracy of the client below which a tenth of the clients lie.",
    "test_loss": "Mean loss over test samples. Lower is better.",
    "worst_test_loss": "Test loss of the client that is served worst. Lower is better.",
    "precision": "Share of the flagged samples that are flagged rightly. Higher is better.",
    "recall": "Share of the samples to be flagged that are flagged. Higher is better.",
    "f1": "Harmonic mean of precision and recall. Higher is better.",
    "phase": "A method of the algorithm that runs at clients; costs belong to the phase that causes them.",
    "client": "One participant that holds data: a site, a peer, or a simulated client.",
    "curve": "Runs with the same settings. Runs that differ in seeds only form one curve.",
    "runs": "Runs of this curve that did not diverge, one per seed.",
    "seed": "The number that fixes all random draws of a run.",
    "reached": "Runs of this curve that reached the target.",
    "predicted change": "Predicted change of the validation loss, summed over clients, when this sample is removed.",
    "actual change": "Measured change of the validation loss after removing this sample and training again.",
}


def figures_of(columns: Iterable[str]) -> list[str]:
    """Return the measured figures, without costs and positions."""
    return [name for name in columns if name not in (*BESIDE, *COLUMNS)]


def falls(figure: str) -> bool:
    """Return whether lower values of a figure are better.

    A run always reaches a target of such a figure from above. For other figures, the first
    measurement decides from which side a run reaches the target.
    """
    return figure in DIAGNOSTICS or figure.endswith(("loss", "error", "norm", "distance"))


def rises(figure: str) -> bool:
    """Return whether higher values of a figure are better.

    For a figure that neither falls nor rises, no run is called the best.
    """
    return not falls(figure) and not _RISING.isdisjoint(figure.lower().split("_"))


def metric_and_value(text: str) -> tuple[str, float]:
    """Parse a target written as METRIC=VALUE; raise ValueError for other text."""
    name, _, value = text.partition("=")
    if not name or not math.isfinite(number := float(value)):
        raise ValueError(text)
    return name, number

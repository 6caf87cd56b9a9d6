"""Decisions of the server from sums: the cut at a false-discovery rate, and the guard's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedbilevel.detectors import _rows

NUM_BINS = 200  # of the log-odds of a wrong label
TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-16, 17))  # factors of scores, 1/16 to 16
MOST_LOSS = 0.003  # share of right answers that an accepted classifier may lose
ONE_SIDED = 1.645  # standard errors of a one-sided bound of 95 %
MOST_FALSE = 0.5  # share of false flags up to which the flags themselves speak for a cleaning
ROUNDING = 1e-12  # spread that is no difference


def discovery_cut(seen: Tensor, unseen: Tensor, num_right: float, rate: float) -> dict[str, float] | None:
    """Return the lowest cut of log-odds at which few of the flags are false, in 95 % of all draws.

    seen, unseen: numbers of samples by bin, from the least to the most suspicious one. The unseen
    samples have right labels, so their share above a cut, with a 95 % bound for its sampling error,
    bounds the share of right labels above it. None if no cut reaches the rate, for example with few
    unseen samples.
    """
    above = lambda counts: counts.flip(0).cumsum(0).flip(0)
    flags, num = above(seen), float(unseen.sum())
    false = num_right * (upper_bound(above(unseen)) / max(num, 1.0)).clamp(max=1)
    good = ((false <= rate * flags) & (flags > 0)).nonzero()[:, 0]
    if not len(good):
        return None
    first = int(good[0])
    return {"log_odds": _rows.edge(first, NUM_BINS), "flags": float(flags[first]), "false": float(false[first])}


def most_false(seen: Tensor, unseen: Tensor, num_right: float) -> float:
    """Return the 95 % bound of the share of false flags, where P(wrong) above one half is a flag.

    seen, unseen: as in `discovery_cut`; the bound is 1 at most, and 1 without flags or unseen samples.
    """
    flags, false = (float(counts[len(counts) // 2 :].sum()) for counts in (seen, unseen))
    if not flags or not float(unseen.sum()):
        return 1.0
    bound = float(upper_bound(unseen.new_tensor(false))) / float(unseen.sum())
    return min(1.0, num_right * bound / flags)


def upper_bound(count: Tensor) -> Tensor:
    """Return the 95 % upper bound of the mean of a Poisson count (Wilson and Hilferty, 1931)."""
    more = count + 1
    return more * (1 - 1 / (9 * more) + 1.645 / (3 * more.sqrt())) ** 3


def temperature(fits: Sequence[float]) -> float:
    """Return the factor of scores with the largest likelihood; of equal ones, that nearest to one."""
    best = max(range(len(fits)), key=lambda i: (fits[i], -abs(math.log(TEMPERATURES[i]))))
    return TEMPERATURES[best]


def judged(
    num: float, better: float, squares: float, gain: float, gain_squares: float, right: float, *fair: float
) -> dict[str, float]:
    """Return means, standard errors and t of paired differences; t is 0 without two samples.

    The error of the gain is at least 1.5 / num: if no answer of num samples differs, the gain is still
    below 3 / num with a probability of 95 % only.

    fair: sum and squares of the differences in calibrated log-likelihood, of which `evidence` is the t.
    """
    num = round(num)
    if num < 2:
        few = {"num_guard": num, "t": 0.0, "gain": 0.0, "gain_error": math.inf, "plain_accuracy": 0.0}
        return {**few, "evidence": 0.0} if fair else few
    spread = lambda total, square: math.sqrt(max(0.0, square / num - (total / num) ** 2) / (num - 1))
    t = lambda total, square: total / num / spread(total, square) if spread(total, square) > ROUNDING else 0.0
    figures = {
        "num_guard": num, "t": t(better, squares), "gain": gain / num,
        "gain_error": max(spread(gain, gain_squares), least_error(num)), "plain_accuracy": right / num,
    }  # fmt: skip
    return {**figures, "evidence": t(*fair)} if fair else figures


def least_error(num: float) -> float:
    """Return the standard error of a gain if no answer of num samples differs: it is below 3 / num then."""
    return 1.5 / num


def basis(figures: Mapping[str, float], reject_below: float, accept_above: float) -> str:
    """Return what the guard accepts by, "flags", "answers" or "likelihood", or "" if it rejects.

    A classifier that is unsure of noisy labels has a low likelihood even where it is right more often.
    So a likelihood that is not lower is no evidence for the other classifier.

    A few hundred samples hardly tell two good classifiers apart, but they tell how often a right label
    is flagged. Flags most of which are surely wrong labels are evidence, unless answers speak against it.

    Other evidence is the calibrated likelihood. Right answers must also exclude a loss of MOST_LOSS with a
    one-sided bound of 95 %; where the samples are too few for that bound even if no answer is lost, the
    likelihood decides alone.
    """
    gain, error = figures["gain"], figures["gain_error"]
    if figures["t"] < reject_below or gain < -error:
        return ""
    if figures.get("most_false", 1.0) <= MOST_FALSE:
        return "flags"
    if figures["evidence"] < accept_above:
        return ""
    if gain - ONE_SIDED * error >= -MOST_LOSS:
        return "answers"
    return "likelihood" if ONE_SIDED * least_error(figures["num_guard"]) > MOST_LOSS else ""

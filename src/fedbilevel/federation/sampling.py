"""Cohorts whose mean has the weighted mean over all clients as its expectation.

Client i has the share p_i = w_i / sum w in a mean over all clients. A cohort of m clients is drawn
in proportion to these shares:

    with replacement       m draws, each of client i with probability p_i
    without replacement    client i is in the cohort with probability pi_i = min(1, c p_i);
                           c makes the sum m

A member has the weight p_i / pi_i (Horvitz and Thompson, 1952), or 1/m per draw with replacement.
Both sum to one over every cohort that can be drawn, so a cohort's mean is a convex combination: the
mean of equal rows is that row, even if the rows are parameters. With equal weights the draw is
uniform.

Without replacement the draw is systematic in a random order (Madow, 1949): lay the clients side by
side, each as long as its weight, and take the clients under m equidistant marks with a random
start. Clients with m p_i >= 1 are in every cohort; the others are drawn for the remaining places.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from fedbilevel.federation.algorithm import Cohort
from fedbilevel.problem.draws import SERVER, Stream

_AHEAD = 2**14  # keys that are drawn at once for the cohorts of coming outer iterations


class Sampler:
    """Sampler of the cohorts of one federation.

    weights: (n,) positive integers by client number, the weight of each client in a mean over all
        clients.
    member_weights: (n,) integers by client number, the weight of each client per draw in the mean
        of a cohort.
    """

    def __init__(self, cohort: Cohort, weights: Tensor) -> None:
        self.num_clients, self.size = len(weights), cohort.size(len(weights))
        self.replacement = cohort.replacement
        self.equal = bool((weights == weights[0]).all())
        self._weights = self.member_weights = weights
        self._once = torch.ones(self.size, dtype=torch.int64)
        self._drawn: dict[tuple[Stream, int, int], Tensor] = {}  # cohorts of coming outer iterations
        self._most_calls, self._known_calls, self._last = 1, 0, -2
        if self.replacement:
            if not self.equal:
                self.member_weights = torch.ones_like(weights)
            self._ends = torch.tensor(_ends(weights.tolist()))
        elif not self.equal and self.size < self.num_clients:
            always = always_in(weights, self.size)
            self._always, self._others = always.nonzero()[:, 0], (~always).nonzero()[:, 0]
            self._total, self._places = int(weights[~always].sum()), self.size - int(always.sum())
            self.member_weights = torch.where(
                always, self._places * weights, self._total
            )  # p_i / pi_i, times a constant

    @property
    def is_everyone(self) -> bool:
        """Whether every cohort has every client, once."""
        return not self.replacement and self.size == self.num_clients

    def draw(self, stream: Stream, iteration: int, call: int) -> tuple[Tensor, Tensor]:
        """Return the sorted numbers of the clients in the cohort, and how often each was drawn.

        The result depends on the arguments alone. It must not be changed.
        """
        if self.replacement:
            words = _server_words(stream, "cohort", iteration, call, self.size)
            return torch.searchsorted(self._ends, words, right=True).unique(return_counts=True)
        if self.is_everyone:
            numbers = torch.arange(self.num_clients)
        elif self.equal:
            numbers = self._ahead(stream, iteration, call)
        else:
            numbers = torch.cat([self._always, self._systematic(stream, iteration, call)]).sort()[0]
        return numbers, self._once

    def counts(self, times: Tensor) -> Tensor | None:
        """Return the weights of the members, if they are the same for every cohort."""
        return self.member_weights[: self.size] if self.equal and times is self._once else None

    def _ahead(self, stream: Stream, iteration: int, call: int) -> Tensor:
        """Return a cohort; where outer iterations follow each other, cohorts of several are drawn together."""
        follows, self._last = iteration == self._last + 1, iteration
        self._most_calls = max(self._most_calls, call)
        known = self._drawn.get((stream, iteration, call))
        is_narrow = follows and self._known_calls < self._most_calls  # more cohorts are drawn now than at first
        if known is not None and not is_narrow:
            return known
        draw = partial(stream.orders, "cohort", SERVER, self.num_clients, first=self.size)
        room = _AHEAD // (self.num_clients * self._most_calls)
        if not follows or room < 2 or call < 1:
            return draw(iterations=range(iteration, iteration + 1), calls=range(call, call + 1))[0].sort()[0]
        iterations, calls = range(iteration, min(iteration + room, 2**32)), range(1, self._most_calls + 1)
        places = ((stream, when, number) for when in iterations for number in calls)
        cohorts = draw(iterations=iterations, calls=calls).sort(-1)[0].unbind(0)
        self._drawn, self._known_calls = dict(zip(places, cohorts, strict=True)), self._most_calls
        return self._drawn[stream, iteration, call]

    def _systematic(self, stream: Stream, iteration: int, call: int) -> Tensor:
        order = self._others[stream.order("cohort", SERVER, len(self._others), iteration=iteration, call=call)]
        high, low = _server_words(stream, "cohort/start", iteration, call, 2).tolist()
        start = (high >> 1 << 32 | low) * self._total >> 63
        marks = [(start + place * self._total) // self._places for place in range(self._places)]
        return order[torch.searchsorted(self._weights[order].cumsum(0), torch.tensor(marks), right=True)]


def always_in(weights: Tensor, size: int) -> Tensor:
    """Return (n,) flags of the clients that are in every cohort.

    Such a client's share of the weight is at least one place, after others have taken theirs.
    """
    always = torch.zeros(len(weights), dtype=torch.bool)
    while True:
        places, total = size - int(always.sum()), int(weights[~always].sum())
        more = ~always & (places * weights >= total)
        if not bool(more.any()):
            return always
        always |= more


def _ends(weights: list[int]) -> list[int]:
    """Return the end of each client's part of the 2**32 words.

    Python's integers are used because they do not overflow.
    """
    total = sum(weights)
    return [-(-(end << 32) // total) for end in itertools.accumulate(weights)]


def _server_words(stream: Stream, purpose: str, iteration: int, call: int, width: int) -> Tensor:
    words = stream.bits(purpose, torch.tensor([SERVER]), iteration=iteration, call=call, steps=range(1), width=width)
    return words.reshape(-1)

"""The layer that is off costs nothing: counts of torch's operations, not times."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fedbilevel as fb
from fedbilevel import discovery
from fedbilevel.aggregation import groups, layer, ring, robust
from fedbilevel.engines import layered
from fedbilevel.engines.simulation import Simulation
from fedbilevel.federation.algorithm import Sparse
from fedbilevel.tasks.quadratic import Quadratic

NAMES = ("fedbio", "fbo_aggitd", "adasimfbo", "penalty", "commfedbio")


class Bare(Simulation):
    """A server that knows no layer: answers are charged and averaged."""

    def _called(self, phase, broadcast, join):
        self.call += 1
        answers, places, times = Simulation._ask(self, phase, broadcast, *self._present(broadcast.values()), True)
        self.num_answers = len(places)
        gathered, sent = dict.fromkeys(answers), {}
        for name, value in answers.items():
            if value is not None:
                rows, sparse = (value.rows, 4) if isinstance(value, Sparse) else (value, 0)
                kept = value.num_kept if sparse else rows.shape[1]
                self.ledger.charge_message("up", self._numbers_of(self.ids, places), kept, rows.element_size() + sparse)
                sent[name] = rows
        weights = self._counts(places, times)
        whole = self._sum_of_weights(weights)
        totals = self._summed(sent, places, weights)
        means = zip(sent.items(), totals, strict=True)
        gathered.update({name: (one / whole).to(rows.dtype) for (name, rows), one in means})
        self.ledger.count_round()
        return SimpleNamespace(**gathered)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(kind, name, **more):
    """The operations of one outer iteration after the first."""
    algorithm = discovery.algorithm(name)()
    fed = kind(algorithm, *Quadratic(num_clients=4).build(), dtype=torch.float64, strategy="loop", **more)
    fed.begin(0)
    state = algorithm.init(fed)
    fed.begin(1)
    state = algorithm.round(fed, state)
    with Counting() as count:
        fed.begin(2)
        algorithm.round(fed, state)
    return count.found, fed.call


@pytest.mark.parametrize("name", NAMES)
def test_without_settings_an_outer_iteration_has_the_operations_of_a_server_without_the_layer(name):
    off, bare = operations(Simulation, name), operations(Bare, name)
    assert off == bare
    on = operations(Simulation, name, aggregation=fb.Aggregation())
    assert on[1] == off[1]  # rounds
    assert on[0].total() > off[0].total()  # the count sees the layer


@pytest.mark.parametrize("name", NAMES)
def test_without_settings_no_function_of_the_layer_is_called(name, monkeypatch):
    def called(*given, **more):
        raise AssertionError("the layer was called")

    for owner, names in (
        (layer.Layer, ("__init__", "way", "encode", "integers", "mean")),
        (layered, ("means", "group_means", "only", "spend")),
        (groups, ("drawn", "is_whole")),
        (ring, ("fixed", "weighted", "summed", "decoded")),
        (robust, ("robust_mean",)),
    ):
        for one in names:
            monkeypatch.setattr(owner, one, called)
    operations(Simulation, name)
    with pytest.raises(AssertionError, match="the layer was called"):
        operations(Simulation, name, aggregation=fb.Aggregation())

"""Whether a loss gives a sample the same value alone and beside samples of other clients.

Then all samples of all clients may be one batch. Losses with norms over a batch, or with pairs of
samples, do not. A few samples may hide such pairs, for example samples of one class. But padding
must not change a loss, so a loss that needs other samples reads `batch["weight"]`. A loss that reads
it is not called independent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedbilevel.problem.client_data import ClientData
from fedbilevel.problem.layout import Layout, Tree
from fedbilevel.problem.problem import Problem, with_features
from fedbilevel.problem.validation import Watched, away


@torch.no_grad()
def independent(
    problem: Problem, data: ClientData, layout_x: Layout, layout_y: Layout, x: Tensor, y: Tensor, per_sample: set[str]
) -> set[str]:
    """Return which of the losses with values per sample are independent, tried on a few samples of two clients."""
    if data.num_clients == 1 or problem.scopes.upper == "private":
        return set()  # clients have no shared point or no company
    point = layout_x.unravel(away(x)), layout_y.unravel(away(y))
    return {label for label in per_sample if _is_independent(problem, label, data, point)}


def _is_independent(problem: Problem, label: str, data: ClientData, point: tuple[Tree, Tree]) -> bool:
    role = "train" if label == "lower" else "val"
    few = [
        data.batch(data.positions[place : place + 1], role, torch.arange(min(2, size), device=data.device)[None]).row(0)
        for place, size in ((0, int(data.sizes[role][0])), (len(data.positions) - 1, int(data.sizes[role][-1])))
    ]
    together = {name: torch.cat([some[name] for some in few]) for name in few[0]}
    if num := problem.draws.get(role):
        length = len(together["weight"])
        # sorting equal draws moves nothing, so a loss that mixes samples in this order would not be noticed
        together["draw"] = torch.arange(length * num).cos().abs().view(length, num).to(together["weight"])
    given = lambda fields: Watched(with_features(problem, point[0], fields))
    values = lambda fields: getattr(problem, label)(*point, fields)
    try:
        found = values(every := given(together))
        if "weight" in every.read:
            return False
        for place in (0, len(found) - 1):
            alone = {name: value[place : place + 1] for name, value in together.items()}
            if not torch.allclose(values(given(alone))[0], found[place]):
                return False
    except Exception:  # noqa: BLE001 - a function that fails on other shapes is evaluated client by client
        return False
    return bool(found.isfinite().all())

"""Self-tuned: FedBiO's directions with step lengths that are measured during the run.

Use it when you do not want to tune step sizes; `algorithm="auto"` chooses it. It works for all
scopes, small batches and small cohorts, with convex and non-convex lower levels. It costs one round
per outer iteration and one round before the first.

One outer iteration, at the means over clients of

    h = f_x - J u,      g_y = grad_y g,      g_u = H u - f_y + delta L D u

    v_y <- 0.9 c_y v_y + D^-1 g_y,      y <- y - 0.9 (s / L) v_y
    v_u <- 0.9 c_u v_u + D^-1 g_u,      u <- u - 0.9 (s / L) v_u
    x   <- x - l m / sqrt(max h^2),     m <- (m + h) / 2

D is a diagonal that makes the rows of D^-1/2 H D^-1/2 equally long, estimated from products of H
with random signs. L is the largest eigenvalue of D^-1/2 H D^-1/2, by power iteration. Products
for D and L are sent along with the directions in three of eight outer iterations. c_y and c_u are
cosines of successive residuals, as running means of at least zero: steady residuals give momentum,
noisy ones do not. s falls while a cosine is negative, which shows noise or too long steps. delta is
twice the negative part of u' H u / (L u' D u).

The length l grows while h agrees with the last direction and falls when it does not. It has two
limits: a step never promises to lower the upper loss by more than 5 % of the range of losses so
far, and l is multiplied by min(1, 0.15 / lag), where lag is the residual of y or u as a share of
its largest value. x begins to move when the lag is below one half, at the latest after ten outer
iterations.

The answer is an average of the last iterates where residuals are noise, and the last iterate where
they agree. Phases see only 80 % of each client's validation samples. The upper loss on the others
(one float per round) decides which average is kept as the answer. No result depends on the units
of f, g, x or y.

Reference: FedBiO's directions are those of Li, Huang, Huang, "Communication-Efficient Federated
Bilevel Optimization with Global and Local Lower Level Problems", NeurIPS 2023, Algorithm 2. The
diagonal follows Ruiz, "A scaling algorithm to equilibrate both rows and columns norms in matrices",
2001; the falling step follows Pflug, "Non-asymptotic confidence bounds for stochastic approximation
algorithms with constant step size", 1990. The combination is our own.

Deviations: (1) There is no paper of the whole method. (2) With a private x every client steps x by
its own h, with a common length; with a local lower level every client paces its own y and u and
takes `num_local_steps` steps of them per round.

Bias: none at the limit of a strongly convex lower level with all samples in every batch; with
minibatches x, y and u keep a noise that averaging reduces; where u' H u < 0 the damping delta
biases the hypergradient; 20 % of the validation samples have no influence on h.

Cost per outer iteration: 1 round; d_x + 2 d_y floats each way and at most 7 floats up; in three
of eight outer iterations d_y floats each way more; per client one of each of g_y, f_x, f_y, H u,
J u and an upper loss; in five of eight outer iterations one or two products H v more. Before the
first: 1 round; d_x + d_y floats down, 2 d_y + 1 floats up; 17 products H v per client. With a local
lower level, no y, u or product travels, there is no round before the first outer iteration, and a
client that joins later computes its 17 products then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbilevel.algorithms._pacing import (
    Controls,
    Pace,
    Rows,
    dot,
    equilibrated,
    lags,
    lower_step,
    norm,
    random_signs,
    unit,
    upper_step,
    with_curvature,
    with_damping,
    with_diagonal,
)
from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.federation.algorithm import Federation, Kept, ServerAlgorithm, Variable, phase
from fedbilevel.federation.clients import HELD, Clients
from fedbilevel.problem.client_data import Batch
from fedbilevel.settings import setting

_UPPER = ("z_x", "m_x", "s_x", "d_x", "a_x")
_LOWER = ("z_y", "u", "v_y", "v_u", "g_y", "g_u", "a_y", "diagonal", "ray", "controls")


def _probe(iteration: int) -> str:
    """Return the vector whose product with H is measured in this outer iteration, or an empty name."""
    place = iteration % 8
    if iteration <= 6 or place in (1, 2):
        return "ray"
    return "diagonal" if place == 0 else "u" if place in (3, 7) else ""


@dataclass(frozen=True, kw_only=True)
class SelfTuned(ServerAlgorithm):
    learn_x: bool = setting(True, "learn x; False trains y with x fixed at its start, as a baseline")
    pace: float = setting(1.0, "factor of the measured step of x; a run that gets worse reduces it", above=0)
    holdout: float = setting(
        0.2, "share of the validation samples that only choose the best state; 0: the last state", least=0, most=0.5
    )
    num_local_steps: int = setting(5, "steps of y and u per round with a local lower level", least=1)

    upper_space = ("x", *_UPPER)
    lower_space = ("y", *_LOWER)
    decays: ClassVar[tuple[str, ...]] = ("pace",)
    lengths: ClassVar[dict[str, int]] = {"controls": len(Controls._fields)}

    class State(NamedTuple):
        """x and y are the answer, z_x and z_y the iterates, a_x and a_y their averages."""

        x: Variable
        y: Variable
        z_x: Variable
        m_x: Variable
        s_x: Variable
        d_x: Variable
        a_x: Variable
        z_y: Variable
        u: Variable
        v_y: Variable
        v_u: Variable
        g_y: Variable
        g_u: Variable
        a_y: Variable
        diagonal: Variable
        ray: Variable
        controls: Variable
        numbers: list[Any]  # a Pace as a plain list, which a checkpoint can hold

    @property
    def learns_x(self) -> bool:  # type: ignore[override]
        """Return whether this run changes x, which depends on a setting here."""
        return self.learn_x

    def held_share(self) -> float:
        return self.holdout if self.learn_x else 0.0

    def init(self, fed: Federation) -> State:
        x, y = fed.initial()
        found = fed.mean(self.prepare, x=x, y=y)
        local = isinstance(found.diagonal, Kept)
        starts = {name: fed.start(name) for name in ("z_x", "a_x", "z_y", "a_y")}
        zeros = {name: fed.zeros(name) for name in ("m_x", "s_x", "d_x", "u", "v_y", "v_u", "g_y", "g_u")}
        controls = found.controls if local else Controls.start(1.5 * found.top)
        return self.State(
            x=x, y=y, **starts, **zeros, diagonal=found.diagonal, ray=found.ray, controls=controls, numbers=[*Pace()]
        )

    @phase
    def prepare(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return each client's own diagonal, and its largest curvature in that metric."""
        return self.first_metric(clients, x, y, clients.batch("train", "curvature"))

    def first_metric(self, clients: Clients, x: Tensor, y: Tensor, batch: Batch) -> dict[str, Tensor]:
        product = lambda v: clients.hessian_product(x, y, v, batch)
        d = equilibrated(product, torch.ones_like(clients.rows(y)), 6, seed=0)
        w = random_signs(d, torch.Generator().manual_seed(1))
        for _ in range(5):
            w = unit(w / d.sqrt())
            image = product(w)
            curvature, w = norm(image, 1 / d) / norm(w, d), image / d.sqrt()
        kept = {"controls": Controls.start(curvature)} if y.ndim == 2 else {"top": curvature}
        return {"diagonal": d, "ray": unit(w / d.sqrt()), **kept}

    def begun(self, clients: Clients, x: Tensor, rows: Rows) -> Rows:
        """Prepare the clients that were in no cohort before; only they pay for it."""
        new = rows["controls"][:, :1] == 0
        if not bool(new.any()):
            return rows
        batch = replace(clients.batch("train", "curvature"), active=new[:, 0].cpu())
        found = self.first_metric(clients, x, rows["z_y"], batch)
        return rows | {name: torch.where(new, value, rows[name]) for name, value in found.items()}

    def round(self, fed: Federation, state: State) -> State:
        t, pace, old = fed.iteration, Pace(*state.numbers), state._asdict()
        at_clients = {name: value for name, value in old.items() if isinstance(value, Kept)}
        probe, step = _probe(t), self.pace * pace.step if self.learn_x else 0.0
        sent = {name: old[name] for name in ("z_x", "z_y", "u", *([probe] if probe else []))} | at_clients
        if "z_x" in at_clients:
            sent |= {"step": step, "cosine": pace.cosine}
        new = vars(fed.mean(self.look, **sent, probe=probe, keep=pace.keep))
        if "controls" not in new:
            rows = self.measured({name: old[name][None] for name in _LOWER}, probe, new.get("product"))
            rows = lower_step(rows, new["residual_y"][None], new["residual_u"][None] if self.learn_x else None)
            new |= {name: value[0] for name, value in rows.items()} | {"lags": lags(rows["controls"])[0]}
        if self.learn_x and "z_x" not in new:
            rows = {name: old[name][None] for name in _UPPER}
            rows, figures = upper_step(rows, new["h"][None], step, max(1, pace.moved), pace.cosine)
            new |= {name: value[0] for name, value in rows.items()} | {"figures": figures[0]}
        if self.learn_x:
            pace = pace.after(t, float(new["held"]), new["lags"].tolist(), new["figures"].tolist())
        better = pace.keep or not self.holdout
        for name in "xy":
            if name not in at_clients:
                new[name] = new.get(f"a_{name}", old[name]) if better else old[name]
        found: dict[str, Any] = {name: new.get(name, old[name]) for name in self.State._fields[:-1]}
        return self.State(**found, numbers=[*pace._replace(keep=better)])

    def measured(self, rows: Rows, probe: str, product: Tensor | None) -> Rows:
        """Update the metric, the curvature or the damping by the measurement of a probe."""
        if not probe or product is None:
            return rows
        update = {"ray": with_curvature, "diagonal": with_diagonal, "u": with_damping}[probe]
        return update(rows, product if product.ndim == 2 else product[None])

    @phase
    def look(self, clients: Clients, z_x: Tensor, z_y: Tensor, u: Tensor, probe: str, keep: bool, **given: Any) -> Any:
        """Return directions and measurements; step the variables that stay at the client."""
        x, y, u = clients.rows(z_x, z_y, u)
        local, private = "controls" in given, "m_x" in given
        out = {name: given[f"a_{name}" if keep else name] for name in "xy" if name in given}
        rows = {name: given[name] for name in _LOWER if local and name in given} | {"z_y": y, "u": u}
        if local:
            rows = self.begun(clients, x, rows)
        vector = u if probe == "u" else rows.get(probe, given.get(probe))
        product = self.product(clients, x, y, probe, vector) if vector is not None else None
        if local:
            rows = self.measured(rows, probe, product)
        elif product is not None:
            out["product"] = product
        for step in clients.steps(self.num_local_steps if local else 1):
            h, g_y, g_u = self.residuals(clients, step, x, rows)
            if local:
                rows = lower_step(rows, g_y, g_u)
        if local:
            out |= rows | {"lags": lags(rows["controls"])}
        else:
            out |= {"residual_y": g_y, "residual_u": g_u}
        if private and self.learn_x:
            stepped, figures = upper_step(
                {**given, "z_x": x}, h, given["step"], max(1, clients.iteration), given["cosine"]
            )
            out |= stepped | {"figures": figures}
        else:
            out["h"] = h
        if self.learn_x:
            role = HELD if self.holdout else "val"
            out["held"] = clients.upper_loss(x, y, clients.batch(role, "held", times=8))
        return out

    def residuals(self, clients: Clients, step: Any, x: Tensor, rows: Rows) -> tuple[Any, Tensor, Any]:
        """Return h, g_y and g_u; without learning x, only g_y."""
        if not self.learn_x:
            return None, clients.lower_grad(x, rows["z_y"], step.batch("train", "B_g")), None
        return step_directions(clients, step, x, rows["z_y"], rows["u"], "shared")

    def product(self, clients: Clients, x: Tensor, y: Tensor, probe: str, vector: Tensor) -> Tensor:
        """Return H times the ray, u' H u, or a new diagonal, each of every client."""
        batch, vector = clients.batch("train", "curvature"), clients.rows(vector)
        product = lambda v: clients.hessian_product(x, y, v, batch)
        if probe == "diagonal":
            return equilibrated(product, vector, 1, seed=clients.iteration)
        return product(unit(vector)) if probe == "ray" else dot(vector, product(vector))

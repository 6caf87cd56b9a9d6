"""Self-tuned: FedBiO's directions with measured steps, by candidates of which samples choose.

Use it when you do not want to tune step sizes; `algorithm="auto"` chooses it. It works for all
scopes, small batches and small cohorts, with convex and non-convex lower levels. It costs one round
per outer iteration and one round before the first; in each round it sends up to four times as much
as FedBiO. `num_candidates=1` sends as much as FedBiO.

Four candidates start at the same point and differ in their gait (a, b, p, k, r):

    steady  a = b = 0.9, with momentum        p = 5 %     k = 0.15    r = 0
    slow    a = b = 0.2                       p = 10 %    k = 0.15    r = 0.1 |g_y| / |f_y| at the start
    eager   a = b = 0.9, with momentum        p = 20 %    k = 0.5     r = 0
    fit     a = b = 0.9, with momentum        x of slow               r >= 0

One outer iteration of a candidate, at the means over clients of

    h = f_x - J u,      g_y = grad_y g + r f_y,      g_u = H u - f_y + delta L D u

    v_y <- 0.9 c_y v_y + D^-1 g_y,      y <- y - a (s / L) v_y      (no momentum: v_y = D^-1 g_y)
    v_u <- 0.9 c_u v_u + D^-1 g_u,      u <- u - b (s / L) v_u
    x   <- x - l m / sqrt(max h^2),     m <- (m + h) / 2

With a batch size, a direction joins `num_local_steps` minibatches. With its own r > 0, the slow
candidate replaces derivatives along u by differences over r u:

    h = f_x - (g_x(x, y + r u) - g_x(x, y)) / r,      H u <- (grad_y g(x, y + r u) - grad_y g(x, y)) / r

Its y minimises g + r f and y + r u minimises g, as in the penalty method with lam = 1 / r.

D is a diagonal that makes the rows of D^-1/2 H D^-1/2 equally long, estimated from products of H
with random signs. L is the largest eigenvalue of D^-1/2 H D^-1/2, by power iteration. Products
for D and L are sent along with the directions in three of eight outer iterations. Between these, an
entry of D grows where x made y stiffer: where the residual turns around and doubles its largest norm.
c_y and c_u are cosines of successive residuals, as running means of at least zero: steady residuals
give momentum, noisy ones do not. s falls while a cosine is negative, which shows noise or too long steps. delta is
twice the negative part of u' H u / (L u' D u), and zero for a difference over r u.

The length l grows while h agrees with the last direction and falls when it does not. It has two
limits: a step never promises to lower the upper loss by more than the share p of the range of
losses so far, and l is multiplied by min(1, k / lag), where lag is the residual of y or u as a share
of its largest value. x begins to move when the lag is below one half, at the latest after ten outer
iterations (eager: three).

Where the lower level is global, two candidates also fit validation samples: they solve min_y g + r f
instead of min_y g, with D and L of g + r f. The slow candidate has a constant r. The fourth takes x
from the slow candidate and begins with r = 0; its r grows while a step of y along -u surely lowers
the held-out loss. With u = H^-1 f_y, -u is the derivative of y by r at r = 0.

A candidate offers an average of its last iterates where residuals are noise, and its last iterate
where they agree. Phases see only 80 % of each client's validation samples. The upper loss on the
others decides which candidate, and which of its states, is the answer: the slow candidate, unless
another is better by more than two standard errors of the difference over clients. Few held-out
samples would otherwise choose by chance, and slow steps fit noise last. States before y is warmed
up are no answer. A candidate other than the steady ends when its held-out loss rises above its range
so far by ten times that range. Where y - t u has a lower held-out loss than y by more than two
standard errors over clients, for a length t of six, the answer's y is y - t u: the model also fits
validation samples. One client alone shows no standard error, and every gain counts. No result
depends on the units of f, g, x or y.

With x fixed (`learn_x=False`), all validation samples choose among the steady and the slow
candidate and their states, because no other step uses them.

Reference: FedBiO's directions are those of Li, Huang, Huang, "Communication-Efficient Federated
Bilevel Optimization with Global and Local Lower Level Problems", NeurIPS 2023, Algorithm 2. The
diagonal follows Ruiz, "A scaling algorithm to equilibrate both rows and columns norms in matrices",
2001; the falling step follows Pflug, "Non-asymptotic confidence bounds for stochastic approximation
algorithms with constant step size", 1990. The combination is our own.

Deviations: (1) There is no paper of the whole method. (2) With a private x every client steps x by
its own h, with a common length; with a local lower level every client paces its own y and u and
takes `num_local_steps` steps of them per round.

Bias: for a candidate with r = 0, none at the limit of a strongly convex lower level with all
samples in every batch; with minibatches x, y and u keep a noise that averaging reduces; where u' H
u < 0 the damping delta biases the hypergradient; 20 % of the validation samples have no influence
on h. With r > 0, y minimises g + r f, and the h of the slow candidate has an error proportional to
r. The answer is the best state on held-out samples: where y overfits, it stops before y*(x), and
where r > 0 or a refit helps, it moves beyond. `refit=False` keeps r = 0 and y; `holdout=0` returns
the last state of the steady candidate, without a refit.

Cost per outer iteration: 1 round; 3 d_x + 8 d_y floats each way and at most 79 floats up; in three
of eight outer iterations 4 d_y floats each way more; per client five of g_y, four of each of f_x
and f_y, three of each of H u and J u, two of g_x (in the first, four of each but g_x), and 28 upper
losses on held-out samples; in five of eight outer iterations three to eight products H v more;
where y also fits validation samples, up to three f_y for a product; if the fit has begun, one f_y
more. `num_candidates=1`: d_x + 2 d_y floats each way and one of each derivative but g_x. Before the
first: 1 round; d_x + d_y floats down, 2 d_y + 1 floats up; 17 products H v per client. With a local
lower level there is no fourth candidate, y fits training samples alone, no y, u or product travels,
there is no round before the first outer iteration, and a client that joins later computes its 17
products then.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedbilevel.algorithms._gaits import GAITS, SAFE, Gait
from fedbilevel.algorithms._lower_pacing import (
    TINY,
    Controls,
    Rows,
    balance,
    dot,
    equilibrated,
    first_metric,
    lags,
    lower_step,
    reach,
    refitted,
    unit,
    with_curvature,
    with_damping,
    with_diagonal,
)
from fedbilevel.algorithms._pacing import REFITS, Pace, chosen, upper_step
from fedbilevel.algorithms.fedbio import step_directions
from fedbilevel.federation.algorithm import Federation, Kept, ServerAlgorithm, phase
from fedbilevel.federation.clients import HELD, Clients
from fedbilevel.problem.client_data import Batch
from fedbilevel.settings import setting

_UPPER = ("z_x", "m_x", "s_x", "d_x", "a_x")
_LOWER = ("z_y", "u", "v_y", "v_u", "g_y", "g_u", "a_y", "diagonal", "ray", "controls")
_FOUND = ("h", "residual_y", "residual_u", "product", "held", "against", "lags", "figures")
_ENDINGS = tuple(GAITS)
_TOLD = ("step", "cosine", "moved", "reach", "blend")  # numbers of the server


def _named(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the variables of all candidates."""
    return tuple(name + ending for ending in GAITS for name in names)


_record: Callable[..., Any] = namedtuple  # its fields are not literals
_FIELDS = ("x", "y", *_named((*_UPPER, *_LOWER)), "answer", "numbers")


def _of(values: Mapping[str, Any], ending: str) -> dict[str, Any]:
    """Return the variables and measurements of one candidate under their plain names."""
    return {name: values[name + ending] for name in (*_UPPER, *_LOWER, *_FOUND, *_TOLD) if name + ending in values}


def _ended(values: Mapping[str, Any], ending: str) -> dict[str, Any]:
    return {name + ending: value for name, value in values.items()}


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
        0.2,
        "share of the validation samples that only choose the answer; 0: the last state of one candidate",
        least=0,
        most=0.5,
    )
    refit: bool = setting(True, "let y also fit validation samples, where held-out samples are surely better")
    num_candidates: int = setting(
        len(GAITS), "gaits that run side by side; every one costs as much as one run", least=1, most=len(GAITS)
    )
    num_local_steps: int = setting(
        5, "steps of y and u per round with a local lower level; otherwise minibatches per direction", least=1
    )

    upper_space = ("x", *_named(_UPPER))
    lower_space = ("y", *_named(_LOWER))
    reads_samples = True
    exact = ("top", *_named(("diagonal", "ray", "product", "held", "against", "figures", "lags")))
    decays: ClassVar[tuple[str, ...]] = ("pace",)
    lengths: ClassVar[dict[str, int]] = dict.fromkeys(_named(["controls"]), len(Controls._fields))

    # x and y are the answer; z_x and z_y the iterates of a candidate, a_x and a_y their averages.
    # answer: the place of the candidate whose averages become the answer, or -1 if the answer stays.
    # numbers: the paces of all candidates as lists, which a checkpoint can hold.
    State: ClassVar[Any] = _record("State", _FIELDS)

    @property
    def learns_x(self) -> bool:  # type: ignore[override]
        """Return whether this run changes x, which depends on a setting here."""
        return self.learn_x

    @property
    def gaits(self) -> dict[str, Gait]:
        """Return the gaits that run, by the ending of their names."""
        most = self.num_candidates if self.learn_x else min(self.num_candidates, 2)  # with x fixed, eager is steady
        gaits = [(ending, gait) for ending, gait in GAITS.items() if self.refit or not gait.fits]
        return dict(gaits[: most if self.holdout else 1])

    @property
    def refits(self) -> tuple[float, ...]:
        """Return the lengths of the steps along -u that are tried."""
        return REFITS[1:] if self.refit and self.learn_x and self.holdout else ()

    def held_share(self) -> float:
        return self.holdout if self.learn_x else 0.0

    def init(self, fed: Federation) -> Any:
        x, y = fed.initial()
        found = vars(fed.mean(self.prepare, x=x, y=y))
        state: dict[str, Any] = {"x": x, "y": y}
        state |= {name: fed.start(name) for name in _named(("z_x", "a_x", "z_y", "a_y"))}
        state |= {name: fed.zeros(name) for name in _named(("m_x", "s_x", "d_x", "u", "v_y", "v_u", "g_y", "g_u"))}
        if "top" in found:
            measured = {"diagonal": found["diagonal"], "ray": found["ray"]}
            measured["controls"] = Controls.start(1.5 * found["top"])
            found = {name: value for ending in GAITS for name, value in _ended(measured, ending).items()}
        return self.State(**state, **found, answer=0, numbers=[[*Pace()] for _ in GAITS])

    @phase
    def prepare(self, clients: Clients, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return each client's own diagonal, and its largest curvature in that metric."""
        return self.measure(clients, x, y, clients.batch("train", "curvature"))

    def measure(self, clients: Clients, x: Tensor, y: Tensor, batch: Batch) -> dict[str, Tensor]:
        d, curvature, ray = first_metric(lambda v: clients.hessian_product(x, y, v, batch), clients.rows(y))
        found = {"diagonal": d, "ray": ray}
        if y.ndim == 1:
            return {**found, "top": curvature}
        found["controls"] = Controls.start(curvature)
        return {name: value for ending in GAITS for name, value in _ended(found, ending).items()}

    def begun(self, clients: Clients, values: dict[str, Any]) -> dict[str, Any]:
        """Prepare the clients that were in no cohort before; only they pay for it."""
        if "controls" not in values or not bool((new := values["controls"][:, :1] == 0).any()):
            return values
        batch = replace(clients.batch("train", "curvature"), active=new[:, 0].cpu())
        found = self.measure(clients, clients.rows(values["z_x"]), values["z_y"], batch)
        return values | {name: torch.where(new, found[name], values[name]) for name in found if name in values}

    def round(self, fed: Federation, state: Any) -> Any:
        probe, old = _probe(fed.iteration), state._asdict()
        paces = dict(zip(GAITS, (Pace(*one) for one in state.numbers), strict=True))
        local = isinstance(old["z_y"], Kept)
        running = [ending for ending in self.gaits if not ending or not paces[ending].lost]
        if local or SAFE not in running:
            running = [ending for ending in running if not GAITS[ending].fits]
        sent: dict[str, Any] = {name: old[name] for name in "xy" if isinstance(old[name], Kept)}
        told = {ending: self.told(GAITS[ending], _of(old, ending), paces[ending]) for ending in running}
        for ending in running:
            own = _of(old, ending)
            own = {name: own[name] for name in own if name in ("z_x", "z_y", "u", probe) or isinstance(own[name], Kept)}
            sent |= _ended(own | told[ending], ending)
        refit = REFITS[paces[_ENDINGS[state.answer]].refit] if state.answer >= 0 else 0.0
        new = vars(fed.mean(self.look, **sent, probe=probe, answer=state.answer, refit=refit))
        for ending in running:
            gait, pace = GAITS[ending], paces[ending]
            lead = _of(new, SAFE) if gait.fits else {}
            if gait.weight and not pace.age and "blend" in told[ending]:
                pace = pace._replace(blend=gait.weight * balance(_of(old | new, ending)))
            found = self.stepped(_of(old, ending), _of(new, ending), gait, probe, pace, lead)
            if "held" in found:
                held, *tried = found["held"].tolist()
                half = len(tried) // 2
                if "against" in found:
                    pace = pace.compared(held - float(new["held" + SAFE][0]), float(found["against"]), fed.num_answers)
                far = told[ending]["reach"] if gait.fits and "blend" in told[ending] else 0.0
                pace = pace.tried(tried[:half], tried[half:], fed.num_answers, far)
                figures = found["figures"].tolist() if self.learn_x else [0.0] * 4
                paces[ending] = pace.after(held, found["lags"].tolist(), figures, gait)
            new |= _ended(found, ending)
        answer = chosen([paces[ending] for ending in self.gaits]) if self.holdout else 0
        if answer >= 0:
            own = _of(old | new, _ENDINGS[answer])
            new |= {"x": own["a_x"]} if "x" not in sent else {}
            new |= {"y": refitted(own, REFITS[paces[_ENDINGS[answer]].refit])} if "y" not in sent else {}
        variables = {name: new.get(name, old[name]) for name in self.State._fields[:-2]}
        return self.State(**variables, answer=answer, numbers=[[*pace] for pace in paces.values()])

    def told(self, gait: Gait, own: dict[str, Any], pace: Pace) -> dict[str, float]:
        """Return the numbers that clients need for one candidate."""
        told: dict[str, float] = {}
        if isinstance(own["z_x"], Kept):
            told |= {"step": self.length(pace), "cosine": pace.cosine, "moved": max(1, pace.moved)}
        if self.refits and not isinstance(own["z_y"], Kept):
            told["reach"] = float(reach(own["z_y"], own["u"], own["diagonal"]))
            told |= {"blend": pace.blend} if gait.fits or gait.weight else {}
        return told

    def length(self, pace: Pace) -> float:
        return self.pace * pace.step if self.learn_x else 0.0

    def stepped(
        self, old: dict[str, Any], new: dict[str, Any], gait: Gait, probe: str, pace: Pace, lead: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a candidate after the steps of the variables that the server holds.

        lead: the safe candidate after its steps, for a candidate that takes its x.
        """
        if "controls" not in new:
            rows = self.measured({name: old[name][None] for name in _LOWER}, probe, new.get("product"))
            rows = lower_step(rows, new["residual_y"][None], new["residual_u"][None] if self.learn_x else None, gait)
            new |= {name: value[0] for name, value in rows.items()} | {"lags": lags(rows["controls"])[0]}
        if gait.fits:
            new |= {name: lead[name] for name in (*_UPPER, "figures") if name in lead}
        elif self.learn_x and "z_x" not in new:
            rows = {name: old[name][None] for name in _UPPER}
            rows, figures = upper_step(rows, new["h"][None], self.length(pace), max(1, pace.moved), pace.cosine)
            new |= {name: value[0] for name, value in rows.items()} | {"figures": figures[0]}
        return new

    def measured(self, rows: Rows, probe: str, product: Tensor | None) -> Rows:
        """Update the metric, the curvature or the damping by the measurement of a probe."""
        if not probe or product is None:
            return rows
        update = {"ray": with_curvature, "diagonal": with_diagonal, "u": with_damping}[probe]
        return update(rows, product if product.ndim == 2 else product[None])

    @phase
    def look(self, clients: Clients, probe: str, answer: int, refit: float, **given: Any) -> dict[str, Any]:
        """Return directions and measurements of every candidate; step what stays at the client."""
        out = {name: given[name] for name in "xy" if name in given}
        if answer >= 0:
            own = _of(given, _ENDINGS[answer])
            out |= {"x": own["a_x"]} if "x" in out else {}
            out |= {"y": refitted(own, refit)} if "y" in out else {}
        given = self.begun(clients, given)
        for ending, gait in self.gaits.items():
            if "z_y" + ending in given:  # a lost candidate is not sent
                lead = _of(out, SAFE) if gait.fits else {}
                out |= _ended(self.seen(clients, gait, probe, _of(given, ending), lead), ending)
        safe = out.get("held" + SAFE)
        for ending in self.gaits:
            if safe is not None and ending != SAFE and "held" + ending in out:
                out["against" + ending] = (out["held" + ending][:, :1] - safe[:, :1]) ** 2
        return out

    def seen(
        self, clients: Clients, gait: Gait, probe: str, own: dict[str, Any], lead: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what a client sees and steps of one candidate.

        lead: the same of the safe candidate, for a candidate that takes its x.
        """
        x, y, u = clients.rows(own["z_x"], own["z_y"], own["u"])
        local, private = "controls" in own, "m_x" in own
        rows = {name: own[name] for name in _LOWER if local} | {"z_y": y, "u": u}
        r = own.get("blend", 0.0)
        vector = None if probe == "u" and r and gait.weight else rows.get(probe, own.get(probe))  # no H u, no damping
        product = self.product(clients, x, y, probe, vector, r) if vector is not None else None
        out: dict[str, Any] = {}
        if local:
            rows = self.measured(rows, probe, product)
        elif product is not None:
            out["product"] = product
        for step in clients.steps(self.num_local_steps if local else 1):
            h, g_y, g_u = self.residuals(clients, step, x, rows, gait, r)
            if local:
                rows = lower_step(rows, g_y, g_u, gait)
        if local:
            out |= rows | {"lags": lags(rows["controls"])}
        else:
            out |= {"residual_y": g_y, "residual_u": g_u}
        if gait.fits:
            out |= {name: lead[name] for name in _UPPER if name in lead}
        elif private and self.learn_x:
            upper = {name: own[name] for name in _UPPER} | {"z_x": x}
            upper, figures = upper_step(upper, h, own["step"], own["moved"], own["cosine"])
            out |= upper | {"figures": figures}
        else:
            out["h"] = h
        if self.learn_x or self.holdout:
            batch = clients.batch(HELD if self.held_share() else "val", "held", times=8)
            unit_length = reach(y, u, own["diagonal"]) if local else own.get("reach", 0.0)
            held = clients.upper_loss(x, y, batch)
            changes = [clients.upper_loss(x, y - r * unit_length * u, batch) - held for r in self.refits]
            out["held"] = torch.cat([held, *changes, *(change**2 for change in changes)], dim=1)
        return out

    def residuals(
        self, clients: Clients, step: Any, x: Tensor, rows: Rows, gait: Gait, r: float
    ) -> tuple[Any, Tensor, Any]:
        """Return h, g_y and g_u, where y minimises g + r f; without learning x, only g_y."""
        times, y = 1 if "controls" in rows else self.num_local_steps, rows["z_y"]
        if not self.learn_x:
            return None, clients.lower_grad(x, y, step.batch("train", "B_g", times=times)), None
        if not r or gait.fits:
            h, g_y, g_u = step_directions(clients, step, x, y, rows["u"], "shared", times=times)
            return h, g_y + r * clients.upper_grad_y(x, y, step.batch("val", "B_f", times=times)) if r else g_y, g_u
        train, z = step.batch("train", "B_g", times=times), y + r * rows["u"]
        f_x, f_y = clients.upper_grads(x, y, step.batch("val", "B_f", times=times))
        at_y, at_z = clients.lower_grad(x, y, train), clients.lower_grad(x, z, train)
        h = f_x - (clients.lower_grad_x(x, z, train) - clients.lower_grad_x(x, y, train)) / r
        return h, at_y + r * f_y, (at_z - at_y) / r - f_y

    def product(self, clients: Clients, x: Tensor, y: Tensor, probe: str, vector: Tensor, blend: float) -> Tensor:
        """Return H times the ray, u' H u, or a new diagonal, each of every client.

        The ray and the diagonal are those of the Hessian of g + blend f.
        """
        batch, vector = clients.batch("train", "curvature"), clients.rows(vector)
        product = lambda v: clients.hessian_product(x, y, v, batch)
        if probe == "u":
            return dot(vector, product(vector))
        if blend:
            upper = self.upper_product(clients, x, y)
            lower, product = product, lambda v: lower(v) + blend * upper(v)
        return product(unit(vector)) if probe == "ray" else equilibrated(product, vector, 1, seed=clients.iteration)

    def upper_product(self, clients: Clients, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function for products with the Hessian of f, as differences of gradients."""
        batch, size = clients.batch("val", "curvature"), torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        slope = clients.upper_grad_y(x, y, batch)

        def product(v: Tensor) -> Tensor:
            step = (0.01 * size / torch.linalg.vector_norm(v, dim=-1, keepdim=True)).clamp(min=TINY)
            return (clients.upper_grad_y(x, y + step * v, batch) - slope) / step

        return product

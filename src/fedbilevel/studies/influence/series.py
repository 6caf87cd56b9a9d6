"""The series of HGP at a server, in tens of rounds instead of one per term.

    u = eta sum_{m < M} (I - eta H)^m b,   H = mean g_yy,   b = mean f_y

On the Krylov space of H and b, with an orthonormal basis V of K vectors (Lanczos) and T = V' H V,

    u = |b| V phi(T) e_1,   phi(l) = eta sum_{m < M} (1 - eta l)^m = (1 - (1 - eta l)^M) / l.

K products with H, one round each, give this u up to an error that falls fast with K. Conjugate
gradients are the case phi(l) = 1 / l. They fail where the curvature of the lower level is negative
along a direction, as that of a network is. Damping, phi(l) = 1 / (l + d) with d above the most
negative curvature, does not fail, but it also weakens all flat directions, along which a removal
moves a network most. The series treats a direction as M steps of training would, and needs no
damping. On a tenth of the embedded digits and the small network of the task (two splits, 30 samples
each removed and trained again), it predicted as HGP did; with damping, changes were too small, and
random samples were ordered worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbilevel.errors import SettingError
from fedbilevel.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class Series(Settings):
    """Settings of the series.

    >>> import fedbilevel as fb
    >>> from fedbilevel.studies.influence.series import Series
    >>> task = fb.tasks.Influence(num_train=20, num_val=10)
    >>> fb.influence(task, method=Series(lr_system=1.0, num_terms=500, num_products=6))
    <influence by series: 24 of 60 samples harm, 8 rounds>
    """

    lr_system: float = setting(0.02, "step of u", symbol="eta", above=0)
    num_terms: int = setting(2000, "terms of the series", symbol="M", least=1)
    num_products: int = setting(40, "products H v, one round each", symbol="K", least=1)

    @staticmethod
    def name() -> str:
        return "series"

    def solve(self, product: Callable[[Tensor], Tensor], b: Tensor) -> tuple[Tensor, int]:
        """Return u (d,) and the number of products H v, below K if they span a complete space."""
        basis, diagonal, beside = [b / torch.linalg.vector_norm(b).clamp(min=torch.finfo(b.dtype).tiny)], [], []
        for _ in range(min(self.num_products, len(b))):
            w, v = product(basis[-1]), torch.stack(basis)
            size, parts = torch.linalg.vector_norm(w), v @ w
            diagonal.append(parts[-1])
            w = w - v.T @ parts
            w = w - v.T @ (v @ w)  # again, because rounding leaves parts along the basis
            length = torch.linalg.vector_norm(w)
            if length <= 1e3 * torch.finfo(b.dtype).eps * size:
                break
            beside.append(length)
            basis.append(w / length)
        k = len(diagonal)
        off = torch.stack(beside[: k - 1]) if k > 1 else b.new_zeros(0)
        tridiagonal = torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(tridiagonal.double())  # 1 - (1 - eta l)^M cancels in float32
        eta, largest = self.lr_system, float(values[-1])
        if eta * largest > 2:
            raise SettingError(
                f"lr_system is {eta}, but the largest curvature is {largest:.3g}, so that the series grows without "
                f"bound: use at most {1 / largest:.2g}."
            )
        flat = (eta * self.num_terms * values).abs() < 1e-6
        phi = torch.where(flat, eta * self.num_terms, (1 - (1 - eta * values) ** self.num_terms) / values)
        if not bool(phi.isfinite().all()):
            raise SettingError(
                f"num_terms is {self.num_terms}, but the most negative curvature is {float(values[0]):.3g}, so that "
                "the series overflows: use fewer terms or a smaller lr_system."
            )
        u = torch.linalg.vector_norm(b).double() * (torch.stack(basis[:k]).double().T @ (vectors @ (phi * vectors[0])))
        return u.to(b.dtype), k

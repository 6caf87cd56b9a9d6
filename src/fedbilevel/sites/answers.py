"""Checks of the sites' answers before the server uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbilevel.aggregation.layer import At, Encoded, Layer
from fedbilevel.columns import CALLS
from fedbilevel.engines.layered_means import Answers
from fedbilevel.errors import NonFiniteError, WireError
from fedbilevel.federation.algorithm import Algorithm, Sparse
from fedbilevel.privacy.noisy_oracle import PARTS
from fedbilevel.sites.mailbox import Answer

KEPT = torch.empty(0, 0)  # marks rows that stayed at the sites
Figures = tuple[list[str], Tensor]  # names of the columns, and a row for each client


class PhaseReader:
    """Reads the answers of sites to a phase.

    kept_names: names of the sequences that stay at the sites.
    spaces: lengths of y and of x; x is absent if it is private.
    layer: the encoding of rows; None: rows arrive as they are.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        kept_names: set[str],
        dtype: torch.dtype,
        spaces: Mapping[str, int],
        layer: Layer | None = None,
    ) -> None:
        self._algorithm, self._kept_names, self._dtype, self._spaces = algorithm, kept_names, dtype, spaces
        self._layer = layer
        self._sent: Mapping[str, Any] = {}
        self._call = ("", 0, 0)

    def expect(self, phase: str, iteration: int, call: int, sent: Mapping[str, Any]) -> None:
        """Note the call that the next answers belong to, and the values that the server sent."""
        self._call, self._sent = (phase, iteration, call), sent

    def __call__(self, answer: Answer, num: int) -> Answers:
        """Return the rows of an answer by name, with one row for each of `num` clients."""
        results, calls = answer.header.get("results"), answer.header.get("calls")
        if (
            not isinstance(results, dict)
            or not isinstance(calls, dict)
            or not isinstance(answer.header.get("changed"), bool)
        ):
            raise WireError("its answer lacks results, calls or changed.")
        if not all(name in CALLS and are_counts(numbers, num, least=0) for name, numbers in calls.items()):
            raise WireError("its answer has invalid counts of derivatives or samples.")
        private = self._layer is not None and self._layer.settings.level == "example"
        if private and not are_counts(answer.header.get("derived"), len(PARTS), least=0):
            raise WireError("its answer does not say how many noisy derivatives it has used.")
        return {name: self._rows(name, kind, answer.arrays.get(name, []), num) for name, kind in results.items()}

    def _rows(self, name: str, kind: Any, arrays: list[Tensor], num: int) -> Any:
        if kind is None:
            return None
        is_kept = name in self._kept_names
        if kind == "kept":
            if not is_kept:
                raise WireError(f"it kept {name}, which should have been sent.")
            return KEPT
        if self._layer is not None and not is_kept:
            return self._encoded(self._layer, name, kind, arrays, num)
        if kind == "rows" and len(arrays) == 1 and not is_kept:
            return _finite(name, arrays[0], self._dtype, num, self._expected(name))
        if isinstance(kind, dict) and isinstance(kind.get("sparse"), int) and len(arrays) == 2 and not is_kept:
            return self._sparse(name, kind["sparse"], arrays[0].long(), _finite(name, arrays[1], self._dtype, num))
        raise WireError(f"its answer has {name} in a form that was not requested.")

    def _encoded(self, layer: Layer, name: str, kind: Any, arrays: list[Tensor], num: int) -> Encoded:
        """Read rows in the form of the layer."""
        form, width = (kind.get("form"), kind.get("width")) if isinstance(kind, dict) else (None, None)
        if not isinstance(form, str) or type(width) is not int or not arrays:
            raise WireError(f"its answer has {name} in a form that was not requested.")
        expected = self._expected(name)
        widths = [expected] if expected is not None else [*self._spaces.values(), *arrays[0].shape[1:]]
        if width not in widths or width < 1:
            raise WireError(f"it sent {name} with {width} entries, expected {' or '.join(map(str, widths))}.")
        for array in arrays:
            _finite(name, array, array.dtype, 1 if layer.settings.secure else num)
        phase, iteration, call = self._call
        return layer.received(At(phase, name, iteration, call), form, arrays, self._sent, width, self._dtype)

    def _sparse(self, name: str, width: int, places: Tensor, values: Tensor) -> Sparse:
        known = self._expected(name)
        widths = (
            [known] if known is not None else [self._spaces[space] for space in ("y", "x") if space in self._spaces]
        )
        if width not in widths:
            raise WireError(f"its sparse {name} has {width} entries, expected {' or '.join(map(str, widths))}.")
        if places.shape != values.shape or (places.numel() and not 0 <= int(places.min()) <= int(places.max()) < width):
            raise WireError(f"its sparse {name} has entries outside its length.")
        rows = torch.zeros(len(values), width, dtype=self._dtype).scatter_(1, places, values)
        return Sparse(rows, places.shape[1])

    def _expected(self, name: str) -> int | None:
        """Return the length of the rows with this name, or None if the algorithm does not declare
        it."""
        if name in self._algorithm.lengths and name in (*self._algorithm.upper_space, *self._algorithm.lower_space):
            return self._algorithm.lengths[name]
        if name in self._algorithm.upper_space:
            return self._spaces["x"]
        return self._spaces["y"] if name in self._algorithm.lower_space else self._spaces.get(name)


def read_nothing(_answer: Answer, _num: int) -> None:
    """Ignore the content of an answer, because the answer itself is the confirmation."""


def read_figures(answer: Answer, num: int) -> Figures:
    """Read the measurement of `num` clients. A later check across sites decides whether its values
    are finite."""
    names, tables = answer.header.get("names"), answer.arrays.get("figures", [])
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or not isinstance(answer.header.get("changed"), bool)
    ):
        raise WireError("its measurement lacks names or changed.")
    if (
        len(tables) != 1
        or tables[0].shape != (num, len(names))
        or tables[0].dtype != torch.float64
        or names[:3] != ["upper", "lower", "weight"]
    ):
        raise WireError("its measurement is not a row of figures for each client.")
    if not bool(((tables[0][:, 2] > 0) & (tables[0][:, 2] < 2**40)).all()):
        raise WireError("its measurement has an invalid weight.")
    return names, tables[0]


def read_masked_figures(answer: Answer, _num: int) -> tuple[list[str], Tensor]:
    """Read a measurement under secure sums: names, and a masked row of integers."""
    names, tables = answer.header.get("names"), answer.arrays.get("figures", [])
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or names[:3] != ["upper", "lower", "weight"]
        or not isinstance(answer.header.get("changed"), bool)
        or [(table.shape, table.dtype) for table in tables] != [((1, 2 * len(names)), torch.int64)]
    ):
        raise WireError("its measurement is not a masked row of figures.")
    return names, tables[0]


def read_stage(answer: Answer, _num: int) -> Any:
    """Read a site's message of a secure sum, which the sum itself checks."""
    return answer.header.get("answer")


def is_free(answer: Answer) -> bool:
    """Check whether a site that answered a ping can begin immediately."""
    return answer.header.get("busy") is False and "wait" not in answer.header


def are_counts(numbers: Any, num: int, least: int) -> bool:
    """Check whether `numbers` are `num` integers from `least` up, small enough that sums do not
    overflow."""
    return (
        isinstance(numbers, list)
        and len(numbers) == num
        and all(type(number) is int and least <= number < 2**40 for number in numbers)
    )


def form_of(rows: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the names, kinds and lengths of an answer's rows. All sites with the same version of
    an algorithm answer in the same form."""
    return tuple((name, _form(row)) for name, row in sorted(rows.items()))


def _form(row: Any) -> Any:
    if isinstance(row, Encoded):
        return row.kind, row.way.width, tuple(array.shape[1] for array in row.arrays)
    return type(row), row.num_kept if isinstance(row, Sparse) else None if row is None else row.shape[1:]


def sent_rows(answers: Mapping[int, tuple[Answer, Answers]]) -> dict[str, dict[int, Tensor]]:
    """Return dense rows by name and site for all sequences that the sites sent."""
    first = next(iter(answers.values()))[1]
    names = [name for name, row in first.items() if row is not None and row is not KEPT]
    return {name: {site: _dense(rows[name]) for site, (_, rows) in answers.items()} for name in names}


def _dense(rows: Any) -> Tensor:
    if isinstance(rows, Encoded):
        return rows.absolute()
    return rows.rows if isinstance(rows, Sparse) else rows


def _finite(name: str, rows: Tensor, dtype: torch.dtype, num: int, width: int | None = None) -> Tensor:
    if rows.ndim != 2 or len(rows) != num or rows.dtype != dtype or rows.shape[1] != (width or rows.shape[1]):
        expected = f"{num} rows of {dtype}{f' of length {width}' if width else ''}"
        raise WireError(f"it sent {name} as {rows.dtype} of shape {tuple(rows.shape)}, expected {expected}.")
    if not bool(torch.isfinite(rows).all()):
        raise NonFiniteError(
            f"it sent a value of {name!r} that is not finite: its steps are too long, or its data are extreme."
        )
    return rows


def stacked(rows: list[Any]) -> Any:
    """Stack the rows of all sites into one matrix."""
    if rows[0] is None or rows[0] is KEPT:
        return rows[0]
    if isinstance(rows[0], Encoded):
        arrays = [torch.cat(parts) for parts in zip(*(row.arrays for row in rows), strict=True)]
        return rows[0]._replace(arrays=arrays, rows=torch.cat([row.rows for row in rows]))
    if isinstance(rows[0], Sparse):
        return Sparse(torch.cat([row.rows for row in rows]), rows[0].num_kept)
    return torch.cat(rows)

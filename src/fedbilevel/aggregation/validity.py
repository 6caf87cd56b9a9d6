"""Which settings of a run go together, as one table.

`check_aggregation` refuses every other combination before anything runs, and the documentation
makes its table from the same entries.
"""

from __future__ import annotations

from typing import NamedTuple

from fedbilevel.aggregation.sealing import bits_of
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort
from fedbilevel.privacy.noise import ring_sigma

FEATURES = {  # in words, in the order of the documentation
    "secure": "secure sums: the server sees sums of rows only",
    "noise": "noise for differential privacy of clients",
    "examples": "noise for differential privacy of examples",
    "clip": "clipping",
    "int8": "compression int8",
    "topk": "compression topk",
    "randk": "compression randk",
    "powersgd": "compression powersgd",
    "robust": "a robust mean",
    "gather": "an algorithm that reads single rows (`gather`)",
    "reads": "an algorithm that uses samples or losses beside derivatives",
    "cohort": "a cohort of some clients",
    "replacement": "a cohort drawn with replacement",
    "private": "a private upper variable",
    "local": "a local lower level",
}
_REST = "the rest that error feedback adds to a row is not bounded by clip, so noise would not hide it"
_ALONE = "masks cancel only if all clients send integers on the same scale at the same places"


class Clash(NamedTuple):
    """Two features that exclude each other, and the reason."""

    one: str
    other: str
    why: str


CLASHES = (
    Clash("secure", "robust", "a robust mean compares single rows, and the server sees only their sum"),
    Clash("secure", "gather", "the algorithm compares single rows, and the server sees only their sum"),
    Clash("secure", "int8", f"{_ALONE}, and every client has its own scale"),
    Clash("secure", "topk", f"{_ALONE}, and every client sends other places; randk draws the same for all"),
    Clash("secure", "powersgd", f"{_ALONE}, and a product of two factors is no sum of products"),
    Clash("noise", "robust", "the noise is shared among all clients, and hides a sum but no single row"),
    Clash("noise", "gather", "the noise is shared among all clients, and hides a sum but no single row"),
    Clash("noise", "int8", _REST),
    Clash("noise", "topk", _REST),
    Clash("noise", "randk", _REST),
    Clash("noise", "powersgd", _REST),
    Clash("noise", "replacement", "the accountant counts each client once per round"),
    Clash("examples", "noise", "a run has one level: noise is in derivatives or in rows"),
    Clash("examples", "clip", "aggregation.clip is then the norm of an example's derivative, and rows have none"),
    Clash("examples", "reads", "only derivatives have noise, so all else would leave without it"),
    Clash("robust", "gather", "the algorithm reads every row itself, so the rule would protect nothing"),
)
# settings that a contract runs every algorithm with: each compressor and each rule
TRIED = (
    Aggregation(),
    Aggregation(clip=1.0),
    *(Aggregation(clip=1.0, compress=one) for one in ("int8", "topk:0.3", "randk:0.5", "powersgd:1")),
    *(
        Aggregation(robust=one)
        for one in ("trimmed:0.2", "median", "krum:1", "multikrum:1", "centred:1.0", "geometric")
    ),
    Aggregation(clip=1.0, compress="int8", robust="median"),
    Aggregation(secure=True),
    Aggregation(secure=True, compress="randk:0.5"),
)
NEEDS = {"noise": ("clip", "the noise is a multiple of the largest norm of a row")}


def clash(one: str, other: str) -> str | None:
    """Return the reason why two features exclude each other, or None."""
    return next((found.why for found in CLASHES if {found.one, found.other} == {one, other}), None)


def features(settings: Aggregation) -> set[str]:
    """Return the features that the settings of a run or of a sequence ask for."""
    found = {name for name in ("secure", "noise", "clip", "robust") if getattr(settings, name, None)}
    return found | ({settings.compressor.kind} if settings.compressor is not None else set())


def check_features(asked: set[str]) -> None:
    """Raise if two features exclude each other, or if one lacks another that it needs."""
    for one, other, why in CLASHES:
        if {one, other} <= asked:
            raise SettingError(
                f"aggregation combines {FEATURES[one]} with {FEATURES[other]}, which exclude each other: {why}; leave "
                "out one of them."
            )
    for one, (needed, why) in NEEDS.items():
        if one in asked and needed not in asked:
            raise SettingError(f"aggregation has {FEATURES[one]} without {needed}: {why}; set {needed}.")


def check_aggregation(
    settings: Aggregation, algorithm: Algorithm, cohort: Cohort, num_clients: int, largest: int
) -> None:
    """Raise if the settings do not fit each other, the algorithm, the cohort or the weights.

    largest: largest weight of a client.
    """
    _check_noise(settings, algorithm)
    size = cohort.size(num_clients)
    bits = bits_of(settings, size, largest)
    around = {
        name
        for name, is_so in (
            ("gather", algorithm.gathers),
            ("examples", settings.level == "example"),
            ("reads", algorithm.reads_samples),
            ("cohort", size < num_clients),
            ("replacement", cohort.replacement),
        )
        if is_so
    }
    for one in settings.of_rows().all():
        check_features(features(one) | around)
        if one.noise is not None and one.clip is not None:  # raises if the noise is below the steps of the integers
            ring_sigma(one.clip, one.noise, 2.0 ** (bits - 2) / one.clip, 1, members=size)
        if one.rule is not None and one.rule.kind in ("krum", "multikrum"):
            needed = 2 * int(one.rule.number) + 3
            if size < needed:
                raise SettingError(
                    f"aggregation.robust is {one.robust!r}, which needs {needed} clients in every round, and there are "
                    f"{size}: assume fewer attackers, or use another rule such as 'median'."
                )


def _check_noise(settings: Aggregation, algorithm: Algorithm) -> None:
    """Raise if a row would leave without noise, although the settings ask for it."""
    if settings.noise is None:
        return
    steps = algorithm.auto_names()
    if steps:
        raise SettingError(
            f"{steps[0]} is 'auto', and its measurement is not clipped, so noise would not hide it: give a number, or "
            "leave out aggregation.noise."
        )
    bare = [name for name in algorithm.exact if name not in (settings.sequences or {})]
    if bare and settings.level == "client":
        raise SettingError(
            f"{algorithm.name()} measures {bare[0]!r} without clipping, so noise would not hide it: give "
            f"aggregation.sequences.{bare[0]}.clip, or use another algorithm."
        )


def check_gather(settings: Aggregation) -> None:
    """Raise if single rows may not be read under these settings."""
    for one in settings.of_rows().all():
        check_features(features(one) | {"gather"})


def table() -> str:
    """Return the table of all pairs in Markdown: a tick, or the number of the reason below it."""
    reasons = list(dict.fromkeys(found.why for found in CLASHES))
    names = list(FEATURES)

    def cell(one: str, other: str) -> str:
        why = clash(one, other)
        return "" if one == other else "✓" if why is None else f"no ({reasons.index(why) + 1})"

    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| `{one}` | " + " | ".join(cell(one, other) for other in names) + " |" for one in names]
    lines += ["", *(f"{place}. {why[:1].upper()}{why[1:]}." for place, why in enumerate(reasons, 1)), ""]
    lines += [f"- `{name}`: {text}." for name, text in FEATURES.items()]
    return "\n".join(lines)

"""Which settings of a run go together, as one table.

`check_aggregation` refuses every other combination before anything runs, and the documentation
makes its table from the same entries.
"""

from __future__ import annotations

from typing import NamedTuple

from fedbilevel.aggregation.groups import LEAST
from fedbilevel.aggregation.sealing import bits_of
from fedbilevel.aggregation.settings import Aggregation
from fedbilevel.errors import SettingError
from fedbilevel.federation.algorithm import Algorithm, Cohort, PeerAlgorithm
from fedbilevel.federation.averaging import Averaging
from fedbilevel.federation.network import Links
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
    "groups": "a robust mean of groups of clients",
    "gather": "an algorithm that reads single rows (`gather`)",
    "reads": "an algorithm that uses samples or losses beside derivatives",
    "cohort": "a cohort of some clients",
    "replacement": "a cohort drawn with replacement",
    "private": "a private upper variable",
    "local": "a local lower level",
    "peers": "peers without a server",
    "push_sum": "averages of peers other than gossip",
}
_REST = "the rest that error feedback adds to a row is not bounded by clip, so noise would not hide it"
_ALONE = "masks cancel only if all clients send integers on the same scale at the same places"

_NO_SERVER = "peers read single rows of their neighbours, and there is no server that would see a sum only"
_ONE = "an algorithm has a server or peers, and peers always take part"
_WEIGHTS = "rows of Push-Sum that are changed no longer fit their weights, so their quotient has a bias"


class Clash(NamedTuple):
    """Two features that exclude each other, and the reason."""

    one: str
    other: str
    why: str


CLASHES = (
    Clash("secure", "robust", "a robust mean compares single rows, and the server sees only their sum; set groups"),
    Clash("secure", "gather", "the algorithm compares single rows, and the server sees only their sum"),
    Clash("secure", "int8", f"{_ALONE}, and every client has its own scale"),
    Clash("secure", "topk", f"{_ALONE}, and every client sends other places; randk draws the same for all"),
    Clash("secure", "powersgd", f"{_ALONE}, and a product of two factors is no sum of products"),
    Clash("noise", "robust", "the noise is shared among all clients, and hides a sum but no single row"),
    Clash("noise", "groups", "the noise is shared among all clients, and the sum of a group has only a part of it"),
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
    Clash("groups", "gather", "the algorithm reads every row itself, so the rule would protect nothing"),
    Clash("groups", "replacement", "the number of different clients, and so that of groups, is not known before"),
    Clash("peers", "secure", _NO_SERVER),
    Clash("peers", "noise", _NO_SERVER),
    Clash("peers", "groups", _NO_SERVER),
    Clash("peers", "clip", "peers send whole rows, and no difference to what a server sent"),
    Clash("peers", "powersgd", "the share of a row that it sends is not known, and steps of peers have that length"),
    Clash("peers", "gather", _ONE),
    Clash("peers", "cohort", _ONE),
    Clash("peers", "replacement", _ONE),
    Clash("push_sum", "robust", _WEIGHTS),
    Clash("push_sum", "int8", _WEIGHTS),
    Clash("push_sum", "topk", _WEIGHTS),
    Clash("push_sum", "randk", _WEIGHTS),
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
    Aggregation(secure=True, robust="median", groups=3),
)
NEIGHBOURS = ("trimmed", "centred")  # rules that need the rows of neighbours only
NEEDS = {"noise": ("clip", "the noise is a multiple of the largest norm of a row")}


def clash(one: str, other: str) -> str | None:
    """Return the reason why two features exclude each other, or None."""
    return next((found.why for found in CLASHES if {found.one, found.other} == {one, other}), None)


def features(settings: Aggregation) -> set[str]:
    """Return the features that the settings of a run or of a sequence ask for."""
    found = {name for name in ("secure", "noise", "clip") if getattr(settings, name)}
    if settings.rule is not None:
        found.add("robust" if settings.groups is None else "groups")
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
    _check_groups(settings, size)
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
            needed, what = 2 * int(one.rule.number) + 3, "clients" if one.groups is None else "groups"
            found = size // (one.groups or 1)
            if found < needed:
                raise SettingError(
                    f"aggregation.robust is {one.robust!r}, which needs {needed} {what} in every round, and there are "
                    f"{found}: assume fewer attackers, or use another rule such as 'median'."
                )


def _check_groups(settings: Aggregation, size: int) -> None:
    """Raise if there are too few groups, or no rule for them."""
    if settings.groups is None:
        return
    if all(one.rule is None for one in settings.all()):
        raise SettingError(
            f"aggregation.groups is {settings.groups} without a robust mean: set robust, or leave it out."
        )
    if size // settings.groups < LEAST:
        raise SettingError(
            f"aggregation.groups is {settings.groups}, and {size} clients in every round make "
            f"{size // settings.groups} groups, expected at least {LEAST}: use smaller groups or more clients."
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


def check_peers(
    settings: Aggregation, algorithm: PeerAlgorithm, averaging: Averaging, links: Links, *, unequal: bool = False
) -> None:
    """Raise if peers cannot treat rows by these settings.

    unequal: whether the peers have unequal weights.
    """
    around = {"peers"} | ({"push_sum"} if averaging.kind != "gossip" else set())
    for one in settings.all():
        check_features(features(one) | around)
        if one.rule is not None and (one.rule.kind not in NEIGHBOURS or one.outside is not None):
            rule = one.robust if one.outside is None else f"{one.robust} with outside"
            raise SettingError(
                f"aggregation.robust is {rule}, and peers see the rows of their neighbours only: use "
                f"{' or '.join(NEIGHBOURS)}, without outside."
            )
    verbs = sorted({*algorithm.verbs()} - {"mix"})
    if verbs:
        raise SettingError(
            f"{algorithm.name()} with these settings also sends rows by {verbs[0]}, which the layer does not treat: "
            "use settings that average only (hgp with lower_solver='mix'), or leave out aggregation."
        )
    if links.period != 1:
        raise SettingError(
            "the network changes from step to step, and peers keep copies of the rows of their neighbours: use a fixed "
            "network, or leave out aggregation."
        )
    if unequal:
        raise SettingError(
            "the clients have unequal weights, and a rule or a copy would need them for every row: use client_weights "
            "'equal', or leave out aggregation."
        )


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

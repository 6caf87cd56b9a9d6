"""`Aggregation`: what happens to the rows that clients send, for the whole run and by sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fedbilevel.errors import SettingError, UnknownNameError
from fedbilevel.privacy.noisy_oracle import KINDS
from fedbilevel.settings import Settings, setting

Level = Literal["client", "example"]
OFF = "none"  # switches a setting of the run off for one sequence
_SHARE, _COUNT, _LENGTH = "a share above 0 and at most 1", "a whole number, at least 1", "a number above 0"
# by kind: meaning of the number after the colon, or "" if there is none
COMPRESSORS = {"int8": "", "topk": _SHARE, "randk": _SHARE, "powersgd": _COUNT}
ROBUST = {
    "trimmed": "a share above 0 and below 0.5",
    "median": "",
    "krum": _COUNT,
    "multikrum": _COUNT,
    "centred": _LENGTH,
    "geometric": "",
}
_FITS = {
    _SHARE: lambda number: 0 < number <= 1,
    _COUNT: lambda number: number >= 1 and number == int(number),
    _LENGTH: lambda number: 0 < number < float("inf"),
    ROBUST["trimmed"]: lambda number: 0 < number < 0.5,
}


class Choice(NamedTuple):
    """A method with its number, such as `topk:0.1`."""

    kind: str
    number: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Aggregation(Settings):
    """Treatment of the rows that clients send to the server.

    A row is treated as the difference to the array of its name and length that the server sent with
    the same call, if there is one. Clipping and compression concern rows in the spaces of x and y.
    Statistics that an algorithm measures, such as losses and curvatures, are sent as they are.
    Robust rules concern all rows. Means are sums of integers, which do not depend on the order of
    clients.

    Between peers, `compress` and `robust` treat rows in averages of kind gossip.

    clip: a longer row is scaled to this norm.
    compress: `int8`, `topk:0.1` (the largest tenth of the entries), `randk:0.1` (a tenth that all
        clients draw alike) or `powersgd:2` (two columns of two factors). The rest stays at the
        client, which adds it to its next row (error feedback).
    robust: instead of the mean, `trimmed:0.2` (without a fifth of the weight at both ends),
        `median`, `krum:1` and `multikrum:1` (against one attacker), `centred:1.0` (centred clipping
        with that radius) or `geometric` (geometric median).
    groups: with `robust`, the rule compares the means of random groups of at least this many clients,
        drawn anew in every outer iteration. Under secure sums the server learns the sums of groups
        only. An attacker spoils its whole group.
    outside: with `robust`, for clients that differ: before the rule, each row becomes the mean of its
        nearest rows, without this share of all rows.
    secure: the server sees sums of rows only. Between sites each row carries masks that cancel in the
        sum; in one process the same integers are added without masks.
    noise: standard deviation of the noise in a sum, divided by the largest change of the sum by one
        client, or by one example (differential privacy). It needs `clip` and `epsilon`.
    level: what noise hides. With `client`, rows are clipped and get noise. With `example`, each
        derivative at a client is a sum over examples that are clipped one by one, and gets noise;
        rows are computed from these derivatives, so everything else may be done to them.
    rate: with `example`, the probability with which an example takes part in a derivative.
    clips: with `example`, other norms by derivative: gy, gx, fy, fx, hv (H v) or jv (J v).
    epsilon, delta: the privacy budget at which the run stops.
    fixed_point: bits of an integer; None means as many as the weights and the noise leave.
    bound: largest entry of a row without `clip`; None derives it from the arrays that were sent.
    sequences: other settings by the name of a sequence, e.g. `{"u": {"clip": 5.0, "compress":
        "none"}}`.

    >>> import fedbilevel as fb
    >>> from fedbilevel.tasks.quadratic import Quadratic
    >>> layer = fb.Aggregation(clip=10.0, compress="int8", sequences={"u": {"compress": "none"}})
    >>> runs = [fb.solve(*Quadratic().build(), "fedbio", num_rounds=2, aggregation=a) for a in (None, layer)]
    >>> [run.ledger["bytes_up"] for run in runs]
    [640, 420]
    """

    clip: float | None = setting(None, "largest L2 norm of a row, as a difference to what the client received", above=0)
    compress: str | None = setting(None, "compression with error feedback: int8, topk:0.1, randk:0.1 or powersgd:2")
    robust: str | None = setting(
        None, "robust mean: trimmed:0.2, median, krum:1, multikrum:1, centred:1.0 or geometric"
    )
    groups: int | None = setting(
        None, "with a robust mean, compare the means of groups of at least this many clients", least=3
    )
    outside: float | None = setting(
        None, "before a robust mean, average each row with its nearest rows, without this share", least=0, most=0.49
    )
    secure: bool = setting(False, "secure sums: the server sees sums of rows only")
    noise: float | None = setting(None, "noise multiplier of differential privacy", above=0)
    level: Level = setting("client", "what noise hides: a client, or one example of a client")
    rate: float = setting(1.0, "level example: probability of an example to take part", above=0, most=1)
    clips: dict[str, Any] | None = setting(None, "level example: other norms of clipping by derivative")
    epsilon: float | None = setting(None, "privacy budget: the run stops at this epsilon", above=0)
    delta: float = setting(1e-5, "delta of the privacy budget", above=0, most=0.1)
    fixed_point: int | None = setting(
        None, "bits of an integer in a sum (None: as many as the weights leave)", least=8, most=54
    )
    bound: float | None = setting(None, "largest entry of a row without clip (None: from what was sent)", above=0)
    sequences: dict[str, Any] | None = setting(None, "other settings by the name of a sequence")

    def __post_init__(self) -> None:
        super().__post_init__()
        for label, known in (("compress", COMPRESSORS), ("robust", ROBUST)):
            parsed(label, getattr(self, label), known)
        for name in self.sequences or ():
            self.of(name)
        if (self.noise is None) != (self.epsilon is None):
            given, missing = ("noise", "epsilon") if self.epsilon is None else ("epsilon", "noise")
            raise SettingError(f"aggregation.{given} is given without aggregation.{missing}: give both, or neither.")
        self._check_level()

    def _check_level(self) -> None:
        if self.level == "client":
            for label, usual in (("rate", 1.0), ("clips", None)):
                if getattr(self, label) != usual:
                    raise SettingError(f"aggregation.{label} is for examples: set aggregation.level = 'example'.")
            return
        if self.noise is None or self.clip is None:
            raise SettingError("aggregation.level is 'example' without noise or clip: give clip, noise and epsilon.")
        for kind, clip in (self.clips or {}).items():
            if kind not in KINDS:
                raise UnknownNameError("derivative in aggregation.clips", kind, KINDS)
            if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < float("inf"):
                raise SettingError(f"aggregation.clips.{kind} is {clip!r:.80}, expected a number above 0.")
        for name, own in (self.sequences or {}).items():
            if "clip" in own:
                raise SettingError(
                    f"aggregation.sequences.{name}.clip is given, and with level 'example' derivatives are clipped "
                    "and rows are not: give aggregation.clips."
                )

    def of_rows(self) -> Aggregation:
        """Return the settings for rows, which have no clipping and noise of their own at the level of
        examples."""
        if self.level == "client":
            return self
        return dataclasses.replace(
            self, level="client", rate=1.0, clip=None, clips=None, noise=None, epsilon=None, delta=1e-5
        )

    @property
    def compressor(self) -> Choice | None:
        return parsed("compress", self.compress, COMPRESSORS)

    @property
    def rule(self) -> Choice | None:
        return parsed("robust", self.robust, ROBUST)

    def of(self, name: str) -> Aggregation:
        """Return the settings of one sequence."""
        own = (self.sequences or {}).get(name)
        if own is None:
            return self if self.sequences is None else dataclasses.replace(self, sequences=None)
        if not isinstance(own, Mapping):
            raise SettingError(f"aggregation.sequences.{name} is {own!r:.80}, expected a table of settings.")
        known = ("clip", "compress", "robust", "outside", "bound")
        for label in own:
            if label not in known:
                raise UnknownNameError(f"setting of the sequence {name}", label, known)
        values: dict[str, Any] = {label: None if value == OFF else value for label, value in own.items()}
        return dataclasses.replace(self, sequences=None, **values)

    def all(self) -> list[Aggregation]:
        """Return the settings of the run and of every named sequence."""
        return [self.of(""), *(self.of(name) for name in self.sequences or ())]


def parsed(label: str, text: str | None, known: Mapping[str, str]) -> Choice | None:
    """Return the method and number in a text such as `topk:0.1`, or None."""
    if text is None or text == OFF:
        return None
    kind, colon, number = text.partition(":")
    if kind not in known:
        raise UnknownNameError(f"method of aggregation.{label}", kind, known)
    meaning = known[kind]
    if not meaning:
        if colon:
            raise SettingError(f"aggregation.{label} is {text!r}, and {kind} has no number: write {kind!r}.")
        return Choice(kind)
    try:
        value = float(number)
        fits = _FITS[meaning](value)
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise SettingError(f"aggregation.{label} is {text!r}, expected {kind}:NUMBER with {meaning}.")
    return Choice(kind, value)

"""Sites whose answers were far from the others': the diary's sentences about them, and the site
that explains a failure."""

from __future__ import annotations

from fedbilevel.sites.outliers import Flag, OutlierWatch


class Suspects:
    """Remembers flags by the name of the site."""

    def __init__(self) -> None:
        self.watch = OutlierWatch()
        self._new: dict[str, str] = {}  # flags since `taken`
        self._averaged: dict[str, Flag] = {}  # first flagged answer that went into a mean, until a clean iteration

    def flag(self, site: str, flag: Flag) -> None:
        self._new.setdefault(site, str(flag))
        self.watch.remember(site, flag.iteration)

    def averaged(self, site: str, flag: Flag) -> None:
        """Remember that a flagged answer of this site went into a mean."""
        self._averaged.setdefault(site, flag)

    def is_only(self, site: str) -> bool:
        """Check whether no other site is suspect."""
        return not self._averaged.keys() - {site}

    def begin(self, iteration: int) -> None:
        """Clear sites that were not flagged in the outer iteration before."""
        recent = {site: flag for site, flag in self._averaged.items() if self.watch.last(site) >= iteration - 1}
        self._averaged = recent

    def taken(self) -> dict[str, str]:
        """Return the flags since the last call, by site."""
        found, self._new = dict(sorted(self._new.items())), {}
        return found

    def blame(self, iteration: int) -> str:
        """Write a sentence about the first site whose outlying answer went into a mean, because
        that answer explains later failures. Return an empty text if there is no such site."""
        if not self._averaged:
            return ""
        site, flag = min(self._averaged.items(), key=lambda entry: entry[1].iteration)
        fix = "look at that site, then start the run anew without it or with exclude_outliers = true"
        return f"{flag.of(site)}: {fix}{self.watch.history(iteration)}."

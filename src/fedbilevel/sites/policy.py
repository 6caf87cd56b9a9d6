"""A site's own settings: where its data are, and what it allows. The file `site.toml` never leaves
the site.

    data = "/data/cleaning"  # folder for the loader; FEDBILEVEL_SITE_DATA overrides it
    loader = "folder"        # train.npz, val.npz, ...; or "package.module:function", installed;
                             # or "simulated": the task's own data of this client, for trials
    device = "cpu"
    auto_approve = false     # true: plans run without an operator's approval
    [policy]                 # limits, see `Policy`
    [policy.settings]        # allowed ranges of algorithm and task settings, by name or pattern

Neither the server nor a message can change these. Every refusal names the line of the file that
caused it.
"""

from __future__ import annotations

import fnmatch
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.data.folders import read_folder, read_folders
from fedbilevel.errors import DataError, PlanError, PolicyError, UnknownNameError
from fedbilevel.problem.client_data import Holdings
from fedbilevel.settings import check_plain
from fedbilevel.sites.loaders import is_one_client, loader_of
from fedbilevel.sites.plan import SitePlan

FILE = "site.toml"
TEMPLATE = """\
# This site's own settings. Nothing in this file ever leaves the site.

data = ""                             # folder with train.npz, val.npz, ...; `start-site KIT --data PATH` sets it too
loader = "folder"                     # or "package.module:function", installed here and called with the path
device = "cpu"
auto_approve = false                  # true: plans run without `fedbilevel federation approve`

[policy]                              # a run that does not keep to these lines is refused; shown are the defaults
# tasks = ["data_cleaning"]           # the only tasks allowed; without this line: all that are installed here
# algorithms = ["fedbio"]             # likewise
# min_samples = 1                     # training samples that this site must have
# min_batch = 16                      # samples behind every number that leaves
# max_rounds = 5000                   # phases and measurements computed, in total over all runs of this kit
# max_repeats = 100                   # outer iterations of one plan that may be done again, as after a crash
# max_answer_megabytes = 64           # size of one answer
# max_answer_seconds = 600            # computing time of one answer
# max_memory_megabytes = 8192         # memory of the job's process; without this line: half of the machine's
# max_disk_megabytes = 4096           # this site's folder: state of runs and logs
# min_members = 3                     # sites in a secure sum to which this site contributes
# max_runs = 20                       # runs with state on this site's disk
# max_epsilon = 8.0                   # privacy of one sample over all runs of this kit; plans need noise then
# max_delta = 1e-5                    # delta at which max_epsilon counts

[policy.settings]                     # allowed ranges of the plan's settings, by name or pattern
# num_local_steps = [1, 1000]
# "num_*" = [0, 1000]
"""
DATA = "FEDBILEVEL_SITE_DATA"
Range = tuple[float, float]
RANGES: dict[str, Range] = {
    "num_iterations": (1, 100_000), "num_classes": (2, 1000), "num_hidden": (1, 4096), "num_train": (1, 100_000),
    "num_val": (1, 100_000), "num_test": (1, 100_000), "num_*": (0, 1000), "dim_*": (1, 1000),
}  # fmt: skip
_KINDS = {"data": "text", "loader": "text", "device": "text", "auto_approve": "flag", "policy": "table"}
_POLICY = {
    "tasks": "names",
    "algorithms": "names",
    "min_samples": "whole",
    "min_batch": "whole",
    "max_rounds": "whole",
    "max_repeats": "whole",
    "max_answer_megabytes": "number",
    "max_answer_seconds": "number",
    "max_memory_megabytes": "number",
    "max_disk_megabytes": "number",
    "max_runs": "whole",
    "min_members": "whole",
    "max_epsilon": "number",
    "max_delta": "number",
    "settings": "table",
}


@dataclass(frozen=True)
class Policy:
    """Limits on what a run may learn from a site and on the resources that it may use. The defaults
    are for real data."""

    tasks: list[str] | None = None
    algorithms: list[str] | None = None
    min_samples: int = 1
    min_batch: int = 16
    max_rounds: int = 5_000
    max_repeats: int = 100
    max_answer_megabytes: float = 64.0
    max_answer_seconds: float = 600.0
    max_memory_megabytes: float | None = None
    max_disk_megabytes: float = 4096.0
    max_runs: int = 20
    min_members: int = 3
    max_epsilon: float | None = None
    max_delta: float = 1e-5
    settings: dict[str, Range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.max_epsilon is None or 0 < self.max_epsilon < float("inf")) or not 0 < self.max_delta < 1:
            raise PlanError(
                f"max_epsilon and max_delta of the policy in {FILE} are {self.max_epsilon} and {self.max_delta}, "
                "expected a positive number and one between 0 and 1."
            )

    def check_plan(self, plan: SitePlan) -> None:
        """Check everything that can be checked before any data are read."""
        for line, asked in (("tasks", plan.task["name"]), ("algorithms", plan.algorithm["name"])):
            allowed = getattr(self, line)
            if allowed is not None and asked not in allowed:
                known = ", ".join(allowed) or "none"
                raise PolicyError(f"this site's policy does not allow {asked}: its line {line!r} allows {known}.")
        for name, value in _numbers(plan):
            self.check_setting(name, value)
        for size in _batch_sizes(plan):
            if size < self.min_batch:
                raise PolicyError(
                    f"this site's policy does not allow batches of {size} samples: its line 'min_batch' asks for "
                    f"at least {self.min_batch}."
                )

    def check_setting(self, name: str, value: float) -> None:
        low, high = self.range_of(name)
        if not low <= value <= high:
            raise PolicyError(
                f"this site's policy does not allow {name} = {value}: its line {name!r} in [policy.settings] "
                f"allows {low:g} to {high:g}."
            )

    def range_of(self, name: str) -> Range:
        """Find the range of a setting. The site's own line takes precedence over a default, and an
        exact name over a pattern."""
        for ranges in (self.settings, RANGES):
            for pattern in sorted(ranges, key=lambda one: (one != name, -len(one))):
                if fnmatch.fnmatchcase(name, pattern):
                    return ranges[pattern]
        return (-float("inf"), float("inf"))

    def check_samples(self, sizes: Mapping[str, int], rate: float = 1.0) -> None:
        """Raise if there are few samples, because a sum over few samples is close to a single
        sample.

        sizes: number of samples by role.
        rate: probability with which each of them takes part.
        """
        if sizes["train"] < self.min_samples:
            raise PolicyError(
                f"this site has fewer than the {self.min_samples} training samples that the line 'min_samples' of its "
                "policy asks for: lower it there, or run without this site."
            )
        for role, size in sizes.items():
            if rate * size < self.min_batch:
                raise PolicyError(
                    f"this site has fewer {role} samples than the {self.min_batch} that the line 'min_batch' of its "
                    "policy asks for: lower it there, or run without this site."
                )

    def check_rounds(self, num_rounds: int) -> None:
        """Raise if the site has answered too often.

        num_rounds: number of answers so far over all runs, including the requested answer.
        """
        if num_rounds > self.max_rounds:
            raise PolicyError(
                f"this site's policy allows {self.max_rounds} answers in total over all runs, and they are used up: "
                "raise its line 'max_rounds' there, or run without this site."
            )

    def check_repeats(self, num_repeats: int) -> None:
        """Raise if too many outer iterations were repeated.

        num_repeats: number of repeated outer iterations of a plan, including the requested one.
        """
        if num_repeats > self.max_repeats:
            raise PolicyError(
                f"this site's policy allows to repeat {self.max_repeats} outer iterations of a plan, and they are used "
                "up: raise its line 'max_repeats' there, or start a new run."
            )

    def check_answer(self, num_bytes: int) -> None:
        if num_bytes > self.max_answer_megabytes * 1e6:
            raise PolicyError(
                f"this site's policy does not allow an answer of {num_bytes / 1e6:.1f} MB: its line "
                f"'max_answer_megabytes' allows {self.max_answer_megabytes:g}."
            )

    def check_seconds(self, seconds: float) -> None:
        if seconds > self.max_answer_seconds:
            raise PolicyError(
                f"this site stopped computing an answer after {seconds:.0f} s: the line 'max_answer_seconds' of its "
                f"policy allows {self.max_answer_seconds:g}."
            )

    def check_disk(self, folder: Path, more: int = 0) -> None:
        """Raise if the site's folder would become too large.

        more: bytes that will be written.
        """
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) + more
        if used > self.max_disk_megabytes * 1e6:
            raise PolicyError(
                f"this site's folder would hold {used / 1e6:.0f} MB: the line 'max_disk_megabytes' of its policy "
                f"allows {self.max_disk_megabytes:g}."
            )

    def check_runs(self, runs: Path, name: str) -> None:
        """Raise if too many runs have state at this site.

        runs: the folder with one sub-folder for each run that has state here.
        """
        known = {path.name for path in runs.iterdir() if path.is_dir()} if runs.is_dir() else set()
        if name not in known and len(known) >= self.max_runs:
            raise PolicyError(
                f"this site holds the state of {len(known)} runs: the line 'max_runs' of its policy allows "
                f"{self.max_runs}; delete finished runs there, or raise it."
            )

    def limit_memory(self) -> None:
        """Set the memory limit of this process, until the process ends."""
        import resource

        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        used, mapped = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmData"))
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        allowed = machine / 2 if self.max_memory_megabytes is None else self.max_memory_megabytes * 1e6
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = mapped + max(0, int(allowed) - used)  # the limit counts mapped memory, of which a part is in use
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    def memory_error(self) -> PolicyError:
        return PolicyError(
            "this site has not enough memory for the request: raise the line 'max_memory_megabytes' of its policy, "
            "or choose a smaller model or batch."
        )


@dataclass(frozen=True)
class SiteSettings:
    """The content of `site.toml`."""

    data: str = ""
    loader: str = "folder"
    device: str = "cpu"
    auto_approve: bool = False
    policy: Policy = field(default_factory=Policy)

    def holdings(self, plan: SitePlan, site: str) -> list[Holdings]:
        """Read the data of the clients that this site hosts, from one folder with train and val or
        from a folder for each client."""
        found, numbers = self._read(plan, plan.numbers(site)), plan.numbers(site)
        if len(found) != len(numbers):
            raise PolicyError(
                f"this site has the data of {len(found)} clients, and the plan expects {len(numbers)}: "
                f"set clients = {{{site} = {len(found)}}} in the run file."
            )
        return found

    def _read(self, plan: SitePlan, numbers: range) -> list[Holdings]:
        if self.loader == "simulated":
            clients = plan.built_task().build().clients
            if numbers.stop > len(clients):
                raise PlanError(
                    f"the simulated task has {len(clients)} clients, this site hosts number {numbers.stop - 1}: "
                    "raise num_clients of the task in the plan."
                )
            return list(clients[numbers.start : numbers.stop])
        place = os.environ.get(DATA) or self.data
        if not place:
            raise PlanError(
                f"this site does not say where its data are: set data in its {FILE}, or start it with --data."
            )
        if self.loader == "folder" and is_one_client(Path(place)):
            return [read_folder(Path(place), num_classes=plan.num_classes)]
        if self.loader == "folder":
            return list(read_folders(place, num_classes=plan.num_classes).values())
        found = loader_of(self.loader, FILE)(place)
        return found if isinstance(found, list) else [found]


def _numbers(plan: SitePlan) -> Iterator[tuple[str, float]]:
    """Yield all numbers of a plan that a range can bound, with their names."""
    yield "num_iterations", plan.num_iterations
    yield "num_clients", plan.num_clients
    if plan.num_classes is not None:
        yield "num_classes", plan.num_classes
    for table in (plan.task, plan.algorithm):
        for name, value in table.items():
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, int | float) and not isinstance(one, bool):
                    yield name, one


def _batch_sizes(plan: SitePlan) -> list[int]:
    size = plan.keywords()["batch_size"]
    return [one for one in (size.values() if isinstance(size, Mapping) else (size,)) if one is not None]


def read_settings(folder: Path) -> SiteSettings:
    place = folder / FILE
    try:
        content = tomllib.loads(place.read_text()) if place.exists() else {}
    except OSError as error:
        raise PlanError(f"{FILE} of this site cannot be read ({error.strerror}): put a file there, or none.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{FILE} of this site is not readable as TOML: {error}.") from error
    policy = content.get("policy", {})
    for kinds, table, what in (
        (_KINDS, content, f"entry of {FILE}"),
        (_POLICY, policy, f"entry of the policy in {FILE}"),
    ):
        for name, value in table.items() if isinstance(table, dict) else ():
            if name not in kinds:
                raise UnknownNameError(what, name, kinds)
            check_plain(f"{name} in {FILE}", value, kinds[name], PlanError)
    ranges = {name: _range(name, value) for name, value in policy.get("settings", {}).items()}
    limits = {name: value for name, value in policy.items() if name != "settings"}
    return SiteSettings(**{**content, "policy": Policy(**limits, settings=ranges)})


def _range(name: str, value: Any) -> Range:
    match value:
        case [int() | float() as low, int() | float() as high] if not {type(low), type(high)} & {bool} and low <= high:
            return low, high
    raise PlanError(f"{name} in [policy.settings] of {FILE} is {value!r}, expected a range such as [1, 100].")


def check_data(settings: SiteSettings, place: Path) -> None:
    """Raise at the start of a site if there are no data to read, before a run depends on them."""
    if settings.loader == "folder" and not any(
        path.stem == "train" for pattern in ("*", "*/*") for path in place.glob(pattern)
    ):
        raise DataError(
            f"there is no train file in {place}: a site's folder holds train.npz and val.npz (or .csv, or "
            ".safetensors), or one such folder per client."
        )

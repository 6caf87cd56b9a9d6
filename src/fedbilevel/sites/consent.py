"""Consent of a site: a plan runs at the site only if it is the submitted plan, fits the policy and
is approved."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel._version import __version__
from fedbilevel.errors import (
    AwaitingOperatorError,
    PlanError,
    PolicyError,
    SettingError,
    UnknownNameError,
    WireError,
)
from fedbilevel.sites import operator
from fedbilevel.sites.plan import SitePlan, plan_digest, plan_of
from fedbilevel.sites.policy import SiteSettings, read_settings
from fedbilevel.sites.preview import preview
from fedbilevel.sites.status import StatusFile

PAUSED = "the site is paused: `fedbilevel federation unpause` there ends the pause."


class Submitted(NamedTuple):
    """The plan of the job that a site takes part in, as stated in the job's signed
    configuration."""

    digest: str
    who: str  # the lead's name, from the certificate that signed the plan
    job: str = ""


class Consent:
    """Checks the plan that a server sends, and the operator's decision about the plan.

    submitted: the only plan that this site answers to; None, for trials in one process, allows any
        approved plan.
    """

    def __init__(self, name: str, folder: Path, submitted: Submitted | None, status: StatusFile) -> None:
        self._name, self._folder, self._submitted, self._status = name, folder, submitted, status
        self.digest = submitted.digest if submitted else ""
        self._run = ""  # name of the plan's run

    def admitted(self, header: Mapping[str, Any]) -> tuple[SitePlan, SiteSettings]:
        """Check the plan in a server's request to join, and return the plan with the settings that
        were used for the checks."""
        _check_version(header.get("version"))
        content, settings = header.get("plan", {}), read_settings(self._folder)
        plan = self._checked(content, settings)
        self._ask_operator(content, plan, settings)
        return plan, settings

    def _checked(self, content: Any, settings: SiteSettings) -> SitePlan:
        """Check a plan against the submitted plan and the site's policy before any data are
        read."""
        digest = plan_digest(content) if isinstance(content, Mapping) else ""
        if self._submitted is not None and digest != self._submitted.digest:
            raise PolicyError(
                f"the message has the plan {digest[:12] or 'none'}, but the plan {self._submitted.digest[:12]} was "
                "submitted for this job: submit the plan that is to run."
            )
        try:
            plan = plan_of(content)
        except (PlanError, SettingError, UnknownNameError) as error:  # without the list of what is installed here
            raise WireError(str(error).partition(" Known:")[0]) from error
        if self._name not in plan.sites:
            raise PolicyError(f"this site is not among those of the plan ({', '.join(plan.sites)}): name it there.")
        settings.policy.check_plan(plan)
        settings.policy.check_disk(self._folder)
        self.digest = digest
        return plan

    def _ask_operator(self, content: Mapping[str, Any], plan: SitePlan, settings: SiteSettings) -> None:
        """File a new plan for the operator. An approval by `auto_approve` counts only while that
        setting is true."""
        if not settings.auto_approve:
            operator.withdraw_automatic(self._folder)
        self._run = plan.name
        if self._decision() is None:
            auto = self._approves_itself()
            leaves = {} if auto else preview(plan, self._name, settings)
            who = self._submitted.who if self._submitted else "this process"
            operator.ask(self._folder, self.digest, who, plan.name, content, leaves)
            if auto:
                operator.approve(self._folder, self.digest, "auto_approve in site.toml", "auto")
        self.check_approved(plan.name)

    def check_approved(self, run: str) -> None:
        decision = self._decision()
        if decision is None:
            self._status.write(state="waiting for approval", run=run, digest=self.digest)
            raise AwaitingOperatorError(self._waiting())
        if decision != "approved":
            self._status.write(state="left", run=run, digest=self.digest)
            said = "has left the run" if decision == "left" else "has refused the plan"
            raise PolicyError(f"its operator {said}: ask there for `fedbilevel federation approve {self.digest[:12]}`.")

    def check_unpaused(self) -> None:
        if operator.is_paused(self._folder):
            self._status.write(state="paused")
            raise AwaitingOperatorError(PAUSED)

    def availability(self, busy: bool) -> dict[str, Any]:
        """Return the answer to a ping: whether the site is busy, and whether it waits for its
        operator."""
        if operator.is_paused(self._folder):
            return {"busy": True, "wait": PAUSED}
        if self.digest and not busy and self._decision() is None and not self._approves_itself():
            return {"busy": False, "wait": self._waiting()}
        return {"busy": busy}

    def _decision(self) -> str | None:
        return operator.decision(self._folder, self.digest)

    def _approves_itself(self) -> bool:
        """Check whether plans of this run need no operator. They always need one after the operator
        refused a plan of the run or left the run."""
        with contextlib.suppress(PlanError, UnknownNameError):
            said = {one["decision"] for one in operator.requests(self._folder) if one["run"] == self._run}
            return read_settings(self._folder).auto_approve and not said & {"refused", "left"}
        return False

    def _waiting(self) -> str:
        return f"the plan is not approved there yet: `fedbilevel federation approve {self.digest[:12]}`."


def _check_version(version: Any) -> None:
    if version is not None and version != __version__:
        raise WireError(
            f"this site has fedbilevel {__version__}, the server {version!r:.20}: install the same version at both."
        )

"""Code that runs inside the job processes of FLARE: a Server at the server, and a Client at each
site."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nvflare.collab import collab

from fedbilevel.errors import FedBilevelError, PolicyError, QuorumError
from fedbilevel.sites.flare.configuration import lead_of, unpacked
from fedbilevel.sites.flare.identity import Party, Signer, root_of, server_of
from fedbilevel.sites.flare.progress import ProgressFile
from fedbilevel.sites.flare.transport import ANSWER, ASKED, CALL, SERVER, FlareTransport, Tidy
from fedbilevel.sites.transport import SiteTransport

if TYPE_CHECKING:
    from fedbilevel.sites.consent import Submitted

RUNS = "runs"  # folder of a kit: records of runs at the server, plans of runs at the lead
PROGRESS = "progress.json"  # in the folder of a run; the lead reads it through the server
SITE = "site"  # folder of a site's kit: its settings, its state, and the log of what left it
STOP = "fedbilevel_stop"  # the lead's command to a running job: stop after the current outer iteration

log = logging.getLogger(__name__)


class Handler(Protocol):
    def handle(self, message: bytes) -> bytes: ...

    def refuse_caller(self, caller: str, reason: str) -> str: ...


class Client:
    """The site in a job process, which answers only the server of its own job.

    plan: the submitted plan, from the job's configuration.
    seal: the lead's signature of the plan.
    """

    def __init__(self, plan: str = "", seal: str = "") -> None:
        self.plan, self.seal = plan, seal
        self._site: Handler | None = None
        self._signer: Signer | None = None
        self._server: Party | None = None  # from the certificate of an earlier call
        self._lock = threading.Lock()
        self._tidy = Tidy()

    def site(self, name: str, folder: Path) -> Handler:
        from fedbilevel.sites.membership import Papers
        from fedbilevel.sites.policy import read_settings
        from fedbilevel.sites.site import Site

        kit = folder.parent
        plan = submitted(kit, self.plan, self.seal, str(collab.fl_ctx.get_job_id()))
        papers = Papers(Signer(kit), lambda certificate: Party(certificate, root_of(kit)))
        found = Site(name, folder, plan, papers)
        with contextlib.suppress(FedBilevelError):  # joining says what is wrong with the settings
            read_settings(folder).policy.limit_memory()
        Rejections(found.refuse_caller).attach()
        return found

    @collab.publish
    def handle(self, message: bytes, signature: bytes, certificate: bytes) -> dict[str, Any]:
        """Answer the server. For an unexpected error, only the type leaves the site, because the
        message of the error may quote data."""
        try:
            kit, job = Path(collab.workspace.get_root_dir()), str(collab.fl_ctx.get_job_id())
            with self._lock:  # at the first message: FLARE allows a minute for initialisation, and data may take longer
                if self._signer is None:
                    self._signer = Signer(kit)
                if self._site is None:
                    self._site = self.site(collab.site_name, kit / SITE)
            reason = self._stranger(kit, job, message, signature, certificate)
            if reason:
                return {"refusal": self._site.refuse_caller(collab.caller, reason)}
            answer = self._site.handle(message)
            self._tidy(len(message) + len(answer))
            shown = self._signer.certificate if certificate else b""  # a server that shows its own does not know ours
            return {
                "content": answer,
                "signature": self._signer.sign(ANSWER, job, collab.site_name, message, answer),
                "certificate": shown,
            }
        except PolicyError as error:
            log.warning("refused: %s", error)
            return {"refusal": str(error)}
        except Exception as error:
            log.exception("a call failed")
            return {"refusal": f"the site failed with {type(error).__name__}; its own log says more."}

    def _stranger(self, kit: Path, job: str, message: bytes, signature: bytes, certificate: bytes) -> str:
        """Return the reason why a call is not from the server of this job, or an empty text if it
        is. FLARE's name for the caller is checked first, but the signature decides, because a
        routing header can be forged."""
        if collab.caller != SERVER:
            return f"this site answers the server of the run only, and not {collab.caller}."
        if certificate:
            party = Party(certificate, root_of(kit))
            if party.name != server_of(kit):
                holder = f"the holder of the certificate of {party.name}"
                return f"this site answers the server of the run only, and not {holder}."
            self._server = party
        if self._server is None or not self._server.signed(signature, CALL, job, collab.site_name, message):
            return "the message does not carry the signature of the server of the run."
        return ""


def submitted(kit: Path, plan: str, seal: str, job: str) -> Submitted:
    """Check the lead's signature and return the plan of a job."""
    from fedbilevel.sites.consent import Submitted
    from fedbilevel.sites.plan import plan_digest

    return Submitted(plan_digest(unpacked(plan)), lead_of(kit, plan, seal), job)


class Rejections(logging.Handler):
    """Reports calls from other jobs and from strangers that FLARE itself refused, because FLARE
    only logs these calls."""

    _CALL = re.compile(r"rejected Collab call from (\S+): (.*)")

    def __init__(self, report: Callable[[str, str], str]) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def attach(self) -> None:
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        found = self._CALL.search(record.getMessage())
        if found:
            self._report(found[1], f"FLARE refused the call: {found[2]}.")


class Server:
    """Runs the plan at the server, or resumes it after an earlier job of the same run."""

    def __init__(self, plan: str, seal: str = "") -> None:
        self.plan, self.seal = plan, seal

    def serve(
        self, plan: dict[str, Any], transport: SiteTransport, folder: Path, say: Callable[[dict[str, Any]], None]
    ) -> str:
        from fedbilevel.sites.serve import serve

        root = root_of(Path(collab.workspace.get_root_dir()))
        return serve(plan, transport, folder, say, lambda certificate: Party(certificate, root))

    @collab.main
    def run(self) -> None:
        plan = unpacked(self.plan)
        lead_of(Path(collab.workspace.get_root_dir()), self.plan, self.seal)
        transport = FlareTransport()
        folder = Path(collab.workspace.get_root_dir()) / RUNS / plan["name"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as mine:
            try:
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # two followers may have started a job each
                log.error("another job of the run %s is still at work", plan["name"])
                transport.close()
                return
            self._run(plan, transport, folder)

    def _run(self, plan: dict[str, Any], transport: FlareTransport, folder: Path) -> None:
        progress = ProgressFile(folder / PROGRESS, collab.fl_ctx.get_job_id(), list(transport.sites))

        def stop(_topic: str, data: Any, _context: Any) -> dict[str, Any]:
            transport.ask_to_stop(str((data or {}).get("why") or ASKED))
            return {"stopping": transport.stopping}

        collab.fl_ctx.get_engine().register_app_command(STOP, stop)
        try:
            outcome = self.serve(plan, transport, folder, progress.say)
        except QuorumError as error:  # another job may find more sites
            log.error("the job ended: %s", error)
            progress.end("interrupted", str(error))
        except FedBilevelError as error:
            log.error("the run ended: %s", error)
            progress.end("failed", str(error))
        else:
            progress.end(outcome, transport.stopping if outcome == "stopped" else "")
        finally:
            transport.close()

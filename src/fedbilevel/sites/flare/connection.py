"""Connections of the lead to the server of a federation, through FLARE's own sessions."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedbilevel.errors import FedBilevelError, SettingError

TROUBLE = (
    ConnectionError,
    TimeoutError,
    FLCommunicationError,
    api_spec.SessionClosed,
    api_spec.AuthenticationError,
    api_spec.InternalError,
    api_spec.NoReply,
    api_spec.JobNotRunning,
    RuntimeError,
)
REFUSED = (api_spec.AuthorizationError, api_spec.InvalidJobDefinition)  # a repetition would be refused again
T = TypeVar("T")


def check_lead(kit: Path) -> Path:
    settings = kit / "startup" / "fed_admin.json"
    if not settings.is_file():
        raise SettingError(f"{kit} is not the kit of a lead: there is no startup/fed_admin.json in it.")
    return settings


def _opened(kit: Path, timeout: float = 10.0) -> Session:
    settings = check_lead(kit)
    user = json.loads(settings.read_text())["admin"]["username"]
    with contextlib.redirect_stdout(io.StringIO()):  # FLARE prints that it connects
        return new_secure_session(user, str(kit.resolve()), timeout=timeout)


@contextlib.contextmanager
def session(kit: Path, timeout: float = 10.0) -> Iterator[Session]:
    """Open a session for one request. Raise an error if the server cannot be reached."""
    try:
        opened = _opened(kit, timeout)
    except TROUBLE as error:
        raise FedBilevelError(
            f"the server of {kit} cannot be reached ({error}): start it, and open its port."
        ) from None
    try:
        yield opened
    except REFUSED as error:
        raise FedBilevelError(f"the server refused: {error}.") from None
    finally:
        _close(opened)


def _close(opened: Session) -> None:
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):  # the connection may be lost
        opened.close()


class Link:
    """A session that opens again after the connection was lost, because the server may restart
    while a run is followed."""

    def __init__(self, kit: Path, say: Callable[[str], None]) -> None:
        self._kit, self._say = kit, say
        self._session: Session | None = None
        self._lost = False

    def ask(self, question: Callable[..., T], *arguments: Any, quietly: bool = False) -> T | None:
        """Return the result of `question(session, *arguments)`, or None if the server could not be
        reached.

        quietly: whether to report no fault, because a site may be the reason for it.
        """
        try:
            if self._session is None:
                self._session = _opened(self._kit, timeout=5.0)
            answer = question(self._session, *arguments)
        except REFUSED as error:
            raise FedBilevelError(f"the server refused: {error}.") from None
        except TROUBLE as error:
            self.close()
            if quietly:
                return None
            if not self._lost:
                self._say(f"no answer from the server ({error}); trying on.")
            self._lost = True
            return None
        if self._lost:
            self._say("the server answers again.")
        self._lost = False
        return answer

    def close(self) -> None:
        if self._session is not None:
            _close(self._session)
        self._session = None

"""The page of a site's operator: the state of the site, and buttons to decide.

The site's machine serves the page to itself. Other users of the machine can reach the port too, so
every request needs a token, which is new at each start and is part of the address in the operator's
terminal. The command line of a browser would show the address to all users, so the browser opens a
private file that redirects to the address.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedbilevel.errors import FedBilevelError, SettingError
from fedbilevel.report.page import as_data, file_of, filled, hash_of, policy_of
from fedbilevel.report.watch import Answer, OwnMachine
from fedbilevel.sites import operator, telling
from fedbilevel.sites.view import View

LONGEST = 4096  # bytes of an action
LOOK = Callable[[], View]


def content(view: View, kit: Path) -> dict[str, Any]:
    """Return the whole content of the page, in words."""
    return {
        "name": view.name,
        "kit": str(kit),
        "rows": [row for row in telling.rows(view, kit) if row[0] != telling.WAITING],
        "pending": [{**_named(one), "rows": telling.plan_rows(one)} for one in view.pending],
        "paused": view.paused,
        "run": view.run if view.is_at_work else "",
        "progress": view.iterations if view.is_at_work else (None, 0),
        "trouble": _trouble(view),
    }


def _trouble(view: View) -> str:
    """Return the reason why the site cannot answer, or an empty text if no reason is known."""
    if view.running is False:
        return "This site is not running: start it with start-site."
    if view.connected is False:
        return "This site is not connected to the server; it tries again by itself."
    return "A file of this site cannot be read; see below." if view.problems else ""


def _named(request: dict[str, Any]) -> dict[str, str]:
    return {name: request[name] for name in ("digest", "run", "who")}


def act(folder: Path, by: str, asked: Any) -> str:
    """Carry out the action of a button, and return a sentence about the action."""
    match asked:
        case {"action": "approve", "digest": str(digest)}:
            return f"{operator.approve(folder, digest, by)['run']} is approved."
        case {"action": "refuse", "digest": str(digest)}:
            return f"{operator.refuse(folder, digest, by)['run']} is refused."
        case {"action": "leave", "run": str(run)}:
            operator.leave(folder, run, by)
            return f"This site takes no further part in {run}."
        case {"action": "pause"}:
            operator.pause(folder)
            return "This site is paused: it answers nothing until you resume."
        case {"action": "unpause"}:
            operator.unpause(folder)
            return "This site answers again."
    raise SettingError("that is no action of this page: expected approve, refuse, leave, pause or unpause.")


class OperatorPage(OwnMachine):
    """The server of the operator's page.

    look: function that returns the state of the site.
    by: name of the operator.
    """

    def __init__(self, kit: Path, look: LOOK, by: str, port: int = 0) -> None:
        self.kit, self.folder, self.look, self.by = kit, operator.site_folder(kit), look, by
        self.token, self.acting = secrets.token_urlsafe(24), threading.Lock()
        self.way: Path | None = None
        super().__init__(_OfSite, port)

    def make_way(self) -> Path:
        """Make a private file that redirects a browser to this page.

        The first visit removes the file. It is in the kit, because some browsers cannot read files
        in /tmp or in hidden folders.
        """
        file, name = tempfile.mkstemp(prefix="open-", suffix=".html", dir=self.kit.resolve())
        self.way = Path(name)
        with os.fdopen(file, "w") as opened:
            target = html.escape(self.address)
            opened.write(
                f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">\n'
            )
        return self.way

    def remove_way(self) -> None:
        if self.way is not None:
            self.way.unlink(missing_ok=True)

    def server_close(self) -> None:
        self.remove_way()
        super().server_close()

    @property
    def address(self) -> str:
        return f"{super().address}?token={self.token}"

    def knows(self, token: str | None) -> bool:
        return hmac.compare_digest((token or "").encode(), self.token.encode())


class _OfSite(Answer):
    server: OperatorPage

    def policy(self) -> str:
        return policy_of([file_of("operator.js")], hash_of(_style()), "connect-src 'self'; img-src data:")

    def do_GET(self) -> None:
        """Answer with the page (token in its address) or with its content (token in a header)."""
        place = urlsplit(self.path)
        if not self.is_for_us():
            return
        if place.path == "/" and self.server.knows(parse_qs(place.query).get("token", [""])[0]):
            self.server.remove_way()
            self.say(200, "text/html", self._page())
        elif place.path == "/data.json" and self.server.knows(self.headers.get("X-Token")):
            self.say(200, "application/json", as_data(self._content()))
        elif place.path in ("/", "/data.json"):
            self.say(403, "text/plain", "Use the address with the token that the terminal shows.")
        else:
            self.say(404, "text/plain", "There is only / and /data.json here.")

    def do_POST(self) -> None:
        if not self.is_for_us():
            return
        origin, size = self.headers.get("Origin"), self.headers.get("Content-Length", "")
        if not self.server.knows(self.headers.get("X-Token")) or origin not in (None, *self._origins()):
            return self.say(403, "text/plain", "This action did not come from this page.")
        if self.path != "/act" or not size.isdigit() or int(size) > LONGEST:
            return self.say(400, "text/plain", "This is no action of this page.")
        try:
            with self.server.acting:
                said = act(self.server.folder, self.server.by, json.loads(self.rfile.read(int(size))))
            self.say(200, "application/json", as_data({"said": said}))
        except (FedBilevelError, ValueError, RecursionError) as error:
            self.say(400, "application/json", as_data({"error": str(error)}))

    def _origins(self) -> list[str]:
        return [f"http://{host}" for host in self.server.hosts()]

    def _content(self) -> dict[str, Any]:
        return content(self.server.look(), self.server.kit)

    def _page(self) -> str:
        shown = self._content()
        parts = {
            "title": html.escape(f"{shown['name']}: site of a federation"),
            "policy": self.policy(),
            "style": _style(),
            "script": file_of("operator.js"),
            "data": as_data({**shown, "token": self.server.token}),
        }
        return filled("operator.html", parts)


def _style() -> str:
    return file_of("page.css") + file_of("operator.css")


def serve(page: OperatorPage, begun: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    begun: function that receives the address.
    """
    with page:
        begun(page.address)
        with contextlib.suppress(KeyboardInterrupt):
            page.serve_forever(poll_interval=0.2)

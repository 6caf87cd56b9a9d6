"""Jobs of FLARE that time messages: sites that echo every message, and a server with a clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sockets import Lines, papers
from fedbilevel.errors import FedBilevelError
from fedbilevel.sites.flare.job import Client, Handler, Server
from fedbilevel.sites.transport import SiteTransport

ROUNDS = "rounds.json"  # in the folder of the run: seconds of every round by contestant, for each part of the plan
WARM = 5  # rounds that are not counted


class EchoSite:
    def handle(self, message: bytes) -> bytes:
        return message

    def refuse_caller(self, caller: str, reason: str) -> str:
        return reason


class EchoClient(Client):
    def site(self, name: str, folder: Path) -> Handler:
        return EchoSite()


class EchoServer(Server):
    """A server that times FLARE, TLS and TCP in turns.

    The plan names `parts`, each [number of float32, number of rounds], and the `ports` of processes
    that answer without FLARE.
    """

    def serve(
        self, plan: dict[str, Any], transport: SiteTransport, folder: Path, say: Callable[[dict[str, Any]], None]
    ) -> str:
        kit = folder.parents[1]
        lines = {
            "tls": Lines([one["tls"] for one in plan["ports"]], papers(kit, is_server=True).context(is_server=False)),
            "tcp": Lines([one["tcp"] for one in plan["ports"]]),
        }

        def through_flare(message: bytes) -> list[bytes]:
            replies, failures = transport.exchange(dict.fromkeys(transport.sites, message), deadline=60.0)
            if failures:
                raise FedBilevelError("; ".join(f"{site}: {failure.reason}" for site, failure in failures.items()))
            return [reply.content for reply in replies.values()]

        contestants: dict[str, Callable[[bytes], Any]] = {
            "flare": through_flare,
            "tls": lines["tls"].exchange,
            "tcp": lines["tcp"].exchange,
        }
        found = []
        for floats, rounds in plan["parts"]:
            message, before = os.urandom(4 * floats), os.getloadavg()[0]
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            for number in range(WARM + rounds):
                for name, exchange in contestants.items():
                    start = time.perf_counter()
                    answers = exchange(message)
                    took = time.perf_counter() - start
                    if len(answers) != len(plan["sites"]) or any(one != message for one in answers):
                        raise FedBilevelError(f"{name} brought back something else than what was sent.")
                    if number >= WARM:
                        seconds[name].append(took)
            found.append(
                {"floats": floats, "seconds": seconds, "load_before": before, "load_after": os.getloadavg()[0]}
            )
            say({"iteration": len(found), "sites": {}})
        (folder / ROUNDS).write_text(json.dumps(found))
        for one in lines.values():
            one.close()
        return "finished"

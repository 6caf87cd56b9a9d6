"""A real federation whose server does what a test tells it through files, message by message."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedbilevel.sites.flare import job
from fedbilevel.sites.flare.local import Loopback


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Driver:
    """plan: of the job, whose server is `support.sites.flare_standins.Driven`."""

    def __init__(self, federation: Loopback, plan: dict[str, Any], **classes: str) -> None:
        self.federation, self.number = federation, 0
        self.folder = federation.kits["server"] / job.RUNS / plan["name"]
        federation.submit(plan, **classes)
        until((self.folder / job.PROGRESS).exists)

    def exchange(self, messages: Mapping[str, bytes], deadline: float = 10.0) -> dict[str, Any]:
        asked = {"messages": {site: message.hex() for site, message in messages.items()}, "deadline": deadline}
        unfinished = self.folder / "ask.new"
        unfinished.write_text(json.dumps(asked))
        unfinished.replace(self.folder / f"{self.number}.ask.json")
        answer = self.folder / f"{self.number}.answer.json"
        until(answer.exists, deadline + 20)
        self.number += 1
        return json.loads(answer.read_text())

    def tell(self, site: str, deadline: float = 10.0, **told: Any) -> dict[str, Any]:
        return self.exchange({site: json.dumps(told).encode()}, deadline)


def contents(answer: Mapping[str, Any]) -> dict[str, bytes]:
    return {site: bytes.fromhex(reply["content"]) for site, reply in answer["replies"].items()}

"""What FLARE's job processes run in tests: sites that do as a message tells them, and servers that are driven by the test through files."""

import json
import os
import time

from fedbilevel.errors import FedBilevelError
from fedbilevel.flare.job import Client, Server
from fedbilevel.sites.transport import Reply


class ToldSite:
    """Answers with the message, unless the message is a JSON object that asks for something else."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def handle(self, message):
        told = json.loads(message) if message[:1] == b"{" else {}
        if told.get("do") == "refuse":
            raise FedBilevelError(f"{self.name} takes no part in this.")
        if told.get("do") == "fail":
            raise ValueError("patient 4711 has no label")
        if told.get("do") == "sleep":
            time.sleep(told["seconds"])
        if told.get("do") == "who":
            return json.dumps({"name": self.name, "pid": os.getpid(), "has_settings": (self.folder / "site.toml").is_file()}).encode()
        return message


class ToldClient(Client):
    def site(self, name, folder):
        return ToldSite(name, folder)


class Driven(Server):
    """Makes the exchanges that the test asks for: N.ask.json names messages as hex and a deadline, N.answer.json says what came back."""

    def serve(self, plan, transport, folder, say):
        number = 0
        say({"iteration": 0, "sites": list(transport.sites)})
        while not transport.stop_asked():
            ask = folder / f"{number}.ask.json"
            if not ask.exists():
                time.sleep(0.01)
                continue
            told = json.loads(ask.read_text())
            start = time.monotonic()
            replies, failures = transport.exchange({site: bytes.fromhex(text) for site, text in told["messages"].items()}, deadline=told["deadline"])
            answer = {
                "order": [list(replies), list(failures)],
                "replies": {site: {"content": reply.content.hex(), "seconds": reply.seconds, "kind": type(reply) is Reply} for site, reply in replies.items()},
                "failures": {site: failure._asdict() for site, failure in failures.items()},
                "seconds": time.monotonic() - start,
            }
            unfinished = folder / "answer.new"
            unfinished.write_text(json.dumps(answer))
            unfinished.replace(folder / f"{number}.answer.json")
            number += 1
        return "stopped"


class Counting(Server):
    """Outer iterations that are kept on disk, as those of a real run: each is one exchange with all sites of the job."""

    def serve(self, plan, transport, folder, say):
        kept = folder / "iterations.jsonl"
        done = len(kept.read_text().splitlines()) if kept.exists() else 0
        for iteration in range(done, plan["iterations"]):
            if transport.stop_asked():
                return "stopped"
            replies, failures = transport.exchange(dict.fromkeys(transport.sites, b"x"), deadline=plan["deadline"])
            row = {"iteration": iteration, "sites": list(replies), "silent": [site for site, one in failures.items() if one.silent]}
            with kept.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            say(row)
            time.sleep(plan["pause"])
        return "finished"

"""What FLARE's job processes run in tests: sites that do as a message tells them, and servers that are driven by the test through files."""

import json
import os
import re
import subprocess
import time

from fedbilevel.errors import FedBilevelError
from fedbilevel.flare.job import Client, Server
from fedbilevel.sites import wire
from fedbilevel.sites.serve import serve
from fedbilevel.sites.site import Site
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


class Several(Server):
    """Runs several plans one after the other, because starting a job takes longer than all of them. Whoever is told a port weighs what passes through it."""

    def serve(self, plan, transport, folder, say):
        for one in plan["plans"]:
            weights = folder / f"{one['name']}.weights.jsonl"

            def weigh(line, weights=weights):
                with weights.open("a") as file:
                    file.write(json.dumps({"iteration": line["iteration"], "megabytes": line["megabytes"], "sockets": through(plan["port"])}) + "\n")

            assert serve(one, transport, folder / one["name"], weigh) == "finished"
        return "finished"


def through(port):
    """Bytes up and down so far on all open connections to this port, TLS and all, as the kernel counts them."""
    found = subprocess.run(["ss", "-tinH", f"dport = :{port}"], capture_output=True, text=True, check=True).stdout
    return [sum(int(number) for number in re.findall(rf"\b{name}:(\d+)", found)) for name in ("bytes_sent", "bytes_received")]


class Moody(Site):
    """A site that raises, answers NaN or sleeps in the outer iterations that a file in its folder names, and takes `pace` seconds for every other."""

    def _answer(self, header, arrays):
        moods = json.loads((self.folder / "moods.json").read_text()) if (self.folder / "moods.json").exists() else {}
        mood = moods.get(str(header.get("iteration")), moods.get("pace")) if header["kind"] == "phase" else None
        if mood == "raise":
            raise ValueError("patient 4711 has no label")
        if isinstance(mood, float):
            time.sleep(mood)
        answer = super()._answer(header, arrays)
        if mood == "nan":
            head, found = wire.unpack(answer)
            return wire.pack(head, [array * float("nan") for array in found])
        return answer


class MoodyClient(Client):
    def site(self, name, folder):
        return Moody(name, folder)

"""Classes that FLARE's job processes run in tests: sites that obey a message, and servers that a
test drives through files."""

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

from nvflare.apis.fl_constant import ServerCommandKey
from nvflare.apis.shareable import Shareable
from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.defs import new_cell_message

import fedbilevel
from fedbilevel.errors import PolicyError
from fedbilevel.sites import wire
from fedbilevel.sites.flare.configuration import unpacked
from fedbilevel.sites.flare.identity import Signer
from fedbilevel.sites.flare.job import STOP, Client, Server
from fedbilevel.sites.flare.transport import CALL
from fedbilevel.sites.policy import read_settings
from fedbilevel.sites.serve import serve
from fedbilevel.sites.site import Site
from fedbilevel.sites.transport import Reply

ESCAPES = "no \x1b]0;pwned\x07\x1b[2J\x1b[31m\u202e thank you."


class ToldSite:
    """Answers with the message, unless the message is a JSON object that asks for something else."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def handle(self, message):
        told = json.loads(message) if message[:1] == b"{" else {}
        if told.get("do") == "refuse":
            raise PolicyError(f"{self.name} takes no part in this.")
        if told.get("do") == "fail":
            raise ValueError("patient 4711 has no label")
        if told.get("do") == "sleep":
            time.sleep(told["seconds"])
        if told.get("do") == "who":
            return json.dumps(
                {"name": self.name, "pid": os.getpid(), "has_settings": (self.folder / "site.toml").is_file()}
            ).encode()
        return message

    def refuse_caller(self, caller, reason):
        return reason


class ToldClient(Client):
    def site(self, name, folder):
        return ToldSite(name, folder)


class Driven(Server):
    """Makes the exchanges that the test requests: N.ask.json holds messages as hex and a deadline,
    N.answer.json the answers."""

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
            replies, failures = transport.exchange(
                {site: bytes.fromhex(text) for site, text in told["messages"].items()}, deadline=told["deadline"]
            )
            answer = {
                "order": [list(replies), list(failures)],
                "replies": {
                    site: {"content": reply.content.hex(), "seconds": reply.seconds, "kind": type(reply) is Reply}
                    for site, reply in replies.items()
                },
                "failures": {site: failure._asdict() for site, failure in failures.items()},
                "seconds": time.monotonic() - start,
            }
            unfinished = folder / "answer.new"
            unfinished.write_text(json.dumps(answer))
            unfinished.replace(folder / f"{number}.answer.json")
            number += 1
        return "stopped"


class Commanding(Server):
    """A server whose job sends a command of FLARE to a site."""

    def serve(self, plan, transport, folder, say):
        cell = collab.fl_ctx.get_engine().get_cell()
        shell = AdminMessage("sys.shell", "cat site/site.toml")
        reply = cell.send_request(
            channel="admin", topic="admin", target="north", request=new_cell_message({}, shell), timeout=5.0
        )
        (folder / "reply.json").write_text(
            json.dumps([str(reply.get_header(MessageHeaderKey.RETURN_CODE)), repr(reply.payload)])
        )
        return "finished"


class Several(Server):
    """Runs several plans one after the other, because starting a job takes longer than all of them.
    It records the bytes that pass through the plan's port."""

    def serve(self, plan, transport, folder, say):
        for one in plan["plans"]:
            weights = folder / f"{one['name']}.weights.jsonl"

            def weigh(line, weights=weights):
                with weights.open("a") as file:
                    file.write(
                        json.dumps(
                            {
                                "iteration": line["iteration"],
                                "megabytes": line["megabytes"],
                                "sockets": through(plan["port"]),
                            }
                        )
                        + "\n"
                    )

            assert serve(one, transport, folder / one["name"], weigh) == "finished"
        return "finished"


def through(port):
    """Bytes up and down so far on all open connections to this port, with TLS, as the kernel counts
    them."""
    found = subprocess.run(["ss", "-tinH", f"dport = :{port}"], capture_output=True, text=True, check=True).stdout
    return [
        sum(int(number) for number in re.findall(rf"\b{name}:(\d+)", found))
        for name in ("bytes_sent", "bytes_received")
    ]


class Moody(Site):
    """A site that raises, answers NaN or sleeps in the outer iterations that a file in its folder
    names, and takes `pace` seconds for every other one."""

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


class SeveralClient(Client):
    """Takes part in every plan of a job that has several."""

    def site(self, name, folder):
        read_settings(folder).policy.limit_memory()
        return Site(name, folder)


class ThiefClient(Client):
    """At west: asks north for single samples, as itself, unsigned, and under the server's name.
    Elsewhere: an ordinary client."""

    @collab.publish
    def handle(self, message, signature, certificate):
        answer = Client.handle(self, message, signature, certificate)
        loot = Path(collab.workspace.get_root_dir()) / "site" / "loot.json"
        if collab.site_name == "west" and wire.unpack(message)[0]["kind"] == "phase" and not loot.exists():
            loot.write_text("[]")
            loot.write_text(json.dumps(self.stolen()))
        return answer

    def stolen(self):
        kit, job = Path(collab.workspace.get_root_dir()), collab.fl_ctx.get_job_id()
        plan = unpacked(self.plan)
        greedy = {**plan, "options": {**plan["options"], "batch_size": 1}}
        join = {"kind": "join", "plan": greedy, "version": fedbilevel.__version__}
        ask = {"kind": "phase", "phase": "aggregate", "iteration": 1, "call": 1, "values": {}, "new": [], "live": []}
        found = []
        for how in ("as itself", "unsigned", "under the server's name"):
            for number, header in enumerate((join, ask)):
                message = wire.pack({**header, "run": plan["name"], "turn": [2**60, len(found), number]})
                mine = Signer(kit)
                papers = (b"", b"") if how == "unsigned" else (mine.sign(CALL, job, "north", message), mine.certificate)
                with forged_origin(f"server.{job}") if how == "under the server's name" else contextlib.nullcontext():
                    answers = collab.get_clients(["north"])(timeout=5.0).handle(message, *papers)
                got = [answer for _, answer in answers]
                found.append(
                    [
                        how,
                        header["kind"],
                        got[0].get("refusal", "an answer") if got else f"failed: {list(answers.failures.values())}",
                    ]
                )
        return {"calls": found, "commands": self.commands(job)}

    def commands(self, job):
        """Send commands of FLARE: a shell and a deletion at another site, an end of its job and of
        the run."""
        cell = collab.fl_ctx.get_engine().get_cell()
        shell = AdminMessage("sys.shell", "cat site/site.toml")
        delete = AdminMessage("train.delete_run", "")
        delete.set_headers({"job_id": "site"})
        stop = Shareable()
        stop[ServerCommandKey.TOPIC], stop[ServerCommandKey.DATA] = STOP, {"why": "asked"}
        asked = [
            ("admin", "north", "admin", shell),
            ("admin", "south", "admin", delete),
            ("client_command", f"north.{job}", "abort", None),
            ("server_command", f"server.{job}", "app_command", stop),
        ]
        ask = lambda channel, target, topic, what: cell.send_request(
            channel=channel, topic=topic, target=target, request=new_cell_message({}, what), timeout=5.0
        )
        replies = [ask(channel, target, topic, what) for channel, target, topic, what in asked]
        return [str(reply.get_header(MessageHeaderKey.RETURN_CODE)) for reply in replies]


@contextlib.contextmanager
def forged_origin(name):
    """Messages of this process that claim to come from another cell."""
    me = collab.fl_ctx.get_engine().get_cell().core_cell.my_info
    before, me.fqcn = me.fqcn, name
    try:
        yield
    finally:
        me.fqcn = before


class Scaling(Site):
    """A site whose answers are multiplied by what a file in its folder says for an outer iteration."""

    def _sent(self, content, state="idle"):
        header, sent, when = content
        factors = (
            json.loads((self.folder / "factors.json").read_text()) if (self.folder / "factors.json").exists() else {}
        )
        factor = factors.get(str(when.get("iteration")), 1.0) if when["kind"] == "phase" else 1.0
        return super()._sent(
            (header, {name: [array * factor for array in arrays] for name, arrays in sent.items()}, when), state
        )


class ScalingClient(Client):
    def site(self, name, folder):
        return Scaling(name, folder)


class EscapingSite:
    """Refuses in words that would retitle a terminal and clear it."""

    def handle(self, message):
        return wire.pack({"error": ESCAPES})

    def refuse_caller(self, caller, reason):
        return reason


class EscapingClient(Client):
    def site(self, name, folder):
        return EscapingSite() if name == "west" else Site(name, folder)

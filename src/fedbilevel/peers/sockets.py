"""Messages between peers over TCP, encrypted, and only between those in the roster: no server, no broker, no plain text to another machine.

Every peer listens with one socket (ROUTER) and has one (DEALER) to every other peer. All of them belong to one thread, since sockets of ZeroMQ must not be
shared; whoever sends puts a message in a queue of ours and wakes that thread up.

Who sent a message is the public key that the connection was authenticated with, which libzmq attaches to it (`User-Id`). It is neither the identity that a
ROUTER shows, which a sender chooses freely, nor anything in the message. Without keys, which is allowed between addresses of this machine (loopback) only, the
identity is all there is: then any process of this machine can speak in any peer's name.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from fedbilevel.errors import RosterError, SettingError, WireError
from fedbilevel.peers.roster import NEEDS, PeerRoster, Secret, is_loopback, split_address
from fedbilevel.peers.transport import TICK, Take

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import recv_monitor_message
except ImportError:
    raise SettingError(NEEDS) from None

HEAD = 4096  # bytes of the longest head
BACKLOG = 256 << 20  # bytes that wait for one peer at most; beyond it the oldest are given up
FLUSH = 2.0  # seconds that messages have to leave at the end
PAUSE = 1.0  # seconds before a peer that refused a connection is tried again
AT_ONCE = 64  # messages that are read before the others have their turn
SLOWEST = 500_000  # bytes per second: on a slower line than this, a long message makes a connection look dead
_OVERHEAD = 512  # bytes that a waiting message takes besides its own, or so: messages without a body count too
_ENVELOPE = 256  # bytes that encryption adds to a frame, and a margin


class Sockets:
    """A Transport. `secret`: None only where all addresses are of this machine. `bind`: where to listen, if that is not the address in the roster (behind NAT).

    What is refused, by reason: "key" (a connection whose key is not in the roster), "handshake" (a connection without encryption, for another key than ours, or
    that broke off before it was made), "sender" (without keys: an identity that is no peer's number), "frames", "head", "body" (not two frames, or one of them
    too long; a frame that is much too long ends the connection instead, and is not counted), "failed" (what takes messages raised an error), "shut out"
    (connections of ours that a peer did not let in) and "backlog" (messages of ours, given up because too much waited for their peer).
    """

    def __init__(
        self,
        roster: PeerRoster,
        me: int,
        secret: Secret | None,
        *,
        max_bytes: int,
        bind: str | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        own = roster.peers[me]
        self.address = own.address if bind is None else bind
        split_address(self.address, "the address to listen at", unspecified=True)
        if secret is None:
            for address in (*(peer.address for peer in roster.peers), self.address):
                if not is_loopback(address):
                    raise RosterError(
                        f"{address} is not an address of this machine alone, like 127.0.0.1, so a private key is needed: make one with keygen."
                    )
        elif secret.key != own.key:
            raise RosterError(
                f"the private key of {secret.name!r} is not the one that {own.name!r} has in the roster: use that of {own.name!r}."
            )
        self._roster, self._me, self._secret, self._max_bytes, self._log = roster, me, secret, max_bytes, log
        self._number_of = {
            peer.key if secret else str(number): number for number, peer in enumerate(roster.peers) if number != me
        }  # by what shows who it is
        self._lock = threading.Lock()  # of all that follows
        self._waiting: dict[int, OrderedDict[Hashable, tuple[bytes, bytes | memoryview]]] = {
            number: OrderedDict() for number in self._number_of.values()
        }
        self._bytes: Counter[int] = Counter()  # that wait, by peer
        self._refused: Counter[str] = Counter()
        self._said: dict[str, float] = {}  # when a reason was last logged
        self._awake = False  # there is a byte on its way to wake the thread
        self._closing = False
        self._last = dict.fromkeys(self._waiting, time.monotonic())
        self._thread: threading.Thread | None = None

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        self._take, self._tick = take, tick
        self._context = (
            zmq.Context()
        )  # of its own, as is the place inproc://zeromq.zap.01 in it: several of these may live in a process
        self._context.set(
            zmq.MAX_SOCKETS, 3 * len(self._roster.peers) + 100
        )  # a DEALER and the two ends of its monitor for each; the default is 1023
        self._sleeper, self._waker = socket.socketpair()  # and not a socket of ZeroMQ, since any thread may wake
        self._sleeper.setblocking(False)
        self._waker.setblocking(False)
        self._watched: list[zmq.Socket[bytes]] = []  # those with a monitor
        try:
            self._open()
        except BaseException:
            self._end(0.0)
            raise
        self._last = dict.fromkeys(self._waiting, time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"peer {self._roster.peers[self._me].name}", daemon=True)
        self._thread.start()  # from here on the sockets are that thread's

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        if len(head) > HEAD or _size(body) > self._max_bytes:  # the other side would end the connection
            raise WireError(
                f"a message of {len(head)} + {_size(body)} bytes is too long: {HEAD} + {self._max_bytes} are the limit."
            )
        mark = object() if newest is None else newest  # like nothing else: a message that stays as it is
        with self._lock:
            if self._closing:
                return
            waiting = self._waiting[to]
            if (old := waiting.get(mark)) is not None:
                self._bytes[to] -= _weight(old)
            waiting[mark] = (head, body)  # in the old one's place in the queue
            self._bytes[to] += _weight(waiting[mark])
            dropped = 0
            while self._bytes[to] > BACKLOG and len(waiting) > 1:
                self._bytes[to] -= _weight(waiting.popitem(last=False)[1])
                dropped += 1
            self._wake()
        if dropped:
            self._refuse(
                "backlog",
                f"{self._roster.peers[to].name} has been away for so long that messages to it were given up.",
                dropped,
            )

    def quiet(self, peer: int) -> float:
        return time.monotonic() - self._last[peer]

    def refused(self) -> dict[str, int]:
        with self._lock:
            return dict(self._refused)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self._thread is not None:
                self._wake()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        """Called with the lock. One byte is enough until the thread has read it."""
        if not self._awake and self._thread is not None:
            self._awake = True
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                self._waker.send(b"\0")

    def _open(self) -> None:
        self._router = self._socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._zap: zmq.Socket[bytes] | None = None
        if self._secret is not None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")  # before anybody can connect
            self._poller.register(self._zap, zmq.POLLIN)
            self._router.curve_server = True  # from here on a connection without encryption does not come about
            self._router.setsockopt(zmq.ZAP_DOMAIN, b"peers")
            self._router.setsockopt(
                zmq.ZAP_ENFORCE_DOMAIN, 1
            )  # nobody who can say who may come in: then nobody comes in
        else:
            self._router.setsockopt(
                zmq.ROUTER_HANDOVER, 1
            )  # who starts again has its old identity, which the old connection may still hold
        self._router.setsockopt(
            zmq.MAXMSGSIZE, max(self._max_bytes, HEAD) + _ENVELOPE
        )  # of a frame; refused before it is read
        # Not HANDSHAKE_FAILED_AUTH: on this side it only repeats what our own answers to ZAP were.
        self._monitor = self._watch(
            self._router, zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        )
        for sleeper in (self._sleeper, self._router, self._monitor):
            self._poller.register(sleeper, zmq.POLLIN)
        host, port = split_address(self.address, "the address to listen at", unspecified=True)
        self._bind(host, port)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._places: dict[int, str] = {}
        self._ended: dict[int, float] = {}  # when a connection ended that libzmq has not begun to make anew
        self._doors: dict[
            int, zmq.Socket[bytes]
        ] = {}  # what became of our connections; looked at now and then only, which keeps the list to poll short
        for number in self._waiting:
            peer = self._roster.peers[number]
            host, port = split_address(peer.address, f"the address of {peer.name}")
            dealer = self._dealers[number] = self._socket(zmq.DEALER)
            if self._secret is not None:
                dealer.curve_serverkey = peer.key.encode()
            else:
                dealer.setsockopt(zmq.ROUTING_ID, str(self._me).encode())
            # With keys there is no routing id: every connection then has one of its own, and nobody can push another out by choosing the same.
            dealer.setsockopt(zmq.IPV6, host.startswith("["))
            self._doors[number] = self._watch(
                dealer, zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
            )
            self._places[number] = f"tcp://{_numeric(host)}:{port}"
            dealer.connect(self._places[number])

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        # A peer that lost its power says nothing more, and TCP would not notice for a quarter of an hour. A heart-beat has to wait until the message before it
        # has gone through, so the timeout grows with the longest.
        made.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000 + 1000 * self._max_bytes // SLOWEST)
        made.setsockopt(zmq.HANDSHAKE_IVL, 10_000)  # a connection that begins and says no more goes after this long
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # doubles up to here; the default is no increase
        # Messages inside libzmq, for a peer each: without a limit a slow peer fills our memory. Few on the way out, where newer ones cannot take their place;
        # as measured, 2, 8 and 64 are equally fast.
        made.setsockopt(zmq.SNDHWM, 8)
        made.setsockopt(zmq.RCVHWM, 64)
        # Only a connection that is made takes messages. Else libzmq keeps those for a peer that is away, out of our reach: old ones where newer ones should go.
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.LINGER, 0)  # until the end, see _end; the default is to wait for ever
        if self._secret is not None:
            made.curve_publickey, made.curve_secretkey = self._secret.key.encode(), self._secret.secret.encode()
        return made

    def _watch(self, watched: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        self._watched.append(watched)
        return watched.get_monitor_socket(events)

    def _bind(self, host: str, port: int) -> None:
        self._router.setsockopt(
            zmq.IPV6, host.startswith("[")
        )  # elsewhere a name could mean an IPv6 address that this machine or the other does not have
        try:
            self._router.bind(f"tcp://{_interface(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise RosterError(
                    f"port {port} of this machine is in use: end what listens at {self.address}, or choose another port in the roster."
                ) from None
            why = f"this machine cannot listen at {self.address} ({error.strerror})"
            raise RosterError(
                f'{why}: where that is another machine\'s address that leads here, give bind = "0.0.0.0:{port}".'
            ) from None

    def _run(self) -> None:
        deadline = None
        due = time.monotonic() + TICK
        try:
            while True:
                for number, dealer in self._dealers.items():
                    self._push(number, dealer)
                now = time.monotonic()
                if self._closing:
                    deadline = now + FLUSH if deadline is None else deadline
                    if now >= deadline or not any(self._waiting.values()):
                        break
                ready = dict(self._poller.poll(max(0, math.ceil((due - now) * 1000))))
                if self._sleeper.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._sleeper.recv(16)
                    with (
                        self._lock
                    ):  # what is put in a queue after this wakes us again, and what was put in before it is seen next
                        self._awake = False
                if self._zap in ready:
                    self._admit()
                if self._monitor in ready:
                    self._failures()
                if self._router in ready:
                    self._read()
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK
                    self._knock()
                    if not self._closing:
                        self._guarded(self._tick)
        finally:
            self._end(0.0 if deadline is None else max(0.0, deadline - time.monotonic()))

    def _push(self, number: int, dealer: zmq.Socket[bytes]) -> None:
        """Hand over what the connection accepts. While something waits, the thread is woken when it accepts more."""
        waiting = self._waiting[number]
        while True:
            with self._lock:  # so that nothing newer can come for what is on its way out
                if not waiting:
                    break
                mark, message = next(iter(waiting.items()))
                try:
                    dealer.send(message[0], zmq.NOBLOCK | zmq.SNDMORE)
                    dealer.send(message[1], zmq.NOBLOCK, copy=False)  # pyzmq copies what is short all the same
                except zmq.Again:  # after the first frame too: the connection went, and that frame with it
                    break
                del waiting[mark]
                self._bytes[number] -= _weight(message)
        if bool(waiting) != (dealer in self._poller):
            if waiting:
                self._poller.register(dealer, zmq.POLLOUT)
            else:
                self._poller.unregister(dealer)

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._message(frames)

    def _message(self, frames: list[Any]) -> None:
        if self._closing:
            return None  # read all the same, so that the other side gets rid of it
        shown = frames[-1].get("User-Id") if self._secret is not None else frames[0].bytes.decode("ascii", "replace")
        sender = self._number_of.get(shown)
        if sender is None:
            return self._refuse("sender", "refused a message whose sender is not a peer.")
        name = self._roster.peers[sender].name
        if len(frames) != 3:
            return self._refuse("frames", f"refused a message of {name} that has {len(frames) - 1} frames, and not 2.")
        head, body = frames[1].buffer, frames[2].buffer
        if head.nbytes > HEAD:
            return self._refuse(
                "head", f"refused a message of {name} whose head has {head.nbytes} bytes, more than {HEAD}."
            )
        if body.nbytes > self._max_bytes:
            return self._refuse(
                "body", f"refused a message of {name} whose body has {body.nbytes} bytes, more than {self._max_bytes}."
            )
        self._last[sender] = time.monotonic()
        return self._guarded(self._take, sender, bytes(head), body)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - what one message does must not make this peer deaf to all others
            self._refuse("failed", f"an error in what takes messages: {type(error).__name__}: {error}")

    def _admit(self) -> None:
        """Answer libzmq's question (ZAP 1.0) whether to let a key in. It asks after the other side has shown that it has the secret of that key."""
        assert self._zap is not None
        version, request, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        key = (
            z85.encode(credentials[0]).decode()
            if mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
            else ""
        )
        known = key in self._number_of
        self._zap.send_multipart(
            [
                version,
                request,
                b"200" if known else b"400",
                b"OK" if known else b"not in the roster",
                key.encode() if known else b"",
                b"",
            ]
        )
        if not known:
            self._refuse(
                "key",
                f"refused a connection from {address.decode('ascii', 'replace')}: its key {key} is not in the roster.",
            )

    def _failures(self) -> None:
        """libzmq waits for room in its monitor, so all that is there is read."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._refuse(
                "handshake",
                "refused a connection that is not encrypted, is meant for another key than this peer's, or broke off as it was made.",
            )

    def _knock(self) -> None:
        """libzmq makes a connection anew when it breaks, and not when the other side refused it or spoke another language, which may change as well: somebody
        puts the right roster there, or what answers in a peer's place goes away. So then it is made anew from here."""
        now = time.monotonic()
        for number, door in self._doors.items():
            while door.poll(0):
                event = recv_monitor_message(door)["event"]
                if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                    self._refuse(
                        "shut out",
                        f"{self._roster.peers[number].name} does not let this peer in: is its key in the roster there?",
                    )
                elif event == zmq.Event.DISCONNECTED:
                    self._ended[number] = now
                else:
                    self._ended.pop(number, None)
            if now - self._ended.get(number, now) > PAUSE:
                del self._ended[number]
                self._dealers[number].disconnect(self._places[number])
                self._dealers[number].connect(self._places[number])

    def _refuse(self, reason: str, line: str, times: int = 1) -> None:
        """Counted always, logged at most once a second: a flood must not fill a disk."""
        with self._lock:
            self._refused[reason] += times
            now = time.monotonic()
            quiet = now - self._said.get(reason, -1.0) < 1.0
            if not quiet:
                self._said[reason] = now
        if not quiet:
            self._log(line)

    def _end(self, linger: float) -> None:
        """Also after a start that failed half-way. What libzmq has taken and not sent yet has `linger` seconds."""
        for watched in self._watched:
            watched.disable_monitor()  # while there is who reads it: else libzmq waits for somebody to come
        self._context.destroy(linger=round(linger * 1000))
        self._sleeper.close()
        self._waker.close()


def _size(body: bytes | memoryview) -> int:
    return body.nbytes if isinstance(body, memoryview) else len(body)


def _weight(message: tuple[bytes, bytes | memoryview]) -> int:
    return len(message[0]) + _size(message[1]) + _OVERHEAD


def _numeric(host: str) -> str:
    return (
        "127.0.0.1" if host.lower() == "localhost" else host
    )  # which must not be taken for a name, for which all interfaces are listened at


def _interface(host: str) -> str:
    """Where to listen for who is reached by `host`. libzmq takes no names here, and one may belong to a router before this machine: then at all interfaces."""
    host = _numeric(host)
    return host if host.startswith("[") or host.replace(".", "").isdigit() else "*"

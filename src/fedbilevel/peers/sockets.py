"""Encrypted messages over TCP between the peers of the roster, which alone can connect.

Every peer listens with one socket (ROUTER) and has one socket (DEALER) to every other peer. One
thread owns all sockets, because ZeroMQ sockets must not be shared. A sender puts its message in a
queue and notifies that thread.

The sender of a message is the public key that authenticated the connection; libzmq attaches this
key to the message (`User-Id`). The identity that a ROUTER shows is not used, because a sender
chooses it freely. A run without keys is allowed only between loopback addresses. There the identity
alone names the sender, so any process on this machine can send in any peer's name.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from fedbilevel.errors import RosterError, SettingError, WireError
from fedbilevel.peers.addresses import LISTEN, interface, split_address, without_localhost
from fedbilevel.peers.refusals import Refusals
from fedbilevel.peers.roster import NEEDS, PeerRoster, Secret
from fedbilevel.peers.send_queues import SendQueues, Waker, size
from fedbilevel.peers.transport import TICK, Take
from fedbilevel.peers.wire import Packed

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import recv_monitor_message
except ImportError:
    raise SettingError(NEEDS) from None

LONGEST_HEAD = 4096  # bytes
FLUSH = 2.0  # seconds that waiting messages have to leave at the end
PAUSE = 1.0  # seconds before a refused connection is tried again
AT_ONCE = 64  # messages that are read before other work gets its turn
SLOWEST = 500_000  # bytes per second: on a slower line, a long message makes a connection look dead
_ENVELOPE = 256  # bytes that encryption adds to a frame, with a margin
_Socket = zmq.Socket[bytes]


class Sockets:
    """PeerTransport over ZeroMQ.

    secret: private key of this peer; None is allowed only if all addresses are loopback.
    bind: address to listen at, if it differs from the address in the roster (behind NAT).

    Reasons for refusals:
    - "key": a connection whose key is not in the roster.
    - "handshake": a connection without encryption, for another key, or closed during the handshake.
    - "sender": without keys, an identity that is not a peer's number.
    - "frames", "head", "body": a message that is not two frames, or a frame that is too long. A
      frame that is far too long closes the connection instead and is not counted.
    - "failed": the receiver of messages raised an error.
    - "shut out": a peer refused a connection of this peer.
    - "backlog": messages of this peer, dropped because too many were queued for one peer.
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
        self.address = roster.peers[me].address if bind is None else bind
        roster.check_secret(me, secret, self.address)
        self._roster, self._me, self._secret, self._max_bytes = roster, me, secret, max_bytes
        self._number_of = {  # by key, or without keys by identity
            peer.key if secret else str(number): number for number, peer in enumerate(roster.peers) if number != me
        }
        self._others = list(self._number_of.values())
        self.queues = SendQueues(self._others)
        self._refusals = Refusals(log)
        self._closing = False
        self._last = dict.fromkeys(self._others, time.monotonic())  # time of the last message, by peer
        self._thread: threading.Thread | None = None

    # ---- calls by any thread ---------------------------------------------------------------------

    def start(self, take: Take, tick: Callable[[], None]) -> None:
        self._take, self._tick = take, tick
        # Each Sockets has a context of its own, because inproc://zeromq.zap.01 exists once per context.
        self._context = zmq.Context()
        # A DEALER and both ends of its monitor for each peer; the default is 1023.
        self._context.set(zmq.MAX_SOCKETS, 3 * len(self._roster.peers) + 100)
        self._waker = Waker()
        self._watched: list[_Socket] = []  # sockets with a monitor
        try:
            self._open()
        except BaseException:
            self._end(0.0)
            raise
        self._last = dict.fromkeys(self._others, time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"peer {self._roster.peers[self._me].name}", daemon=True)
        self._thread.start()  # from here on this thread owns the sockets

    def send(self, to: int, head: bytes, body: bytes | memoryview = b"", *, newest: Hashable = None) -> None:
        if len(head) > LONGEST_HEAD or size(body) > self._max_bytes:  # the receiver would end the connection
            raise WireError(
                f"a message of {len(head)} + {size(body)} bytes is too long: "
                f"{LONGEST_HEAD} + {self._max_bytes} are the limit."
            )
        dropped = self.queues.put(to, (head, body), newest)
        if self._thread is not None:
            self._waker.wake()
        if dropped:
            name = self._roster.peers[to].name
            self._refusals.add("backlog", f"dropped messages for {name}: it has been away too long.", times=dropped)

    def quiet(self, peer: int) -> float:
        return time.monotonic() - self._last[peer]

    def refused(self) -> dict[str, int]:
        return self._refusals.as_dict()

    def close(self) -> None:
        self._closing = True
        self.queues.close()
        if self._thread is not None:
            self._waker.wake()
            self._thread.join()

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        self._poller = zmq.Poller()
        self._zap: _Socket | None = None
        self._router = self._socket(zmq.ROUTER)
        if self._secret is not None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind("inproc://zeromq.zap.01")  # before the first connection
            self._poller.register(self._zap, zmq.POLLIN)
            self._router.curve_server = True  # refuses connections without encryption
            self._router.setsockopt(zmq.ZAP_DOMAIN, b"peers")
            self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a ZAP handler, refuse all connections
        else:
            # A restarted peer has its old identity, which the old connection may still hold.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Limit per frame; libzmq refuses a longer one before reading it.
        self._router.setsockopt(zmq.MAXMSGSIZE, max(self._max_bytes, LONGEST_HEAD) + _ENVELOPE)
        # Not HANDSHAKE_FAILED_AUTH: on this side it only repeats our own answers to ZAP.
        self._monitor = self._watch(
            self._router, zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        )
        for polled in (self._waker, self._router, self._monitor):
            self._poller.register(polled, zmq.POLLIN)
        self._bind()
        self._dealers: dict[int, _Socket] = {}
        self._places: dict[int, str] = {}
        self._doors: dict[int, _Socket] = {}  # monitors of the dealers; read in `_knock` to keep the poll list short
        self._ended: dict[int, float] = {}  # time of the end of connections that libzmq does not reconnect
        for number in self._others:
            self._connect(number)

    def _bind(self) -> None:
        host, port = split_address(self.address, LISTEN, unspecified=True)
        # Off for names: they could resolve to an IPv6 address that one of the machines does not have.
        self._router.setsockopt(zmq.IPV6, host.startswith("["))
        try:
            self._router.bind(f"tcp://{interface(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise RosterError(
                    f"port {port} of this machine is in use: end the process that listens at {self.address}, "
                    "or choose another port in the roster."
                ) from None
            raise RosterError(
                f"this machine cannot listen at {self.address} ({error.strerror}): "
                f'if a router forwards that address to this machine, give bind = "0.0.0.0:{port}".'
            ) from None

    def _connect(self, number: int) -> None:
        peer = self._roster.peers[number]
        host, port = split_address(peer.address, f"the address of {peer.name}")
        dealer = self._dealers[number] = self._socket(zmq.DEALER)
        if self._secret is not None:
            # No routing id: libzmq gives every connection its own, so no sender can replace another connection.
            dealer.curve_serverkey = peer.key.encode()
        else:
            dealer.setsockopt(zmq.ROUTING_ID, str(self._me).encode())
        dealer.setsockopt(zmq.IPV6, host.startswith("["))
        self._doors[number] = self._watch(
            dealer, zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED
        )
        self._places[number] = f"tcp://{without_localhost(host)}:{port}"
        dealer.connect(self._places[number])

    def _socket(self, kind: int) -> _Socket:
        made: _Socket = self._context.socket(kind)
        # TCP notices a peer without power only after a quarter of an hour. A heartbeat waits until the message
        # before it has passed, so the timeout grows with the longest message.
        made.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000 + 1000 * self._max_bytes // SLOWEST)
        made.setsockopt(zmq.HANDSHAKE_IVL, 10_000)  # an unfinished handshake ends after this time
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # doubles up to here; the default is no increase
        # Messages inside libzmq, per peer: without a limit a slow peer fills the memory. The send limit is low,
        # because newer messages cannot replace these; 2, 8 and 64 were measured to be equally fast.
        made.setsockopt(zmq.SNDHWM, 8)
        made.setsockopt(zmq.RCVHWM, 64)
        # Only a completed connection takes messages. Otherwise libzmq would keep outdated ones for an absent peer.
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.LINGER, 0)  # until `_end`; the default is to wait forever
        if self._secret is not None:
            made.curve_publickey, made.curve_secretkey = self._secret.key.encode(), self._secret.secret.encode()
        return made

    def _watch(self, watched: _Socket, events: int) -> _Socket:
        self._watched.append(watched)
        return watched.get_monitor_socket(events)

    # ---- the thread ------------------------------------------------------------------------------

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
                    if now >= deadline or self.queues.empty():
                        break
                self._serve(dict(self._poller.poll(max(0, math.ceil((due - now) * 1000)))))
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK
                    self._knock()
                    if not self._closing:
                        self._guarded(self._tick)
        finally:
            self._end(0.0 if deadline is None else max(0.0, deadline - time.monotonic()))

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._zap in ready:
            self._admit()
        if self._monitor in ready:
            self._failures()
        if self._router in ready:
            self._read()

    def _push(self, number: int, dealer: _Socket) -> None:
        """Send messages until the connection accepts no more, and poll while messages are queued."""

        def send(message: Packed) -> bool:
            try:
                dealer.send(message[0], zmq.NOBLOCK | zmq.SNDMORE)
                dealer.send(message[1], zmq.NOBLOCK, copy=False)  # pyzmq copies short bodies all the same
            except zmq.Again:  # also after the first frame: the connection and that frame are lost
                return False
            return True

        waiting = self.queues.drain(number, send)
        if waiting != (dealer in self._poller):
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
            if not self._closing:  # messages after `close` are read and dropped, so that senders need not wait
                self._message(frames)

    def _message(self, frames: list[Any]) -> None:
        shown = frames[-1].get("User-Id") if self._secret is not None else frames[0].bytes.decode("ascii", "replace")
        sender = self._number_of.get(shown)
        if sender is None:
            return self._refusals.add("sender", "refused a message whose sender is not a peer.")
        what = f"refused a message of {self._roster.peers[sender].name}"
        if len(frames) != 3:
            return self._refusals.add("frames", f"{what} that has {len(frames) - 1} frames, and not 2.")
        head, body = frames[1].buffer, frames[2].buffer
        if head.nbytes > LONGEST_HEAD:
            return self._refusals.add("head", f"{what} whose head has {head.nbytes} bytes, above {LONGEST_HEAD}.")
        if body.nbytes > self._max_bytes:
            return self._refusals.add("body", f"{what} whose body has {body.nbytes} bytes, above {self._max_bytes}.")
        self._last[sender] = time.monotonic()
        return self._guarded(self._take, sender, bytes(head), body)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - one bad message must not stop the thread
            self._refusals.add("failed", f"an error while taking a message: {type(error).__name__}: {error}")

    def _admit(self) -> None:
        """Answer a ZAP 1.0 request whether a key, whose ownership is already proved, may connect."""
        assert self._zap is not None
        version, request, _domain, address, _identity, mechanism, *credentials = self._zap.recv_multipart()
        is_curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32
        key = z85.encode(credentials[0]).decode() if is_curve else ""
        known = key in self._number_of
        answer = (b"200", b"OK", key.encode()) if known else (b"400", b"not in the roster", b"")
        self._zap.send_multipart([version, request, *answer, b""])
        if not known:
            where = address.decode("ascii", "replace")
            self._refusals.add("key", f"refused a connection from {where}: its key {key} is not in the roster.")

    def _failures(self) -> None:
        """Read all failed handshakes, because libzmq blocks if its monitor is full."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._refusals.add(
                "handshake",
                "refused a connection that is not encrypted, is for another key, or broke off during the handshake.",
            )

    def _knock(self) -> None:
        """Reconnect to peers that refused a connection or did not use the protocol.

        libzmq reconnects only after a connection breaks. A refusal can also end when the other peer
        gets the right roster, or when an unrelated program at its address ends.
        """
        now = time.monotonic()
        for number, door in self._doors.items():
            while door.poll(0):
                event = recv_monitor_message(door)["event"]
                if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                    name = self._roster.peers[number].name
                    self._refusals.add("shut out", f"{name} refuses this peer: is its key in the roster there?")
                elif event == zmq.Event.DISCONNECTED:
                    self._ended[number] = now
                else:
                    self._ended.pop(number, None)
            if now - self._ended.get(number, now) > PAUSE:
                del self._ended[number]
                self._dealers[number].disconnect(self._places[number])
                self._dealers[number].connect(self._places[number])

    def _end(self, linger: float) -> None:
        """Close all sockets, even after a failed start; libzmq has `linger` seconds to send."""
        for watched in self._watched:
            watched.disable_monitor()  # before its reader ends: otherwise libzmq waits for a reader
        self._context.destroy(linger=round(linger * 1000))
        self._waker.close()

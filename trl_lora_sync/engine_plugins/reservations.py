"""How a trainer has a server on its host take a version past HTTP.

A request to load an adapter passes through the server, its engine and its workers, which takes longer than to fill a
slot. Here each worker sends the server the checksum of what lies in its slot, and the trainer that of the version.
Where all are equal, the server notes the name of the version and answers. With fused serving, no worker sends anything:
the engine is paused once the trainer begins to write a version, and its checksum is the sign to load it. The sockets
are in the folder of the trainer, which only its user can open.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from trl_lora_sync.engine_plugins import logger
from trl_lora_sync.engine_plugins.forks import keep_from_children
from trl_lora_sync.engine_plugins.refusals import Refused
from trl_lora_sync.engine_plugins.sockets import Watch, short_path

SOCKET = "reservations"
"""Its name in the folder that the trainer makes."""
_MOST_BYTES = 1 << 16
# A slot is filled within milliseconds. A version that is not confirmed is loaded by a request.
PATIENCE_S = 0.5
_MOST_TRAINERS = 8


class ReservationClient:
    """The trainer's end.

    Args:
        folder: private to the user; the socket is made in it.
        watch: as for `shared_files.SharedFiles`; answers are awaited on its loop.

    Raises:
        OSError: the socket cannot be made there.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder = folder
        self._servers: dict[str, Sender] = {}
        self._waiting: dict[str, asyncio.Future[str | None]] = {}  # by reservation
        self._begins: dict[str, list[tuple[str, str]]] = {}
        self._socket = _bound(folder / SOCKET)
        # A forked child would take what is for its parent.
        keep_from_children(self._socket)
        self._stop = watch(self._socket, self._hear)

    def send_at_begin(self, name: str, number: str, server: str) -> None:
        """Have `begin` notify a server, by the name of its socket, of the version that a reservation is for."""
        if name not in self._begins:  # what is there is of an earlier version
            self._begins = {name: []}
        self._begins[name].append((number, server))

    def begin(self, name: str) -> None:
        """Notify the servers that a version is being written; in any thread."""
        for number, server in self._begins.pop(name, ()):
            self._sender(server).send([number, "", ""])

    async def confirm(self, number: str, server: str, checksum: str) -> str | None:
        """Have a server note the version that a reservation is for, if its workers hold it.

        Args:
            server: the name of its socket.
            checksum: of the version.

        Returns:
            What the server answers, see `_Expected`; empty if a worker holds something else, None without an answer.
        """
        loop = asyncio.get_running_loop()
        answer = self._waiting[number] = loop.create_future()
        # Not `asyncio.wait_for`, which takes several turns of the loop.
        timer = loop.call_later(PATIENCE_S, _settle, answer, None)
        try:
            return await answer if self._sender(server).send([number, "", checksum]) else None
        finally:
            timer.cancel()
            del self._waiting[number]

    def _sender(self, server: str) -> "Sender":
        return self._servers.setdefault(server, Sender(self._folder / server))

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            while True:  # until there is no more, which is an OSError
                number, content = json.loads(self._socket.recv(_MOST_BYTES))
                if number in self._waiting:
                    _settle(self._waiting[number], content)

    def close(self) -> None:
        """May be called again."""
        (self._folder / SOCKET).unlink(missing_ok=True)
        self._stop()


def _settle(answer: "asyncio.Future[str | None]", content: str | None) -> None:
    if not answer.done():  # a task that waits may be cancelled
        answer.set_result(content)


@dataclass
class _Expected:
    """What is known of one version.

    Attributes:
        workers: whose checksums are needed.
        note: called once they are as the trainer's; what it returns is the answer. It raises nothing.
        begin: called if the trainer has sent that it begins to write the version.
        found: checksums, by worker; the trainer's under the empty name.
    """

    workers: Collection[str]
    note: Callable[[], Awaitable[str]]
    begin: Callable[[], object]
    found: dict[str, str] = field(default_factory=dict)


class ReservationServer:
    """A server's end, for one trainer. To be made, used and closed on the server's loop.

    Args:
        folder: of the trainer.

    Attributes:
        path: of the socket.

    Raises:
        OSError: no socket can be made there, or the folder belongs to another user.
    """

    def __init__(self, folder: Path) -> None:
        if folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        self.path = folder / f"server-{secrets.token_hex(4)}"
        self._trainer = Sender(folder / SOCKET)
        self._expected: dict[str, _Expected] = {}
        self._answers: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._socket = _bound(self.path)
        self._loop.add_reader(self._socket, self._hear)

    def expect(
        self,
        number: str,
        workers: Collection[str],
        note: Callable[[], Awaitable[str]],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Await the checksums for a reservation, see `_Expected`, and none any more for the one before."""
        self._expected = {number: _Expected(workers, note, begin)}

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            while True:
                number, sender, checksum = json.loads(self._socket.recv(_MOST_BYTES))
                expected = self._expected.get(number)
                if expected is not None and not sender and not checksum:
                    expected.begin()
                elif expected is not None:
                    expected.found[sender] = checksum
                    self._answer(number, expected)
                    if not sender:  # a trainer that waits no longer may have withdrawn the version
                        self._loop.call_later(PATIENCE_S, self._expected.pop, number, None)

    def _answer(self, number: str, expected: _Expected) -> None:
        if "" not in expected.found:
            return  # the trainer has not sent its own yet, and does not wait
        given = [expected.found.get(worker) for worker in expected.workers]
        is_held = all(one == expected.found[""] for one in given)
        if is_held or any(one not in (None, expected.found[""]) for one in given):
            del self._expected[number]
            if not is_held:
                self._trainer.send([number, ""])
                return
            answering = asyncio.ensure_future(self._note(number, expected.note))
            self._answers.add(answering)  # the loop alone would let it go
            answering.add_done_callback(self._answers.discard)

    async def _note(self, number: str, note: Callable[[], Awaitable[str]]) -> None:
        self._trainer.send([number, await note()])

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._trainer.close()
        self.path.unlink(missing_ok=True)


class ReservationServers:
    """A server's ends, for the trainers that came last."""

    def __init__(self) -> None:
        self._servers: OrderedDict[Path, ReservationServer] = OrderedDict()

    def of(self, folder: Path) -> ReservationServer:
        """For the trainer with this folder.

        Raises:
            Refused: there is none.
        """
        server = self._servers.pop(folder, None)
        if server is not None and not server.path.exists():  # as a trainer deletes its folder, and may make it again
            server.close()
            server = None
        try:
            self._servers[folder] = server or ReservationServer(folder)
        except OSError as error:
            raise Refused(409, f"No socket can be made for the trainer ({error}).") from error
        # Most trainers are gone by then, and another one gets a new one with its next request.
        while len(self._servers) > _MOST_TRAINERS:
            self._servers.popitem(last=False)[1].close()
        return self._servers[folder]


class Sender:
    """Sends messages to one socket, which need not be there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket: socket.socket | None = None

    def send(self, message: list[str]) -> bool:
        """Whether it was sent; without waiting."""
        try:
            if self._socket is None:
                self._socket = _connected(self.path)
            self._socket.send(json.dumps(message).encode())
        except OSError as error:  # the version is then loaded by a request
            logger.debug("%s takes no message: %s", self.path, error)
            self.close()
            return False
        return True

    def close(self) -> None:
        """May be called again, and a later message opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connected(path: Path) -> socket.socket:
    with short_path(path) as short:
        return _opened(lambda made: made.connect(short))


def _bound(path: Path) -> socket.socket:
    with short_path(path) as short:
        return _opened(lambda made: made.bind(short))


def _opened(open_: Callable[[socket.socket], None]) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)  # a process that hangs must not hold up another one
        open_(made)
    except OSError:
        made.close()
        raise
    return made

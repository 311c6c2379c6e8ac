"""The server's end of an upload over several connections at once, beside the HTTP server.

An HTTP server in Python takes a body in one thread and copies it a few times, which is slower than a link of 10 Gbit/s.
Here each connection has a thread, which leaves the interpreter's lock while it receives, adds up and writes. The port
is open for one upload only, and a connection must begin with the secret that the trainer got over HTTP.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from trl_lora_sync.engine_plugins.checksum import parts_of
from trl_lora_sync.engine_plugins.push_store import Upload

# For all connections, and from one piece of an adapter to the next one.
CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S = 10.0, 30.0
# For its first bytes, because a stranger that sends none keeps a thread from the trainer for so long.
HEAD_TIMEOUT_S = 2.0
MOST_STREAMS = 8
_TOKEN_BYTES = 32
# Then the number of the stream, in one byte.
_HEAD_BYTES = _TOKEN_BYTES + 1


class IncomingStreams:
    """Receives one upload. Its threads end by themselves, at the latest when the trainer has been silent for long.

    Args:
        upload: what is received; aborted by an error, and by `abort`.
        address: of this host, where the trainer's HTTP request arrived.

    Attributes:
        token: what each connection must begin with.

    Raises:
        OSError: no port can be opened there.
    """

    def __init__(self, upload: Upload, address: str, streams: int) -> None:
        self.upload = upload
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        # An IPv4 client of a server that listens on `::`; a socket for IPv6 alone cannot be bound to that form.
        address = address.removeprefix("::ffff:")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # On this address only, so that the port is not open on other networks of the host.
        self._listener = socket.create_server((address, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._left = dict(enumerate(parts_of(upload.size, streams)))
        self._open = {self._listener}
        # Guards `_left` and `_open`, which all threads change.
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + CONNECT_TIMEOUT_S
        self._all = asyncio.gather(*(asyncio.wrap_future(_in_thread(self._receive_one)) for _ in range(streams)))
        self._all.add_done_callback(self._end)

    async def received(self) -> None:
        """Wait for all of it.

        Raises:
            OSError: a connection did not come, broke, or was silent for too long.
            Refused: the file system is full.
        """
        await asyncio.shield(self._all)

    def abort(self) -> None:
        """End it and delete what has arrived; does nothing to an upload that is finished."""
        with self._lock:
            # Wakes the threads, each of which closes its own.
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self.upload.abort()

    def _end(self, done: "asyncio.Future[list[None]]") -> None:
        # The first error ends `gather` while other threads still receive; closing their sockets ends these.
        if done.cancelled() or done.exception():
            self.abort()
        with self._lock:
            self._open.discard(self._listener)
        self._listener.close()

    def _receive_one(self) -> None:
        while True:
            # A timeout of 0 would make the socket non-blocking, for all threads that wait at it.
            self._listener.settimeout(max(0.01, self._deadline - time.monotonic()))
            connection, _ = self._listener.accept()
            # `_closed_early` ends first, so `abort` never finds a socket that is closed already.
            with connection, self._closed_early(connection):
                part = self._part_of(connection)
                if part is not None:
                    connection.settimeout(SILENCE_TIMEOUT_S)
                    self.upload.receive(connection.recv_into, *part)
                    return

    @contextlib.contextmanager
    def _closed_early(self, connection: socket.socket) -> Iterator[None]:
        """Let `abort` end it."""
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def _part_of(self, connection: socket.socket) -> tuple[int, int] | None:
        """What a connection brings; None if it does not come from the trainer."""
        connection.settimeout(HEAD_TIMEOUT_S)
        head = b""
        # A stranger that stays silent or leaves may not end the upload.
        with contextlib.suppress(OSError):
            while len(head) < _HEAD_BYTES and (more := connection.recv(_HEAD_BYTES - len(head))):
                head += more
        if len(head) < _HEAD_BYTES or not hmac.compare_digest(head[:_TOKEN_BYTES], self.token.encode()):
            return None
        with self._lock:
            # Removed, so that a second connection with this number gets no part.
            return self._left.pop(head[_TOKEN_BYTES], None)


def _in_thread(act: Callable[[], None]) -> "Future[None]":
    """Not in a pool, for whose threads the end of the process would wait."""
    done: Future[None] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            act()
        # Everything, or `received` would wait for this thread for ever.
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="lora-sync-push", daemon=True).start()
    return done

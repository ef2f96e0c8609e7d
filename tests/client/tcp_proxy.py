"""Stands between two nodes like a bad network: slow, silent, cut, or with other bytes."""

import contextlib
import socket
import threading
import time

CHUNK_BYTES = 16 * 1024


class TcpProxy:
    """Connects the clients of `listen` with `target`.

    The target's bytes are held back while `is_held`, limited to `bytes_per_s`, and passed through `rewrite`. The bytes
    to the target are not changed.
    """

    def __init__(self, listen, target):
        self.target = target
        self.bytes_per_s = None
        self.rewrite = None
        self.num_bytes = 0
        # The number of connections since the start, including closed ones.
        self.num_connections = 0
        self._sockets = []
        self._lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self._holds_after = None
        self._free_at = 0.0
        self._listener = socket.create_server(listen)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_held(self):
        return not self._passes.is_set()

    @is_held.setter
    def is_held(self, is_held):
        if is_held:
            self._passes.clear()
        else:
            self._passes.set()

    def hold_after(self, num_bytes):
        """Starts holding after this many more bytes."""
        with self._lock:
            self._holds_after = self.num_bytes + num_bytes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A shutdown, unlike a close, wakes the accepting thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.is_held = False

    def cut(self):
        """Breaks all connections, and accepts new ones."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self.num_connections += 1
                self._sockets += [near, far]
            for pump in (self._pump_to_target, self._pump_from_target):
                threading.Thread(target=pump, args=(near, far), daemon=True).start()

    def _pump_to_target(self, near, far):
        with contextlib.suppress(OSError):
            while chunk := near.recv(CHUNK_BYTES):
                far.sendall(chunk)
        shut(near, far)

    def _pump_from_target(self, near, far):
        with contextlib.suppress(OSError):
            while True:
                self._passes.wait()
                chunk = far.recv(CHUNK_BYTES)
                if not chunk:
                    break
                self._passes.wait()
                if self.rewrite is not None:
                    chunk = self.rewrite(chunk)
                self._wait_for_turn(len(chunk))
                near.sendall(chunk)
        shut(near, far)

    def _wait_for_turn(self, num_bytes):
        """Waits until the bytes may pass. All connections share the link."""
        with self._lock:
            self.num_bytes += num_bytes
            if self._holds_after is not None and self.num_bytes >= self._holds_after:
                self._holds_after, self.is_held = None, True
            if self.bytes_per_s is None:
                return
            start = max(self._free_at, time.monotonic())
            self._free_at = start + num_bytes / self.bytes_per_s
            pause_s = self._free_at - time.monotonic()
        time.sleep(max(pause_s, 0))


def shut(*sockets):
    for connection in sockets:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

"""Stands between two nodes and holds the frames of one node back, from a chosen frame on."""

import contextlib
import struct

from fleet import ROW_BYTES
from tcp_proxy import TcpProxy, shut

FRAME_BYTES = 64
TRAILER_BYTES = 16
# As in `crates/corella-cluster/src/transport/frame.rs`.
HELLO, ROWS, ROWS_END, BLOCKS = ord("C"), 3, 4, 9
# Verbs of messages about cached blocks.
LANDED, FOUND, CONFIRMED, HOLD_ENDED = 3, 5, 6, 9


class FrameProxy(TcpProxy):
    """A TcpProxy that passes on whole frames of KV connections."""

    def __init__(self, listen, target):
        self._hold_before = None
        # Replaces a frame by another, or returns `None`. It is reset after its first replacement.
        self.change = None
        super().__init__(listen, target)

    def hold_before(self, kind, verb=None, after=0):
        """Starts holding before a frame of this kind, after this many frames of the kind."""
        self._hold_before = (kind, verb, after)

    def _pump_from_target(self, near, far):
        with contextlib.suppress(OSError), far.makefile("rb") as frames:
            while frame := frames.read(FRAME_BYTES):
                if frame[0] == HELLO:
                    num_layers, _, _, page_size = struct.unpack_from("<2H2I", frame, 40)
                payload = frames.read(_payload_bytes(frame, ROW_BYTES // num_layers, page_size))
                self._note(frame)
                self._passes.wait()
                near.sendall(self._changed(frame) + payload)
        shut(near, far)

    def _changed(self, frame):
        with self._lock:
            changed = self.change and self.change(frame)
            if changed is None:
                return frame
            self.change = None
            return changed

    def _note(self, frame):
        with self._lock:
            if self._hold_before is None:
                return
            kind, verb, after = self._hold_before
            if frame[0] != kind or verb not in (None, frame[36]):
                return
            if after:
                self._hold_before = kind, verb, after - 1
                return
            self._hold_before = None
            self.is_held = True


def _payload_bytes(frame, layer_row_bytes, page_size):
    if frame[0] == ROWS:
        (num_rows,) = struct.unpack_from("<I", frame, 20)
        return -(-num_rows // page_size) * page_size * layer_row_bytes + TRAILER_BYTES
    if frame[0] == BLOCKS:
        (num_bytes,) = struct.unpack_from("<I", frame, 32)
        return num_bytes
    return 0

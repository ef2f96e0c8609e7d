"""A file system that never answers, like a network file system whose server is gone."""

import contextlib
import ctypes
import os

import pytest

FORCE, DETACH = 1, 2


@contextlib.contextmanager
def stalled_mount(folder):
    """Mounts a stalled file system over a folder. Every access waits until the mount is released, and then fails.

    Yields a function that releases it. It is a FUSE file system whose first message is never answered.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"this machine has no FUSE: {error}")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    name = os.fsencode(folder)
    if libc.mount(b"stalled", name, b"fuse", ctypes.c_ulong(0), options) != 0:
        os.close(device)
        pytest.skip(f"this machine allows no mounts: {os.strerror(ctypes.get_errno())}")
    ends = contextlib.ExitStack()
    ends.callback(libc.umount2, name, FORCE | DETACH)
    # Closing the descriptor makes the kernel fail every access that waits.
    ends.callback(os.close, device)
    with ends:
        yield ends.close

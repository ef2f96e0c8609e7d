"""A disk of a few megabytes whose file system reserves no room for files."""

import contextlib
import os
import shutil
import subprocess

import pytest

# Where distributions keep tools for administrators.
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """Mounts an empty file system over `folder`, from an image beside it. Files of it may have holes: ext2 has no
    extents, so it reserves nothing for them, and a write into a hole fails when the disk is full.
    """
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    make, mount, unmount = (shutil.which(name, path=SEARCHED) for name in ("mkfs.ext2", "mount", "umount"))
    if not (make and mount and unmount):
        pytest.skip("mkfs.ext2, mount or umount is missing")
    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(num_bytes)
    subprocess.run([make, "-q", "-F", "-m", "0", image], check=True, capture_output=True)
    mounted = subprocess.run([mount, "-o", "loop", image, folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no image: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([unmount, "--lazy", folder], check=True)


def fill(path):
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 10)):
            pass

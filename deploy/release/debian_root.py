"""A system of Debian's packages alone, in a folder, whose programs run without an outside network."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

# Lent folders, and databases, logs and locks of the system's own programs.
UNWATCHED = {"cargo", "dev", "proc", "release", "rust", "wheels", "tmp", "var/log"}
UNWATCHED |= {"var/cache/ldconfig", "var/lib/dpkg", "var/lib/rpm", "var/lib/systemd"}
UNWATCHED_FILES = {f"etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")} | {"etc/.pwd.lock"}
# The folder of the user who runs programs.
HOME = "srv/user"
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def fetch(archive, packages):
    """Makes the archive of a system with these packages, unless the archive exists."""
    if archive.exists():
        return
    partial = archive.with_suffix(".partial.tar")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", partial]
    subprocess.run(command, check=True)
    partial.rename(archive)


def enter_namespaces():
    """Starts this program again with its own mounts, processes and network, all of which end with the program."""
    if "CORELLA_OWN_NETWORK" in os.environ:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
        return
    own = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", sys.executable, "-B", *sys.argv]
    os.execvpe(own[0], own, {**os.environ, "CORELLA_OWN_NETWORK": "1"})


class Root:
    def __init__(self, folder, archive=None):
        """Unpacks the archive of a system, or begins with an empty folder."""
        self.folder = folder
        self.mounted = []
        self.remove()
        folder.mkdir(parents=True)
        if archive:
            subprocess.run(["tar", "--extract", "--file", archive, "--directory", folder], check=True)
        self.before = self.files()

    def __truediv__(self, path):
        return self.folder / path

    def __enter__(self):
        self.mount("proc", "--types", "proc", "proc")
        self.before = self.files()
        return self

    def __exit__(self, *_):
        for folder in reversed(self.mounted):
            subprocess.run(["umount", folder], check=True)
        self.remove()

    def remove(self):
        # A folder that is lent here stays, whatever has failed.
        subprocess.run(["rm", "--recursive", "--force", "--one-file-system", self.folder], check=True)

    def mount(self, inside, *arguments):
        folder = self / inside
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments, folder], check=True)
        self.mounted.append(folder)

    def lend(self, outside, inside):
        """Shows a folder of this machine in the system, which cannot write to the folder."""
        self.mount(inside, "--bind", outside)
        subprocess.run(["mount", "--options", "remount,bind,ro", self / inside], check=True)
        self.before = self.files()

    def files(self):
        """Returns the paths of all files and folders that installing and removing may change."""
        found = set()
        for folder, folders, names in os.walk(self.folder):
            inside = os.path.relpath(folder, self.folder)
            folders[:] = [name for name in folders if os.path.normpath(f"{inside}/{name}") not in UNWATCHED]
            found |= {os.path.normpath(f"{inside}/{name}") for name in [*folders, *names]}
        return found - UNWATCHED_FILES

    def left_over(self):
        """Returns the files and folders that did not exist at first."""
        return self.files() - self.before

    def command(self, words, user=0, environment=None):
        """Returns a command that runs in the system, and its environment."""
        variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        variables |= {"HOME": f"/{HOME}", **(environment or {})}
        return ["chroot", f"--userspec={user}:{user}", self.folder, *words], variables

    def run(self, *words, user=0, environment=None, text=""):
        command, variables = self.command(words, user, environment)
        # `chroot` looks for the program with its own PATH.
        done = subprocess.run(command, env=variables, input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

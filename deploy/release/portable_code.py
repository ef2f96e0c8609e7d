"""Checks that built code runs on other machines, and names no folder of this machine."""

import io
import os
import re
import zipfile
from pathlib import Path

from bill_of_materials import ROOT

# The version of CentOS 7, from 2012, and of manylinux2014.
NEWEST_GLIBC = (2, 17)
VERSION = re.compile(rb"GLIBC_(\d+)\.(\d+)(?:\.\d+)?\0")


def check(name, code):
    """Ends the program if code needs a newer C library, or names a folder of this machine."""
    versions = {(int(major), int(minor)) for major, minor in VERSION.findall(code)}
    newer = sorted(version for version in versions if version > NEWEST_GLIBC)
    if newer:
        listed = ", ".join(f"{major}.{minor}" for major, minor in newer)
        raise SystemExit(f"{name} needs symbols of glibc {listed}; `objdump -T {name}` names them")
    tools = [os.environ.get(variable, default) for variable, default in
             [("CARGO_HOME", "~/.cargo"), ("RUSTUP_HOME", "~/.rustup")]]  # fmt: skip
    for folder in [ROOT, *(Path(tool).expanduser() for tool in tools)]:
        if f"{folder}/".encode() in code:
            at = code.index(f"{folder}/".encode())
            text = code[at : at + 120].split(b"\0")[0].decode(errors="replace")
            raise SystemExit(f"{name} names a path of this machine: {text!r}")


def check_wheel(wheel):
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        for name in archive.namelist():
            check(f"{name} of {wheel.name}", archive.read(name))

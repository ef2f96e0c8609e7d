"""Packs a built binary and the Python package for users.

    cargo xtask dist

builds them and calls this. The same files give the same bytes, whenever and in whatever folder; another version of zlib
may compress them differently.
"""

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path

from bill_of_materials import ROOT, bill_of_materials, licences, read_metadata, run
from debian_package import debian_package
from file_tree import compress, tar
from oci_image import Base, oci_image
from payload import Payload
from portable_code import check, check_wheel
from rpm_package import rpm_package
from source_package import source_package

TARGET = "x86_64-unknown-linux-gnu"
MAX_IMAGE_BYTES = 50_000_000


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True, help="folder with the wheel and the source package")
    parser.add_argument("--output", type=Path, required=True, help="folder for what is made")
    arguments = parser.parse_args()
    base = Base.fetch()
    for path in make(arguments.binary.resolve(), arguments.python, base, arguments.output):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


def make(binary, python, base, folder):
    """Writes all files of a release, and returns their paths."""
    (version,) = [package["version"] for package in read_metadata()["packages"] if package["name"] == "corella"]
    seconds = commit_time()
    name = f"corella-{version}-{TARGET}"
    materials = json.dumps(bill_of_materials(TARGET), indent=1).encode() + b"\n"
    payload = Payload(binary, materials, licences(TARGET).encode())
    (wheel,) = python.glob("*.whl")
    (source,) = python.glob("*.tar.gz")
    check(binary.name, payload.binary.data)
    check_wheel(wheel)
    made = dict([
        (f"{name}.tar.gz", compress(tar(payload.archive(), seconds, f"{name}/"))),
        (f"{name}.cdx.json", materials),
        debian_package(payload.system(), version, seconds),
        rpm_package(payload.system(), version, seconds),
        (wheel.name, wheel.read_bytes()),
        source_package(source, seconds),
        oci_image(base, payload, version, seconds),
        ("install.sh", (Path(__file__).parent / "install.sh").read_bytes()),
    ])  # fmt: skip
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(made.items())]
    made["SHA256SUMS"] = "".join(sums).encode()
    for name, data in made.items():
        if name.endswith("-image.tar") and len(data) > MAX_IMAGE_BYTES:
            raise SystemExit(f"{name} has {len(data)} bytes, more than {MAX_IMAGE_BYTES}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in made]


def commit_time():
    """Returns the time of all files: the usual variable for reproducible builds, or the time of the commit."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct"))


if __name__ == "__main__":
    main()

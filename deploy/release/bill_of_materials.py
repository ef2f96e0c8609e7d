"""What the binary is made of: a bill of materials, and the licences of its parts."""

import base64
import functools
import hashlib
import json
import re
import subprocess
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE_PACKAGES = ROOT / "crates/corella-server/page/vendor"
LICENCE_FILE = re.compile(r"(licen[cs]e|copying|notice|unlicense)", re.IGNORECASE)


@functools.cache
def read_metadata():
    return json.loads(run("cargo", "metadata", "--format-version", "1", "--locked"))


def bill_of_materials(target):
    """Returns the crates that are part of the binary, as CycloneDX 1.5."""
    metadata = read_metadata()
    packages = {(found["name"], found["version"]): found for found in metadata["packages"]}
    needed = read_tree(target)
    checksums = read_checksums(ROOT / "Cargo.lock")
    (itself,) = [crate for crate in needed if crate[0] == "corella"]

    def reference(crate):
        return "pkg:cargo/{}@{}".format(*crate)

    def component(crate):
        found = packages[crate]
        described = {
            "type": "application" if crate == itself else "library",
            "bom-ref": reference(crate),
            "name": found["name"],
            "version": found["version"],
            "purl": reference(crate),
        }
        if found.get("license"):
            # Old manifests separate licences by a slash.
            described["licenses"] = [{"expression": found["license"].replace("/", " OR ")}]
        if crate in checksums:
            described["hashes"] = [{"alg": "SHA-256", "content": checksums[crate]}]
        return described

    crates = sorted(needed, key=reference)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(itself)},
        "components": [component(crate) for crate in crates if crate != itself] + packages_of_the_page(),
        "dependencies": [
            {"ref": reference(crate), "dependsOn": sorted(map(reference, needed[crate]))}
            for crate in crates
        ],
    }
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
    # The serial number is made from the document, because a random number would differ each time.
    return {"serialNumber": uuid.UUID(bytes=digest[:16], version=4).urn, **document}


def packages_of_the_page():
    """Returns the npm packages whose files are part of the binary, with the hashes of their archives."""
    locked = json.loads((ROOT / "tests/client/node/package-lock.json").read_text())["packages"]
    components = []
    for folder in sorted(PAGE_PACKAGES.iterdir()):
        package = locked[f"node_modules/{folder.name}"]
        algorithm, digest = package["integrity"].split("-", 1)
        reference = f"pkg:npm/{folder.name}@{package['version']}"
        described = {"type": "library", "bom-ref": reference, "name": folder.name, "version": package["version"]}
        described |= {"purl": reference, "licenses": [{"expression": package["license"]}]}
        hash_name = algorithm.upper().replace("SHA", "SHA-")
        described["hashes"] = [{"alg": hash_name, "content": base64.b64decode(digest).hex()}]
        components.append(described)
    return components


@functools.cache
def read_tree(target):
    """Returns the crates that the binary is made of, each with the crates that it uses directly.

    Crates that only builds and tests use are left out.
    """
    command = ["cargo", "tree", "--package", "corella", "--locked", "--target", target]
    command += ["--edges", "normal", "--prefix", "depth", "--no-dedupe"]
    needed, above = {}, []
    for line in run(*command).decode().splitlines():
        depth, name, version = re.match(r"(\d+)(\S+) v(\S+)", line).groups()
        crate = (name, version)
        del above[int(depth) :]
        if above:
            needed[above[-1]].add(crate)
        needed.setdefault(crate, set())
        above.append(crate)
    return needed


def read_checksums(lock):
    """Returns the checksum of each crate by name and version, as Cargo.lock has them."""
    checksums, crate = {}, {}
    for line in lock.read_text().splitlines():
        if line == "[[package]]":
            crate = {}
        elif " = " in line:
            key, value = line.split(" = ", 1)
            crate[key] = value.strip('"')
            if key == "checksum":
                checksums[crate["name"], crate["version"]] = crate["checksum"]
    return checksums


def licences(target):
    """Returns the licence texts of all parts, each text once, below the names of the parts with this text."""
    packages = {(found["name"], found["version"]): found for found in read_metadata()["packages"]}
    parts, silent = {}, []
    for crate in sorted(read_tree(target)):
        name = "{} {}".format(*crate)
        files = licence_files(Path(packages[crate]["manifest_path"]).parent)
        if not files and packages[crate]["source"]:
            silent.append(f"{name}: {packages[crate].get('license') or 'see its repository'}")
        for file in files:
            parts.setdefault(file.read_text(errors="replace").strip(), []).append(name)
    for folder in sorted(PAGE_PACKAGES.iterdir()):
        for file in licence_files(folder):
            parts.setdefault(file.read_text().strip(), []).append(f"{folder.name} (files of the page)")
    sections = [f"{', '.join(names)}\n\n{text}\n" for text, names in parts.items()]
    if silent:
        sections.append("These bring no text of their licence:\n\n" + "\n".join(silent) + "\n")
    return f"\n{'=' * 80}\n\n".join(sections)


def licence_files(folder):
    return sorted(path for path in folder.iterdir() if LICENCE_FILE.match(path.name) and path.is_file())


def run(*command):
    done = subprocess.run([str(word) for word in command], cwd=ROOT, check=True, capture_output=True)
    return done.stdout

"""Packs a built binary for others: the archive, its bill of materials and their checksums.

    cargo xtask dist

builds the binary and calls this. The same binary and sources give the same bytes, whenever and in whatever folder; another version of zlib may compress
them differently.
"""

import argparse
import base64
import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELLS = {"bash": "corella.bash", "zsh": "_corella", "fish": "corella.fish"}
# Files of the repository, and their names in the archive.
FILES = {
    "LICENSE": "LICENSE",
    "crates/corella-server/page/vendor/katex/LICENSE": "licenses/KaTeX",
    "README.md": "README.md",
    "deploy/systemd/corella.service": "systemd/corella.service",
    "deploy/prometheus/alerts.yml": "prometheus/alerts.yml",
    "deploy/grafana/corella.json": "grafana/corella.json",
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for what is made")
    arguments = parser.parse_args()
    for path in make(arguments.binary.resolve(), arguments.output):
        print(path)


def make(binary, folder):
    """Writes archive, bill of materials and checksums, and returns their paths."""
    metadata = json.loads(run("cargo", "metadata", "--format-version", "1", "--locked"))
    (package,) = [package for package in metadata["packages"] if package["name"] == "corella"]
    target = host()
    name = f"corella-{package['version']}-{target}"
    materials = json.dumps(bill_of_materials(metadata, package, target), indent=1).encode() + b"\n"
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{name}.tar.gz"
    archive.write_bytes(pack(name, contents(binary, materials)))
    sbom = folder / f"{name}.cdx.json"
    sbom.write_bytes(materials)
    sums = folder / "SHA256SUMS"
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (sbom, archive)]
    sums.write_text("".join(lines))
    return [archive, sbom, sums]


def contents(binary, materials):
    """Returns each file's mode and bytes by its name in the archive."""
    files = {"corella": (0o755, binary.read_bytes()), "corella.cdx.json": (0o644, materials)}
    for path, name in FILES.items():
        files[name] = (0o644, (ROOT / path).read_bytes())
    for shell, name in SHELLS.items():
        files[f"completions/{name}"] = (0o644, run(binary, "completions", shell))
    with tempfile.TemporaryDirectory() as pages:
        run(binary, "man", "--output", pages)
        for page in Path(pages).iterdir():
            files[f"man/{page.name}"] = (0o644, page.read_bytes())
    return files


def pack(name, files):
    """Returns a compressed archive in which nothing tells who made it, where or when."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, (mode, data) in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(tar.getvalue(), compresslevel=6, mtime=0)


def bill_of_materials(metadata, package, target):
    """Returns the crates that are part of the binary, as CycloneDX 1.5."""
    packages = {(found["name"], found["version"]): found for found in metadata["packages"]}
    needed = read_tree(target)
    checksums = read_checksums(ROOT / "Cargo.lock")
    itself = (package["name"], package["version"])

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
    # Made from what it names, because a random one would differ each time.
    return {"serialNumber": uuid.UUID(bytes=digest[:16], version=4).urn, **document}


def packages_of_the_page():
    """Returns the npm packages whose files are part of the binary, with the hashes of their archives."""
    locked = json.loads((ROOT / "tests/client/node/package-lock.json").read_text())["packages"]
    components = []
    for folder in sorted((ROOT / "crates/corella-server/page/vendor").iterdir()):
        package = locked[f"node_modules/{folder.name}"]
        algorithm, digest = package["integrity"].split("-", 1)
        reference = f"pkg:npm/{folder.name}@{package['version']}"
        described = {"type": "library", "bom-ref": reference, "name": folder.name, "version": package["version"]}
        described |= {"purl": reference, "licenses": [{"expression": package["license"]}]}
        hash_name = algorithm.upper().replace("SHA", "SHA-")
        described["hashes"] = [{"alg": hash_name, "content": base64.b64decode(digest).hex()}]
        components.append(described)
    return components


def read_tree(target):
    """Returns the crates that the binary is made of, each with those that it uses itself.

    What only builds and tests use is not among them.
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


def host():
    """Returns the target that cargo builds for, for example x86_64-unknown-linux-gnu."""
    (line,) = [line for line in run("rustc", "-vV").decode().splitlines() if line.startswith("host: ")]
    return line.removeprefix("host: ")


def run(*command):
    done = subprocess.run([str(word) for word in command], cwd=ROOT, check=True, capture_output=True)
    return done.stdout


if __name__ == "__main__":
    main()

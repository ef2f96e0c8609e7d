"""An image for containers, made without a container engine: the C library and certificates of Debian, and the binary.

Engines get the same settings as from deploy/Containerfile.
"""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from bill_of_materials import ROOT
from file_tree import File, compress, folder, tar, with_folders

CONTAINERFILE = ROOT / "deploy/Containerfile"
# apt's own user may not write into a folder of this user.
APT_DOWNLOAD = ["apt-get", "download", "--quiet=2", "--option", "APT::Sandbox::User=root"]
BASE_PACKAGES = ["ca-certificates", "libc6"]
LIBRARY = re.compile(r"(usr/)?lib(64)?/(.*/)?(ld-linux|lib[\w-]+\.so\.)[^/]*")
CERTIFICATE = re.compile(r"usr/share/ca-certificates/.*\.crt")
NOBODY = 65534
SYSTEM = {
    "etc/passwd": File(f"root:x:0:0::/:/sbin/nologin\nnobody:x:{NOBODY}:{NOBODY}::/:/sbin/nologin\n".encode()),
    "etc/group": File(f"root:x:0:\nnogroup:x:{NOBODY}:\n".encode()),
    "etc/nsswitch.conf": File(b"hosts: files dns\n"),
    "cache": folder(NOBODY),
    "tmp": folder(mode=0o1777),
    "lib": File(link="usr/lib"),
    "lib64": File(link="usr/lib64"),
}


class Base:
    """The files of Debian packages that the binary needs, and the packages' versions."""

    def __init__(self, files, versions):
        self.files = files
        self.versions = versions

    @classmethod
    def fetch(cls):
        """Fetches the packages from the archive that this machine's apt uses."""
        files, versions, certificates = dict(SYSTEM), {}, []
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(APT_DOWNLOAD + BASE_PACKAGES, cwd=scratch, check=True)
            for package in sorted(Path(scratch).glob("*.deb")):
                fields = ask("--field", package, "Package", "Version").decode()
                found = dict(line.split(": ") for line in fields.splitlines())
                versions[found["Package"]] = found["Version"]
                with tarfile.open(fileobj=io.BytesIO(ask("--fsys-tarfile", package))) as archive:
                    for entry in archive:
                        path = entry.name.removeprefix("./")
                        if CERTIFICATE.fullmatch(path):
                            certificates.append((path, archive.extractfile(entry).read().rstrip() + b"\n"))
                        elif LIBRARY.fullmatch(path) or path == f"usr/share/doc/{found['Package']}/copyright":
                            kept = read_entry(archive, entry)
                            files[path if path.startswith("usr/") else f"usr/{path}"] = kept
        bundle = b"".join(text for _, text in sorted(certificates))
        files["etc/ssl/certs/ca-certificates.crt"] = File(bundle)
        return cls(files, versions)


def ask(*words):
    return subprocess.run(["dpkg-deb", *words], check=True, capture_output=True).stdout


def read_entry(archive, entry):
    if entry.issym():
        return File(link=entry.linkname)
    return File(archive.extractfile(entry).read(), entry.mode)


def oci_image(base, payload, version, seconds):
    """Returns the image's name and bytes, in OCI's layout, which older engines read by its manifest.json."""
    own = {
        "usr/local/bin/corella": payload.binary,
        "usr/share/doc/corella/LICENSE": payload.documents["LICENSE"],
        "usr/share/doc/corella/THIRD-PARTY-LICENSES": payload.documents["THIRD-PARTY-LICENSES"],
        "usr/share/doc/corella/corella.cdx.json": payload.documents["corella.cdx.json"],
    }
    layers = [tar(with_folders(files), seconds) for files in (base.files, own)]
    blobs = {}

    def add(media_type, data):
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = File(data)
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    def add_json(media_type, value):
        return add(media_type, json.dumps(value, sort_keys=True).encode())

    descriptors = [add("layer.v1.tar+gzip", compress(layer)) for layer in layers]
    labels = {"org.opencontainers.image.title": "corella", "org.opencontainers.image.version": version}
    labels["org.opencontainers.image.licenses"] = "Apache-2.0"
    for package, its_version in sorted(base.versions.items()):
        labels[f"corella.debian.{package}"] = its_version
    config = add_json("config.v1+json", {
        "architecture": "amd64",
        "os": "linux",
        "created": datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z"),
        "config": {**engine_settings(CONTAINERFILE.read_text()), "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    })  # fmt: skip
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    described = add_json("manifest.v1+json", {**manifest, "config": config, "layers": descriptors})
    described["annotations"] = {"org.opencontainers.image.ref.name": version}
    described["annotations"]["io.containerd.image.name"] = f"docker.io/library/corella:{version}"

    def blob(descriptor):
        return f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}"

    older = {"Config": blob(config), "RepoTags": [f"corella:{version}"], "Layers": list(map(blob, descriptors))}
    files = {
        **blobs,
        "oci-layout": File(b'{"imageLayoutVersion": "1.0.0"}'),
        "index.json": File(json.dumps({"schemaVersion": 2, "manifests": [described]}).encode()),
        "manifest.json": File(json.dumps([older]).encode()),
    }
    return f"corella-{version}-x86_64-image.tar", tar(with_folders(files), seconds)


def engine_settings(containerfile):
    """Returns the settings for engines from the last stage of a Containerfile."""
    said = dict(re.findall(r"^(\w+) (.*)$", containerfile.rsplit("\nFROM ", 1)[1], re.MULTILINE))
    return {
        "User": said["USER"],
        "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", *said["ENV"].split()],
        "Volumes": {said["VOLUME"]: {}},
        "ExposedPorts": {f"{said['EXPOSE']}/tcp": {}},
        "StopSignal": said["STOPSIGNAL"],
        "Entrypoint": json.loads(said["ENTRYPOINT"]),
        "Cmd": json.loads(said["CMD"]),
    }

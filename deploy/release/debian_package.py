"""A package for Debian and its relatives, written without their tools."""

import hashlib

from file_tree import File, compress, tar, with_folders
from package_script import FORGET, MAKE_USER, RELOAD_UNITS, SERVE_NEW_VERSION, STOP, when
from payload import CONFIGURATION

CONTROL = """\
Package: corella
Version: {version}
Architecture: amd64
Maintainer: The authors of Corella
Installed-Size: {kibibytes}
Depends: libc6 (>= 2.17), passwd
Recommends: ca-certificates
Section: net
Priority: optional
Description: server of language models on CPUs and NVIDIA GPUs
 Corella answers the OpenAI API. A small model is part of the binary; others are
 fetched from the Hugging Face hub by name, or read from a folder or a GGUF file.
 .
 The service listens on the loopback address. `systemctl enable --now corella`
 starts it.
"""
SHELL = "#!/bin/sh\nset -e\n"
SCRIPTS = {
    "postinst": when('[ "$1" = configure ]', MAKE_USER, RELOAD_UNITS, when('[ -n "$2" ]', SERVE_NEW_VERSION)),
    "prerm": when('[ "$1" = remove ]', STOP),
    "postrm": RELOAD_UNITS + when('[ "$1" = purge ]', FORGET),
}


def debian_package(files, version, seconds):
    """Returns the package's name and bytes."""
    files = dict(files)
    # Debian has other paths for these files.
    files["usr/share/zsh/vendor-completions/_corella"] = files.pop("usr/share/zsh/site-functions/_corella")
    files["usr/share/doc/corella/copyright"] = files.pop("usr/share/doc/corella/LICENSE")
    num_bytes = sum(len(file.data) for file in files.values())
    sums = [
        f"{hashlib.md5(file.data).hexdigest()}  {path}\n"
        for path, file in sorted(files.items())
        if path != CONFIGURATION
    ]
    control = {
        "control": File(CONTROL.format(version=version, kibibytes=num_bytes // 1024).encode()),
        "conffiles": File(f"/{CONFIGURATION}\n".encode()),
        "md5sums": File("".join(sums).encode()),
    }
    for name, script in SCRIPTS.items():
        control[name] = File((SHELL + script).encode(), 0o755)
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": compress(tar(control, seconds, "./")),
        "data.tar.gz": compress(tar(with_folders(files), seconds, "./")),
    }
    return f"corella_{version}_amd64.deb", archive(members, seconds)


def archive(members, seconds):
    """Returns members in the format of ar."""
    packed = [b"!<arch>\n"]
    for name, data in members.items():
        header = f"{name:<16}{seconds:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n"
        packed += [header.encode(), data, b"\n" * (len(data) % 2)]
    return b"".join(packed)

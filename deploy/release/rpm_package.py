"""A package for Fedora, RHEL, SUSE and their relatives, written by rpmbuild."""

import os
import subprocess
import tempfile
from pathlib import Path

from file_tree import with_folders
from package_script import FORGET, MAKE_USER, RELOAD_UNITS, SERVE_NEW_VERSION, STOP, when
from payload import CONFIGURATION

SPEC = """\
Name: corella
Version: {version}
Release: 1
Summary: Server of language models on CPUs and NVIDIA GPUs
License: Apache-2.0
Requires(pre): /usr/sbin/useradd
Recommends: ca-certificates

%description
Corella answers the OpenAI API. A small model is part of the binary; others are
fetched from the Hugging Face hub by name, or read from a folder or a GGUF file.

The service listens on the loopback address. `systemctl enable --now corella`
starts it.

%install
cp -a {files}/. %{{buildroot}}

%pre
{pre}
%post
{post}
%preun
{preun}
%postun
{postun}
%files
{list}
"""
MACROS = {
    # The binary is already stripped, and manual pages are already compressed.
    "__os_install_post": "%{nil}",
    "debug_package": "%{nil}",
    "_build_id_links": "none",
    # Every rpm since 4.6 reads this compression.
    "_binary_payload": "w6.gzdio",
    "_buildhost": "localhost",
    "use_source_date_epoch_as_buildtime": "1",
    "clamp_mtime_to_source_date_epoch": "1",
}
# Other folders belong to all packages that have files in them, and are removed with the last of these.
OF_THE_SYSTEM = {"etc", "usr", "usr/bin", "usr/lib", "usr/lib/systemd", "usr/lib/systemd/system", "usr/share"}
OF_THE_SYSTEM |= {"usr/share/doc", "usr/share/man", "usr/share/man/man1"}
# Scripts are told how many versions are left: one at an installation, two within an upgrade.
SCRIPTS = {
    "pre": MAKE_USER,
    "post": RELOAD_UNITS + when("[ $1 -gt 1 ]", SERVE_NEW_VERSION),
    "preun": when("[ $1 -eq 0 ]", STOP),
    "postun": RELOAD_UNITS + when("[ $1 -eq 0 ]", FORGET),
}


def rpm_package(files, version, seconds):
    """Returns the package's name and bytes."""
    lines = [f"%dir /{path}" for path in sorted(with_folders(files).keys() - files.keys()) if path not in OF_THE_SYSTEM]
    for path, file in sorted(files.items()):
        kind = "%config(noreplace) " if path == CONFIGURATION else ""
        lines.append(f"{kind}%attr({file.mode:04o}, root, root) /{path}")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for path, file in files.items():
            target = scratch / "files" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
            target.chmod(file.mode)
        for path in [scratch / "files", *(scratch / "files").rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
            os.utime(path, (seconds, seconds))
        spec = scratch / "corella.spec"
        spec.write_text(SPEC.format(version=version, files=scratch / "files", list="\n".join(lines), **SCRIPTS))
        command = ["rpmbuild", "-bb", "--quiet", "--target", "x86_64-linux"]
        for name, value in {**MACROS, "_topdir": scratch / "rpm"}.items():
            command += ["--define", f"{name} {value}"]
        # Settings of this machine and of its user must not change the package.
        environment = {"PATH": os.environ["PATH"], "HOME": str(scratch), "LC_ALL": "C", "TZ": "UTC"}
        environment["SOURCE_DATE_EPOCH"] = str(seconds)
        done = subprocess.run([*command, spec], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"rpmbuild failed:\n{done.stdout}{done.stderr}")
        (package,) = (scratch / "rpm").rglob("*.rpm")
        return package.name, package.read_bytes()

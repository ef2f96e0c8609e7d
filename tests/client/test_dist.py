"""The archive of a release: the same bytes twice, and its content."""

import importlib.util
import json
import os
import re
import subprocess
import tarfile
import time

import pytest
from server_process import BINARY, ROOT

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a first archive, and one made later with another clock, umask and time zone."""
    script = ROOT / "deploy/make_archive.py"
    spec = importlib.util.spec_from_file_location("make_archive", script)
    make_archive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_archive)
    first = make_archive.make(BINARY.resolve(), tmp_path_factory.mktemp("first"))
    copy = tmp_path_factory.mktemp("elsewhere") / "corella"
    copy.write_bytes(BINARY.read_bytes())
    copy.chmod(0o700)
    # Times in archives have seconds.
    later_s = time.time() + 3600
    mask = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "Pacific/Chatham")
            patch.setattr(time, "time", lambda: later_s)
            second = make_archive.make(copy, tmp_path_factory.mktemp("second"))
    finally:
        os.umask(mask)
    return first, second


def test_two_archives_of_one_binary_are_equal(made):
    first, second = made
    assert [path.name for path in first] == [path.name for path in second]
    for one, other in zip(first, second):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_the_archive_has_what_a_machine_needs(made, tmp_path):
    (archive, sbom, sums), _ = made
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=sums.parent, check=True)
    with tarfile.open(archive) as packed:
        for entry in packed:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 0)
            assert entry.isfile()
        packed.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert root.name == archive.name.removesuffix(".tar.gz")
    assert (root / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (root / "corella.cdx.json").read_bytes() == sbom.read_bytes()
    version = subprocess.run([root / "corella", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.split()[1] in root.name
    assert ".TH" in (root / "man/corella-serve.1").read_text()
    subprocess.run(["bash", "-n", root / "completions/corella.bash"], check=True)


def test_the_bill_names_the_crates_of_the_binary(made):
    # Only tests that run should wait for these imports.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    (_, sbom, _), _ = made
    text = sbom.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(text) is None
    bill = json.loads(text)
    described = [*bill["components"], bill["metadata"]["component"]]
    page = [package for package in described if package["purl"].startswith("pkg:npm/")]
    assert [package["name"] for package in page] == ["katex"]
    crates = {(crate["name"], crate["version"]) for crate in described if crate not in page}
    assert len(crates) == len(described) - len(page)
    lock = (ROOT / "Cargo.lock").read_text()
    assert crates <= set(re.findall(r'^name = "(.*)"\nversion = "(.*)"$', lock, re.MULTILINE))
    names = {name for name, _ in crates}
    # Dependencies in the manifests of the binary and of its parts, and dependencies of their tests.
    waiting, own = ["corella"], set()
    while waiting:
        crate = waiting.pop()
        own.add(crate)
        manifest = (ROOT / "crates" / crate / "Cargo.toml").read_text()
        (section,) = re.findall(r"^\[dependencies\]\n((?:[^\[\n].*\n|\n)*)", manifest, re.MULTILINE)
        used = re.findall(r"^([\w-]+)", section, re.MULTILINE)
        assert used and set(used) <= names, crate
        waiting += [name for name in used if name.startswith("corella") and name not in own]
    assert own == {name for name in names if name.startswith("corella")}
    assert not names & {"proptest", "xtask", "corella-sim"}
    references = {crate["bom-ref"] for crate in described}
    for dependency in bill["dependencies"]:
        assert dependency["ref"] in references and set(dependency["dependsOn"]) <= references
    for crate in described:
        assert crate["licenses"], crate["name"]
        if not crate["name"].startswith("corella"):
            assert len(crate["hashes"][0]["content"]) == (128 if crate in page else 64)

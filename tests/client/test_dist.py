"""The files of a release: the same bytes twice, and their content.

A small program stands for the binary, because packing the real one takes longer. `deploy/release/try_install.py`
installs and uses real ones.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from fnmatch import fnmatch
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from manifest import program
from server_process import BINARY, ROOT

RELEASE = ROOT / "deploy/release"
sys.path.append(str(RELEASE))
import make_release
import oci_image
import payload
import portable_code
import source_package
from bill_of_materials import bill_of_materials
from file_tree import File

SMALL_PROGRAM = """#!/bin/sh
case $1 in
    --version) echo corella 0.1.0 ;;
    completions) echo "# completions of $2" ;;
    man) echo '.TH corella-serve 1' >"$3/corella-serve.1" ;;
esac
"""
BASE = oci_image.Base({**oci_image.SYSTEM, "usr/lib/libc.so.6": File(b"library", 0o755)}, {"libc6": "2.36"})


def pack(folder, mode):
    binary = folder / "corella"
    binary.write_text(SMALL_PROGRAM)
    binary.chmod(mode)
    python = folder / "python"
    python.mkdir(mode=0o700)
    with zipfile.ZipFile(python / "corella_llm-0.1.0-cp310-abi3-manylinux2014_x86_64.whl", "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("corella/_corella.abi3.so"), "code")
    with tarfile.open(python / "corella_llm-0.1.0.tar.gz", "w:gz") as source:
        source.add(ROOT / "Cargo.toml", "corella_llm-0.1.0/Cargo.toml")
    return {path.name: path for path in make_release.make(binary, python, BASE, folder / "dist")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the files of a first release by their names, and those of one made later with another clock, umask and
    time zone.
    """
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is missing")
    first = pack(tmp_path_factory.mktemp("first"), 0o755)
    # Times in archives have seconds.
    later_s = time.time() + 3600
    mask = os.umask(0o077)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "Pacific/Chatham")
            patch.setattr(time, "time", lambda: later_s)
            second = pack(tmp_path_factory.mktemp("second"), 0o700)
    finally:
        os.umask(mask)
    return first, second


@pytest.fixture(scope="module")
def release(made):
    return made[0]


def named(release, ending):
    (path,) = [path for name, path in release.items() if name.endswith(ending)]
    return path


def test_two_releases_of_one_binary_are_equal(made):
    first, second = made
    assert first.keys() == second.keys()
    for name, path in first.items():
        assert path.read_bytes() == second[name].read_bytes(), name
    assert {path.name for path in first["SHA256SUMS"].parent.iterdir()} == first.keys()


def test_each_file_has_its_checksum(release):
    sums = release["SHA256SUMS"]
    subprocess.run(["sha256sum", "--check", "--strict", sums.name], cwd=sums.parent, check=True)
    assert {line.split()[1] for line in sums.read_text().splitlines()} == release.keys() - {"SHA256SUMS"}


def test_the_readme_says_how_to_install_each_file(release):
    readme = (ROOT / "README.md").read_text()
    patterns = re.findall(r"[\w*.-]+", " ".join(re.findall(r"^\| (`.*?) \|", readme, re.MULTILINE)))
    for name in release:
        # The source of the Python package and the bill of materials install nothing by themselves.
        if not name.endswith((".cdx.json", "corella_llm-0.1.0.tar.gz")):
            assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_the_archive_has_what_a_machine_needs(release, tmp_path):
    archive = named(release, "-gnu.tar.gz")
    with tarfile.open(archive) as packed:
        for entry in packed:
            assert (entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, "", "")
            assert entry.isfile() and entry.mtime == make_release.commit_time()
        packed.extractall(tmp_path)
    (root,) = tmp_path.iterdir()
    assert root.name == archive.name.removesuffix(".tar.gz")
    assert (root / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (root / "corella.cdx.json").read_bytes() == named(release, ".cdx.json").read_bytes()
    assert os.access(root / "corella", os.X_OK)
    licences = (root / "THIRD-PARTY-LICENSES").read_text()
    assert "katex (files of the page)" in licences and "\nMIT License" in licences
    for crate in ("tokio", "ring", "serde", "minijinja"):
        assert re.search(rf"^(.*, )?{crate} \d", licences, re.MULTILINE), crate


def test_a_payload_has_the_pages_and_completions_of_the_binary():
    found = payload.Payload(BINARY.resolve(), b"", b"")
    assert b".TH" in found.pages["corella-serve.1"].data
    subprocess.run(["bash", "-n"], input=found.completions["bash"].data, check=True)
    packed = found.archive()
    assert packed["corella"].data == BINARY.read_bytes()


@program("dpkg-deb")
def test_debian_reads_its_package(release, tmp_path):
    package = named(release, ".deb")
    subprocess.run(["dpkg-deb", "--extract", package, tmp_path / "files"], check=True)
    subprocess.run(["dpkg-deb", "--control", package, tmp_path / "control"], check=True)
    sums = tmp_path / "control/md5sums"
    subprocess.run(["md5sum", "--check", "--strict", "--quiet", sums], cwd=tmp_path / "files", check=True)
    check_system(tmp_path / "files")
    assert (tmp_path / "control/conffiles").read_text() == "/etc/corella/corella.toml\n"
    for name in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", tmp_path / "control" / name], check=True)


@program("rpm2archive")
def test_rpm_reads_its_package(release, tmp_path):
    package = named(release, ".rpm")

    def ask(*words):
        query = ["rpm", "--query", *words, "--package", package]
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout

    assert ask("--configfiles") == "/etc/corella/corella.toml\n"
    assert "/usr/sbin/useradd" in ask("--requires").split()
    # Otherwise, these would be the building host's name and the time of the build.
    assert ask("--queryformat", "%{buildhost} %{buildtime}") == f"localhost {make_release.commit_time()}"
    shutil.copy(package, tmp_path)
    subprocess.run(["rpm2archive", tmp_path / package.name], check=True)
    with tarfile.open(tmp_path / f"{package.name}.tgz") as archive:
        archive.extractall(tmp_path)
    check_system(tmp_path)


def check_system(root):
    """Checks what a package installs."""
    unit = (root / "usr/lib/systemd/system/corella.service").read_text()
    assert "\nUser=corella\n" in unit and "DynamicUser" not in unit and "/usr/local" not in unit
    (start,) = re.findall(r"^ExecStart=(\S+) serve --config (\S+)$", unit, re.MULTILINE)
    for path in start:
        assert (root / path.lstrip("/")).is_file()
    assert (root / "usr/lib/systemd/system/corella.socket").is_file()
    assert (root / "usr/share/man/man1/corella-serve.1.gz").is_file()
    assert (root / "usr/share/bash-completion/completions/corella").is_file()


def test_the_configuration_of_packages_is_read(tmp_path):
    broken = tmp_path / "corella.toml"
    text = (RELEASE / "corella.toml").read_text()
    assert '\nhost = "127.0.0.1"\n' in text
    broken.write_text(text + 'prot = 1\nmodel = "none"\n')
    done = subprocess.run([BINARY, "serve", "--config", broken], capture_output=True, text=True)
    # The first refused line is the one after the package's configuration.
    line = len(text.splitlines()) + 1
    assert f"corella.toml, line {line}: `corella serve` has no option `prot`" in done.stderr


def test_the_image_says_what_the_containerfile_says(release):
    with tarfile.open(named(release, "-image.tar")) as image:

        def read(path):
            return image.extractfile(path).read()

        def blob(descriptor):
            data = read(f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}")
            assert len(data) == descriptor["size"]
            return data

        (described,) = json.loads(read("index.json"))["manifests"]
        manifest = json.loads(blob(described))
        config = json.loads(blob(manifest["config"]))
        layers = [blob(layer) for layer in manifest["layers"]]
        (older,) = json.loads(read("manifest.json"))
        assert read(older["Config"]) == blob(manifest["config"]) and [read(path) for path in older["Layers"]] == layers
    said = config["config"]
    assert said["User"] == "65534:65534" and said["Volumes"] == {"/cache": {}} and "8000/tcp" in said["ExposedPorts"]
    assert said["Entrypoint"] == ["corella"] and said["Cmd"] == ["serve", "--host", "0.0.0.0"]
    assert {"XDG_CACHE_HOME=/cache", "HF_HOME=/cache/huggingface"} < set(said["Env"])
    assert said["Labels"]["corella.debian.libc6"] == "2.36" and len(layers) == 2


def test_the_source_package_has_what_the_binary_includes(release):
    with tarfile.open(named(release, "corella_llm-0.1.0.tar.gz")) as source:
        names = {name.removeprefix("corella_llm-0.1.0/") for name in source.getnames()}
    built_in = (ROOT / "crates/corella/src/built_in.rs").read_text()
    included = re.findall(r'file!\("(.*)"\)', built_in)
    assert len(included) == 5
    assert {f"{source_package.MODEL}/{name}" for name in included} | {"Cargo.toml"} == names


@pytest.mark.parametrize(
    "code, complaint",
    [
        (b"\0GLIBC_2.2.5\0GLIBC_2.17\0", None),
        (b"\0GLIBC_2.17\0GLIBC_2.34\0GLIBC_2.18\0", "glibc 2.18, 2.34"),
        (f"\0{ROOT}/crates/x.rs\0".encode(), "path of this machine"),
        (b"/corella/crates/x.rs\0", None),
    ],
)
def test_code_that_others_cannot_run_is_refused(code, complaint, tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("corella/_corella.abi3.so", code)
    for check in (lambda: portable_code.check("corella", code), lambda: portable_code.check_wheel(wheel)):
        if complaint:
            with pytest.raises(SystemExit, match=complaint):
                check()
        else:
            check()


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def install(script, home, *arguments):
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return subprocess.run(["sh", script, *arguments], env=environment, capture_output=True, text=True)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_the_script_installs_and_removes(release, home):
    (home / ".local/bin").mkdir(parents=True)
    other = home / ".local/bin/other"
    other.write_text("")
    before = files(home)
    done = install(release["install.sh"], home)
    assert done.returncode == 0 and "installed corella 0.1.0" in done.stdout and "PATH=" in done.stdout, done
    binary = home / ".local/bin/corella"
    assert subprocess.run([binary, "--version"], capture_output=True, text=True).stdout == "corella 0.1.0\n"
    assert (home / ".local/share/man/man1/corella-serve.1").is_file()
    alerts = ("prometheus/alerts.yml", "prometheus/alerts_test.yml")
    for document in ("systemd/corella.service", "systemd/corella.socket", *alerts, "grafana/corella.json"):
        assert (home / ".local/share/corella" / document).is_file(), document
    assert f"are in {home}/.local/share/corella" in done.stdout and done.stdout.endswith("install.sh --remove\n")
    installed = files(home)
    # The second time is an upgrade from a version with one file more.
    (home / ".local/share/corella/old").write_text("")
    with open(home / ".local/share/corella/installed", "a") as names:
        names.write("share/corella/old\n")
    assert install(release["install.sh"], home).returncode == 0
    assert files(home) == installed
    done = install(release["install.sh"], home, "--remove")
    assert done.returncode == 0 and "/.local/state/corella" in done.stdout, done
    assert files(home) == before
    assert install(release["install.sh"], home, "--remove").returncode == 1
    done = install(release["install.sh"], home, "--help")
    assert done.returncode == 0 and "--prefix FOLDER" in done.stdout and "set -eu" not in done.stdout, done


@program("curl")
def test_the_script_fetches_and_refuses_another_file(release, home, tmp_path):
    served = tmp_path / "served"
    served.mkdir()
    for name in ("SHA256SUMS", named(release, "-gnu.tar.gz").name):
        shutil.copy(release[name], served)
    handler = partial(SimpleHTTPRequestHandler, directory=served)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            done = install(release["install.sh"], home, "--from", address, "--prefix", str(home / "own"))
            assert done.returncode == 0 and os.access(home / "own/bin/corella", os.X_OK), done
            assert done.stdout.endswith(f"install.sh --remove --prefix {home / 'own'}\n"), done
            with open(named({path.name: path for path in served.iterdir()}, ".tar.gz"), "ab") as archive:
                archive.write(b"x")
            done = install(release["install.sh"], home, "--from", f"{address}/")
            assert done.returncode == 1 and "the checksum of corella-0.1.0" in done.stderr, done
            done = install(release["install.sh"], home, "--from", f"{address}/nowhere")
            assert done.returncode == 1 and "could not be fetched" in done.stderr, done
        finally:
            server.shutdown()
            thread.join()
    assert files(home) & {".local"} == set()


def test_the_bill_names_the_crates_of_the_binary():
    # Only tests that run should wait for these imports.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bill = bill_of_materials(make_release.TARGET)
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(bill)) is None
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

"""The files of a release, and their paths in a system."""

import tempfile
from pathlib import Path

from bill_of_materials import ROOT, run
from file_tree import File, compress

SHELLS = {
    "bash": ("corella.bash", "bash-completion/completions/corella"),
    "zsh": ("_corella", "zsh/site-functions/_corella"),
    "fish": ("corella.fish", "fish/vendor_completions.d/corella.fish"),
}
# Files of the repository, and their names in the archive and in a package's folder of documentation.
DOCUMENTS = {
    "LICENSE": "LICENSE",
    "README.md": "README.md",
    "deploy/systemd/corella.service": "systemd/corella.service",
    "deploy/systemd/corella.socket": "systemd/corella.socket",
    "deploy/prometheus/alerts.yml": "prometheus/alerts.yml",
    "deploy/prometheus/alerts_test.yml": "prometheus/alerts_test.yml",
    "deploy/grafana/corella.json": "grafana/corella.json",
}
UNIT = "deploy/systemd/corella.service"
SOCKET = "deploy/systemd/corella.socket"
# The user of the packages' service. The packages' scripts make this user.
USER = "corella"
CONFIGURATION = "etc/corella/corella.toml"


class Payload:
    """The binary at a path, and the files that belong to it."""

    def __init__(self, binary, materials, licences):
        self.binary = File(binary.read_bytes(), 0o755)
        self.completions = {shell: File(run(binary, "completions", shell)) for shell in SHELLS}
        self.pages = {}
        with tempfile.TemporaryDirectory() as pages:
            run(binary, "man", "--output", pages)
            for page in Path(pages).iterdir():
                self.pages[page.name] = File(page.read_bytes())
        self.documents = {name: File((ROOT / path).read_bytes()) for path, name in DOCUMENTS.items()}
        self.documents["corella.cdx.json"] = File(materials)
        self.documents["THIRD-PARTY-LICENSES"] = File(licences)

    def archive(self):
        """Returns the files of the archive, which users unpack in any folder."""
        files = {"corella": self.binary, **self.documents}
        for shell, (name, _) in SHELLS.items():
            files[f"completions/{name}"] = self.completions[shell]
        for name, page in self.pages.items():
            files[f"man/{name}"] = page
        return files

    def system(self):
        """Returns the files of a package by their paths below the root."""
        files = {"usr/bin/corella": self.binary}
        for shell, (_, path) in SHELLS.items():
            files[f"usr/share/{path}"] = self.completions[shell]
        for name, page in self.pages.items():
            files[f"usr/share/man/man1/{name}.gz"] = File(compress(page.data))
        for name, document in self.documents.items():
            if not name.startswith("systemd/"):
                files[f"usr/share/doc/corella/{name}"] = document
        files["usr/lib/systemd/system/corella.service"] = File(package_unit().encode())
        files["usr/lib/systemd/system/corella.socket"] = File((ROOT / SOCKET).read_bytes())
        files[CONFIGURATION] = File((Path(__file__).parent / "corella.toml").read_bytes())
        return files


def package_unit():
    """Returns the unit with a package's paths, and with a fixed user, who owns the files between starts."""
    unit = (ROOT / UNIT).read_text()
    head, changes = unit.split("\n", 1)
    for own, other in [("/usr/local/bin/corella ", "/usr/bin/corella "), ("DynamicUser=yes\n", f"User={USER}\n")]:
        assert own in changes, f"{UNIT} has no {own!r}"
        changes = changes.replace(own, other)
    assert head.startswith("# Corella under systemd"), head
    return f"# Corella under systemd, with options in /{CONFIGURATION}.\n{changes}"

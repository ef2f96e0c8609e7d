"""Makes the certificates of a test with openssl."""

import shutil
import subprocess

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    def __init__(self, folder, name="authority"):
        assert shutil.which("openssl"), "openssl is missing: cargo xtask set-up installs it"
        self.folder = folder
        self.name = name
        self.certificate = folder / f"{name}.pem"
        self._run(
            ["req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}"],
            ["-keyout", folder / f"{name}.key", "-out", self.certificate],
        )

    def options(self, name, host="IP:127.0.0.1", days=2):
        """Issues a certificate, and returns the options of a node that has it."""
        certificate, key = self.issue(name, host, days)
        return (
            *("--cluster-tls-cert", certificate, "--cluster-tls-key", key),
            *("--cluster-tls-ca", self.certificate),
        )

    def issue(self, name, host="IP:127.0.0.1", days=2):
        """Returns the files of a new certificate and of its key."""
        paths = {end: self.folder / f"{name}.{end}" for end in ("key", "csr", "ext", "pem")}
        self._run(
            ["req", "-new", *KEY, "-subj", f"/CN={name}"],
            ["-keyout", paths["key"], "-out", paths["csr"]],
        )
        paths["ext"].write_text(f"subjectAltName={host}\n")
        self._run(
            ["x509", "-req", "-in", paths["csr"], "-days", str(days), "-extfile", paths["ext"]],
            ["-CA", self.certificate, "-CAkey", self.folder / f"{self.name}.key"],
            ["-CAcreateserial", "-out", paths["pem"]],
        )
        return paths["pem"], paths["key"]

    def _run(self, *arguments):
        command = ["openssl", *(str(argument) for part in arguments for argument in part)]
        subprocess.run(command, check=True, capture_output=True)

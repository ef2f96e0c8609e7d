"""Makes the certificates of a test with openssl."""

import datetime
import shutil
import subprocess

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

# The configuration of `openssl ca`, the only command that sets the second at which a certificate expires.
CA_CONFIGURATION = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
[any]
commonName = supplied
"""


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
        """Issues a certificate, and returns the options of a node with it."""
        certificate, key = self.issue(name, host, days)
        return (
            *("--cluster-tls-cert", certificate, "--cluster-tls-key", key),
            *("--cluster-tls-ca", self.certificate),
        )

    def issue(self, name, host="IP:127.0.0.1", days=2):
        """Returns the files of a new certificate and of its key."""
        paths = self._request(name, host)
        self._run(
            ["x509", "-req", "-in", paths["csr"], "-days", str(days), "-extfile", paths["ext"]],
            ["-CA", self.certificate, "-CAkey", self.folder / f"{self.name}.key"],
            ["-CAcreateserial", "-out", paths["pem"]],
        )
        return paths["pem"], paths["key"]

    def issue_for_seconds(self, name, seconds, host="IP:127.0.0.1"):
        """Like `issue`, for a certificate that expires after this many seconds."""
        paths = self._request(name, host)
        configuration = self.folder / "ca.cnf"
        configuration.write_text(CA_CONFIGURATION.format(folder=self.folder))
        (self.folder / "index.txt").touch()
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        self._run(
            ["ca", "-batch", "-notext", "-config", configuration, "-enddate", f"{end:%Y%m%d%H%M%SZ}"],
            ["-cert", self.certificate, "-keyfile", self.folder / f"{self.name}.key"],
            ["-in", paths["csr"], "-extfile", paths["ext"], "-out", paths["pem"]],
        )
        return paths["pem"], paths["key"]

    def _request(self, name, host):
        paths = {end: self.folder / f"{name}.{end}" for end in ("key", "csr", "ext", "pem")}
        self._run(
            ["req", "-new", *KEY, "-subj", f"/CN={name}"],
            ["-keyout", paths["key"], "-out", paths["csr"]],
        )
        paths["ext"].write_text(f"subjectAltName={host}\n")
        return paths

    @staticmethod
    def is_expired(certificate):
        """Asks openssl, by the clock of this machine. A certificate is valid in its last second."""
        command = ["openssl", "x509", "-checkend", "-1", "-noout", "-in", str(certificate)]
        return subprocess.run(command, capture_output=True).returncode != 0

    def _run(self, *arguments):
        command = ["openssl", *(str(argument) for part in arguments for argument in part)]
        subprocess.run(command, check=True, capture_output=True)

"""The source of the Python package, from which pip builds it where no wheel fits."""

import io
import tarfile

from bill_of_materials import ROOT
from file_tree import File, compress, tar

# The binary contains these files, and maturin leaves out files outside the crates.
MODEL = "models/nano"
MODEL_FILES = "crates/corella/src/built_in.rs"


def source_package(made_by_maturin, seconds):
    """Returns maturin's archive with the built-in model added, and with the same time for all files."""
    files = {}
    with tarfile.open(made_by_maturin) as archive:
        for entry in archive:
            if entry.isfile():
                files[entry.name] = File(archive.extractfile(entry).read())
    (name,) = {path.split("/")[0] for path in files}
    for path in (ROOT / MODEL).iterdir():
        if f'"{path.name}"' in (ROOT / MODEL_FILES).read_text():
            files[f"{name}/{MODEL}/{path.name}"] = File(path.read_bytes())
    return f"{name}.tar.gz", compress(tar(files, seconds))

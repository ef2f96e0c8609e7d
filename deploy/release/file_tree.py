"""Files of a package, and archives of such files, which do not tell who made them, where or when."""

import gzip
import io
import tarfile
from typing import NamedTuple


class File(NamedTuple):
    """A file that root owns by default, or a folder, which has no data, or a link."""

    data: bytes | None = None
    mode: int = 0o644
    owner_id: int = 0
    link: str | None = None


def folder(owner_id=0, mode=0o755):
    return File(None, mode, owner_id)


def with_folders(files):
    """Adds the folders in which the files lie."""
    found = dict(files)
    for path in files:
        parts = path.split("/")[:-1]
        for end in range(1, len(parts) + 1):
            found.setdefault("/".join(parts[:end]), folder())
    return found


def tar(files, seconds, prefix=""):
    """Returns an archive of files, given by their paths. All entries have the same time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, file in sorted(files.items()):
            entry = tarfile.TarInfo(prefix + path)
            entry.mode, entry.mtime, entry.uid, entry.gid = file.mode, seconds, file.owner_id, file.owner_id
            if file.link is not None:
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, file.link, 0o777
            elif file.data is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(file.data)
            archive.addfile(entry, io.BytesIO(file.data or b""))
    return packed.getvalue()


def compress(data):
    return gzip.compress(data, compresslevel=6, mtime=0)

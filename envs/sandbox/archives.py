"""Tar archives, the form in which many files go into and out of a sandbox."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def pack(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """Pack plain files, owned by root and without times, so that equal files give equal bytes.

    The unpacking side makes the folders.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = mode
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def plain_files(data: bytes, strip: str = "") -> dict[str, bytes]:
    """Unpack every plain file but those below ``.git``; links and devices are left out.

    ``strip`` is the archive's top folder, taken off the names.
    """
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if strip:
                name = name.removeprefix(strip).removeprefix("/")
            if not member.isreg() or ".git" in name.split("/"):
                continue
            content = archive.extractfile(member)
            assert content is not None
            files[name] = content.read()
    return files

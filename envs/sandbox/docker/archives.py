"""Tar archives, the form in which files go into and out of a container."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def pack(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """An archive of plain files owned by root; folders are made by the unpacking side."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = mode
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def plain_files(data: bytes, strip: str = "") -> dict[str, bytes]:
    """Every plain file of an archive but those below ``.git``; links and devices are left out.

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

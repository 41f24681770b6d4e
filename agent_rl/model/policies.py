"""The folder of the starting policy: one that ships, any other, or one of Hugging Face's cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

from agent_rl.config.suggestions import command_line
from agent_rl.errors import ConfigError

_ASSETS = Path(__file__).parents[1] / "assets"
_BUILTIN_PREFIX = "builtin:"
HUB_PREFIX = "hf:"


def builtin_policies() -> list[str]:
    """Return the names that ``policy.path`` accepts beside folders."""
    folders = sorted(p.parent.name for p in _ASSETS.glob("*/config.json"))
    return [f"{_BUILTIN_PREFIX}{name}" for name in folders]


def policy_folder(path: str) -> Path:
    """Return the folder of ``path``; downloads nothing.

    Raises ``ConfigError`` when it holds no policy; says how to get one.
    """
    if path.startswith(_BUILTIN_PREFIX):
        if path not in builtin_policies():
            raise ConfigError(
                [f"policy.path: got {path!r}, expected one of {', '.join(builtin_policies())}"]
            )
        return _ASSETS / path.removeprefix(_BUILTIN_PREFIX)
    folder = _cached(path.removeprefix(HUB_PREFIX)) if path.startswith(HUB_PREFIX) else Path(path)
    missing = _missing_files(folder)
    if missing:
        fetch = f"fetch it: {command_line('hf', 'download', 'ORG/NAME', '--local-dir', path)}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.exists():
            fetch = f"if it is on the Hugging Face Hub: {HUB_PREFIX}{path}"
        raise ConfigError(
            [f"policy.path: got {path!r}, expected a folder with {missing[0]} in it; {fetch}"]
        )
    return folder


def _cached(repository: str) -> Path:
    """Return the newest snapshot of a Hugging Face repository that is on this machine."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError([f"policy.path: got {HUB_PREFIX}{repository}: {error}"]) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            [
                f"policy.path: got {HUB_PREFIX}{repository}, which is not on this machine; "
                f"download it: {command_line('hf', 'download', repository)}"
            ]
        ) from error


def _missing_files(folder: Path) -> list[str]:
    """List what a policy needs and ``folder`` lacks; every shard of an index counts."""
    wanted = ["config.json", "tokenizer.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted += sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [name for name in wanted if not (folder / name).is_file()]

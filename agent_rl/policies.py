"""Where the starting policy lies: a Hugging Face folder, or one that ships with the package."""

from __future__ import annotations

from pathlib import Path

from agent_rl.errors import ConfigError

_ASSETS = Path(__file__).parent / "assets"
_BUILTIN_PREFIX = "builtin:"


def builtin_policies() -> list[str]:
    """Names that ``policy.path`` accepts beside folders."""
    folders = sorted(p.parent.name for p in _ASSETS.glob("*/config.json"))
    return [f"{_BUILTIN_PREFIX}{name}" for name in folders]


def policy_folder(path: str) -> Path:
    """The folder of ``path``. Raises ``ConfigError`` when it cannot hold a policy."""
    if path.startswith(_BUILTIN_PREFIX):
        if path not in builtin_policies():
            raise ConfigError(
                [f"policy.path: got {path!r}, expected one of {', '.join(builtin_policies())}"]
            )
        return _ASSETS / path.removeprefix(_BUILTIN_PREFIX)
    folder = Path(path)
    missing = [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]
    if missing:
        raise ConfigError([f"policy.path: got {path!r}, expected a folder with {missing[0]} in it"])
    return folder

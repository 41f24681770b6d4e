"""Tiny random checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_helpers import MakeFolder, build_model
from transformers.utils import logging as hf_logging

hf_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """Checkpoint folders by their settings, written once."""
    made: dict[str, Path] = {}

    def make(seed: int = 0, **changes: object) -> Path:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            build_model(seed, **changes).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def folder(make_folder: MakeFolder) -> Path:
    return make_folder()

"""Fixtures for every test: where the real data is, and no model hub."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models that lies beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real data in {SHARED.name}/ beside the checkout")
    return SHARED

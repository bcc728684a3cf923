"""What all tests share: a quiet transformers, and the default pair where a test asks for it."""

from pathlib import Path

import pytest

from services.cache import cache_folder


@pytest.fixture(scope="session")
def default_pair() -> Path:
    """The cache that `stagespec fetch` fills; a test run without it has not been set up."""
    folder = cache_folder()
    missing = [name for name in ("smollm2-135m-instruct", "humaneval.jsonl") if not (folder / name).exists()]
    if missing:
        pytest.fail(f"{folder} lacks {missing}: run `stagespec fetch` first")
    return folder

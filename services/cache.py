"""Where prepared files are kept: models, tables, compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`STAGESPEC_CACHE` if it is set, else ~/.cache/stagespec."""
    configured = os.environ.get("STAGESPEC_CACHE")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".cache" / "stagespec"

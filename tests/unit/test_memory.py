"""What memory there is, and what is refused for want of it: always with both figures."""

from pathlib import Path

import pytest

import services.causal_lm.fit
from services.causal_lm.check import UnservableModelError
from services.causal_lm.fit import cache_limit, least_rows, require_room
from services.causal_lm.memory import Memory, memory_of
from services.causal_lm.settings import ModelSettings
from tests.models import save, tiny_model

MEMINFO = "MemTotal:  8000 kB\nMemFree: 100 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: str, used: int, spare: int, version: int) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
    values = (limit, str(used), f"anon 1\ninactive_file {spare}\n")
    return {f"{folder}/{name}": text for name, text in zip((*names, "memory.stat"), values, strict=True)}


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available"),
    [
        ("", {}, 8000, 6000),
        ("0::/a/b\n", group("sys/fs/cgroup/a/b", "max", 9, 9, 2), 8000, 6000),
        ("0::/a/b\n", group("sys/fs/cgroup/a", str(4000 * 1024), 3000 * 1024, 1000 * 1024, 2), 4000, 2000),
        # In a container the path is not there, and the mount is the container's own group.
        ("0::/../x\n", group("sys/fs/cgroup", str(3000 * 1024), 1000 * 1024, 0, 2), 3000, 2000),
        ("4:cpu,memory:/a\n", group("sys/fs/cgroup/memory/a", str(2000 * 1024), 1024, 0, 1), 2000, 1999),
        ("4:memory:/a\n", group("sys/fs/cgroup/memory", str(2**63 - 4096), 1024, 0, 1), 8000, 6000),
    ],
)
def test_the_smallest_limit_counts(tmp_path, cgroup, files, total, available):
    root = machine(tmp_path, cgroup, files)
    assert memory_of("cpu", root) == Memory(total * 1024, available * 1024)


def test_what_is_not_known_is_not_guessed(tmp_path):
    assert memory_of("cpu", tmp_path) is None
    assert memory_of("mps") is None


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_too_large_for_memory_is_refused_before_it_is_read(tmp_path, monkeypatch, safe):
    model = tiny_model("llama")
    folder = save(model, tmp_path)
    if not safe:
        import torch

        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    settings = ModelSettings(folder)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    row = 2 * 2 * 2 * 16 * 4  # layers, heads, keys and values, width, bytes
    needed = weights + least_rows(settings, 256) * row
    slack = 0 if safe else 64 * 1024  # of the file's own structure

    def have(num_bytes: int) -> None:
        monkeypatch.setattr(services.causal_lm.fit, "memory_of", lambda _: Memory(num_bytes, num_bytes))

    have(needed + slack)
    require_room(settings)
    have(needed - 1)
    with pytest.raises(
        UnservableModelError, match=r"takes .* GiB for its weights as float32 and .* available"
    ):
        require_room(settings)


def test_a_model_that_is_not_there_is_left_to_the_loader(tmp_path):
    require_room(ModelSettings(str(tmp_path / "nothing")))


def test_limits_of_the_cache_are_checked_by_name():
    def limit(memory: Memory | None, **fields: int) -> int:
        return cache_limit(ModelSettings("m", max_sessions=2, max_nodes=8, **fields), 10, 1000, 100, memory)

    least = (2 + 1) * 100 * 10
    assert limit(None, max_cache_bytes=least) == least
    with pytest.raises(
        UnservableModelError, match=f"max_cache_bytes is {least - 1} and must be at least {least}"
    ):
        limit(None, max_cache_bytes=least - 1)
    with pytest.raises(UnservableModelError, match="max_cache_bytes is 9000 and cpu has 8000 bytes in all"):
        limit(Memory(8000, 8000), max_cache_bytes=9000)
    with pytest.raises(UnservableModelError, match=r"the smallest cache takes .* available"):
        limit(Memory(8000, least - 1))
    assert limit(Memory(10**9, 40_000)) == 10_000, "a quarter of what is available"
    assert limit(Memory(10**9, 10**9)) == 2 * 1000 * 10, "no more than the sessions can use"
    assert limit(Memory(10**9, least)) == least, "no less than the least"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_cache_bytes": 0}, "max_cache_bytes is 0 and must be at least 1"),
        ({"prefix_pool_bytes": -1}, "prefix_pool_bytes is -1 and must be at least 0"),
        ({"shared_prefill_chunk": 0}, "shared_prefill_chunk is 0"),
        (
            {"prefix_pool_bytes": 9, "max_cache_bytes": 8},
            "prefix_pool_bytes is 9 and must be at most max_cache_bytes",
        ),
    ],
)
def test_settings_out_of_range_are_errors_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        ModelSettings("m", **fields)

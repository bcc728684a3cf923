"""Configuration: what is wrong is said by name, value and limit, before anything starts."""

from pathlib import Path

import pytest

from deploy.config import dump, load, override, parse
from deploy.errors import ConfigError

MINIMAL = "stages: {target: {kind: target, settings: {model: /m}}}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "speed: high\n", ["speed", "not a known setting"]),
        (MINIMAL + "listen: nowhere\n", ["listen", "nowhere", "host:port"]),
        (MINIMAL + "launcher: docker\n", ["launcher", "docker"]),
        (MINIMAL + "speculation: {max_nodes: 0}\n", ["speculation.max_nodes", "0", "1"]),
        (MINIMAL + "speculation: {max_depth: many}\n", ["speculation.max_depth", "many"]),
        (MINIMAL + "timeouts: {propose_s: -1}\n", ["timeouts.propose_s", "-1"]),
        (MINIMAL + "admission: {max_concurrent_requests: 0}\n", ["max_concurrent_requests", "0"]),
        ("stages: {}\n", ["target"]),
        ("stages: {a: {kind: magic}}\n", ["stages.a", "magic", "ngram, draft or target"]),
        ("stages: {a: {settings: {}}}\n", ["stages.a", "no kind"]),
        ("stages: {t: {kind: target, settings: {model: /m, dtype: int3}}}\n", ["stages.t", "dtype", "int3"]),
        (
            "stages: {t: {kind: target, settings: {model: /m, device: banana}}}\n",
            ["stages.t", "device", "banana"],
        ),
        (
            "stages: {t: {kind: target, settings: {model: /m, num_threads: 9999}}}\n",
            ["num_threads", "9999", "1024"],
        ),
        ("stages: {t: {kind: target, settings: {model: /m, max_sessions: 0}}}\n", ["max_sessions", "0", "1"]),
        ("stages: {t: {kind: target, settings: {model: /m}, ray: {num_cpus: 0}}}\n", ["num_cpus", "0"]),
        (
            "stages: {a: {kind: target, settings: {model: /m}}, b: {kind: target, settings: {model: /m}}}\n",
            ["target", "'a', 'b'"],
        ),
        ("stages: {t: {kind: target, settings: {model: '${home}/m'}}}\n", ["${home}", "${cache}"]),
        ("stages: [", ["not YAML"]),
        (MINIMAL + MINIMAL, ["stages is there twice", "line 2"]),
        ("stages: {a: {kind: ngram}, a: {kind: ngram}}\n", ["a is there twice"]),
        (MINIMAL + "listen: a:b:c:1\n", ["listen", "a:b:c:1", "[::1]"]),
        (MINIMAL + "listen: '[a:b]:1'\n", ["listen", "[a:b]:1"]),
        (
            "stages: {t: {kind: target, settings: {model: /m}, listen: 'h:7'},"
            " n: {kind: ngram, listen: 'h:7'}}\n",
            ["stages.n.listen", "h:7", "stage t"],
        ),
        (
            "listen: 'h:7'\nstages: {t: {kind: target, settings: {model: /m}, listen: 'h:7'}}\n",
            ["stages.t.listen", "h:7", "public API"],
        ),
        ("3\n", ["mapping"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path, text, says):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    for part in [str(path), *says]:
        assert part in str(caught.value)


def test_all_faults_are_named_at_once(tmp_path):
    text = MINIMAL + "speculation: {max_nodes: 0}\nadmission: {max_waiting_requests: -1}\n"
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert "speculation.max_nodes" in str(caught.value)
    assert "admission.max_waiting_requests" in str(caught.value)


def test_the_default_is_the_bundled_pair_and_survives_a_round_trip(monkeypatch, tmp_path):
    monkeypatch.delenv("STAGESPEC_CONFIG", raising=False)
    monkeypatch.setenv("STAGESPEC_CACHE", str(tmp_path))
    config = load(None)
    assert list(config.drafters) == ["ngram", "draft"]
    name, target = config.target
    assert (name, target.settings.model) == ("target", f"{tmp_path}/smollm2-135m-instruct")
    assert parse(dump(config)) == config
    assert override(config, listen="127.0.0.1:9", launcher="process").launcher == "process"
    assert override(config, listen="[::1]:0").listen == "[::1]:0"
    with pytest.raises(ConfigError, match="99999"):
        override(config, listen="127.0.0.1:99999")


def test_the_environment_names_a_file_and_chains_may_be_long(monkeypatch, tmp_path):
    text = """
stages:
  ngram: {kind: ngram}
  small: {kind: draft, settings: {model: /a}}
  larger: {kind: draft, settings: {model: /b}}
  target: {kind: target, settings: {model: /c, device: "cuda:0", dtype: bfloat16}, ray: {num_gpus: 0.5}}
"""
    monkeypatch.setenv("STAGESPEC_CONFIG", str(write(tmp_path, text)))
    config = load(None)
    assert list(config.drafters) == ["ngram", "small", "larger"]
    assert config.target[1].ray.num_gpus == 0.5

"""`stagespec bench` as a person runs it, with a tiny model: stages, peer and forward pass in processes."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from deploy.bench.child import Child, ChildError
from deploy.cli.main import main
from deploy.stages import NgramStage
from tests.fakes import write_model
from tests.models import VOCABULARY_SIZE, save, tiny_model

PROMPTS = ["def f(x):", "one two one two one"]
NUM_TOKENS = 12


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    model = tiny_model("llama")
    folder = save(model, tmp_path / "model")
    write_model(tmp_path / "model", [bytes([i]) for i in range(VOCABULARY_SIZE)])
    path = tmp_path / "config.yaml"
    target = {"model": folder, "num_threads": 1, "max_sessions": 4, "kernel": "torch"}
    stages = {"ngram": {"kind": "ngram"}, "target": {"kind": "target", "settings": target}}
    path.write_text(json.dumps({"launcher": "process", "stages": stages}), encoding="utf-8")
    monkeypatch.setattr("deploy.bench.machine._WATCH_S", 0.05)
    return path


def plain(folder: Path, prompt: str) -> list[int]:
    """What transformers generates."""
    inputs = torch.tensor([list(prompt.encode())])
    mask = torch.ones_like(inputs)
    output = tiny_model("llama").generate(
        inputs, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return output[0, inputs.shape[1] :].tolist()


def test_a_whole_run_and_its_records(config, tmp_path, capsys, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    out = tmp_path / "out"
    command = ["bench", "--config", str(config), "--prompts", str(prompts), "--max-tokens", str(NUM_TOKENS)]
    command += ["--modes", "off,ngram", "--peers", "hf,llamacpp-f32", "--pairs", "2", "--sessions", "1,2"]
    command += [
        "--contexts",
        "32,4096",
        "--rows",
        "1,2,4",
        "--prompt-lengths",
        "64",
        "--out",
        str(out),
        "--json",
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command) == 0
    found = capsys.readouterr()
    report = json.loads(found.out)
    assert report["complete"]
    assert "about" in found.err
    off, ngram, hf = report["results"]
    assert [result["mode"] for result in report["results"]] == ["off", "ngram", "hf"]
    assert [result["weight_format"] for result in report["results"]] == ["float32"] * 3
    assert off["kernel"] == "torch"
    assert hf["software"].startswith("transformers ")
    for result in report["results"]:
        assert result["same_tokens"] == {"as": "off configured", "same": 2, "of": 2}
        assert result["num_tokens"] == 2 * NUM_TOKENS
        for record in result["records"]:
            assert record["token_ids"] == plain(tmp_path / "model", PROMPTS[record["prompt"]])
            assert 0 < record["first_token_s"] < record["seconds"]
            if result is not hf:
                assert record["num_tokens"] == record["num_steps"] + record["num_accepted"]
    for a, b in ((off, "hf"), (hf, "off configured"), (ngram, "hf")):
        assert a["ratios"][b]["tokens_per_s"]["count"] == 2
    assert {(entry["mode"], entry["length"]) for entry in report["prefill"]} == {("off", 64), ("hf", 64)}
    assert [(entry["mode"], entry["sessions"]) for entry in report["sessions"]] == [
        ("off", 1),
        ("off", 2),
        ("ngram", 1),
        ("ngram", 2),
    ]
    passes = [(entry["context"], entry["num_rows"]) for entry in report["verify"]]
    assert passes == [(32, 1), (32, 2), (32, 4)]
    assert all(entry["share_of_limit"] > 0 for entry in report["verify"])
    [quality] = report["quality"]
    assert quality["num_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert quality["loss"] == pytest.approx(quality["loss_float32"], abs=1e-4)
    assert quality["agreement"] == 1.0
    assert set(report["peak_bytes"]) == {
        "ngram, configured",
        "target, configured",
        "orchestrator and bench",
        "hf",
    }
    assert report["machine"]["num_threads"] == 1
    assert report["machine"]["read_bytes_per_s"] > 0
    reasons = {entry["what"]: entry["reason"] for entry in report["skipped"]}
    assert set(reasons) == {"llamacpp-f32", "verify at 4096"}
    # Whether the library is there or not, there is no file for a model made just now.
    assert "bench-peers" in reasons["llamacpp-f32"] or "--gguf" in reasons["llamacpp-f32"]
    assert {path.name for path in out.iterdir()} == {
        "records.jsonl",
        "report.json",
        "speed-greedy.svg",
        "sessions-greedy.svg",
        "verify-32.svg",
    }

    # All of it is on record: nothing is started again.
    monkeypatch.setattr("deploy.bench.child.Child.start", None)
    monkeypatch.setattr("deploy.serve.new_launcher", None)
    assert main(command) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == report
    assert "left out as when this run began: llamacpp-f32" in again.err
    assert main([*command, "--pairs", "3"]) == 1
    assert "num_pairs was 2 and is 3" in capsys.readouterr().err


async def test_a_child_says_why_it_fails():
    stage = NgramStage("ngram")
    with pytest.raises(ChildError, match="one: No module named"):
        await Child.start("one", "no_worker", {}, stage, 60)
    with pytest.raises(ChildError, match=r"one: .*unexpected keyword argument 'colour'"):
        await Child.start("one", "machine_worker", {"colour": 1}, stage, 60)
    child = await Child.start("one", "machine_worker", {"num_threads": 1}, stage, 60)
    try:
        with pytest.raises(ChildError, match="one: 'dance'"):
            await child.ask("dance")
        os.kill(child.process_id, signal.SIGKILL)
        with pytest.raises(ChildError, match="one ended with code -9"):
            await child.ask("measure")
    finally:
        await child.stop()

"""The default pair as a person runs it: the real model, real processes, real Ray, the real command."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.client import Client
from stagespec.v1.generation_pb2 import (
    FINISH_REASON_EOS,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingOptions,
    SpeculationOptions,
    StopOptions,
)
from stagespec.v1.pipeline_pb2 import STAGE_STATE_READY

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "deploy.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}

pytestmark = [pytest.mark.model]


def test_digits_are_tokens_of_their_own(default_pair):
    """SmolLM2 was trained so; the tokenizer that comes out of the GGUF file alone merges them."""
    tokenizer = Tokenizer.from_file(str(default_pair / "smollm2-135m-instruct" / "tokenizer.json"))
    text = "x = 2048 + 3.14"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids == [104, 446, 216, 34, 32, 36, 40, 1232, 216, 35, 30, 33, 36]
    pieces = [tokenizer.decode([token_id]).strip() for token_id in ids]
    assert [piece for piece in pieces if piece.isdigit()] == list("2048314")


@pytest.fixture(scope="module")
def server(default_pair) -> Iterator[str]:
    """`stagespec serve` with its defaults: the one Ray cluster of a test run."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--listen", "127.0.0.1:0"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), f"serve ended with {process.wait()}"
    yield line.split()[-1]
    family = descendants(process.pid)
    assert len(family) > 5, "Ray has processes of its own"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
    for _ in range(200):
        left = [pid for pid in family if Path(f"/proc/{pid}/stat").exists()]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"processes left behind: {left}")


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            parents[int(folder.name)] = int(fields[1])
    found: list[int] = []
    queue = [pid]
    while queue:
        above = queue.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        queue += below
    return found


def request(prompt: str, drafters: list[str] | None, **sampling) -> GenerateRequest:
    return GenerateRequest(
        text=prompt,
        sampling=SamplingOptions(**({"temperature": 0.0} | sampling)),
        stop=StopOptions(max_tokens=32),
        speculation=SpeculationOptions(enabled=drafters is not None, drafters=drafters or []),
    )


@pytest.mark.ray
async def test_three_ray_actors_generate_the_same_in_every_mode(server, default_pair):
    prompts = [
        json.loads(line)["prompt"] for line in (default_pair / "humaneval.jsonl").read_text().splitlines()[:2]
    ]
    async with Client(server) as client:
        pipeline = await client.get_pipeline()
        stages = [*pipeline.drafters, pipeline.verifier]
        assert [stage.name for stage in stages] == ["ngram", "draft", "target"]
        assert all(stage.state == STAGE_STATE_READY for stage in stages)
        assert len({stage.info.process_id for stage in stages}) == 3
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 7}):
            for prompt in prompts:
                modes = [None, ["ngram"], ["draft"], ["ngram", "draft"]]
                found = [await client.complete(request(prompt, drafters, **sampling)) for drafters in modes]
                assert len({generated.token_ids for generated in found}) == 1
        staged = found[-1].completion.speculation
        by_name = {drafter.name: drafter for drafter in staged.drafters}
        assert by_name["ngram"].num_proposed > 0
        assert by_name["draft"].num_proposed > 0
        # The n-gram's guesses are scored several levels at once: fewer passes than a pass a level costs.
        depth = max(level for level, count in enumerate(staged.accepted_histogram) if count)
        assert depth >= 2
        assert by_name["draft"].num_passes < staged.num_steps * depth


@pytest.mark.ray
async def test_a_killed_drafter_costs_no_token_and_comes_back(server, default_pair):
    prompt = json.loads((default_pair / "humaneval.jsonl").read_text().splitlines()[3])["prompt"]
    async with Client(server) as client:
        plain = await client.complete(request(prompt, None))
        before = {s.name: s.info.process_id for s in (await client.get_pipeline()).drafters}
        running = asyncio.ensure_future(client.complete(request(prompt, ["ngram", "draft"])))
        await asyncio.sleep(0.5)
        os.kill(before["ngram"], signal.SIGKILL)
        assert (await running).token_ids == plain.token_ids
        for _ in range(600):
            stages = {s.name: s for s in (await client.get_pipeline()).drafters}
            back = stages["ngram"]
            if back.state == STAGE_STATE_READY and back.info.process_id != before["ngram"]:
                break
            await asyncio.sleep(0.2)
        assert back.info.process_id != before["ngram"]
        again = await client.complete(request(prompt, ["ngram"]))
        assert again.token_ids == plain.token_ids
        assert again.completion.speculation.num_accepted > 0


@pytest.mark.ray
async def test_chat_goes_through_the_models_template(server):
    async with Client(server) as client:
        chat = ChatPrompt(messages=[ChatMessage(role="user", content="What is 12 plus 30?")])
        found = await client.complete(
            GenerateRequest(
                chat=chat,
                sampling=SamplingOptions(temperature=0.0),
                stop=StopOptions(max_tokens=24),
                return_prompt_token_ids=True,
            )
        )
        assert found.completion.prompt_token_ids[0] == 1  # <|im_start|>
        assert "<|im_" not in found.text
        assert found.text.startswith("12 + 30 =")  # its sum is not to be relied on
        assert found.completion.finish_reason == FINISH_REASON_EOS


@pytest.mark.ray
def test_the_command_prints_one_object(server):
    done = subprocess.run(
        [*COMMAND, "generate", "--target", server, "--humaneval", "1", "--max-tokens", "16", "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(found["token_ids"]) == found["usage"]["num_completion_tokens"] == 16
    assert sum(found["speculation"]["histogram"]) == found["speculation"]["num_steps"]
    assert [drafter["name"] for drafter in found["speculation"]["drafters"]] == ["ngram", "draft"]
    assert found["finish_reason"] == "length"
    assert found["effective"]["sampling"]["temperature"] == 0.0

"""`stagespec bench --check-exact` through a real orchestrator: what is exact passes, what is not is found."""

import json
from typing import Any

import pytest
import torch

from deploy.cli.bench_exact import check
from deploy.cli.main import parser
from tests.fakes import ScriptedDrafter, TableVerifier, oracle
from tests.models import VOCABULARY_SIZE, save, tiny_model
from tests.serving import codec_of, serve

CODEC = codec_of(tuple(bytes([i]) for i in range(VOCABULARY_SIZE)), ())
NUM_TOKENS = 8


def target_of(seed: int) -> Any:
    """The logits of a tiny model, one context at a time."""
    model = tiny_model("llama", seed)

    def logits(context: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            found: list[float] = model(torch.tensor([context]), use_cache=False).logits[0, -1].tolist()
        return found

    return logits


@pytest.mark.parametrize("served_seed", [0, 1])
async def test_the_exit_code_says_whether_tokens_agree(served_seed, tmp_path, capsys):
    folder = save(tiny_model("llama", 0), tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "x"}\n{"prompt": "not this one"}\n')
    target = target_of(served_seed)
    verifier = TableVerifier(target, CODEC.vocabulary, model=folder)
    drafters = [ScriptedDrafter(name, oracle(target, 2), CODEC.vocabulary) for name in ("ngram", "draft")]
    async with serve(CODEC, verifier, drafters) as running:
        command = ["bench", "--check-exact", "--target", running.address, "--prompts", str(prompts)]
        command += ["--limit", "2", "--max-tokens", str(NUM_TOKENS), "--max-nodes", "1", "--json"]
        code = await check(parser().parse_args(command))
    report = json.loads(capsys.readouterr().out)
    assert [result["variant"] for result in report["results"]] == [
        *("off", "ngram", "draft", "staged", "staged, 1 nodes", "transformers"),
    ]
    assert {result["num_tokens"] for result in report["results"]} == {2 * NUM_TOKENS}
    assert report["exact"] == (served_seed == 0)
    assert code == (0 if report["exact"] else 1)
    assert {entry["variant"] for entry in report["mismatches"]} <= {"transformers"}

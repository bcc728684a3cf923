"""`stagespec bench` through a real orchestrator over fakes: what it prints, leaves out, and goes on with."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.bench import Bench
from deploy.bench.child import ChildError
from deploy.bench.roofline import Work
from deploy.bench.ways import Description, Sample, Way
from deploy.cli import bench as command
from deploy.cli.main import parser
from deploy.errors import SetupError
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.fakes import ScriptedDrafter, TableVerifier, level_by_level, oracle, random_target
from tests.oracle import oracle_draw
from tests.serving import Orchestrator, codec_of, serve

CODEC = codec_of()
SIZE = len(CODEC.vocabulary.tokens)
EOS = SIZE - 1
TARGET = random_target(SIZE)
PROMPTS = ["ABC", "DEFGH"]
NUM_TOKENS = 12
INFO = {
    "model": "/models/fake",
    "device": "cpu",
    "weight_format": "float32",
    "num_threads": 1,
    "num_parameters": 100,
    "weight_bytes": 400,
    "pass_weight_bytes": 400,
    "max_context_length": 64,
}


class FakePeer:
    """Decodes by the oracle. It gives up at prompt number `breaks_at`."""

    def __init__(self, name: str, breaks_at: int | None = None) -> None:
        self.way = Way(name)
        self.description = Description("float32", "", 1, Work(400, 100), "fake 1.0")
        self.stopped = False
        self._breaks_at = breaks_at

    async def generate(self, prompt: Sequence[int], sampling: str, max_tokens: int) -> Sample:
        if self._breaks_at is not None and max_tokens == NUM_TOKENS:
            self._breaks_at -= 1
            if self._breaks_at < 0:
                raise ChildError(f"{self.way.name} ended with code -9")
        return Sample(plain(list(prompt)), seconds=2.0, first_token_s=1.0)

    async def prefill(self, prompt: Sequence[int]) -> float:
        assert len(prompt) == 16
        return 0.5

    def processes(self) -> dict[str, int]:
        return {}

    async def stop(self) -> None:
        self.stopped = True


def plain(prompt: list[int]) -> tuple[int, ...]:
    """Greedy decoding, written down once more."""
    context = list(prompt)
    while len(context) < len(prompt) + NUM_TOKENS and context[-1] != EOS:
        params = SamplingParams(temperature=0.0)
        context.append(oracle_draw(TARGET(tuple(context)), params, context, len(context)))
    return tuple(context[len(prompt) :])


def prompt_ids(index: int) -> list[int]:
    return [ord(letter) - ord("A") for letter in PROMPTS[index]]


@pytest.fixture
def peers(monkeypatch) -> dict[str, Any]:
    """What starting a peer gives; the machine is not measured."""
    found: dict[str, Any] = {}

    async def start(name: str, place: Any) -> Any:
        if name not in found:
            raise SetupError(f"{name} is not installed")
        return found[name]

    async def measure_machine(bench: Bench) -> None:
        limits = {"read_bytes_per_s": 1e9, "flops": 1e9}
        bench.records.add(("machine",), {"processor": "", "num_threads": 1, "busy_cores": 0.0, **limits})

    monkeypatch.setattr("deploy.bench.served_part.start_peer", start)
    monkeypatch.setattr("deploy.bench.run.measure_machine", measure_machine)
    monkeypatch.setattr("deploy.bench.machine._WATCH_S", 0.01)
    return found


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@asynccontextmanager
async def serving(*names: str) -> AsyncIterator[Orchestrator]:
    verifier = TableVerifier(TARGET, CODEC.vocabulary, **INFO)
    drafters = [ScriptedDrafter(name, oracle(TARGET, 2), CODEC.vocabulary) for name in names]
    async with serve(CODEC, verifier, drafters) as running:
        yield running


async def bench(address: str, prompts: Path, *options: str) -> int:
    """The command, in this event loop."""
    arguments = ["bench", "--target", address, "--prompts", str(prompts), "--json"]
    args = parser().parse_args([*arguments, "--max-tokens", str(NUM_TOKENS), *options])
    return await command._bench(args, command._settings(args))


async def test_one_object_with_everything(peers, prompts, tmp_path, capsys):
    peers["hf"] = FakePeer("hf")
    options = ["--modes", "off,ngram,staged", "--sampling", "greedy,topk50", "--peers", "hf,llamacpp-q4"]
    options += ["--pairs", "3", "--sessions", "1,2,99", "--prompt-lengths", "16,999"]
    async with serving("ngram") as running:
        assert await bench(running.address, prompts, *options, "--out", str(tmp_path / "out")) == 0
    found = capsys.readouterr()
    report = json.loads(found.out)
    assert report["complete"]
    results = {(result["sampling"], result["mode"]): result for result in report["results"]}
    assert list(results) == [
        *(("greedy", mode) for mode in ("off", "ngram", "staged", "hf")),
        *(("topk50", mode) for mode in ("off", "ngram", "staged")),
    ]
    for (sampling, mode), result in results.items():
        assert Counter(record["prompt"] for record in result["records"]) == {0: 2, 1: 2}
        assert result["same_tokens"] == {"as": "off configured", "same": 4, "of": 4}
        for record in result["records"]:
            if sampling == "greedy":
                assert tuple(record["token_ids"]) == plain(prompt_ids(record["prompt"]))
            assert record["num_tokens"] == len(record["token_ids"])
            if mode == "off":
                assert record["num_steps"] == record["num_tokens"]
            elif mode != "hf":
                # Every draft is right, but the last step may be cut by an end.
                assert record["num_tokens"] <= record["num_steps"] + record["num_accepted"]
        lengths = sum(record["num_tokens"] for record in result["records"])
        assert lengths == result["num_tokens"]
    assert results["greedy", "off"]["acceptance_length"] == 1.0
    assert results["greedy", "staged"]["acceptance_length"] > 1.5
    off, hf = results["greedy", "off"], results["greedy", "hf"]
    there, back = off["ratios"]["hf"]["tokens_per_s"], hf["ratios"]["off configured"]["tokens_per_s"]
    assert there["count"] == back["count"] == 4
    pairs = zip(off["records"], hf["records"], strict=True)
    ratios = sorted(own["tokens_per_s"] / peer["tokens_per_s"] for own, peer in pairs)
    assert there["median"] == pytest.approx((ratios[1] + ratios[2]) / 2)
    assert {(entry["mode"], entry["length"]) for entry in report["prefill"]} == {("off", 16), ("hf", 16)}
    assert {entry["sessions"] for entry in report["sessions"]} == {1, 2}
    assert {entry["what"]: entry["reason"] for entry in report["skipped"]} == {
        "llamacpp-q4": "llamacpp-q4 is not installed",
        "99 sessions": "the server generates 8 requests at the same time",
        "prefill at 999": "the target's context ends at 64",
        "peers, topk50": "they would draw other tokens",
    }
    for what in ("llamacpp-q4", "99 sessions", "peers, topk50"):
        assert found.err.count(f"left out: {what}") == 1
    assert peers["hf"].stopped
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


async def test_an_interrupted_run_says_what_there_is_and_goes_on(peers, prompts, tmp_path, capsys):
    options = ["--parts", "generate", "--modes", "off,ngram", "--pairs", "4", "--out", str(tmp_path)]
    async with serving("ngram") as running:
        whole = NUM_TOKENS * 8
        first = asyncio.create_task(bench(running.address, prompts, *options))

        async def interrupt(_: Any) -> None:
            if running.verifier.num_requests == whole // 4:
                first.cancel()

        running.verifier.before_answer = interrupt
        with pytest.raises(asyncio.CancelledError):
            await first
        half = json.loads(capsys.readouterr().out)
        assert not half["complete"]
        assert half["num_missing"] + sum(len(result["records"]) for result in half["results"]) == 8
        before = (tmp_path / "records.jsonl").read_bytes()
        lines = before.splitlines()
        # As if the machine had lost power while the last record was written.
        (tmp_path / "records.jsonl").write_bytes(before[: -len(lines[-1]) // 2])
        running.verifier.before_answer = None
        assert await bench(running.address, prompts, *options) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["complete"]
        assert [len(result["records"]) for result in report["results"]] == [4, 4]
        kept = {json.dumps(json.loads(line)["key"]): line for line in lines[1:-1] if b'"generate"' in line}
        groups = Counter(tuple(json.loads(key)[2:]) for key in kept)
        after = (tmp_path / "records.jsonl").read_bytes().splitlines()
        for key, line in kept.items():
            is_whole = groups[tuple(json.loads(key)[2:])] == 2
            # A pair that was cut short is taken again, both sides.
            again = [other for other in after if json.loads(other).get("key") == json.loads(key)]
            assert (again == [line]) == is_whole
        num_requests = running.verifier.num_requests
        assert await bench(running.address, prompts, *options) == 0
        assert json.loads(capsys.readouterr().out) == report
        assert running.verifier.num_requests == num_requests, "nothing was left to measure"


async def test_a_peer_that_breaks_is_left_out_from_then_on(peers, prompts, capsys):
    peers["hf"] = FakePeer("hf", breaks_at=1)
    options = ["--parts", "generate", "--peers", "hf", "--pairs", "4"]
    async with serving() as running:
        assert await bench(running.address, prompts, *options) == 0
    found = capsys.readouterr()
    report = json.loads(found.out)
    assert report["complete"]
    off, hf = report["results"]
    assert (len(off["records"]), len(hf["records"])) == (4, 1)
    assert report["skipped"] == [{"what": "hf", "reason": "hf ended with code -9"}]
    assert found.err.count("left out") == 1


async def test_a_mode_without_its_drafter_is_left_out(peers, prompts, capsys):
    options = ["--parts", "generate", "--modes", "off,draft", "--pairs", "1"]
    async with serving("ngram") as running:
        assert await bench(running.address, prompts, *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["mode"] for result in report["results"]] == ["off"]
    (skipped,) = report["skipped"]
    assert skipped["what"] == "draft configured"
    assert "mode draft needs a drafter" in skipped["reason"]


async def test_a_prompt_that_does_not_fit_ends_the_run(peers, prompts):
    prompts.write_text(json.dumps({"prompt": "A" * 60}) + "\n")
    async with serving() as running:
        with pytest.raises(SetupError, match=r"prompt 0 has 60 tokens .* context of 64"):
            await bench(running.address, prompts, "--parts", "generate")


COUNTED = ["--parts", "speculation", "--modes", "off,ngram,draft,staged,chain", "--sampling", "greedy,topk50"]
COUNTED += ["--chain-length", "3", "--budgets", "2,6,999"]


@asynccontextmanager
async def counting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Orchestrator]:
    """A pipeline of two drafters, on a machine that must not be measured."""

    async def refuse(*_: Any) -> None:
        pytest.fail("counting does not depend on the machine")

    monkeypatch.setattr("deploy.bench.run.measure_machine", refuse)
    monkeypatch.setattr("deploy.bench.served_part.watch_idle", refuse)
    sizes = {"num_parameters": 10, "pass_weight_bytes": 40, "cache_bytes_per_token": 1}
    drafters = [
        ScriptedDrafter("ngram", oracle(TARGET, 1), CODEC.vocabulary, **sizes),
        ScriptedDrafter("draft", level_by_level(TARGET), CODEC.vocabulary, **sizes),
    ]
    verifier = TableVerifier(TARGET, CODEC.vocabulary, cache_bytes_per_token=8, **INFO)
    async with serve(CODEC, verifier, drafters) as running:
        yield running


async def test_drafts_are_counted_without_measuring_the_machine(monkeypatch, prompts, tmp_path, capsys):
    async with counting(monkeypatch) as running:
        assert await bench(running.address, prompts, *COUNTED, "--out", str(tmp_path)) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["complete"]
        assert report["machine"] is None
        assert report["idle"] is None
        num_requests = running.verifier.num_requests
        assert await bench(running.address, prompts, *COUNTED, "--out", str(tmp_path)) == 0
        assert json.loads(capsys.readouterr().out) == report
        assert running.verifier.num_requests == num_requests, "all of it is on record"
    results = {(result["sampling"], result["mode"]): result for result in report["results"]}
    assert len(results) == 10
    for (_, mode), result in results.items():
        assert result["tokens_per_s"] is None
        assert result["same_tokens"] == {"as": "off configured", "same": 2, "of": 2}
        assert [record["prompt"] for record in result["records"]] == [0, 1]
        total = {
            name: sum(record[name] for record in result["records"]) for name in ("num_tokens", "num_steps")
        }
        assert result["acceptance_length"] == total["num_tokens"] / total["num_steps"]
        assert sum(result["origins"].values()) == pytest.approx(1.0)
        for record in result["records"]:
            ranks = sum(each[-1] for each in record["ranks"])
            histogram = sum(k * count for k, count in enumerate(record["accepted_histogram"]))
            assert ranks == histogram == record["num_accepted"]
            assert sum(record["origins"].values()) == record["num_tokens"] == len(record["token_ids"])
        assert [each["max_nodes"] for each in result["budgets"]] == (
            [] if mode in ("off", "chain") else [2, 6]
        )
    for sampling in ("greedy", "topk50"):
        off, chain = results[sampling, "off"], results[sampling, "chain"]
        assert (off["acceptance_length"], off["relative_traffic"], off["rates"]) == (1.0, 1.0, [])
        # Three tokens, each with a pass of its own, and the target's: three steps for twelve tokens.
        assert chain["acceptance_length"] == 4.0
        assert chain["draft_passes_per_step"] == chain["level_passes_per_step"] == 3.0
        assert [(each["depth"], each["rank"], each["rate"]) for each in chain["rates"]] == [
            (depth, 0, 1.0) for depth in range(3)
        ]
        read = plain = 0
        for prompt in map(len, PROMPTS):
            for context in (prompt + 4, prompt + 8):
                read += 400 + 8 * context + 3 * (40 + context)
            plain += sum(400 + 8 * context for context in range(prompt + 4, prompt + 12))
        assert chain["relative_traffic"] == pytest.approx(read / plain)
    assert {entry["what"] for entry in report["skipped"]} == {"999 nodes"}
    names = {
        f"{chart}-{name}.svg" for chart in ("budgets", "prompts", "origins") for name in ("greedy", "topk50")
    }
    assert {path.name for path in tmp_path.glob("*.svg")} == names


async def test_counts_are_the_same_however_often_the_run_was_cut_short(
    monkeypatch, prompts, tmp_path, capsys
):
    async with counting(monkeypatch) as running:
        assert await bench(running.address, prompts, *COUNTED, "--concurrency", "1") == 0
        expected = json.loads(capsys.readouterr().out)
        running.verifier.num_requests = 0
        first = asyncio.create_task(bench(running.address, prompts, *COUNTED, "--out", str(tmp_path / "out")))

        async def interrupt(_: Any) -> None:
            if running.verifier.num_requests == 100:
                first.cancel()

        running.verifier.before_answer = interrupt
        with pytest.raises(asyncio.CancelledError):
            await first
        half = json.loads(capsys.readouterr().out)
        assert 0 < half["num_missing"] < 44
        running.verifier.before_answer = None
        assert await bench(running.address, prompts, *COUNTED, "--out", str(tmp_path / "out")) == 0
        assert json.loads(capsys.readouterr().out)["results"] == expected["results"]


async def test_drafts_larger_than_the_server_allows_end_the_run(monkeypatch, prompts):
    async with counting(monkeypatch) as running:
        for option in ("--max-nodes", "--chain-length"):
            with pytest.raises(SetupError, match=f"{option} is 300; the server allows at most 256 nodes"):
                await bench(running.address, prompts, *COUNTED, option, "300")

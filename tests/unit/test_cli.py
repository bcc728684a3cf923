"""The command line: wrong arguments and missing things end in one clear line and a non-zero exit."""

import asyncio
import json
import signal

import pytest

from deploy import interrupts
from deploy.cli.main import main
from deploy.errors import SetupError
from deploy.exactness import Difference, Report
from deploy.prompts import Prompt, read_prompts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "x", "--max-tokens", "0"], "at least 1"),
        (["generate", "x", "--humaneval", "1"], "not allowed with"),
        (["generate", "x", "--mode", "magic"], "magic"),
        (["bench", "--limit", "0"], "at least 1"),
        (["bench", "--modes", "off,,staged"], "empty name"),
        (["bench", "--rows", "1,0"], "at least 1"),
        (["bench", "--suite", "humaneval", "--prompts", "x"], "not allowed with"),
        (["stage", "magic"], "magic"),
        (["stage", "ngram", "--grace", "nan"], "from 0"),
        (["stage", "ngram", "--grace", "inf"], "from 0"),
        (["stage", "ngram", "--grace", "-5"], "from 0"),
        (["serve", "--launcher", "docker"], "docker"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_named(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", "off,magic"], "mode 'magic' is unknown; there are off, ngram"),
        (["--modes", "off,off"], "modes name something twice"),
        (["--peers", "vllm"], "peer 'vllm' is unknown; there are hf"),
        (["--sampling", "beam"], "sampling 'beam' is unknown; there are greedy, topk50"),
        (["--parts", "memory"], "part 'memory' is unknown"),
        (["--suite", "mmlu"], "'mmlu' is unknown; there are humaneval"),
        (["--weight-format", "float12"], "weight_format is 'float12'"),
        (["--weight-format", "float32,float16", "--launcher", "ray"], "one server at a time"),
        (["--target", "127.0.0.1:1", "--kernel", "torch"], "do not go with --target"),
        (["--target", "127.0.0.1:1", "--parts", "verify"], "does not go with --target"),
        (["--temperature", "0.5"], "--temperature: such options go with --check-exact only"),
        (["--budgets", "4,8"], "--budgets: such options go with --parts speculation"),
        (["--max-nodes", "4", "8"], "--max-nodes: several go with --check-exact only"),
        (["--check-exact", "--budgets", "4"], "--budgets: such options do not go"),
        (["--check-exact", "--modes", "off", "--out", "x"], "--modes, --out: such options do not go"),
    ],
)
def test_what_a_benchmark_cannot_measure_is_named(arguments, says, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    monkeypatch.delenv("STAGESPEC_CONFIG", raising=False)
    given = [] if "--suite" in arguments else ["--prompts", str(prompts)]
    assert main(["bench", *given, *arguments]) == 1
    found = capsys.readouterr()
    assert says in found.err
    assert found.out == ""
    assert len(found.err.strip().splitlines()) == 1


def test_what_is_missing_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STAGESPEC_CACHE", str(tmp_path))
    monkeypatch.delenv("STAGESPEC_CONFIG", raising=False)
    cases = {
        ("serve",): "run `stagespec fetch`",
        ("generate", "--humaneval", "0"): "run `stagespec fetch`",
        ("generate", "hi", "--target", "127.0.0.1:1"): "no server answers at 127.0.0.1:1",
        ("generate", "hi", "--config", str(tmp_path / "none.yaml")): "none.yaml cannot be read",
        ("generate", "--prompt-file", str(tmp_path / "none.txt")): "none.txt cannot be read",
        ("health", "127.0.0.1:1"): "127.0.0.1:1",
        ("pipeline", "show", "--target", "127.0.0.1:1"): "no server answers",
    }
    for arguments, says in cases.items():
        assert main(list(arguments)) == 1, arguments
        found = capsys.readouterr()
        assert says in found.out + found.err, arguments
        assert "Traceback" not in found.err
        assert len(found.err.strip().splitlines()) <= 1


@pytest.fixture
def interruptible():
    """SIGINT as at a terminal; a test run in the background has inherited it as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_stage_loads_ends_at_once(monkeypatch):
    def build(name, stage):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("loading went on")

    monkeypatch.setattr("deploy.stages.build", build)
    assert main(["stage", "ngram", "--listen", "127.0.0.1:0"]) == 130


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_command_line_loads_is_no_traceback(monkeypatch):
    monkeypatch.setattr("deploy.cli.main.parser", lambda: signal.raise_signal(signal.SIGINT))
    assert main(["serve"]) == 130


@pytest.mark.parametrize(("ignored", "code"), [(True, 7), (False, 129)])
def test_a_hangup_that_nohup_ignores_stays_ignored(ignored, code):
    async def work() -> int:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        return 7

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert interrupts.run(work()) == code
    finally:
        signal.signal(signal.SIGHUP, before)


def test_check_config_tells_good_from_bad(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    good = tmp_path / "good.yaml"
    good.write_text(f"stages: {{t: {{kind: target, settings: {{model: {model}}}}}}}\n", encoding="utf-8")
    assert main(["check-config", "--config", str(good)]) == 0
    bad = tmp_path / "bad.yaml"
    bad.write_text("stages: {t: {kind: target, settings: {model: /none/here}}}\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["check-config", "--config", str(bad)]) == 1
    assert "/none/here" in capsys.readouterr().err


def test_prompts_are_read_and_bad_lines_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "hi"}]
    path.write_text(
        json.dumps({"prompt": "a"}) + "\n\n" + json.dumps({"messages": turns}) + "\n", encoding="utf-8"
    )
    assert read_prompts(path, None) == [Prompt(text="a"), Prompt(messages=(("user", "hi"),))]
    assert read_prompts(path, 1) == [Prompt(text="a")]
    for content, says in [
        ('{"prompt": 3}', "line 1"),
        ("{", "not JSON"),
        ("", "no prompts"),
        ("[]", "line 1"),
    ]:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(SetupError, match=says):
            read_prompts(path, None)


def test_a_report_tells_ties_from_mismatches():
    report = Report(1)
    report.differences = [Difference(0, "staged", 3, 5, 6, 2e-5), Difference(0, "draft", 3, 5, None, None)]
    assert [difference.variant for difference in report.mismatches] == ["draft"]
    plain = json.loads(json.dumps(report.plain()))
    assert plain["exact"] is False
    assert [entry["variant"] for entry in plain["ties"]] == ["staged"]

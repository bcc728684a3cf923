"""Training: rows against their definition, resuming against one run, and what is refused."""

from pathlib import Path

import pytest
import torch

from services.causal_lm.load import load
from services.causal_lm.sample import Prompted, continuations
from services.causal_lm.settings import ModelSettings
from services.draft.artifact import CAUSAL_LM, FEATURE, read_artifact
from services.training import fit as fitting
from services.training.batches import Example, drafted_from, make_batch
from services.training.collect import collect, plan
from services.training.collection import Collection, CollectionError, read_parts
from services.training.fit import FitError, FitSettings, fit
from services.training.prompts import read_stubs, stubs_of
from stagespec.v1.sampling_pb2 import SamplingParams
from tests.models import VOCABULARY_SIZE, save, tiny_model

SMALL = {"num_layers": 1, "hidden_size": 32, "num_kept": 100, "batch_size": 8, "block": 3, "num_epochs": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return save(tiny_model("llama"), tmp_path_factory.mktemp("target"))


def gather(target: str, folder: Path, num_prompts: int = 96) -> None:
    prompts = [[i % VOCABULARY_SIZE, (7 * i + 1) % VOCABULARY_SIZE, 3] for i in range(num_prompts)]
    loaded = load(ModelSettings(target, max_sessions=16))
    collect(
        loaded,
        plan(prompts, 0.5, 0),
        folder,
        {"seed": 0},
        batch_size=16,
        max_tokens=12,
        report=lambda *_: None,
    )


@pytest.fixture(scope="module")
def collection(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "collection"
    gather(target, folder)
    return folder


def test_a_continuation_is_what_the_model_says_one_token_at_a_time(target):
    loaded = load(ModelSettings(target))
    greedy = SamplingParams(temperature=0.0)
    prompts = [Prompted(key, (key + 1, 2, 3), greedy) for key in range(5)]
    model = tiny_model("llama")
    found = list(continuations(loaded, prompts, batch_size=3, max_tokens=6))
    assert sorted(each.key for each in found) == list(range(5))
    for each in found:
        ids = torch.tensor([each.token_ids])
        with torch.no_grad():
            result = model(input_ids=ids, output_hidden_states=True)
        logits = result.logits[0, each.prompt_length - 1 : -1]
        assert logits.argmax(1).tolist() == list(each.token_ids[each.prompt_length :])
        assert torch.allclose(each.top_logits, logits.gather(1, each.top_ids.long()), atol=1e-3)
        assert torch.allclose(each.totals, logits.logsumexp(1), atol=1e-3)
        hidden = result.hidden_states[-1][0, :-1]
        assert torch.allclose(each.hidden_states.float(), hidden, atol=2e-2)


def test_a_collection_goes_on_where_it_was_cut_short(target, collection, tmp_path):
    gather(target, tmp_path / "again")
    lost = sorted((tmp_path / "again").glob("part-*"))[0]
    whole = lost.read_bytes()
    lost.unlink()
    gather(target, tmp_path / "again")
    assert lost.read_bytes() == whole
    with pytest.raises(CollectionError, match="other settings"):
        gather(target, tmp_path / "again", num_prompts=80)
    lost.write_bytes(whole[:-100])
    with pytest.raises(CollectionError, match="damaged"):
        list(read_parts(tmp_path / "again"))
    with pytest.raises(CollectionError, match="no parts"):
        list(read_parts(tmp_path))
    assert Collection(collection, fitting.read_settings(collection)).has(0)


def test_rows_see_what_they_will_see_when_they_are_served():
    n, prompt = 9, 3
    example = Example(
        torch.arange(n),
        prompt,
        torch.randn(n, 4),
        torch.arange(prompt, n + 1),
        torch.zeros(n - prompt + 1, 2, dtype=torch.long),
        torch.ones(n - prompt + 1, 2),
    )
    for offset in range(3):
        batch = make_batch([example], 3, [offset], two_kinds=True)
        first = drafted_from(example, 3, offset).tolist()
        for row, (position, begin) in enumerate(zip(range(prompt, n), first, strict=True), start=n):
            seen = {
                (int(batch.positions[0, other]), other >= n)
                for other in torch.nonzero(batch.visible[0, row]).flatten().tolist()
            }
            context = {(p, False) for p in range(begin)}
            assert seen == context | {(p, True) for p in range(begin, position + 1)}
            assert 0 <= position - begin < 3
            assert not batch.known[0, row]
        assert batch.known[0, :n].tolist() == [False] + [True] * (n - 1)
        assert torch.equal(batch.features[0, 1:n], example.hidden_states[:-1])
        for row, next_id in zip(batch.taught[1].tolist(), batch.next_ids.tolist(), strict=True):
            assert int(batch.positions[0, row]) + 1 == next_id


@pytest.mark.parametrize("kind", [FEATURE, CAUSAL_LM])
def test_a_run_that_was_cut_short_gives_the_same_draft(target, collection, tmp_path, monkeypatch, kind):
    settings = FitSettings(kind=kind, **SMALL)

    def run(name: str, **options) -> dict[str, float]:
        return fit(
            collection,
            Path(target),
            tmp_path / name,
            settings,
            checkpoint=tmp_path / f"{name}.checkpoint",
            weight_format="float16",
            report=lambda _: None,
            **options,
        )

    figures = run("whole")
    assert not (tmp_path / "whole.checkpoint").exists()
    assert 0.0 < figures["top_1"] <= figures["top_4"] <= figures["top_8"] <= 1.0
    monkeypatch.setattr(fitting, "CHECKPOINT_STEPS", 3)
    evaluate, calls = fitting._evaluate, []

    def stop_once(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*args)

    monkeypatch.setattr(fitting, "_evaluate", stop_once)
    with pytest.raises(KeyboardInterrupt):
        run("parts")
    assert run("parts") == figures
    whole, parts = (read_artifact(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(parts.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_what_cannot_be_fitted_is_refused_by_name(target, collection, tmp_path):
    def refusal(settings: FitSettings, model: str = target, weight_format: str = "int8") -> str:
        with pytest.raises((FitError, CollectionError)) as caught:
            fit(
                collection,
                Path(model),
                tmp_path / "out",
                settings,
                checkpoint=tmp_path / "checkpoint",
                weight_format=weight_format,
                report=lambda _: None,
            )
        return str(caught.value)

    small = FitSettings(**SMALL)
    assert "must be one of float16, int8" in refusal(small, weight_format="int4")
    assert "lower --batch-size" in refusal(FitSettings(**SMALL | {"batch_size": 500}))
    (tmp_path / "checkpoint").write_bytes(b"torn")
    assert "cannot be read" in refusal(small)
    torch.save({"fingerprint": "another's"}, tmp_path / "checkpoint")
    assert "another target" in refusal(small)
    with pytest.raises(ValueError, match="batch_size is 0"):
        FitSettings(batch_size=0)


def test_stubs_are_documented_functions(tmp_path):
    source = (
        'def f(x: int):\n    """Doubles a number that is given."""\n    return 2 * x\n\ndef g():\n    pass\n'
    )
    (stub,) = stubs_of(source)
    assert stub.source == 'def f(x: int):\n    """Doubles a number that is given."""\n'
    assert stub.header == "def f(x: int):"
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_stubs([tmp_path / "bad.py"])
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="no documented function"):
        read_stubs([tmp_path / "empty.py"])


def test_a_table_of_what_was_written_is_that_of_its_tokens(collection):
    from services.ngram.corpus import CorpusError
    from services.ngram.counts import SEPARATOR
    from services.training.written import written_stream

    expected = []
    for part in read_parts(collection):
        begin = 0
        for length in part.lengths.tolist():
            expected += [SEPARATOR, *part.token_ids[begin : begin + length].tolist()]
            begin += length
    found = [token for ids, _ in written_stream(collection, "") for token in ids.tolist()]
    assert found == expected
    with pytest.raises(CorpusError, match="another tokenizer"):
        next(written_stream(collection, "0123"))

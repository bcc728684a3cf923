"""The stage as its host sees it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from services.engine import ProposeTask
from services.ngram.counts import count_ngrams
from services.ngram.engine import NgramEngine, NgramJob
from services.ngram.katz import fit
from services.ngram.layout import TableError
from services.ngram.session import NgramSession
from services.ngram.settings import NgramSettings
from services.ngram.table import store
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1 import stage_pb2
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams

SECRET = [50, 51, 52, 53]


@pytest.fixture
def table(tmp_path: Path) -> str:
    counted = count_ngrams(np.array([1, 2, 3, 1, 2, 4, 50, 51, 9]), 3)
    kept = [np.ones(len(keys), dtype=np.bool_) for keys in counted.keys]
    store(tmp_path / "table.ngram", fit(counted, kept, 60), "ab" * 32)
    return str(tmp_path / "table.ngram")


def task(hint: DraftTree = EMPTY_DRAFT) -> ProposeTask:
    return ProposeTask(SamplingParams(), hint, Budget(max_nodes=16, max_depth=4), drafter_index=1)


def session_of(engine: NgramEngine, context: list[int]) -> NgramSession:
    session = engine.new_session()
    session.apply(0, context)
    return session


def test_info_tells_what_the_stage_is(table):
    info = NgramEngine(NgramSettings(table=table, max_sessions=7)).info
    assert info.kind == stage_pb2.STAGE_KIND_DRAFTER
    assert (info.implementation, info.model, info.device) == ("ngram", table, "cpu")
    assert (info.tokenizer_hash, info.vocabulary_size) == ("ab" * 32, 60)
    assert info.weight_bytes == Path(table).stat().st_size
    assert info.can_rollback
    assert info.max_sessions == 7

    bare = NgramEngine(NgramSettings())
    assert (bare.info.model, bare.info.tokenizer_hash, bare.info.vocabulary_size) == ("context only", "", 0)
    assert bare.vocabulary is None


def test_jobs_are_answered_and_one_fault_stays_alone(table):
    engine = NgramEngine(NgramSettings(table=table))
    jobs = [NgramJob(session_of(engine, [1, 2]), task()) for _ in range(3)]
    jobs[1].task = None  # whatever goes wrong inside
    engine.run(jobs)
    assert [job.error is None for job in jobs] == [True, False, True]
    assert all(job.done and job.seconds["grow"] > 0 for job in jobs)
    answer = jobs[0].answer
    assert answer == jobs[2].answer
    assert (answer.next_round_gain, answer.num_passes, answer.num_rows) == (0.0, 0, 0)
    assert answer.draft.token_ids[0] == 3
    assert set(answer.draft.drafter_indices) == {1}


def test_one_request_s_context_never_reaches_another_s_draft(table):
    for settings in (NgramSettings(table=table), NgramSettings()):
        engine = NgramEngine(settings)
        alone = NgramJob(session_of(engine, [1, 2, 50, 51]), task())
        engine.run([alone])

        holder = session_of(engine, [*SECRET, 1, 2, *SECRET, 50, 51])
        asker = session_of(engine, [1, 2, 50, 51])
        jobs = [NgramJob(holder, task()), NgramJob(asker, task()), NgramJob(holder, task())]
        engine.run(jobs)
        assert SECRET[2] in jobs[0].answer.draft.token_ids
        assert jobs[1].answer == alone.answer
        assert not {52, 53} & set(jobs[1].answer.draft.token_ids)
        holder.close()
        late = NgramJob(session_of(engine, [1, 2, 50, 51]), task())
        engine.run([late])
        assert late.answer == alone.answer


def test_a_table_of_too_low_an_order_is_refused(table):
    with pytest.raises(TableError, match=f"order is 4 and n-gram table {table} has order 3"):
        NgramEngine(NgramSettings(table=table, order=4))
    NgramEngine(NgramSettings(table=table, order=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"table": ""}, "table is empty"),
        ({"order": 1}, "order is 1 and must be from 2 to 5"),
        ({"order": 6}, "order is 6 and must be from 2 to 5"),
        ({"context_order": 1}, "context_order is 1 and must be from 2 to 32"),
        ({"context_order": 33}, "context_order is 33 and must be from 2 to 32"),
        ({"context_weight": 1.5}, "context_weight is 1.5 and must be from 0 to 1"),
        ({"context_weight": float("nan")}, "context_weight is nan and must be from 0 to 1"),
        ({"max_sessions": 0}, "max_sessions is 0 and must be at least 1"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        NgramSettings(**settings)


def test_the_stage_runs_without_torch(table):
    program = f"""
import sys
from services.engine import ProposeTask
from services.ngram import builder, engine
from services.ngram.settings import NgramSettings
from deploy.cli import build_ngram
from stagespec.tree import EMPTY_DRAFT
from stagespec.v1.drafter_pb2 import Budget
from stagespec.v1.sampling_pb2 import SamplingParams
stage = engine.NgramEngine(NgramSettings(table={table!r}))
session = stage.new_session()
session.apply(0, [1, 2])
job = engine.NgramJob(session, ProposeTask(SamplingParams(), EMPTY_DRAFT, Budget(max_nodes=4, max_depth=2)))
stage.run([job])
assert len(job.answer.draft) == 4
assert not {{"torch", "transformers", "ray"}} & set(sys.modules), "a heavy library was imported"
"""
    folders = [str(Path(path).resolve()) for path in (".", "protos")]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{program}"], check=True, timeout=60
    )

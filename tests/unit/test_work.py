from orchestrator.work import Work
from stagespec.v1.generation_pb2 import StageWork


def test_work_of_the_step_that_reads_the_prompt_is_left_out():
    work = Work()
    work.add(1, context_length=500, num_passes=3, num_rows=512)
    assert work == Work()
    work.add(2, context_length=10, num_passes=2, num_rows=7)  # each pass reads the whole context
    work.add(2, context_length=10, num_passes=1, num_rows=1)
    work.add(3, context_length=14, num_passes=0, num_rows=0)
    expected = StageWork(name="draft", num_passes=3, num_cache_rows=30, num_rows=8)
    assert work.to_proto("draft") == expected

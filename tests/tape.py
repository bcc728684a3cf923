"""A graph capture for the CPU: records operations, then repeats them in the same memory, without Python."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tape(work):
    """See `services.causal_lm.graphs.Capture`. Like a CUDA graph it is deaf to whatever Python does later."""
    work()  # once before, as CUDA's libraries need it
    with _Recorder() as recorder:
        work()

    def replay():
        for operation, arguments, options, results in recorder.steps:
            for old, new in zip(results, tree_leaves(operation(*arguments, **options)), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

    return replay


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        self.steps.append((operation, arguments, options or {}, tree_leaves(result)))
        return result

"""The process at the other end of `child`: runs the actions of one module, a line of JSON at a time.

The end of standard input means that whoever asked is gone.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Actions = Mapping[str, Callable[..., Any]]
"""What a module's `start` returns: functions by name, of plain arguments and with plain results."""


def main() -> int:
    """Serves requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not end up among the replies.
    os.dup2(2, 1)
    actions: Actions = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "module" in request:
                module = importlib.import_module(f"deploy.bench.{request['module']}")
                actions, result = module.start(**request["settings"]), None
            else:
                result = actions[request["action"]](**request["arguments"])
            reply = {"result": result}
        except Exception as error:
            text = " ".join(str(error).split())
            reply = {"error": text or type(error).__name__}
        print(json.dumps(reply), file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

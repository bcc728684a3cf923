"""Generates the Python code that is committed beside the protos.

`python -m deploy.protos` writes it in place; a test runs `generate` into an empty folder and compares.
"""

import shutil
import sys
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent.parent / "protos"


def generate(output: Path) -> list[Path]:
    """Generates messages, stubs and their types for every proto under `PROTO_ROOT`.

    Only protos that define a service get a gRPC module, so that no empty modules appear.

    Args:
        output: Folder that becomes the root of the generated packages.

    Returns:
        The generated files.

    Raises:
        RuntimeError: protoc refused a proto.
    """
    import grpc_tools
    from grpc_tools import protoc

    # The plug-ins of mypy-protobuf are scripts beside the interpreter, which need not be on PATH.
    scripts = Path(sys.executable).parent
    well_known = Path(grpc_tools.__path__[0]) / "_proto"
    includes = ["-I", str(PROTO_ROOT), "-I", str(well_known)]
    for proto in sorted(PROTO_ROOT.glob("stagespec/v1/*.proto")):
        options = [f"--python_out={output}", f"--mypy_out={output}"]
        options.append(f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}")
        if "\nservice " in proto.read_text(encoding="utf-8"):
            options += [f"--grpc_python_out={output}", f"--mypy_grpc_out={output}"]
            options.append(f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}")
        if protoc.main(["protoc", *includes, *options, str(proto)]) != 0:
            raise RuntimeError(f"protoc refused {proto}")
    return sorted(output.glob("stagespec/v1/*_pb2*"))


if __name__ == "__main__":
    if shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent)) is None:
        sys.exit("mypy-protobuf is not installed beside this Python: run `make setup` first")
    for path in generate(PROTO_ROOT):
        print(path.relative_to(PROTO_ROOT.parent))

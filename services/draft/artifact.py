"""A trained draft on disk: what it is, its weights, and a manifest that tells a damaged or foreign one.

Nothing here computes. Kinds: "feature" is conditioned on the target's hidden states and borrows the target's
embedding and head; "causal_lm" is a small language model of its own.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.causal_lm.formats import GROUP, quantize

FORMAT = "stagespec-draft-1"
FEATURE, CAUSAL_LM = "feature", "causal_lm"
KINDS = (FEATURE, CAUSAL_LM)
STORED_FORMATS = ("float16", "int8")

DESCRIPTION, WEIGHTS, MANIFEST = "draft.json", "weights.safetensors", "MANIFEST.json"
TOKEN_IDS = "token_ids"
_SCALES = ".scales"


class ArtifactError(ValueError):
    """A folder is no trained draft, is damaged, or was made for something else; the text says what."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a trained draft is, beside its weights.

    Attributes:
        kind: One of `KINDS`.
        num_layers: Decoder layers, of the Llama kind.
        hidden_size: Width of a row.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        inner_size: Width of the feed-forward part.
        rope_theta: Base of the rotary positions.
        epsilon: Of every norm.
        max_length: Longest context.
        vocabulary_size: Token ids of the target, padding left out.
        tokenizer_hash: Of the target's tokenizer.
        target_hidden_size: Width of the target's hidden states; 0 if it does not read them.
        borrowed_digest: SHA-256 of the target's embedding and head, see `borrowed_digest`; empty if nothing
            is borrowed.
    """

    kind: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    rope_theta: float
    epsilon: float
    max_length: int
    vocabulary_size: int
    tokenizer_hash: str
    target_hidden_size: int = 0
    borrowed_digest: str = ""

    def tensor_shapes(self, num_kept: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the weights, with `num_kept` tokens in the head."""
        hidden, inner = self.hidden_size, self.inner_size
        attended = self.num_heads * self.head_dim
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            yield f"{name}.norm1", (hidden,)
            yield f"{name}.qkv", (attended + 2 * self.num_kv_heads * self.head_dim, hidden)
            yield f"{name}.output", (hidden, attended)
            yield f"{name}.norm2", (hidden,)
            yield f"{name}.up", (2 * inner, hidden)
            yield f"{name}.down", (hidden, inner)
        yield "norm", (hidden,)
        if self.kind == CAUSAL_LM:
            yield "embedding", (num_kept + 1, hidden)
            return
        width = self.target_hidden_size
        yield "join", (hidden, 2 * width)
        for name in ("embedding_norm", "feature_norm", "no_feature"):
            yield name, (width,)


@dataclass(frozen=True, slots=True)
class DraftArtifact:
    """A trained draft.

    Attributes:
        shape: What it is.
        token_ids: Target's ids of the tokens that the head knows, rising. [num_kept]
        tensors: The weights in float32, by name; see `DraftShape.tensor_shapes`.
    """

    shape: DraftShape
    token_ids: Tensor
    tensors: Mapping[str, Tensor]


def is_artifact(folder: Path) -> bool:
    """Whether a folder claims to hold a trained draft."""
    return (folder / DESCRIPTION).is_file()


def borrowed_digest(embedding: Tensor, head: Tensor) -> str:
    """SHA-256 of what a draft borrows, as the float16 numbers that every weight format begins with.

    Args:
        embedding: [vocab, hidden]
        head: [vocab, hidden]
    """
    digest = hashlib.sha256()
    for table in (embedding, head):
        digest.update(table.detach().half().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def as_stored(artifact: DraftArtifact, weight_format: str) -> DraftArtifact:
    """What is left of a draft that is written and read again."""
    kept = {}
    for name, tensor in artifact.tensors.items():
        whole = tensor.detach().float().cpu()
        found = _unpacked(_packed(name, whole, weight_format), name, tuple(whole.shape))
        assert found is not None
        kept[name] = found
    return DraftArtifact(artifact.shape, artifact.token_ids, kept)


def write_artifact(
    folder: Path, artifact: DraftArtifact, weight_format: str, report: Mapping[str, Any]
) -> None:
    """Writes a trained draft; the folder appears whole or not at all, in place of what was there.

    Args:
        folder: Where to.
        artifact: The draft.
        weight_format: One of `STORED_FORMATS`: of the matrices; vectors are kept in float32.
        report: What there is to say about it (command, data, held-out figures), for the manifest.
    """
    stored: dict[str, Tensor] = {TOKEN_IDS: artifact.token_ids.to(torch.int32).contiguous()}
    for name, tensor in artifact.tensors.items():
        stored.update(_packed(name, tensor.detach().float().cpu(), weight_format))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        aside = Path(made) / folder.name
        aside.mkdir()
        save_file(stored, aside / WEIGHTS)
        _write_json(aside / DESCRIPTION, {"format": FORMAT, **asdict(artifact.shape)})
        files = {name: _describe(aside / name) for name in (DESCRIPTION, WEIGHTS)}
        _write_json(aside / MANIFEST, {"files": files, "weight_format": weight_format, **report})
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(aside, folder)


def read_artifact(folder: Path) -> DraftArtifact:
    """Reads a trained draft and checks it against its manifest.

    Raises:
        ArtifactError: It is not there, damaged, or of another format.
    """
    check_manifest(folder)
    description = _read_json(folder / DESCRIPTION)
    if description.pop("format", None) != FORMAT:
        raise ArtifactError(f"{folder / DESCRIPTION} is not of the format {FORMAT}; make the draft again")
    names = {field.name for field in fields(DraftShape)}
    if set(description) != names or description["kind"] not in KINDS:
        raise ArtifactError(f"{folder / DESCRIPTION} does not describe a draft of a known kind")
    shape = DraftShape(**description)
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    token_ids = stored.get(TOKEN_IDS, torch.empty(0)).long()
    tensors = {}
    for name, size in shape.tensor_shapes(len(token_ids)):
        tensor = _unpacked(stored, name, size)
        if tensor is None or tuple(tensor.shape) != size:
            raise ArtifactError(f"{folder / WEIGHTS} has no {name} of the shape {list(size)}")
        tensors[name] = tensor
    if not len(token_ids) or not 0 <= int(token_ids[0]) <= int(token_ids[-1]) < shape.vocabulary_size:
        raise ArtifactError(f"{folder / WEIGHTS} has token ids outside the vocabulary")
    return DraftArtifact(shape, token_ids, tensors)


def check_manifest(folder: Path) -> None:
    """Compares the files of a draft with its manifest.

    Raises:
        ArtifactError: One is missing, truncated or altered.
    """
    manifest = _read_json(folder / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or not {DESCRIPTION, WEIGHTS} <= files.keys():
        raise ArtifactError(f"{folder / MANIFEST} does not list the draft's files")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing")
        found = _describe(path)
        if found != expected:
            raise ArtifactError(
                f"{path} is truncated or altered: it has {found['bytes']} bytes and SHA-256 "
                f"{found['sha256'][:12]}..., and the manifest says {expected.get('bytes')} and "
                f"{str(expected.get('sha256'))[:12]}..."
            )


def _packed(name: str, tensor: Tensor, weight_format: str) -> dict[str, Tensor]:
    """A tensor as it is stored."""
    if tensor.dim() == 1:
        return {name: tensor.contiguous()}
    if weight_format == "float16":
        return {name: tensor.half().contiguous()}
    integers, scales = quantize(tensor, 127)
    whole = integers.flatten(1)[:, : tensor.shape[1]]
    return {name: whole.to(torch.int8).contiguous(), name + _SCALES: scales.half().contiguous()}


def _unpacked(stored: Mapping[str, Tensor], name: str, size: tuple[int, ...]) -> Tensor | None:
    """A stored tensor in float32, if it is there in full."""
    tensor, scales = stored.get(name), stored.get(name + _SCALES)
    if tensor is None or tensor.dtype != torch.int8:
        return None if tensor is None else tensor.float()
    if scales is None or tuple(scales.shape) != (size[0], -(-size[1] // GROUP)):
        return None
    return tensor.float() * scales.float().repeat_interleave(GROUP, dim=1)[:, : tensor.shape[1]]


def _describe(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} holds no object")
    return content

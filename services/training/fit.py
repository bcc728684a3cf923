"""Fits a draft to what a target wrote. It knows steps, checkpoints and files; the parts know the rest.

A run is a function of the collection and the settings: batches and blocks are drawn from the seed and the
step alone, so that one that was cut short and went on gives the same draft as one that was not.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from services.causal_lm.memory import gibibytes, memory_of
from services.draft.artifact import (
    FEATURE,
    KINDS,
    STORED_FORMATS,
    DraftArtifact,
    as_stored,
    write_artifact,
)
from services.draft.decoder import DraftDecoder
from services.training.batches import Batch, Example, examples, make_batch
from services.training.collection import read_parts, read_settings
from services.training.heldout import held_out_report
from services.training.start import Teacher, begin, read_teacher, shape_of
from services.training.student import Student, most_frequent

HELD_OUT = 20
"""One prompt in so many is not trained on."""

WARM_UP = 50
"""Steps in which the learning rate rises."""

DEPTH_WEIGHT = 0.9
NUM_POOLED = 32
"""Batches that are shuffled together and then cut by length, so that little is filled up."""

CHECKPOINT_STEPS = 100


class FitError(ValueError):
    """A draft cannot be fitted to this; the text says why."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How a draft is fitted.

    Attributes:
        kind: See `artifact`.
        num_layers: Decoder layers.
        hidden_size: Width of a "causal_lm".
        num_kept: Tokens that the head knows.
        num_epochs: Passes over the collection.
        learning_rate: The highest.
        batch_size: Sequences of a step.
        block: Drafted rows one after the other.
        seed: Of first weights and order.
    """

    kind: str = FEATURE
    num_layers: int = 2
    hidden_size: int = 256
    num_kept: int = 8192
    num_epochs: int = 4
    learning_rate: float = 1e-3
    batch_size: int = 16
    block: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r} and must be one of {', '.join(KINDS)}")
        for name in ("num_layers", "hidden_size", "num_kept", "num_epochs", "batch_size", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} and must be at least 1")
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate} and must be above 0")


def fit(
    collection: Path,
    model: Path,
    out: Path,
    settings: FitSettings,
    *,
    checkpoint: Path,
    weight_format: str,
    device: str = "cpu",
    num_threads: int | None = None,
    command: str = "",
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Trains a draft, or goes on from a checkpoint, and writes it.

    Args:
        collection: Folder of what the target wrote.
        model: Folder of the target.
        out: Where the draft goes.
        settings: How to fit.
        checkpoint: File to go on from, written every so often and removed at the end.
        weight_format: How the draft is stored.
        device: To train on. On CUDA products are in bfloat16.
        num_threads: Threads on the CPU; None for all.
        command: What made the draft, for its manifest.
        report: Told how it goes.

    Returns:
        Figures on sequences that were not trained on, of the draft as it was stored.

    Raises:
        FitError: The collection is too small or too large, or it or the checkpoint belongs to something else.
        CollectionError: The collection is damaged.
    """
    if weight_format not in STORED_FORMATS:
        raise FitError(f"the format is {weight_format!r} and must be one of {', '.join(STORED_FORMATS)}")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    described = read_settings(collection)
    _require_room(collection)
    teacher = read_teacher(model)
    if teacher.embedding.shape[1] != described["hidden_size"]:
        raise FitError(
            f"{collection} was collected from a model of width {described['hidden_size']} and {model} has "
            f"{teacher.embedding.shape[1]}; name the target that wrote it"
        )
    taught, held_out = split(examples(read_parts(collection)))
    if len(taught) < settings.batch_size or not held_out:
        raise FitError(
            f"{collection} has {len(taught)} sequences to train on and {len(held_out)} to hold out, and a "
            f"batch takes {settings.batch_size}; collect more, or lower --batch-size"
        )
    student = _student(settings, teacher, taught, described, device)
    # What it is about is in the digest; where it lies is not.
    about = {"settings": asdict(settings), "collection": described, "shape": asdict(student.decoder.shape)}
    fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    num_tokens = sum(len(each.next_ids) for each in taught)
    report(f"{len(taught)} sequences with {num_tokens} tokens, {len(held_out)} held out")
    curve = _train(student, taught, held_out, settings, checkpoint, fingerprint, device, report)

    shape, token_ids = student.decoder.shape, student.token_ids
    artifact = DraftArtifact(shape, token_ids.cpu(), student.decoder.tensors())
    # The figures to go by are those of what will be on disk.
    student.decoder.set_tensors(as_stored(artifact, weight_format).tensors)
    figures = _evaluate(student, held_out, settings, device)
    manifest = {
        "command": command,
        "settings": asdict(settings),
        "collection": described,
        "tokens_seen": num_tokens * settings.num_epochs,
        "curve": curve,
        "held_out": figures,
    }
    write_artifact(out, artifact, weight_format, manifest)
    checkpoint.unlink(missing_ok=True)
    return figures


def split(found: Iterator[Example]) -> tuple[list[Example], list[Example]]:
    """Sequences to train on, and those held out: all of a prompt fall on the same side."""
    sides: tuple[list[Example], list[Example]] = [], []
    for each in found:
        prompt = each.token_ids[: each.prompt_length].numpy().tobytes()
        sides[hashlib.sha256(prompt).digest()[0] % HELD_OUT == 0].append(each)
    return sides


def order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, as places of sequences, those of like length together; a rest is left out."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    pool = batch_size * NUM_POOLED
    batches = []
    for start in range(0, len(shuffled), pool):
        pooled = sorted(shuffled[start : start + pool], key=lambda place: lengths[place])
        batches += [pooled[i : i + batch_size] for i in range(0, len(pooled) - batch_size + 1, batch_size)]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def rate_at(step: int, num_steps: int) -> float:
    """Share of the highest learning rate: a short rise, then half a cosine down to a twentieth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    through = (step - WARM_UP) / max(1, num_steps - WARM_UP)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, through)))


def _student(
    settings: FitSettings, teacher: Teacher, taught: Sequence[Example], described: dict[str, Any], device: str
) -> Student:
    size = int(described["vocabulary_size"])
    counts = torch.zeros(size, dtype=torch.long)
    for each in taught:
        for ids in (each.token_ids, each.next_ids, each.top_ids[:, 0]):
            counts += torch.bincount(ids, minlength=size)[:size]
    token_ids = most_frequent(counts, settings.num_kept)
    index = torch.full((len(teacher.embedding),), len(token_ids))
    index[token_ids] = torch.arange(len(token_ids))
    shape = shape_of(
        settings.kind,
        settings.num_layers,
        settings.hidden_size,
        teacher,
        size,
        str(described["tokenizer_hash"]),
    )
    decoder = begin(shape, len(token_ids), teacher, settings.seed)
    borrows = settings.kind == FEATURE
    return Student(
        decoder.to(device),
        token_ids.to(device),
        index.to(device),
        (teacher.embedding if borrows else torch.empty(0)).to(device),
        (teacher.head[token_ids] if borrows else torch.empty(0)).to(device),
    )


def _train(
    student: Student,
    taught: Sequence[Example],
    held_out: Sequence[Example],
    settings: FitSettings,
    checkpoint: Path,
    fingerprint: str,
    device: str,
    report: Callable[[str], None],
) -> list[dict[str, float]]:
    """Takes all steps that are left. Returns the held-out figures after each epoch."""
    decoder = student.decoder
    optimizer = _optimizer(decoder, settings.learning_rate)
    lengths = [len(each) for each in taught]
    per_epoch = len(order(lengths, settings.batch_size, settings.seed, 0))
    num_steps = per_epoch * settings.num_epochs
    curve: list[dict[str, float]] = []
    first = 0
    if checkpoint.exists():
        saved = _read_checkpoint(checkpoint, fingerprint)
        decoder.load_state_dict(saved["decoder"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
        report(f"going on after step {first} of {num_steps}")
    batches: list[list[int]] = []
    for step in range(first, num_steps):
        epoch, place = divmod(step, per_epoch)
        if not batches or place == 0:
            batches = order(lengths, settings.batch_size, settings.seed, epoch)
        batch = _batch([taught[i] for i in batches[place]], settings, step, device)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * rate_at(step, num_steps)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = student.loss(batch, DEPTH_WEIGHT)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            report(f"step {step} of {num_steps}, loss {loss.item():.3f}")
        if place == per_epoch - 1:
            figures = _evaluate(student, held_out, settings, device)
            curve.append({"step": step + 1.0, **figures})
            report(f"epoch {epoch + 1}: " + ", ".join(f"{n} {v:.3f}" for n, v in figures.items()))
        if (step + 1) % CHECKPOINT_STEPS == 0 or place == per_epoch - 1:
            _write_checkpoint(
                checkpoint,
                {
                    "fingerprint": fingerprint,
                    "decoder": decoder.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                    "curve": curve,
                },
            )
    return curve


def _evaluate(
    student: Student, held_out: Sequence[Example], settings: FitSettings, device: str
) -> dict[str, float]:
    by_length = sorted(held_out, key=len)
    batches = (
        _batch(by_length[start : start + settings.batch_size], settings, start, device)
        for start in range(0, len(by_length), settings.batch_size)
    )
    return held_out_report(student, batches, settings.block)


def _batch(chosen: Sequence[Example], settings: FitSettings, step: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    offsets = torch.randint(settings.block, (len(chosen),), generator=generator).tolist()
    batch = make_batch(chosen, settings.block, offsets, two_kinds=settings.kind == FEATURE)
    return batch if device == "cpu" else batch.to(device)


def _optimizer(decoder: DraftDecoder, learning_rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices alone: to pull norms towards 0 makes no sense."""
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    vectors = [p for p in decoder.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def _require_room(collection: Path) -> None:
    """Refuses a collection that memory cannot hold, before an hour is spent on reading it."""
    needed = sum(path.stat().st_size for path in collection.glob("part-*.safetensors"))
    memory = memory_of("cpu")
    if memory is not None and needed * 1.2 > memory.available:
        raise FitError(
            f"{collection} takes {gibibytes(needed)} and {gibibytes(memory.available)} of memory are "
            "available; collect less, or free memory"
        )


def _read_checkpoint(path: Path, fingerprint: str) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        found = saved["fingerprint"]
    except Exception as error:  # a torn file fails in many ways
        raise FitError(f"{path} cannot be read ({error}); remove it to begin anew") from error
    if found != fingerprint:
        raise FitError(
            f"{path} belongs to other settings, another collection or another target; remove it to begin "
            "anew, or name another --checkpoint"
        )
    return saved


def _write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    torch.save(content, aside)
    os.replace(aside, path)

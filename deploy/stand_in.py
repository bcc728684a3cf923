"""A stand-in draft model: some of the target's own layers between its own embedding, norm and head.

A few first layers alone predict nothing that the target's head can read, so the head can be fitted to them.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.model_libraries import quiet

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"^(?P<before>(?:.*\.)?(?:layers|h)\.)(?P<index>\d+)(?P<after>\..*)$")
_RIDGE = 0.01  # of the rows' own scale, which the final norm fixes
_NUM_LAYERS = ("num_hidden_layers", "n_layer")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")


def make_stand_in(target_folder: Path, output: Path, layers: Sequence[int]) -> None:
    """Writes a model folder made of the target's layers `layers`, in that order.

    Args:
        target_folder: Hugging Face model folder with safetensors.
        output: Folder to write to; made if need be.
        layers: Which layers to keep.

    Raises:
        ValueError: No layers, or one the target does not have.
    """
    from safetensors.torch import save_file

    config = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    key = next((name for name in _NUM_LAYERS if name in config), None)
    if key is None:
        raise ValueError(f"{target_folder / 'config.json'} does not say how many layers the model has")
    wrong = [layer for layer in layers if not 0 <= layer < config[key]]
    if wrong or not layers:
        raise ValueError(f"layers are {list(layers)}; name at least one, each from 0 to {config[key] - 1}")

    tensors = {}
    for name, tensor in _tensors(target_folder):
        match = _LAYER.match(name)
        if match is None:
            tensors[name] = tensor
            continue
        for place, layer in enumerate(layers):
            if layer == int(match["index"]):
                tensors[f"{match['before']}{place}{match['after']}"] = tensor.clone()

    config[key] = len(layers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    for pattern in _TOKENIZER_FILES:
        for path in target_folder.glob(pattern):
            shutil.copyfile(path, output / path.name)


def fit_head(target_folder: Path, stand_in_folder: Path, token_ids: Sequence[Sequence[int]]) -> None:
    """Gives a stand-in a head of its own that reads its last layer as the target's head reads the target's.

    A linear map from the stand-in's last hidden states to the target's, fitted by ridge regression, is folded
    into the head: the "tuned lens" (Belrose et al., arXiv 2303.08112) without its bias.

    Args:
        target_folder: The target.
        stand_in_folder: Written by `make_stand_in`; its weights and configuration are changed.
        token_ids: Texts of equal length to fit on, [texts, tokens].
    """
    import torch
    from safetensors.torch import load_file, save_file

    inputs = torch.tensor(token_ids)
    wanted, head = _last_hidden_states(target_folder, inputs)
    found, _ = _last_hidden_states(stand_in_folder, inputs)
    width = found.shape[1]
    covariance = found.T @ found + _RIDGE * len(found) * torch.eye(width, dtype=found.dtype)
    mapping = torch.linalg.solve(covariance, found.T @ wanted)  # [width, width], applied from the right

    weights = stand_in_folder / "model.safetensors"
    tensors = load_file(weights)
    dtype = next(iter(tensors.values())).dtype
    tensors["lm_head.weight"] = (head @ mapping.T.to(head.dtype)).to(dtype).contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((stand_in_folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (stand_in_folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _last_hidden_states(folder: Path, inputs: "Tensor") -> tuple["Tensor", "Tensor"]:
    """The rows that a model's head reads, [texts * tokens, width] in float64, and that head's weight."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        rows = [
            model.base_model(batch, use_cache=False).last_hidden_state for batch in torch.split(inputs, 8)
        ]
    return torch.cat(rows).flatten(0, 1).double(), model.get_output_embeddings().weight.detach()


def _tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping, it cannot be iterated
                yield name, file.get_tensor(name)

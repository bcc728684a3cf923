"""A trained draft as plain torch operations: what training differentiates, and the oracle of serving.

It has no cache, no trees and no sessions; which row sees which is the caller's to say. Layers are those of
Llama (arXiv 2302.13971), without biases.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.draft.artifact import CAUSAL_LM, DraftShape


class DraftDecoder(nn.Module):
    """The layers of a draft, in float32.

    Args:
        shape: What the draft is.
        num_kept: Tokens that its head knows.
    """

    def __init__(self, shape: DraftShape, num_kept: int) -> None:
        super().__init__()
        self.shape = shape
        self.num_kept = num_kept
        self._weights = nn.ParameterDict(
            {_key(name): torch.zeros(size) for name, size in shape.tensor_shapes(num_kept)}
        )

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the weights, by the names of `DraftShape.tensor_shapes`."""
        return {name: self[name].detach().clone() for name, _ in self.shape.tensor_shapes(self.num_kept)}

    @torch.no_grad()
    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces weights, all or some."""
        for name, tensor in tensors.items():
            self[name].copy_(tensor)

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._weights[_key(name)]
        return weight

    def inputs(self, embedded: Tensor, features: Tensor, known: Tensor) -> Tensor:
        """Rows of a draft that is conditioned on the target, as in EAGLE (arXiv 2401.15077), section 3.1.

        Args:
            embedded: The target's embedding of each row's token. [..., target_hidden]
            features: The target's hidden state one position earlier, after its final norm; anything where it
                is not known. [..., target_hidden]
            known: Where it is known. [...]

        Returns:
            Inputs of the first layer. [..., hidden]
        """
        tokens = self._norm(embedded, self["embedding_norm"])
        given = self._norm(features, self["feature_norm"])
        given = torch.where(known.unsqueeze(-1), given, self["no_feature"].to(given.dtype))
        return functional.linear(torch.cat([tokens, given], dim=-1), self["join"])

    def embedded(self, indices: Tensor) -> Tensor:
        """Rows of a draft with an embedding of its own.

        Args:
            indices: Of tokens among those that the head knows; `num_kept` for others. [...]
        """
        assert self.shape.kind == CAUSAL_LM
        return functional.embedding(indices, self["embedding"])

    def forward(self, inputs: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Runs the layers.

        Args:
            inputs: [batch, n, hidden]
            positions: Of the rows' tokens. [batch, n]
            visible: Which rows each row attends to, itself among them. [batch, n, n]

        Returns:
            Hidden states after the final norm. [batch, n, hidden]
        """
        x, turns = inputs, rotary(self.shape, positions)
        for layer in range(self.shape.num_layers):
            name = f"layers.{layer}"
            x = x + self._attend(name, self._norm(x, self[f"{name}.norm1"]), turns, visible)
            gates, values = functional.linear(self._norm(x, self[f"{name}.norm2"]), self[f"{name}.up"]).chunk(
                2, dim=-1
            )
            x = x + functional.linear(functional.silu(gates) * values, self[f"{name}.down"])
        return self._norm(x, self["norm"])

    def _attend(self, name: str, x: Tensor, turns: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        shape = self.shape
        batch, n, _ = x.shape
        qkv = functional.linear(x, self[f"{name}.qkv"]).view(batch, n, -1, shape.head_dim).transpose(1, 2)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = torch.split(qkv, sizes, dim=1)
        query, key = (_rotated(each, *turns).to(value.dtype) for each in (query, key))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible.unsqueeze(1), enable_gqa=True
        )
        return functional.linear(mixed.transpose(1, 2).reshape(batch, n, -1), self[f"{name}.output"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), weight.shape, weight, self.shape.epsilon)


def rotary(shape: DraftShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (arXiv 2104.09864), each half of a head turned alike.

    Args:
        shape: Of the draft.
        positions: [..., n]

    Returns:
        Two tensors. [..., n, head_dim]
    """
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angles = positions.float().unsqueeze(-1) / shape.rope_theta**exponents
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines.unsqueeze(1) + torch.cat([-high, low], dim=-1) * sines.unsqueeze(1)


def _key(name: str) -> str:
    return name.replace(".", "_")  # torch's names of parameters have no dots

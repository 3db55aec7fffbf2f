"""NarrowMultiheadAttention: `nn.MultiheadAttention` with fewer heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError


class NarrowMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` from which heads have been removed. Names of parameters and arguments are unchanged.

    The query, key and value projections have fewer rows, and the output projection has fewer columns. `head_dim` is unchanged,
    `num_heads` is the number of heads left, and `embed_dim`, `kdim` and `vdim` are the widths of the inputs.
    """

    def _reset_parameters(self) -> None:
        """Initialize the weights, as torch and transformers do before loading a state. Torch's method needs all heads."""
        for entry in self.parameters(recurse=False):
            nn.init.xavier_uniform_(entry) if entry.dim() > 1 else nn.init.zeros_(entry)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as `nn.MultiheadAttention.forward` does.

        Raises:
            InvalidValueError: `is_causal` without `attn_mask`, or a mask of a shape that does not fit.
        """
        if is_causal and attn_mask is None:
            raise InvalidValueError("is_causal=True is a hint about attn_mask and needs it; pass attn_mask too")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, query, key)
        q, k, v = self._heads(query, key, value)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
            attended = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return projected inputs, each (batch, heads, positions, head size), with the positions that torch may append."""
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self.in_proj_weight is None
            else self.in_proj_weight.chunk(3)
        )
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], 1, -1)], dim=1)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the bias of the scores, to broadcast over (batch, heads, targets, sources); None without masks."""
        batch, targets, sources = query.shape[0], query.shape[1], key.shape[1]
        total: Tensor | None = None
        if attn_mask is not None:
            shapes = [(targets, sources), (batch * self.num_heads, targets, sources)]
            if tuple(attn_mask.shape) not in shapes:
                raise InvalidValueError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}, with {self.num_heads} heads left it must have"
                    f" {shapes[0]} or {shapes[1]}; a mask for each head must leave out the heads that are gone"
                )
            total = _additive(attn_mask, query.dtype)
            total = total.unflatten(0, (batch, self.num_heads)) if total.dim() == 3 else total[None, None]
        if padding is not None:
            if tuple(padding.shape) != (batch, sources):
                raise InvalidValueError(
                    f"key_padding_mask has shape {tuple(padding.shape)}, it must have {(batch, sources)}:"
                    " one entry for each position of the keys"
                )
            hidden = _additive(padding, query.dtype)[:, None, None, :]
            total = hidden if total is None else total + hidden
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        return F.pad(total, (0, extra)) if total is not None and extra else total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)

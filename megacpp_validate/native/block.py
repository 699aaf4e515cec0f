"""The A-block: attention and MLP on a residual stream, each behind its own norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from .attention import attention
from .mlp import Activation, NormMLP
from .norms import INIT_STD, NormLinear, check_widths
from .rope import apply_rope


class ABlock(nn.Module):
    """x + out(attention(rope(qkv(norm(x))))), then x + mlp(norm(x)); causal, RMSNorm, no biases.

    Args:
        hidden: width of the residual stream.
        ffn_hidden: width F of the MLP.
        num_heads: query heads H.
        head_dim: D.
        num_gqa_groups: key and value heads G; divides H.
        activation: of the MLP.
        eps: of both norms.
        dtype, device: of the parameters.

    Attributes:
        qkv: `NormLinear` with weight [(H + 2G) x D, hidden]: rows of the queries, then the keys, then the values, each
            ordered by head.
        out: `nn.Linear` with weight [hidden, H x D].
        mlp: `NormMLP`.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        *,
        activation: Activation = "swiglu",
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if num_gqa_groups < 1 or num_heads % num_gqa_groups:
            raise ValueError(
                f"{num_heads} query heads cannot share {num_gqa_groups} key and value heads evenly; "
                f"num_gqa_groups must divide num_heads."
            )
        check_widths(num_heads=num_heads, head_dim=head_dim)
        self.num_heads, self.head_dim, self.num_gqa_groups = num_heads, head_dim, num_gqa_groups
        made = {"dtype": dtype, "device": device}
        self.qkv = NormLinear(hidden, (num_heads + 2 * num_gqa_groups) * head_dim, eps=eps, **made)
        self.out = nn.Linear(num_heads * head_dim, hidden, bias=False, **made)
        nn.init.normal_(self.out.weight, std=INIT_STD)
        self.mlp = NormMLP(hidden, ffn_hidden, activation=activation, eps=eps, **made)

    def forward(
        self,
        rows: Any,
        *,
        rope: tuple[Any, Any] | None = None,
        doc_ids: Any | None = None,
        window: int | None = None,
    ) -> Any:
        """One step of the residual stream.

        Args:
            rows: [B, T, hidden].
            rope: (cos, sin), each [at least T, D/2], from `rope_tables`; None turns nothing.
            doc_ids: [B, T] integers of packed documents.
            window: keys that a query sees, itself the last.

        Returns:
            [B, T, hidden] in the dtype of `rows`.
        """
        if rows.dim() != 3:
            raise ValueError(f"the block takes rows [B, T, hidden]; it was given {tuple(rows.shape)}.")
        query, key, value = self._heads(rows)
        if rope is not None:
            cos, sin = rope
            query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        seen = attention(query, key, value, doc_ids=doc_ids, window=window)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        return rows + self.mlp(rows)

    def _heads(self, rows: Any) -> tuple[Any, Any, Any]:
        """[B, T, hidden] -> query [B, H, T, D], key and value [B, G, T, D]."""
        heads, groups, width = self.num_heads, self.num_gqa_groups, self.head_dim
        mixed = self.qkv(rows).split([heads * width, groups * width, groups * width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in mixed)
        return query, key, value

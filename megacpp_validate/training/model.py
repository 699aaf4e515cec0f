"""The hybrid model: embedding, layers by a pattern, norm, head; one definition for TE, native and mixed builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..bridge.backends import Choice
from ..bridge.errors import WeightMismatch
from ..bridge.fp8_scope import group_scope
from ..bridge.layer_spec import build_norm
from ..bridge.layer_watch import watch_layers
from ..bridge.open_scopes import Scope
from ..native.norms import INIT_STD
from ..native.rope import rope_tables
from .errors import WrongTokens
from .first_weights import build_layer
from .layers import Build
from .seeds import generator_of
from .sizes import Size

ScopeFactory = Callable[[], AbstractContextManager[Scope]]


@dataclass(frozen=True, eq=False)
class Trunk:
    """What the layers make of tokens, before the head.

    Attributes:
        rows: [B, T, hidden] behind the last norm.
        aux_loss, z_loss: [] of all routers, with their coefficients; 0 without an E-layer.
        tokens_per_expert: int64 [number of E-layers, E].
    """

    rows: Any
    aux_loss: Any
    z_loss: Any
    tokens_per_expert: Any


@dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a batch, each [] in fp32 at least.

    Attributes:
        language: mean cross-entropy, nats a prediction; what is held to the floor of the language.
        aux, z: of the routers, with their coefficients.
        total: what is trained on, their sum.
    """

    language: Any
    aux: Any
    z: Any
    total: Any


class HybridModel(nn.Module):
    """A causal language model over blocks A, M, E and R.

    Its first weights depend on the size and the seed, not on what the layers are made of.

    Args:
        size: how large.
        build: of what, in which dtype, where.
        seed: of the weights.

    Attributes:
        embedding: nn.Embedding, [V, hidden].
        layers: one a letter of the pattern.
        norm: behind the last layer.
        head: nn.Linear without bias, [V, hidden]; its weight is the embedding's where the size says tied.

    Raises:
        BridgeError: what the bridge refuses to build.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        self.size, self.build, self.seed = size, build, seed
        made = {"dtype": build.dtype, "device": build.device}
        table = self._draw("embedding")
        self.embedding = nn.Embedding(size.vocabulary, size.hidden, _weight=table)
        self.layers = nn.ModuleList(
            build_layer(letter, size, build, seed=seed, name=f"layers.{place}")
            for place, letter in enumerate(size.letters)
        )
        self.norm = build_norm(size.hidden, eps=size.eps, features=build.features, **made)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False, device="meta", dtype=build.dtype)
        self.head.weight = self.embedding.weight if size.tied else nn.Parameter(self._draw("head"))
        cos, sin = rope_tables(size.length, size.head_dim, device=build.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        watch_layers(self)

    def trunk(
        self,
        tokens: Any,
        *,
        scope: ScopeFactory | None = None,
        rows: Any = None,
        before: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> Trunk:
        """What the layers make of tokens.

        Neighbouring layers that may run in low precision share one scope, entered once; layers of the BF16 zones run
        outside of it, and so do embedding, last norm and head.

        Args:
            tokens: [B, T] int64, T up to the size's length.
            scope: makes the low-precision scope of this pass; None leaves precision as it is.
            rows: [B, T, hidden] that the first layer gets, where they are not the embedding of the tokens.
            before: place of a layer -> what is done to the stream [B, T, hidden] ahead of it, in its precision.

        Raises:
            WrongTokens: tokens of another shape or dtype.
            ScopeEnteredTwice: the factory's scope is open already.
        """
        self._check(tokens)
        rows = self.embedding(tokens) if rows is None else rows
        routings, ahead = [], before or {}
        for places, context in self._groups(scope):
            with context:
                for place in places:
                    rows = ahead[place](rows) if place in ahead else rows
                    step = self.layers[place](rows, (self.cos, self.sin))
                    rows = step.rows
                    routings += [step.routing] if step.routing is not None else []
        nothing = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        counts = [routing.routing_map.sum(0) for routing in routings]
        return Trunk(
            self.norm(rows),
            sum((routing.aux_loss for routing in routings), nothing),
            sum((routing.z_loss for routing in routings), nothing),
            torch.stack(counts) if counts else torch.empty(0, self.size.num_experts, dtype=torch.int64),
        )

    def forward(self, tokens: Any, *, scope: ScopeFactory | None = None) -> Any:
        """Logits [B, T, V] in the dtype of the parameters, of the token after each; raises as `trunk`."""
        return self.head(self.trunk(tokens, scope=scope).rows)

    def losses(self, tokens: Any, *, scope: ScopeFactory | None = None) -> Losses:
        """Losses of predicting tokens [B, T + 1] each from those before it: T predictions a sequence.

        Raises:
            WrongTokens: as `trunk`, or of T + 1 tokens where T does not fit.
        """
        self._check(tokens, more=1)
        seen = self.trunk(tokens[:, :-1], scope=scope)
        logits = self.head(seen.rows).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        language = functional.cross_entropy(wide, tokens[:, 1:].flatten())
        return Losses(language, seen.aux_loss, seen.z_loss, language + seen.aux_loss + seen.z_loss)

    def choices(self) -> dict[str, Choice]:
        """Part, as in layers.3.up -> what its last call took, and why."""
        parts = {
            f"layers.{place}.{part}": choice
            for place, layer in enumerate(self.layers)
            for part, choice in layer.choices().items()
        }
        return {**parts, "norm": self.norm.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of every weight under native names, the same for every build; a tied head is not listed."""
        state = {"embedding.weight": self.embedding.weight.detach().clone()}
        for place, layer in enumerate(self.layers):
            state |= {f"layers.{place}.{name}": value for name, value in layer.native_state_dict().items()}
        state["norm.weight"] = self.norm.weight.detach().clone()
        return state if self.size.tied else {**state, "head.weight": self.head.weight.detach().clone()}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take weights of a model of the same size, exactly.

        Raises:
            WeightMismatch: names that are missing or unknown, or what a layer refuses.
        """
        held = self.native_state_dict().keys()
        if held != state.keys():
            raise WeightMismatch(
                f"missing: {', '.join(sorted(held - state.keys())) or 'nothing'}; unknown: "
                f"{', '.join(sorted(state.keys() - held)) or 'nothing'}. Likely cause: a model of another pattern, or "
                "tied where this one is not. Next step: build the model with the size that the weights come from."
            )
        with torch.no_grad():
            self.embedding.weight.copy_(state["embedding.weight"])
            self.norm.weight.copy_(state["norm.weight"])
            if not self.size.tied:
                self.head.weight.copy_(state["head.weight"])
        for place, layer in enumerate(self.layers):
            start = f"layers.{place}."
            layer.load_native_state_dict(
                {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            )

    def _groups(self, scope: ScopeFactory | None) -> Iterator[tuple[list[int], AbstractContextManager[Any]]]:
        """Neighbouring layers of one precision, and what they run in."""
        zones = self.size.zones
        if scope is None:
            yield list(range(len(self.layers))), nullcontext()
            return
        for _, group in groupby(range(len(self.layers)), zones.is_bf16):
            places = list(group)
            yield places, group_scope(places, zones, [scope] * len(places))

    def _draw(self, name: str) -> Any:
        """A table [V, hidden], drawn as its layers' weights are."""
        size, build = self.size, self.build
        drawn = torch.randn(size.vocabulary, size.hidden, generator=generator_of(self.seed, "weights", name))
        return drawn.mul_(INIT_STD).to(build.device, build.dtype)

    def _check(self, tokens: Any, *, more: int = 0) -> None:
        shape, least, most = tuple(tokens.shape), 1 + more, self.size.length + more
        if len(shape) != 2 or 0 in shape or not least <= shape[1] <= most or tokens.dtype != torch.int64:
            raise WrongTokens(
                f"tokens are {tokens.dtype} of shape {shape}; wanted int64 [B, {least} to {most}]. Likely cause: "
                f"sequences of another size. Next step: make them with batch and length of the size {self.size.name!r}."
            )

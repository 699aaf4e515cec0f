"""The hybrid model: embedding, layers by a pattern, norm, head; one definition for TE, native and mixed builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..bridge.backends import Choice
from ..bridge.errors import WeightMismatch
from ..bridge.fp8_scope import group_scope, high_precision
from ..bridge.layer_spec import build_norm
from ..bridge.layer_watch import watch_layers
from ..bridge.open_scopes import Scope
from ..bridge.recompute import recompute
from ..bridge.residual_norm import choose_residual_norm
from ..native.norms import INIT_STD
from ..native.rope import rope_tables
from .errors import WrongSize, WrongTokens
from .first_weights import build_layer
from .layers import Build, Stepped, norm_of_sum
from .mtp import MtpJoin, summed_surprise, targets_of
from .parallel.replicas import mark_split
from .seeds import generator_of
from .sizes import Size

ScopeFactory = Callable[[], AbstractContextManager[Scope]]


@dataclass(frozen=True)
class Scopes:
    """The low-precision scope of a pass, where other ranks hold the same experts than the same of the rest.

    Attributes:
        dense: makes the scope, with the amax group of layers A, M and R.
        experts: inside it, makes the region of an E-layer (`bridge.fp8_scope`); None where the same ranks hold both.
    """

    dense: ScopeFactory
    experts: ScopeFactory | None = None


RECOMPUTED: Final = Choice("recompute", "recompute", "recompute")


@dataclass(frozen=True, eq=False)
class Trunk:
    """What the layers make of tokens, before the head; under sequence parallelism at the positions of this rank.

    Attributes:
        rows: [B, T, hidden] behind the last norm.
        aux_loss, z_loss: [] of all routers, with their coefficients, this rank's shares; 0 without an E-layer.
        tokens_per_expert: int64 [number of E-layers, E] of this rank's tokens, those that a capacity dropped left out.
        stream: [B, T, hidden] ahead of the last norm.
    """

    rows: Any
    aux_loss: Any
    z_loss: Any
    tokens_per_expert: Any
    stream: Any


@dataclass(frozen=True, eq=False)
class Losses:
    """What this rank adds in one pass to the losses of the whole step, each [] in fp32 at least.

    Summed over the ranks that hold different tokens (`Spread.token_group`) and over the passes of a step they are those
    of one rank that reads the whole batch; of a rank alone, in one pass, they are so by themselves. The gradients of
    `total` are summed likewise, never averaged.

    Attributes:
        language: mean cross-entropy, nats a prediction; what is held to the floor of the language.
        aux, z: of the routers, with their coefficients.
        mtp: of the head that predicts the token after the next one, with its coefficient; 0 without it.
        trajectory: with its coefficient; 0 where it is off.
        total: what is trained on, their sum.
        tokens_per_expert: as in `Trunk`; no loss.
    """

    language: Any
    aux: Any
    z: Any
    mtp: Any
    trajectory: Any
    total: Any
    tokens_per_expert: Any


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
        mtp: what is its own of the head that predicts the token after the next one; None without it.

    Raises:
        WrongSize: a trajectory loss with positions on several ranks, or what a layer refuses.
        BridgeError: what the bridge refuses to build.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        self.size, self.build, self.seed = size, build, seed
        _check_trajectory(size, build)
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
        self.mtp = MtpJoin(size, build, seed=seed) if size.mtp else None
        self._takes_added = ["added" in inspect.signature(layer.forward).parameters for layer in self.layers]
        made = {"dtype": build.dtype, "device": build.device}
        self._recomputed: set[int] = set()  # layers that ran in a recomputed region
        self._joined = choose_residual_norm(size.hidden, **made) if build.forms.fused_residual_norm else None
        self._mark_split()
        watch_layers(self)

    def trunk(
        self,
        tokens: Any,
        *,
        scope: ScopeFactory | Scopes | None = None,
        rows: Any = None,
        before: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> Trunk:
        """What the layers make of tokens.

        Neighbouring layers that may run in low precision share one scope, entered once. Experts that may not leave it
        for their time, and those whose amax other ranks share are in a region of it. Layers of the BF16 zones run
        outside of it, and so do embedding, last norm and head.

        Args:
            tokens: [B, T] int64, T up to the size's length; whole sequences, also where a rank holds a part of them.
            scope: makes the low-precision scope of this pass, or that and the region of experts in it; None leaves
                precision as it is.
            rows: [B, T, hidden] that the first layer gets, where they are not the embedding of the tokens.
            before: place of a layer -> what is done to the stream [B, T, hidden] ahead of it, in its precision.

        Raises:
            WrongTokens: tokens of another shape or dtype.
            ScopeEnteredTwice: the factory's scope is open already.
        """
        self._check(tokens)
        rows = self.embedding(self._here(tokens)) if rows is None else rows
        step, routings, ahead = Stepped(rows), [], before or {}
        for places, context in self._groups(scope):
            with context:
                for place in places:
                    step = Stepped(ahead[place](_whole(step))) if place in ahead else step
                    with self._region(place, scope):
                        step = self._run_layer(place, step)
                    routings += [step.routing] if step.routing is not None else []
        stream, normed = norm_of_sum(self.norm, step.rows, step.added, self.size.eps)
        nothing = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        counts = [routing.routing_map.sum(0) for routing in routings]
        return Trunk(
            normed,
            sum((routing.aux_loss for routing in routings), nothing),
            sum((routing.z_loss for routing in routings), nothing),
            torch.stack(counts) if counts else torch.empty(0, self.size.num_experts, dtype=torch.int64),
            stream,
        )

    def forward(self, tokens: Any, *, scope: ScopeFactory | Scopes | None = None) -> Any:
        """Logits [B, T, V] in the dtype of the parameters, of the token after each; raises as `trunk`."""
        return self.head(self.trunk(tokens, scope=scope).rows)

    def losses(self, tokens: Any, *, scope: ScopeFactory | Scopes | None = None) -> Losses:
        """This rank's shares of the losses of predicting tokens [B, T + 1] each from those before it.

        There are T predictions a sequence, and T - 1 of the token after the next one.

        Raises:
            WrongTokens: as `trunk`, or of T + 1 tokens where T does not fit.
            WrongSize: low precision for a last layer that the head of the token after the next one shares.
        """
        self._check(tokens, more=1)
        self._check_shared_layer(scope)
        seen = self.trunk(tokens[:, :-1], scope=scope)
        logits = self.head(seen.rows).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        share = self.build.spread.share
        language = functional.cross_entropy(wide, self._here(tokens[:, 1:]).flatten()) * share
        total = language + seen.aux_loss + seen.z_loss
        mtp = trajectory = torch.zeros_like(total)
        if self.mtp is not None:
            mtp = self._mtp_loss(self.mtp, seen.stream, tokens)
            total = total + mtp
        if self.size.trajectory_coefficient:
            from .trajectory import trajectory_loss

            trajectory = self.size.trajectory_coefficient * trajectory_loss(seen.rows) * share
            total = total + trajectory
        return Losses(language, seen.aux_loss, seen.z_loss, mtp, trajectory, total, seen.tokens_per_expert)

    def choices(self) -> dict[str, Choice]:
        """Part, as in layers.3.up -> what its last call took, and why."""
        parts = {
            f"layers.{place}.{part}": choice
            for place, layer in enumerate(self.layers)
            for part, choice in layer.choices().items()
        }
        ahead = {} if self.mtp is None else {f"mtp.{part}": choice for part, choice in self.mtp.choices().items()}
        joined = {} if self._joined is None else {"residual_norm": self._joined}
        again = {f"layers.{place}.recompute": RECOMPUTED for place in sorted(self._recomputed)}
        return {**parts, **again, **ahead, **joined, "norm": self.norm.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of every weight under native names, the same for every build; a tied head is not listed.

        Of what is split over ranks, this rank's part: its experts, its heads and columns.
        """
        state = {"embedding.weight": self.embedding.weight.detach().clone()}
        for start, part in self._parts().items():
            state |= {f"{start}{name}": value for name, value in part.native_state_dict().items()}
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
        for start, part in self._parts().items():
            part.load_native_state_dict(
                {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            )

    def _parts(self) -> dict[str, Any]:
        """Start of names -> the module that gives and takes its own weights under the rest of them."""
        parts: dict[str, Any] = {f"layers.{place}.": layer for place, layer in enumerate(self.layers)}
        return parts if self.mtp is None else {**parts, "mtp.": self.mtp}

    def _groups(self, scope: ScopeFactory | Scopes | None) -> Iterator[tuple[list[int], AbstractContextManager[Any]]]:
        """Neighbouring layers of one precision, and the scope that they run in."""
        zones = self.size.zones
        if scope is None:
            yield list(range(len(self.layers))), nullcontext()
            return
        factory = scope.dense if isinstance(scope, Scopes) else scope
        for _, group in groupby(range(len(self.layers)), zones.is_bf16):
            places = list(group)
            yield places, group_scope(places, zones, [factory] * len(places))

    def _region(self, place: int, scope: ScopeFactory | Scopes | None) -> AbstractContextManager[Any]:
        """What a layer of experts runs in, inside the scope of its neighbours."""
        if self.size.letters[place] != "E":
            return nullcontext()
        if not self.build.forms.low_precision_experts:
            return high_precision("the form of this model keeps its experts out of low precision")
        if not isinstance(scope, Scopes) or scope.experts is None or self.size.zones.is_bf16(place):
            return nullcontext()
        return scope.experts()

    def _run_layer(self, place: int, step: Stepped) -> Stepped:
        """One layer behind another; layers that cannot add in their norm get the whole stream."""
        layer, rope = self.layers[place], (self.cos, self.sin)
        if not self._takes_added[place]:
            step = Stepped(_whole(step))
        given = (step.rows,) if step.added is None else (step.rows, step.added)
        kept = self.size.letters[place] == "E" or not torch.is_grad_enabled() or not self.training
        if kept or not self.build.forms.recompute:
            return layer(given[0], rope, *given[1:])

        def run(*given: Any) -> tuple[Any, Any]:
            stepped = layer(given[0], rope, *given[1:])
            return stepped.rows, stepped.added

        rows, added = recompute(run, *given, use_reentrant=False)
        self._recomputed.add(place)
        return Stepped(rows, None, added)

    def _mtp_loss(self, join: MtpJoin, stream: Any, tokens: Any) -> Any:
        """This rank's share of the loss of the token after the next one, with its coefficient.

        Its pass through the last layer is outside of low precision; where that layer is one of experts, its routing
        goes without the losses of a router.
        """
        plan, batch, length = self.build.spread.plan, tokens.shape[0], tokens.shape[1] - 1
        ahead, targets = targets_of(tokens, self.build.spread.positions(length))
        with high_precision(self.size.zones.why_bf16("mtp")):
            step = self._run_layer(len(self.layers) - 1, Stepped(join(stream, self.embedding(ahead))))
            _, normed = norm_of_sum(self.norm, step.rows, step.added, self.size.eps)
            summed = summed_surprise(self.head(normed), targets)
        predictions = batch * max(length - 1, 1) * plan.data * plan.accumulate
        return self.size.mtp_coefficient * summed / predictions

    def _here(self, tokens: Any) -> Any:
        """Of tokens [B, T] those at the positions of this rank."""
        here = self.build.spread.positions(tokens.shape[1])
        return tokens[:, here.start : here.stop]

    def _mark_split(self) -> None:
        """Under sequence parallelism say of all that works on single positions that this rank sees a part of them."""
        if not self.build.spread.plan.sequence_parallel:
            return
        experts = [layer for letter, layer in zip(self.size.letters, self.layers, strict=True) if letter == "E"]
        for part in (self.embedding, self.norm, self.head, self.mtp, *experts):
            mark_split(() if part is None else part.parameters())

    def _check_shared_layer(self, scope: ScopeFactory | Scopes | None) -> None:
        last = len(self.layers) - 1
        if scope is not None and self.mtp is not None and not self.size.zones.is_bf16(last):
            raise WrongSize(
                f"layer {last} in low precision, which the head of the token after the next one shares: auxiliary "
                "heads stay in BF16, and one layer cannot keep the scales of one pass of two. Next step: bf16_last 1 "
                "or more."
            )

    def _draw(self, name: str) -> Any:
        """A table [V, hidden], drawn as its layers' weights are."""
        size, build = self.size, self.build
        drawn = torch.randn(size.vocabulary, size.hidden, generator=generator_of(self.seed, "weights", name))
        return drawn.mul_(INIT_STD).to(build.device, build.dtype)

    def _check(self, tokens: Any, *, more: int = 0) -> None:
        shape, least, most = tuple(tokens.shape), 1 + more, self.size.length + more
        plan = self.build.spread.plan
        if len(shape) != 2 or 0 in shape or not least <= shape[1] <= most or tokens.dtype != torch.int64:
            raise WrongTokens(
                f"tokens are {tokens.dtype} of shape {shape}; wanted int64 [B, {least} to {most}]. Likely cause: "
                f"sequences of another size. Next step: make them with batch and length of the size {self.size.name!r}."
            )
        if plan.sequence_parallel and (shape[1] - more) % plan.tensor_parallel:
            raise WrongTokens(
                f"{shape[1] - more} positions cannot be shared out evenly over {plan.tensor_parallel} ranks. Next "
                "step: make sequences with a length that tensor_parallel divides."
            )


def _whole(step: Stepped) -> Any:
    """The stream behind a layer, [B, T, hidden]."""
    return step.rows if step.added is None else step.rows + step.added


def _check_trajectory(size: Size, build: Build) -> None:
    if size.trajectory_coefficient and build.spread.plan.sequence_parallel:
        raise WrongSize(
            "a trajectory loss and sequence parallelism: a trajectory goes through neighbouring positions, which lie "
            "on several ranks. Next step: trajectory_coefficient 0, or sequence_parallel off."
        )

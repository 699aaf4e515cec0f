"""The hybrid model: embedding, layers by a pattern, norm, head; one definition for TE, native and mixed builds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ..bridge.backends import Choice
from ..bridge.features import PRESETS
from ..bridge.fp8_scope import PrecisionScope, group_scope, high_precision
from ..bridge.fused import choose_residual_norm
from ..bridge.layer_spec import build_norm
from ..bridge.layer_watch import recompute, watch_layers
from ..bridge.liger import choose_head_loss, linear_cross_entropy
from ..bridge.parallel_hooks import mark_split
from ..native.attention import rope_tables
from ..native.block import HyperConnection, read_streams, write_streams
from ..native.norms import INIT_STD
from .expert_layer import ExpertLayer, build_router, build_shared
from .language import drawn_from, generator_of
from .layers import (
    AttentionLayer,
    Build,
    MambaLayer,
    MlaLayer,
    RecurrentLayer,
    RoutedLayer,
    SampledLayer,
    Stepped,
    norm_of_sum,
)
from .sizes import Letter, Size

ScopeFactory = Callable[[], AbstractContextManager[PrecisionScope]]


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
    """Output of the layers, before the head; under sequence parallelism at the positions of this rank.

    Attributes:
        rows: [B, T, hidden] behind the last norm.
        loss: [] of all routers and indexers, with their coefficients, this rank's share; 0 without any.
        stream: [B, T, hidden] ahead of the last norm.
    """

    rows: Any
    loss: Any
    stream: Any


@dataclass(frozen=True, eq=False)
class Losses:
    """Shares of this rank, in one pass, of the losses of the whole step, each [] in fp32 at least.

    Summed over the ranks that hold different tokens (`Spread.token_group`) and over the passes of a step they are those
    of one rank that reads the whole batch. The gradients of
    `total` are summed likewise, never averaged.

    Attributes:
        language: mean cross-entropy, nats a prediction.
        total: the loss of training: language, and with their coefficients the routers' losses, that of the head that
            predicts the token after the next one, and the trajectory loss.
    """

    language: Any
    total: Any


pytree.register_dataclass(Trunk)
pytree.register_dataclass(Losses)


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
        head: nn.Linear without bias, [V, hidden].
        streams: how each layer reads and writes the residual streams; None where there is one stream.
        mtp: what is its own of the head that predicts the token after the next one; None without it.

    Raises:
        BridgeError: what the bridge refuses to build.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        self.size, self.build, self.seed = size, build, seed
        table = self._draw("embedding")
        self.embedding = nn.Embedding(size.grammar.vocabulary, size.hidden, _weight=table)
        self.layers = nn.ModuleList(
            build_layer(letter, size, _build_at(place, size, build), seed=seed, name=f"layers.{place}")
            for place, letter in enumerate(size.letters)
        )
        self.streams = build_streams(size, build, seed=seed) if size.streams > 1 else None
        self.norm = build_norm(size.hidden, eps=size.eps, **build.bridged)
        self.head = nn.Linear(size.hidden, size.grammar.vocabulary, bias=False, device="meta", dtype=build.dtype)
        self.head.weight = nn.Parameter(self._draw("head"))
        cos, sin = rope_tables(size.length, size.head_dim, device=build.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.mtp = MtpJoin(size, build, seed=seed) if size.mtp else None
        self._takes = [set(inspect.signature(layer.forward).parameters) for layer in self.layers]
        self._recomputed: set[int] = set()  # layers that ran in a recomputed region
        self._choices: dict[str, Choice] = {}
        if build.forms.fused_residual_norm:
            self._choices["residual_norm"] = choose_residual_norm(size.hidden, **build.made)
        if build.forms.liger:
            self._choices["head_loss"] = choose_head_loss(**build.made)
        self._mark_split()
        watch_layers(self)

    def trunk(
        self,
        tokens: Any,
        *,
        scope: Scopes | None = None,
        rows: Any = None,
        before: Mapping[int, Callable[[Any], Any]] | None = None,
    ) -> Trunk:
        """What the layers make of tokens.

        Neighbouring layers that may run in low precision share one scope, entered once. Experts that may not leave it
        for their time, and those whose amax other ranks share are in a region of it. Layers of the BF16 zones run
        outside of it, and so do embedding, last norm and head.

        Args:
            tokens: [B, T] int64, T up to the size's length; whole sequences, also where a rank holds a part of them.
            scope: makes the low-precision scope of this pass, and the region of experts in it; None leaves precision as
                it is.
            rows: [B, T, hidden] that the first layer gets, where they are not the embedding of the tokens.
            before: place of a layer -> what is done to the stream [B, T, hidden] ahead of it, in its precision.

        Raises:
            ScopeEnteredTwice: the factory's scope is open already.
        """
        rows = self.embedding(self._here(tokens)) if rows is None else rows
        if self.streams is not None:
            rows = rows.unsqueeze(2).expand(-1, -1, self.size.streams, -1)
        step, ahead = Stepped(rows), before or {}
        loss = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        for places, context in self._groups(scope):
            with context:
                for place in places:
                    step = Stepped(ahead[place](step.whole())) if place in ahead else step
                    with self._region(place, scope):
                        step = self._run_layer(place, step) if self.streams is None else self._run_streams(place, step)
                    loss = loss if step.loss is None else loss + step.loss
        step = step if self.streams is None else Stepped(step.rows.mean(dim=2))
        stream, normed = norm_of_sum(self.norm, step.rows, step.added, self.size.eps)
        return Trunk(normed, loss, stream)

    def forward(self, tokens: Any, *, scope: Scopes | None = None) -> Any:
        """Logits [B, T, V] in the dtype of the parameters, of the token after each; raises as `trunk`."""
        return self.head(self.trunk(tokens, scope=scope).rows)

    def losses(self, tokens: Any, *, scope: Scopes | None = None) -> Losses:
        """This rank's shares of the losses of predicting tokens [B, T + 1] each from those before it.

        There are T predictions a sequence, and T - 1 of the token after the next one.
        """
        seen = self.trunk(tokens[:, :-1], scope=scope)
        share = self.build.spread.share
        language = self._head_loss(seen.rows, self._here(tokens[:, 1:])) * share
        total = language + seen.loss
        if self.mtp is not None:
            total = total + self._mtp_loss(self.mtp, seen.stream, tokens)
        if self.size.trajectory_coefficient:
            total = total + self.size.trajectory_coefficient * trajectory_loss(seen.rows) * share
        return Losses(language, total)

    def choices(self) -> dict[str, Choice]:
        """Part, as in layers.3.up -> what its last call took, and why."""
        parts = {
            f"layers.{place}.{part}": choice
            for place, layer in enumerate(self.layers)
            for part, choice in layer.choices().items()
        }
        ahead = {} if self.mtp is None else {f"mtp.{part}": choice for part, choice in self.mtp.choices().items()}
        again = {f"layers.{place}.recompute": RECOMPUTED for place in sorted(self._recomputed)}
        return {**parts, **again, **ahead, **self._choices, "norm": self.norm.choice}

    def _groups(self, scope: Scopes | None) -> Iterator[tuple[list[int], AbstractContextManager[Any]]]:
        """Neighbouring layers of one precision, and the scope that they run in."""
        zones = self.size.zones
        if scope is None:
            yield list(range(len(self.layers))), nullcontext()
            return
        for _, group in groupby(range(len(self.layers)), zones.is_bf16):
            places = list(group)
            yield places, group_scope(places, zones, [scope.dense] * len(places))

    def _region(self, place: int, scope: Scopes | None) -> AbstractContextManager[Any]:
        """What a layer of experts runs in, inside the scope of its neighbours."""
        if self.size.letters[place] != "E":
            return nullcontext()
        if not self.build.forms.low_precision_experts:
            return high_precision("the form of this model keeps its experts out of low precision")
        if scope is None or scope.experts is None or self.size.zones.is_bf16(place):
            return nullcontext()
        return scope.experts()

    def _run_layer(self, place: int, step: Stepped) -> Stepped:
        """One layer behind another; layers that cannot add in their norm get the whole stream."""
        layer, rope, picked = self.layers[place], (self.cos, self.sin), step.picked
        if "added" not in self._takes[place]:
            step = replace(step, rows=step.whole(), added=None)
        taken = {name: getattr(step, name) for name in ("added", "picked") if name in self._takes[place]}
        kept = self.size.letters[place] in "EDS" or not torch.is_grad_enabled() or not self.training
        if kept or not self.build.forms.recompute:
            stepped = layer(step.rows, rope, **taken)
            return replace(stepped, picked=stepped.picked or picked)

        def run(rows: Any, *added: Any) -> tuple[Any, Any]:
            stepped = layer(rows, rope, *added)
            return stepped.rows, stepped.added

        given = (step.rows,) if step.added is None else (step.rows, step.added)
        rows, added = recompute(run, *given, use_reentrant=False)
        self._recomputed.add(place)
        return Stepped(rows, None, added, picked)

    def _run_streams(self, place: int, step: Stepped) -> Stepped:
        """One layer between the residual streams [B, T, n, hidden], each of which gets a share of the layer's step."""
        pre, post, residual = self.streams[place](step.rows)  # type: ignore[index]
        rows = read_streams(step.rows, pre)
        stepped = self._run_layer(place, replace(step, rows=rows))
        return replace(stepped, rows=write_streams(step.rows, stepped.whole() - rows, post, residual), added=None)

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
            summed = self._head_loss(normed, targets, reduction="sum")
        predictions = batch * max(length - 1, 1) * plan.data * plan.accumulate
        return self.size.mtp_coefficient * summed / predictions

    def _head_loss(self, rows: Any, targets: Any, *, reduction: str = "mean") -> Any:
        """Cross-entropy of targets [B, T] by the head, with or without its logits in memory, [] in fp32 at least."""
        given: dict[str, Any] = {"ignore_index": NO_TARGET, "reduction": reduction}
        if self.build.forms.liger:
            return linear_cross_entropy(rows.flatten(0, 1), self.head.weight, targets.flatten(), **given)
        logits = self.head(rows).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide, targets.flatten(), **given)

    def _here(self, tokens: Any) -> Any:
        """Of tokens [B, T] those at the positions of this rank."""
        here = self.build.spread.positions(tokens.shape[1])
        return tokens[:, here.start : here.stop]

    def _mark_split(self) -> None:
        """Under sequence parallelism say of all that works on single positions that this rank sees a part of them."""
        if self.build.spread.plan.tensor_parallel == 1:
            return
        experts = [layer for letter, layer in zip(self.size.letters, self.layers, strict=True) if letter == "E"]
        for part in (self.embedding, self.norm, self.head, self.mtp, *experts):
            mark_split(() if part is None else part.parameters())

    def _draw(self, name: str) -> Any:
        """A table [V, hidden], drawn as its layers' weights are."""
        size, build = self.size, self.build
        drawn = torch.randn(size.grammar.vocabulary, size.hidden, generator=generator_of(self.seed, "weights", name))
        return drawn.mul_(INIT_STD).to(build.device, build.dtype)


def part_of(parameter: str) -> str:
    """Which part of the model a parameter belongs to: "embedding", "layers.2", "norm", "mtp", "head"."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


# --- layers
#
# Layers with their first weights, which no backend has a part in: each starts from the weights of the native layer of
# its kind, drawn from the seed and the layer's name. Each expert is drawn for itself, by its number, so that a rank
# draws those that it holds and has the numbers of every plan.


_KINDS: Final[dict[str, Callable[..., Any]]] = {
    "M": MambaLayer, "E": ExpertLayer, "R": RecurrentLayer, "D": SampledLayer, "S": partial(SampledLayer, picks=False),
    "gqa": AttentionLayer, "mla": MlaLayer, "moba": RoutedLayer,
}  # fmt: skip


def layer_class(letter: Letter, size: Size) -> Callable[..., Any]:
    """What makes the layer of a letter in a size."""
    return _KINDS[size.attention if letter == "A" else letter]


def _build_at(place: int, size: Size, build: Build) -> Build:
    """The build of a layer: in the BF16 zones without DeepGEMM, which rounds to FP8 outside of every scope too."""
    if not size.zones.is_bf16(place):
        return build
    backends = tuple(name for name in build.forms.expert_backends if name != "deep_gemm") or ("native",)
    return replace(build, forms=replace(build.forms, expert_backends=backends))


def build_layer(letter: Letter, size: Size, build: Build, *, seed: int, name: str) -> Any:
    """A layer whose weights depend on the seed, its name and its kind, not on its backends or its place.

    Raises:
        BridgeError: what the bridge refuses to build.
    """
    with torch.random.fork_rng([build.device] if torch.device(build.device).type == "cuda" else []):
        if build.spread.plan.tensor_parallel > 1 and letter != "E":
            from .parallel.sharding import build_split_layer

            return build_split_layer(letter, size, build, _first_weights(letter, size, build, seed, name))
        layer = layer_class(letter, size)(size, build)
    if letter == "E":
        with drawn_from(seed, "weights", name):
            router, shared = build_router(size, "cpu"), build_shared(size, torch.float32, "cpu")
        layer.load_drawn(router, shared, (_draw_expert(size, seed, name, number) for number in layer.experts))
    else:
        layer.load_native_state_dict(_first_weights(letter, size, build, seed, name))
    return layer


def build_streams(size: Size, build: Build, *, seed: int) -> nn.ModuleList:
    """A connection of the residual streams for each layer, in fp32: every later layer reads what it rounds."""
    made = nn.ModuleList()
    for place in range(len(size.letters)):
        with drawn_from(seed, "weights", f"streams.{place}"):
            made.append(HyperConnection(size.hidden, size.streams, eps=size.eps, dtype=torch.float32))
    return made.to(build.device)


def _first_weights(letter: Letter, size: Size, build: Build, seed: int, name: str) -> dict[str, Any]:
    """Of a whole layer A, M or R: drawn natively, on the CPU and in fp32, then rounded once to the build's dtype."""
    with drawn_from(seed, "weights", name):
        drawn = layer_class(letter, size)(size, Build(PRESETS["off"], torch.float32, "cpu")).native_state_dict()
    return {part: value.to(build.device, build.dtype) for part, value in drawn.items()}


def _draw_expert(size: Size, seed: int, name: str, number: int) -> tuple[Any, Any]:
    """One expert of a layer in fp32 on the CPU: up [2F, hidden], the gate first, and down [hidden, F]."""
    drawn = generator_of(seed, "weights", name, "expert", number)
    up = torch.randn(2 * size.expert_width, size.hidden, generator=drawn).mul_(INIT_STD)
    return up, torch.randn(size.hidden, size.expert_width, generator=drawn).mul_(INIT_STD)


# --- mtp
#
# The head that predicts the token after the next one (multi-token prediction).
#
# Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, with one module: the representation of the trunk at position t,
# ahead of its last norm, and the embedding of token t + 1 are normed each, joined, projected to the width of the
# stream, and run through one layer, which here is the last of the trunk, before the trunk's own norm and head predict
# token t + 2.


NO_TARGET: Final = -100  # what `cross_entropy` leaves out


class MtpJoin(nn.Module):
    """What is this head's own: two norms and the projection. Layer, last norm and head are the trunk's.

    Args:
        size, build, seed: as `HybridModel` takes them.

    Attributes:
        hidden_norm, token_norm: of the stream, and of the embedding of the next token.
        projection: nn.Linear without bias, [hidden, 2 hidden]; the stream comes first.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        made = {"eps": size.eps, **build.bridged}
        self.hidden_norm, self.token_norm = build_norm(size.hidden, **made), build_norm(size.hidden, **made)
        drawn = torch.randn(size.hidden, 2 * size.hidden, generator=generator_of(seed, "weights", "mtp"))
        self.projection = nn.Linear(2 * size.hidden, size.hidden, bias=False, device="meta", dtype=build.dtype)
        self.projection.weight = nn.Parameter(drawn.mul_(INIT_STD).to(build.device, build.dtype))

    def forward(self, stream: Any, ahead: Any) -> Any:
        """Stream and embeddings of the next tokens, each [B, T, hidden] -> [B, T, hidden] for the shared layer."""
        return self.projection(torch.cat([self.hidden_norm(stream), self.token_norm(ahead)], dim=-1))

    def choices(self) -> dict[str, Choice]:
        """Part -> what the last call took."""
        return {"hidden_norm": self.hidden_norm.choice, "token_norm": self.token_norm.choice}


def targets_of(tokens: Any, here: range) -> tuple[Any, Any]:
    """Of tokens [B, T + 1]: those after each position, and those after these; int64 [B, positions here].

    The last position of a sequence has no token to predict, and gets `NO_TARGET`. Every rank reads whole sequences, so
    no other rank is needed.
    """
    positions = slice(here.start, here.stop)
    behind = functional.pad(tokens[:, 2:], (0, 1), value=NO_TARGET)
    return tokens[:, 1:][:, positions], behind[:, positions]


# --- trajectory
#
# The trajectory loss: hidden states of a sequence are to move along locally straight lines.
#
# Source: Huang, LeCun and Balestriero 2026, "Semantic Tube Prediction: Beating LLM Data Efficiency with JEPA",
# arXiv:2602.22617, section 3: the mean of 1 - cos(h_t - h_r, h_r - h_s) over positions s < r < t. There the positions
# are drawn at random; here they are equally spaced, so that two runs of one seed take the same ones, whatever else
# draws.


STRIDE: Final = 8  # positions from s to r and from r to t, of a sequence that is long enough


def trajectory_loss(rows: Any, *, stride: int = STRIDE) -> Any:
    """Mean of 1 - cos(h_r - h_s, h_t - h_r) over equally spaced s < r < t: 0 where all goes straight on, 2 where it
    turns back.

    A step that is no longer than the rounding of the states that it lies between has no direction: it counts 0, and has
    no gradient. The number of triples does not depend on the values, so shares of ranks add up to the whole mean.

    Under sequence parallelism a rank sees the positions that lie on it, and none of the triples that reach over to
    another rank: the loss is that of shorter sequences, not that of one rank.

    Args:
        rows: [B, T, hidden], any floating dtype.
        stride: positions of a step; as many as leave a triple where the sequence is too short for it.

    Returns:
        [], in fp32 at least.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    stride = min(stride, (rows.shape[1] - 1) // 2)
    points = rows[:, ::stride].to(wide)
    steps = points.diff(dim=1)
    lengths = steps.square().sum(-1)
    sizes = points.detach().square().sum(-1)
    moved = lengths > torch.finfo(rows.dtype).eps ** 2 * torch.maximum(sizes[:, 1:], sizes[:, :-1])
    # One where there is no direction: the branch that is not taken has a finite gradient too, which is then zeroed.
    inverse = torch.where(moved, lengths, 1).rsqrt()
    cosines = (steps[:, 1:] * steps[:, :-1]).sum(-1) * inverse[:, 1:] * inverse[:, :-1]
    return torch.where(moved[:, 1:] & moved[:, :-1], 1 - cosines, 0).mean()

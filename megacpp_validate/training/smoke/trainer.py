"""Trains the hybrid model on this rank of a plan, a step at a time, with an account of its time."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from ...bridge.amax_owner import SINGLE_OWNER, delayed_scaling_kept, pending_amax_kept
from ...bridge.fp8_scope import amax_shared_with, low_precision
from ...jit.monitor import mark
from ..language import Language
from ..layers import Build
from ..model import HybridModel, Scopes
from ..optimizer import MasterAdamW
from ..parallel.checkpoint import load_checkpoint, save_checkpoint
from ..parallel.checks import FiniteWatch, NotFinite
from ..parallel.goodput import Ledger
from ..parallel.ranks import Rank
from ..parallel.sharding import make_spread, shard_model
from .audit import Audit, split_experts
from .order import SmokeOrder

DTYPES: Final = {"fp64": torch.float64, "fp32": torch.float32}
NEVER_TRAINED_ON: Final = 1 << 40  # number of the first batch that is only evaluated
PROFILED: Final = 5  # steps that are done before one is profiled: kernels are compiled by then
WARM: Final = 3  # steps that compile and warm up


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: from 0.
        loss: cross-entropy of the language, nats a prediction, before the step's update.
        perfect: loss of a model that knows the language exactly, on the same batch.
        aux_loss: all other losses (routers, MTP, trajectory).
        grad_norm: L2, of all gradients, before clipping.
        seconds: wall time from reading its batch until its loss is known and its update is launched.
    """

    step: int
    loss: float
    perfect: float
    aux_loss: float
    grad_norm: float
    seconds: float


class SmokeTrainer:
    """One rank's part of a run.

    Args:
        order: of the run.
        rank: this one, which has joined the others.
        ledger: of its time.

    Attributes:
        model, language, optimizer: the parts of training.
        sharded: how the model is shared out.
        parameters: of the whole model.
        records: of the steps that this process has done; losses are the whole run's, the same on all ranks.
        validation: step -> loss of a batch that is never trained on, nats a prediction.
        audit: of each step, with `SmokeOrder.audit`.
        exposed: seconds of the profiled step in which a collective ran on the device and no other kernel; None without.
        waited: of each step, seconds inside collectives whose call waits.
        done: steps that are done, by runs before this one too.
        warm_at: the moment, of `jit.monitor.mark`, after which nothing should be compiled; None in the first steps.
    """

    def __init__(self, order: SmokeOrder, rank: Rank, ledger: Ledger) -> None:
        self.order, self.rank, self.ledger = order, rank, ledger
        self.size, self.plan = order.read_size(), order.read_plan()
        self.spread = make_spread(self.plan, order.device, audit=order.audit)
        build = Build(
            order.read_features(),
            DTYPES.get(order.precision, torch.bfloat16),
            rank.device,
            order.recipe,
            order.read_forms(),
            self.spread,
        )
        self.model = self.make_model(build)
        if build.dtype == torch.float64:
            self.model.to(build.dtype)  # routers, which are in fp32 elsewhere
        here = {name: one.numel() for name, one in self.model.named_parameters()}
        self.language = Language(self.size.grammar, seed=order.seed)
        self.sharded = shard_model(self.model)
        times = {
            **dict.fromkeys(self.sharded.in_parts, self.plan.tensor_parallel),
            **dict.fromkeys(self.sharded.experts, self.plan.expert_parallel),
        }
        self.parameters = sum(times.get(name, 1) * count for name, count in here.items())
        sums = self.sharded.sums if self.plan.world > 1 else None
        self.optimizer = MasterAdamW(self.model.named_parameters(), order.read_schedule(), sums=sums)
        self.scope = self._make_scopes()
        self.watch = FiniteWatch(self.model) if order.watch else None
        self.audit = Audit(self.model, self.sharded) if order.audit else None
        self.records: list[StepRecord] = []
        self.validation: dict[int, float] = {}
        self.exposed: float | None = None
        self.waited: list[float] = []
        self.done = 0
        self.warm_at: int | None = None
        self.read_as = rank.rank  # whose sequences this rank reads

    def make_model(self, build: Build) -> HybridModel:
        """The model of the run, with its first weights."""
        return HybridModel(self.size, build, seed=self.order.seed)

    @property
    def tokens(self) -> int:
        """Predictions of a step on all ranks."""
        return self.size.batch * self.size.length

    def run(self) -> None:
        """Steps up to the end of the order, with evaluations and checkpoints where it asks for them.

        Raises:
            NotFinite: a loss, gradient or watched value is NaN or infinite.
            TokensNotConserved, ReplicaDiverged: what an audit found.
            WrongCheckpoint, CheckpointNotSaved: as named.
        """
        order = self.order
        if order.resume:
            self.resume()
        if order.rehearse:
            self.rehearse()
        while self.done < order.steps:
            if order.validate_every and self.done % order.validate_every == 0:
                self.validate()
            if order.profile and order.device == "cuda" and len(self.records) == PROFILED:
                self.profile_step()
            else:
                self.step()
            saves = order.checkpoint_every and self.done % order.checkpoint_every == 0
            if saves or (order.checkpoint_folder and self.done == order.steps):
                self.save()
        if order.validate_every:
            self.validate()

    def rehearse(self) -> None:
        """Forward and backward once, on a batch that is never trained on, and let its gradients go: counted as compile.

        What the first step costs beyond others (compiles, libraries that make handles and workspaces, modules that CUDA
        loads at their first launch, memory that the allocator asks for) is then spent before step 0, but for the update
        of the weights. No weight, no moment, and in low precision no scale and no history moves.
        """
        with self.ledger.phase("compile"), delayed_scaling_kept(self.model):
            _, parts = self._read(NEVER_TRAINED_ON + 1)
            losses = self._passes(parts[:1], with_gradients=True)
            self.optimizer.take_gradients()
            self._sum_over_ranks(losses)
            self.optimizer.drop_gradients()

    def step(self) -> StepRecord:
        """Read a batch, move the weights once, and record it."""
        number = self.done
        self.rank.record.beat(number)
        with self.ledger.phase("data"):
            read, parts = self._read(number)
            perfect = float(self.language.surprise(read).mean())
        inside = self.rank.record.seconds_inside
        with self.ledger.step(self.tokens):
            losses = self._passes(parts, with_gradients=True)
            norm = self.optimizer.take_gradients(first=len(parts) == 1)
            loss, other = self._sum_over_ranks(losses).tolist()
            gradient = float(norm)
            fine = all(map(math.isfinite, (loss, other, gradient)))
            if self.watch is not None:
                fine = self.watch.is_finite(torch.tensor([loss, other, gradient]).sum()) and fine
            self.look(fine=fine)
            if fine:
                self.optimizer.update(number, norm)
        self.waited.append(self.rank.record.seconds_inside - inside)
        record = StepRecord(number, loss, perfect, other, gradient, self.ledger.steps[-1])
        self.records.append(record)
        if len(self.records) == WARM:
            self.warm_at = mark()
        if not fine:
            raise self._not_finite(record, parts)
        self.done += 1
        return record

    def look(self, *, fine: bool) -> None:
        """Look at a step, whose numbers are finite if `fine`, before the weights move."""
        if self.audit is not None and fine:
            self.audit.look(self.optimizer)

    def validate(self) -> float:
        """The loss of a batch that is never trained on; training goes on as if it had not been. Raises NotFinite."""
        with self.ledger.phase("evaluation"), torch.no_grad():
            _, parts = self._read(NEVER_TRAINED_ON)
            with pending_amax_kept(self.model) if self.order.recipe else nullcontext():
                losses = self._passes(parts, with_gradients=False)
            self.validation[self.done] = loss = float(self._sum_over_ranks(losses)[0])
        if not math.isfinite(loss):
            raise NotFinite(f"after {self.done} step(s): the loss of an evaluation is {loss}.", {})
        return loss

    def save(self) -> Path:
        """Write a checkpoint."""
        with self.ledger.phase("checkpoint"):
            folder, identity = Path(self.order.checkpoint_folder), identity_of(self.order)
            own = pack_extra_state(self.model) if self.order.recipe else b""
            return save_checkpoint(folder, self.state(), step=self.done, identity=identity, own=own)

    def resume(self) -> None:
        """Go on from the latest checkpoint. Raises WrongCheckpoint."""
        with self.ledger.phase("checkpoint"):
            folder, identity = Path(self.order.checkpoint_folder), identity_of(self.order)
            self.done, own = load_checkpoint(folder, self.state(), identity=identity)
            self.optimizer.set_step(self.done)
            self.optimizer.round_weights()
            if own and self.order.recipe:
                self.model.load_state_dict(torch.load(io.BytesIO(own)), strict=False)  # has no weights

    def state(self) -> dict[str, Any]:
        """The tensors of a checkpoint, under names that hold on every world."""
        named = self.optimizer.parameters()
        return {
            f"{part}/{key}": value
            for name, parts in self.optimizer.state_tensors().items()
            for part, tensor in parts.items()
            for key, value in self._name_state(name, tensor, named[name])
        }

    def _name_state(self, name: str, tensor: Any, parameter: Any) -> Iterator[tuple[str, Any]]:
        """What lies here of a tensor of the optimizer, under its names in a checkpoint: itself, a view or a DTensor.

        A parameter that FSDP2 shards is a DTensor; experts are named by their number in the layer, whatever rank or
        bank holds them; what a tensor group holds in parts is named by the part, and fits a group of that size alone.
        """
        spread = self.spread
        if name in self.sharded.experts:
            first = spread.experts(self.size.num_experts).start
            for layer, number, one in split_experts(name, first, tensor):
                yield f"{layer}.expert.{number}", one
            return
        if name in self.sharded.in_parts:
            name += f"@tensor{spread.plan.place(spread.rank).tensor}of{spread.plan.tensor_parallel}"
        if hasattr(parameter, "to_local"):
            from torch.distributed.tensor import DTensor

            mesh, placements = parameter.device_mesh, parameter.placements
            whole: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
            tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, **whole)
        yield name, tensor

    def profile_step(self) -> None:
        """Do one step under the profiler, which makes it slower."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.step()
            torch.cuda.synchronize()
        spans: dict[bool, list[Interval]] = {True: [], False: []}  # of collectives, and of all else
        for event in seen.events():
            # A region that the host names, such as FSDP2's, spans gaps and the kernels of both kinds.
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
        self.exposed = exposed_seconds(spans[True], spans[False])

    def _passes(self, parts: list[Any], *, with_gradients: bool) -> Any:
        """Forward, and backward where it is wanted, of each pass; [2] this rank's share of the losses."""
        total = torch.zeros(2, dtype=torch.float64, device=self.rank.device)
        for place, tokens in enumerate(parts):
            if self.audit is not None:
                self.audit.part = place
            losses = self.model.losses(tokens, scope=self.scope)
            if self.audit is not None:
                self.audit.check_tokens()
            if with_gradients:
                losses.total.backward()  # outside of the scope, as the bridge wants it
                if place < len(parts) - 1:
                    self.optimizer.add_gradients(first=place == 0)
            language = losses.language.detach().double()
            total += torch.stack([language, losses.total.detach().double() - language])
        return total

    def _sum_over_ranks(self, losses: Any) -> Any:
        if self.spread.token_group is not None:
            distributed.all_reduce(losses, group=self.spread.token_group)
        return losses

    def _read(self, number: int) -> tuple[Any, list[Any]]:
        """A whole batch [B, T + 1] on the CPU, and what this rank reads of it in each pass, on its device."""
        read, parts = self.language.batch(number, self.size.batch, self.size.length + 1), []
        for part in range(self.plan.accumulate):
            places = self.plan.sequences(self.read_as, self.size.batch, part=part)
            parts.append(read[places.start : places.stop].to(self.rank.device, non_blocking=True))
        return read, parts

    def _not_finite(self, record: StepRecord, parts: list[Any]) -> NotFinite:
        watch = self.watch or FiniteWatch(self.model)  # all ranks are here: their sum is not finite
        found = watch.find(lambda: self._passes(parts, with_gradients=True))
        self.optimizer.drop_gradients()
        where: dict[str, Any] = {"step": record.step}
        words = "all was finite when the step was run again"
        if found is not None:
            _, rank, module, tensor = found
            where |= {"ranks": [rank], "module": module, "tensor": tensor}
            words = f"the first such value is the {tensor} of {module or 'the model itself'} on rank {rank}"
        return NotFinite(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}: {words}. Likely cause: a layer "
            "that overflowed, a kernel that read memory of others, or a learning rate too high. Next step: run this "
            "step on that rank alone; the weights are those from before it.",
            where,
        )

    def _make_scopes(self) -> Scopes | None:
        """Low precision of dense layers and of experts: their amax is shared by those that hold the same of them."""
        order = self.order
        if order.recipe is None:
            return None
        low = partial(low_precision, target=order.target, recipe=order.recipe, features=order.read_features())
        world = distributed.group.WORLD if self.plan.world > 1 else SINGLE_OWNER
        dense = partial(low, amax_reduction_group=world)
        if self.plan.expert_parallel == 1:
            return Scopes(dense)
        same = SINGLE_OWNER if self.spread.same_experts is None else self.spread.same_experts
        return Scopes(dense, partial(amax_shared_with, same))


# --- waits
#
# How long a step waits for other ranks: the time in which collectives run on the device and nothing else does.
#
# On the CPU it is the time inside collectives whose call waits, of which the record of a rank keeps the sum; those that
# are waited for later (FSDP2's, the sums of gradients) count as step. On a GPU a step is profiled: the union of the
# kernels of NCCL less the union of all other kernels.


Interval = tuple[float, float]


def exposed_seconds(collectives: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Seconds in which a collective ran and no other kernel, from intervals (begin, end) in microseconds."""
    others = list(others)
    return (_covered([*collectives, *others]) - _covered(others)) / 1e6


def _covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# --- state
#
# Scales and amax histories of low precision are of one rank and its build: they are taken up again on the same world,
# and made anew on another.


def identity_of(order: SmokeOrder) -> dict[str, Any]:
    """The identity of the model of a run: its size, seed and dtype; not how it is distributed."""
    dtype = order.precision if order.precision in DTYPES else "bf16"
    size = {name: value for name, value in asdict(order.read_size()).items() if name != "batch"}
    return {**size, "seed": order.seed, "dtype": dtype}


def pack_extra_state(model: HybridModel) -> bytes:
    """Scales and histories that layers of Transformer Engine keep."""
    found = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    packed = io.BytesIO()
    torch.save({name: one.detach().cpu() for name, one in found.items() if isinstance(one, torch.Tensor)}, packed)
    return packed.getvalue()

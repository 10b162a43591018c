"""What the processes of a run ask of each other: its ranks, 0 to size - 1.

All ranks hold the same weights, or a share of them each (`sharding`), make the same decisions, and
divide what takes long:

    share        which part of a list is this rank's: requests, episodes of an update, rows
    draw         the next numbers that no rank has, in place of a share
    gather       what every rank has, on all of them, in the order of the ranks
    add_up       tensors, number by number: each rank has filled in its share, the rest is 0
    add_gradients  the same for gradients, before they are clipped
    most         the largest of all ranks' numbers, where all have to make as many passes
    from_first   what the first rank alone reads or writes: files, the value store

All but the first two are meetings: every rank has to come to each, in the same order. One that
does not come within the timeout, or comes to another meeting, ends the others with a RanksError
that says who was where. A run of one process has no meetings: each call returns what it was given.
Nothing travels as a pickle (torch's own `all_gather_object` and its like send nothing else): a rank
runs no code that it receives.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from ragen_apo.distributed.torchrun import Worker
from ragen_apo.errors import RagenApoError, RanksError

T = TypeVar("T")

BUCKET_NUMBERS = 1 << 24
"""Gradients travel in pieces of about this many numbers: few messages, little memory."""
_SEPARATOR = " | "
_SECONDS_FOR_NOTES = 10.0
"""How long the store that has the others' notes is waited for: it can be on a lost host."""
_JSON: TypeAdapter[Any] = TypeAdapter(Any)


@dataclass
class _Log:
    """What a rank has done so far with the others."""

    phase: str = "start"
    num_meetings: int = 0
    waiting_seconds: float = 0.0
    communication_seconds: float = 0.0


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the run's work."""

    worker: Worker = field(default_factory=Worker)
    store: Store | None = None
    """Where every rank notes where it is; None for one process."""
    timeout_seconds: float = 0.0
    """How long the store may take to answer."""
    sharded: bool = False
    """Whether each rank holds a share of the weights only, so that passes are made together."""
    _log: _Log = field(default_factory=_Log, repr=False, compare=False)

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def size(self) -> int:
        return self.worker.size

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files and speaks to people."""
        return self.rank == 0

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint needs this rank: the first one writes, and shares are gathered."""
        return self.is_first or self.sharded

    @property
    def share(self) -> slice:
        """This rank's part of any list that all ranks have: every `size`-th item."""
        return slice(self.rank, None, self.size)

    def enter(self, phase: str) -> None:
        """Notes in which phase of the run this rank is, for the message about a failure."""
        self._log.phase = phase

    def draw(self, most: int, what: str) -> range:
        """The next `most` whole numbers that no rank has drawn since the last meeting, from 0 on.

        They are counted in the store, which a rank asks when it wants: nobody waits for another.
        Raises RanksError where the store does not answer within `timeout_seconds`.
        """
        store, log = self.store, self._log
        assert store is not None, "several ranks have one"
        came = time.perf_counter()
        key = f"drawn/{log.num_meetings}"
        end = answer_within(self.timeout_seconds, lambda: store.add(key, most))
        if end is None:
            silence = RuntimeError("the store of torchrun does not answer")
            raise RanksError(self._account(f"{log.phase}: {what}", silence))
        log.communication_seconds += time.perf_counter() - came
        return range(end - most, end)

    def gather(self, part: bytes, what: str) -> list[bytes]:
        """The bytes of all ranks, in their order."""
        if self.size == 1:
            return [part]
        with self._meeting(what):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(part)]))
            longest = max(int(length) for length in lengths)
            if longest == 0:
                return [b""] * self.size
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(received, _padded(part, longest))
            return [
                bytes(each[: int(length)].numpy())
                for each, length in zip(received, lengths, strict=True)
            ]

    def add_up(self, tensor: Tensor, what: str) -> None:
        """Replaces the tensor by the sum over all ranks, the same bits on each."""
        if self.size > 1:
            with self._meeting(what):
                dist.all_reduce(tensor)

    def total(self, *numbers: float, what: str) -> tuple[float, ...]:
        """Each number's sum over all ranks."""
        if self.size == 1:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.float64)
        self.add_up(totals, what)
        return tuple(totals.tolist())

    def most(self, number: int, what: str) -> int:
        """The largest of all ranks' numbers, where they make passes together; else one's own."""
        if self.size == 1 or not self.sharded:
            return number
        largest = torch.tensor(number)
        with self._meeting(what):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def add_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Replaces every gradient by its sum over all ranks. Those of shares are sums already.

        A rank without a share of the update takes part with zeros. A parameter that no rank has a
        gradient for keeps none, so that the optimizer leaves it alone.
        """
        if self.size == 1 or self.sharded:
            return
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        with self._meeting("gradients"):
            has_gradient = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
            dist.all_reduce(has_gradient)
            reached = [p for p, num in zip(trained, has_gradient.tolist(), strict=True) if num > 0]
            for parameter in reached:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            for bucket in _buckets([p.grad for p in reached if p.grad is not None]):
                joined = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(joined)
                parts = joined.split([gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

    def from_first(self, make: Callable[[], T], what: str, kind: TypeAdapter[T] = _JSON) -> T:
        """What the first rank makes, on all of them; the others wait.

        JSON values, or records of a `kind`. Where it raises there, the others raise RanksError with
        the same message.
        """
        if self.size == 1:
            return make()
        error: Exception | None = None
        answer = b""
        if self.is_first:
            try:
                answer = json.dumps({"made": make()}, default=asdict).encode()
            except Exception as problem:  # noqa: BLE001 - raised again below, after the others know
                error = problem
                known = isinstance(problem, RagenApoError | OSError)
                said = str(problem) if known else f"rank 0, {what}: {problem!r}"
                answer = json.dumps({"failed": said}).encode()
        with self._meeting(what):
            length = torch.tensor([len(answer)])
            dist.broadcast(length, src=0)
            sent = _padded(answer, int(length))
            dist.broadcast(sent, src=0)
        if error is not None:
            raise error
        received = json.loads(bytes(sent.numpy()))
        if "failed" in received:
            raise RanksError(received["failed"])
        return kind.validate_python(received["made"])

    def require_equal_weights(self, modules: Sequence[nn.Module]) -> None:
        """Raises RanksError where ranks have trained to different weights.

        They never should: each makes the same update. A faulty GPU or two kinds of processors would
        show here, before a checkpoint keeps only what the first rank has. Shares have no second
        copy to be compared with.
        """
        if not self.sharded:
            self._compare_weights(
                modules,
                "other weights than rank 0 after the same updates. Expected equal bits: use one "
                "kind of processor and one version of torch on all hosts, and continue with "
                "--resume from the last checkpoint",
            )

    def require_equal_model(self, module: nn.Module) -> None:
        """Raises RanksError where ranks have loaded different weights."""
        self._compare_weights(
            [module],
            "loaded another model than rank 0. Expected equal weights: give all hosts the same "
            "files under policy.path, or a hub name with policy.revision",
        )

    def _compare_weights(self, modules: Sequence[nn.Module], complaint: str) -> None:
        """`complaint` goes on after which ranks have."""
        if self.size == 1:
            return
        sums = [_checksum(p) for module in modules for p in module.parameters()]
        found = self.gather(json.dumps(sums).encode(), "comparing weights")
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise RanksError(
                f"{listed(others)} of {self.size} {'has' if len(others) == 1 else 'have'} "
                f"{complaint}"
            )

    @property
    def seconds(self) -> tuple[float, float]:
        """How long this rank has waited for others so far, and communicated with them."""
        return self._log.waiting_seconds, self._log.communication_seconds

    def mean_seconds(self, *, since: tuple[float, float]) -> dict[str, float]:
        """Means over the ranks of what `seconds` has grown by since; nothing for one process.

        `waiting` is for ranks that came later to a meeting, `communication` the meeting itself.
        """
        if self.size == 1:
            return {}
        spent = (now - then for now, then in zip(self.seconds, since, strict=True))
        waiting, communication = self.total(*spent, what="seconds")
        return {
            "num_ranks": self.size,
            "waiting_seconds": waiting / self.size,
            "communication_seconds": communication / self.size,
        }

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Inside, a pass over shared weights that others do not take part in is a RanksError."""
        try:
            yield
        except RuntimeError as error:
            is_of_torch = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not self.sharded or not is_of_torch:
                raise
            subject = f"{self._log.phase}: weights in shares"
            raise RanksError(self._account(subject, error)) from error

    @contextlib.contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        """All ranks come to the same point; then they exchange what is inside."""
        store, log = self.store, self._log
        assert store is not None, "several ranks have one"
        log.num_meetings += 1
        subject = f"{log.phase}: {what}"
        came = time.perf_counter()
        try:
            store.set(f"at/{self.rank}", f"{log.num_meetings}{_SEPARATOR}{subject}")
            self._require_same_subject(subject)
            met = time.perf_counter()
            yield
        except RanksError:
            raise
        except RuntimeError as error:  # gloo and nccl have no other types
            raise RanksError(self._account(subject, error)) from error
        log.waiting_seconds += met - came
        log.communication_seconds += time.perf_counter() - met

    def _require_same_subject(self, subject: str) -> None:
        """Waits for all; RanksError where one has come for something else."""
        mine = torch.tensor([self._log.num_meetings, zlib.crc32(subject.encode())])
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine)
        if any(not torch.equal(each, mine) for each in all_of_them):
            raise RanksError(
                f"rank {self.rank} of {self.size} is at {subject!r}, and not all others are: "
                f"{self._whereabouts()}. Expected every rank to make the same decisions; see to it "
                "that all hosts have the same files, and continue with --resume"
            )

    def _account(self, subject: str, error: RuntimeError) -> str:
        """Who was missing, from what every rank has noted."""
        reason = " ".join(str(error).split())[:200]
        return (
            f"rank {self.rank} of {self.size} is without the others at {subject!r} ({reason}): "
            f"{self._whereabouts()}. One of them has ended, hangs or cannot be reached, or needed "
            "longer than machine.rank_timeout_seconds. What was saved is whole: see to it and "
            "continue with --resume"
        )

    def _notes(self) -> dict[int, str]:
        """What the others have noted last."""
        assert self.store is not None
        keys = {rank: f"at/{rank}" for rank in range(self.size) if rank != self.rank}
        return {
            rank: self.store.get(key).decode() if self.store.check([key]) else "0 | the start"
            for rank, key in keys.items()
        }

    def _whereabouts(self) -> str:
        """Where the others were last, those that are behind this one first."""
        noted = answer_within(_SECONDS_FOR_NOTES, self._notes)
        if noted is None:
            return "the store of torchrun does not answer either"
        found: list[tuple[int, str]] = []
        for rank, note in noted.items():
            number, _, where = note.partition(_SEPARATOR)
            found.append((int(number), f"rank {rank} was last at {where!r}"))
        behind = [entry for entry in found if entry[0] < self._log.num_meetings]
        return "; ".join(text for _, text in sorted(behind or found)[:4])


ALONE = Ranks()
"""A run of one process."""


def answer_within(seconds: float, question: Callable[[], T]) -> T | None:
    """What `question` returns; None where it takes longer, or fails as a store does.

    torch's store has no time limit for most questions. This one goes on in a thread that does not
    keep the process from ending.
    """
    answers: list[T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, RanksError):
            answers.append(question())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def _padded(part: bytes, length: int) -> Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    if part:
        padded[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return padded


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one format, in their order, until there are `BUCKET_NUMBERS` numbers."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(each.numel() for each in bucket)
        if bucket and (size + tensor.numel() > BUCKET_NUMBERS or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _checksum(weights: Tensor) -> int:
    """A sum of the bits of all numbers."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(weights.detach().contiguous().view(kinds[weights.element_size()]).sum())


def listed(ranks: Sequence[int]) -> str:
    """These ranks, in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

"""Ranks in lockstep inside one process: a thread for each, of which exactly one runs, until it has to wait for another rank.

The order in which they run is always the same. Collectives that do not fit together, and ranks that wait for ever, are found at once,
with no need of a timeout.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.checking.collectives import Record, Records, describe, first_mismatch
from autoshard.checking.processes import Status


class Cancelled(BaseException):
    """Ends a rank because the run is over: another one failed, or they do not fit together."""


class Lockstep:
    """Runs one function per rank.

    logs: the collectives that each rank started. statuses: what each rank is doing. mismatch: why ranks did not fit together, in words.
    failed: the rank that raised, and what; the others were ended then.
    """

    def __init__(self, ranks: int):
        self.logs = [Records() for _ in range(ranks)]
        self.statuses = [Status(None) for _ in range(ranks)]
        self.meetings: dict[tuple[int, ...], Meetings] = defaultdict(Meetings)
        self.mismatch: str | None = None
        self.failed: tuple[int, BaseException] | None = None
        self._over = False
        self._alive = set(range(ranks))
        self._waiting: dict[int, tuple[Callable[[], bool], Record]] = {}
        self._turns = [_closed() for _ in range(ranks)]
        self._done = _closed()

    def run(self, bodies: Sequence[Callable[[], Any]], timeout: float) -> list[Any] | None:
        """What each body returned; None if there was a mismatch, a failure, or no time left (then neither is set).

        Every rank starts with the random state of the caller, whose own is lost.
        """
        results: list[Any] = [None] * len(bodies)
        start = torch.get_rng_state()
        for rank, body in enumerate(bodies):
            # daemons: a rank that never comes back must not keep the process from ending
            threading.Thread(target=self._rank, args=(rank, body, results, start), name=f"rank {rank}", daemon=True).start()
        self._turns[0].release()
        if not self._done.acquire(timeout=timeout):
            self._over = True
            return None
        if not self._over:
            self.mismatch = first_mismatch(self.logs)
        return None if self._over or self.mismatch else results

    def _rank(self, rank: int, body: Callable[[], Any], results: list[Any], start: torch.Tensor) -> None:
        self._turns[rank].acquire()
        try:
            if not self._over:
                torch.set_num_threads(1)  # of this thread: OpenMP keeps the number by thread
                torch.set_rng_state(start)
                results[rank] = body()
        except Cancelled:
            pass
        except BaseException as error:
            if not self._over:
                self.failed, self._over = (rank, error), True
        finally:
            self.logs[rank].end()
            self._alive.discard(rank)
            self._hand_over(rank)

    def wait(self, rank: int, ready: Callable[[], bool], record: Record) -> None:
        """Let others run until ``ready()``; ``record`` is what the rank waits in."""
        if self._over:
            raise Cancelled
        if ready():
            return
        self._waiting[rank] = ready, record
        state = torch.get_rng_state()  # one process, one generator: a rank's own numbers must go on where they were
        self._hand_over(rank)
        self._turns[rank].acquire()
        torch.set_rng_state(state)
        del self._waiting[rank]
        if self._over:
            raise Cancelled

    def stop(self, mismatch: str) -> None:
        """The run is over; raises ``Cancelled`` in this rank, and at their next step in all others."""
        self.mismatch, self._over = first_mismatch(self.logs) or mismatch, True
        raise Cancelled

    def _hand_over(self, rank: int) -> None:
        """Let the next rank run that can."""
        if not self._alive:
            self._done.release()
            return
        n = len(self._turns)
        for other in ((rank + step) % n for step in range(1, n + 1)):
            if other in self._alive and (self._over or other not in self._waiting or self._waiting[other][0]()):
                self._turns[other].release()
                return
        where = "; ".join(f"rank {r} in {record.what} of group {record.group[0]} in {record.stage}" for r, record in self._stuck())
        self.mismatch, self._over = first_mismatch(self.logs) or f"all that still run wait for each other: {where}", True
        self._turns[min(self._alive)].release()

    def _stuck(self):
        return [(rank, self._waiting[rank][1]) for rank in sorted(self._alive)]


def _closed() -> threading.Lock:
    """A lock to wait at until another thread releases it; half the price of a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Meetings:
    """What the members of a group have in common."""

    def __init__(self):
        self.open: dict[int, dict[int, tuple[Record, tuple]]] = defaultdict(dict)  # collective number -> member -> (record, its tensors)
        self.mail: dict[tuple[int, int], deque[tuple[Record, torch.Tensor]]] = defaultdict(deque)  # (from, to) -> messages


class Work:
    """A collective that was started."""

    def __init__(self, group: LocalGroup, ready: Callable[[], bool], record: Record):
        self._group, self._ready, self._record = group, ready, record

    def wait(self, timeout: Any = None) -> bool:
        self._group.lockstep.wait(self._group.me, self._ready, self._record)
        return True

    def is_completed(self) -> bool:
        return self._ready()


class LocalGroup(dist.ProcessGroup):
    """One member's view of a process group whose members are ranks of a ``Lockstep``; ``torch.distributed``'s functions run on it.

    ``ranks`` are the members; ``me`` is one of them.
    """

    def __init__(self, lockstep: Lockstep, ranks: tuple[int, ...], me: int):
        super().__init__(ranks.index(me), len(ranks))
        self.lockstep, self.ranks, self.me = lockstep, ranks, me
        self._meetings = lockstep.meetings[ranks]
        self._started = 0

    def allreduce(self, tensors, opts):
        def act(parts):
            total = _reduce([part[0] for part in parts], opts.reduceOp)
            for part in parts:
                part[0].copy_(total)

        return self._meet("allreduce", (tensors[0],), tensors, act, _name(opts.reduceOp))

    def broadcast(self, tensors, opts):
        def act(parts):
            for part in parts:
                part[0].copy_(parts[opts.rootRank][0])

        return self._meet("broadcast", (tensors[0],), tensors, act, f"from {opts.rootRank}")

    def all_gather_single(self, output, tensor, opts):
        def act(parts):
            whole = torch.cat([t.reshape(-1) for _, t in parts])
            for out, _ in parts:
                out.copy_(whole.view(out.shape))

        return self._meet("all_gather", (output, tensor), (tensor,), act)

    def allgather(self, outputs, tensors, opts):
        def act(parts):
            for outs, _ in parts:
                for out, (_, t) in zip(outs, parts):
                    out.copy_(t)

        return self._meet("all_gather", (outputs[0], tensors[0]), tensors, act)

    def reduce_scatter_single(self, output, tensor, opts):
        def act(parts):
            total = _reduce([t for _, t in parts], opts.reduceOp)
            for (out, _), piece in zip(parts, total.chunk(self.size())):
                out.copy_(piece)

        return self._meet("reduce_scatter", (output, tensor), (tensor,), act, _name(opts.reduceOp))

    def all_to_all_single(self, output, tensor, received, sent, opts):
        def act(parts):
            sends = [t.split(list(splits)) for _, t, splits in parts]
            for member, (out, _, _) in enumerate(parts):
                torch.cat([pieces[member] for pieces in sends], out=out)

        return self._meet("all_to_all", (output, tensor, sent), (), act, str(tensor.dtype), (tuple(received), tuple(sent)))

    def send(self, tensors, to: int, tag: int = 0) -> Work:
        """Message to member ``to``; does not wait for it to be received."""
        record = self._record("send", describe(tensors[0]), peer=self.ranks[to])
        self._meetings.mail[self.rank(), to].append((record, tensors[0].detach().clone()))
        return Work(self, lambda: True, record)

    def recv(self, tensors, source: int, tag: int = 0) -> Work:
        """The next message of member ``source``; its shape and dtype must be those of the tensor. Waits for it."""
        record = self._record("recv", describe(tensors[0]), peer=self.ranks[source])
        mail = self._meetings.mail[source, self.rank()]
        self.lockstep.wait(self.me, lambda: bool(mail), record)
        sent, message = mail.popleft()
        if sent.what != record.what:
            self.lockstep.stop(f"rank {self.ranks[source]} sends {sent.what}, rank {self.me} expects {record.what}")
        with torch.no_grad():
            tensors[0].copy_(message)
        return Work(self, lambda: True, record)

    def _record(self, op: str, what: str, peer: int = -1, splits: tuple = ()) -> Record:
        record = Record((self.ranks, "local"), op, what, self.lockstep.statuses[self.me].stage, peer, splits)
        self.lockstep.logs[self.me].records.append(record)
        return record

    def _meet(
        self, op: str, mine: tuple, described: Sequence, act: Callable[[list[tuple]], None], how: str = "", splits: tuple = ()
    ) -> Work:
        """Start a collective. The member that comes last runs ``act`` on what all of them brought (``mine``, in their order)."""
        record = self._record(op, " ".join(filter(None, [op, how, *map(describe, described)])), splits=splits)
        number, self._started = self._started, self._started + 1
        here = self._meetings.open[number]
        for other, (there, _) in here.items():
            if not _fit(record, there, self.rank(), other):
                self.lockstep.stop(f"rank {self.me} runs {record.what}, rank {self.ranks[other]} runs {there.what}")
        here[self.rank()] = record, mine
        if len(here) == self.size():
            with torch.no_grad():
                act([here[member][1] for member in range(self.size())])
            del self._meetings.open[number]
        return Work(self, lambda: number not in self._meetings.open, record)


def _fit(mine: Record, other: Record, me: int, there: int) -> bool:
    if mine.what != other.what or not mine.splits:
        return mine.what == other.what
    return mine.splits[0][there] == other.splits[1][me] and mine.splits[1][there] == other.splits[0][me]


def _name(op: dist.ReduceOp) -> str:
    return "max" if op == dist.ReduceOp.MAX else "sum"


def _reduce(parts: list[torch.Tensor], op) -> torch.Tensor:
    """The parts added up in the order of ranks, or their maximum."""
    total = parts[0].clone()
    for part in parts[1:]:
        if op == dist.ReduceOp.MAX:
            torch.maximum(total, part, out=total)
        else:
            total += part
    return total

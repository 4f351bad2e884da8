"""A log of every collective that a rank starts, and the check that ranks agree on it.

A record is written before the collective runs, so the logs also tell what ranks wait for when they don't meet.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from autoshard.torch_private import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NO_MESSAGE = ("wait_tensor", "_wrap_tensor_autograd")
_UNLIKE = ("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single")  # ops whose tensors may differ from rank to rank


@dataclass(frozen=True)
class Record:
    """One collective, or one end of a message.

    group: the ranks of the group, and its name. peer: the other rank of a message (-1: none). what: op, arguments and tensors as text.
    splits: for an all-to-all, sizes received from and sent to each member. stage: what the rank was doing.
    """

    group: tuple
    op: str
    what: str
    stage: str
    peer: int = -1
    splits: tuple = ()


class Recorder(TorchDispatchMode):
    """While active, appends every collective of this process to a file. ``stage()`` says what the rank is doing."""

    def __init__(self, path: Path, stage):
        super().__init__()
        self._file = open(path, "w", buffering=1)
        self._stage = stage
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NAMESPACES and func._opname not in _NO_MESSAGE:
            self.count += 1
            self._file.write(json.dumps(asdict(_record(func._opname.rstrip("_"), args, self._stage()))) + "\n")
        return func(*args, **(kwargs or {}))

    def end(self) -> None:
        """The rank starts no more collectives."""
        self._file.write("end\n")


def _record(op: str, args: tuple, stage: str) -> Record:
    group = _group(args)
    ranks = dist.get_process_group_ranks(group)
    tensors = [t for a in args for t in _tensors(a)]
    plain = [a for a in args if type(a) in (int, str) and a != group.group_name]
    if op in ("send", "recv"):  # (tensors, group, peer's place in the group, tag)
        return Record((tuple(ranks), group.group_name), op, " ".join(map(describe, tensors)), stage, ranks[plain[0]])
    lists = tuple(tuple(a) for a in args if isinstance(a, (list, tuple)) and a and all(type(n) is int for n in a))
    shapes = [str(tensors[0].dtype)] if op in _UNLIKE and tensors else list(map(describe, tensors))
    what = " ".join([op, *map(str, plain), *shapes])
    return Record((tuple(ranks), group.group_name), op, what, stage, splits=lists if len(lists) == 2 else ())


def _group(args: tuple) -> dist.ProcessGroup:
    for a in args:
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
            return dist.ProcessGroup.unbox(a)
    return _resolve_process_group(next(a for a in reversed(args) if isinstance(a, str)))


def _tensors(a) -> Iterable[torch.Tensor]:
    if isinstance(a, torch.Tensor):
        yield a
    elif isinstance(a, (list, tuple)):
        for part in a:
            yield from _tensors(part)


def describe(t: torch.Tensor) -> str:
    """dtype and shape, in a word."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


@dataclass
class Records:
    """What a rank has logged so far."""

    records: list[Record] = field(default_factory=list)
    ended: bool = False

    @property
    def count(self) -> int:
        return len(self.records)

    def end(self) -> None:
        """The rank starts no more collectives."""
        self.ended = True


class Log(Records):
    """What a rank of another process has logged to a file so far."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self._read = path, 0

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        if not self.path.exists():
            return False
        with open(self.path, "rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        for line in new.decode().splitlines():
            if line == "end":
                self.ended = True
            else:
                data = json.loads(line)
                ranks, name = data["group"]
                self.records.append(Record(**{**data, "group": (tuple(ranks), name), "splits": tuple(map(tuple, data["splits"]))}))
        return bool(new)


def first_mismatch(logs: list[Records]) -> str | None:
    """The first place where ranks' collectives do not match, in words; None if all that is logged fits together.

    Logs may still be growing: a rank that is behind is no mismatch until it has ended.
    """
    groups: dict[tuple, dict[int, list[Record]]] = defaultdict(dict)
    sent: dict[tuple[int, int], list[Record]] = defaultdict(list)
    received: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for rank, log in enumerate(logs):
        for record in log.records:
            if record.op == "send":
                sent[rank, record.peer].append(record)
            elif record.op.startswith("recv"):
                received[record.peer, rank].append(record)
            else:
                groups[record.group].setdefault(rank, []).append(record)
    for group, by_rank in groups.items():
        for rank in group[0][1:]:
            text = _compare(group[0][0], rank, by_rank, group[0], logs)
            if text:
                return text
    for pair in sent.keys() | received.keys():
        text = _compare_messages(pair, sent[pair], received[pair], logs)
        if text:
            return text
    return None


def _compare(one: int, other: int, by_rank: dict[int, list[Record]], ranks: tuple, logs: list[Records]) -> str | None:
    a, b = by_rank.get(one, []), by_rank.get(other, [])
    for i, (x, y) in enumerate(zip(a, b)):
        fits = x.what == y.what
        if fits and x.splits and y.splits:  # each: (received from member, sent to member)
            here, there = ranks.index(one), ranks.index(other)
            fits = x.splits[0][there] == y.splits[1][here] and x.splits[1][there] == y.splits[0][here]
        if not fits:
            splits = f" {x.splits} against {y.splits}" if x.what == y.what else ""
            here, there = f"rank {one} runs {x.what} in {x.stage}", f"rank {other} runs {y.what} in {y.stage}"
            return f"collective {i + 1} of group {ranks}: {here}, {there}{splits}"
    return _missing(one, a, other, b, f"group {ranks}", logs)


def _compare_messages(pair: tuple[int, int], sent: list[Record], received: list[Record], logs: list[Records]) -> str | None:
    source, target = pair
    for i, (x, y) in enumerate(zip(sent, received)):
        if x.what != y.what:
            return f"message {i + 1} from rank {source} to rank {target}: sent {x.what} in {x.stage}, expected {y.what} in {y.stage}"
    return _missing(source, sent, target, received, f"messages from rank {source} to rank {target}", logs)


def _missing(one: int, a: list[Record], other: int, b: list[Record], where: str, logs: list[Records]) -> str | None:
    for more, rank_more, less, rank_less in ((a, one, b, other), (b, other, a, one)):
        if len(more) > len(less) and logs[rank_less].ended:
            extra = more[len(less)]
            what = extra.what if extra.peer < 0 else f"{extra.op} {extra.what}"
            return f"{where}: rank {rank_more} runs {what} in {extra.stage}; rank {rank_less} ended after {len(less)} and never does"
    return None

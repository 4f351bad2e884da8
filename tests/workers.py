"""Runs test functions on several local gloo processes.

Starting processes is slow, so a test calls ``run_on`` once with a function that checks many cases.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A new process is forked from a clean one that has imported torch but started no threads: as isolated as "spawn", without its 3 s.
mp.set_forkserver_preload(["torch", "torch.distributed"])


class WorkerError(AssertionError):
    """A rank failed; ``rank`` is the first that did, and the text holds its traceback."""

    def __init__(self, rank: int, text: str):
        self.rank = rank
        super().__init__(f"rank {rank}: {text}")


def run_on(n: int, fn, *args, timeout: float = 60.0) -> list:
    """Calls ``fn(rank, *args)`` on ranks 0..n-1, in n processes joined in a gloo group; returns the n results in order.

    ``fn`` must be a function of a module (it is pickled by name), its arguments and results picklable.

    Raises:
        WorkerError: a rank raised (the first in time is reported), died, or ran longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_worker, (n, folder, timeout, fn, args), nprocs=n, join=False, start_method="forkserver")
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=1.0):
                if time.monotonic() >= deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise WorkerError(alive[0] if alive else 0, f"ranks {alive} were still running after {timeout:g} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failures = [torch.load(os.path.join(folder, name)) for name in os.listdir(folder) if name.startswith("error")]
            if not failures:
                raise WorkerError(error.error_index, str(error)) from None
            _, rank, text = min(failures)
            raise WorkerError(rank, text) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [torch.load(os.path.join(folder, f"result{rank}"), weights_only=False) for rank in range(n)]


def _worker(rank: int, n: int, folder: str, timeout: float, fn, args):
    torch.set_num_threads(1)
    try:
        limit = datetime.timedelta(seconds=0.8 * timeout)  # so that a rank that waits in vain says where
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=limit)
        torch.save(fn(rank, *args), os.path.join(folder, f"result{rank}"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        torch.save((time.time(), rank, traceback.format_exc()), os.path.join(folder, f"error{rank}"))
        raise

"""Law of the simulated GPUs: a kernel that writes outside of its contract is a report, in torch's memory as in any
other. A write by torch itself is not one while a thread other than the host's makes kernels run.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
import torch
from harness import RanksFailed
from models import Mlp
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
KERNEL = b"sw_put"  # one a backward: what was used
_kept: list[Any] = []  # the simulation calls them as long as it lasts
Reference = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class KernelReference(ctypes.Structure):
    """A ctypes form of sw_kernel_reference."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("args_bytes", ctypes.c_size_t),
        ("accesses", ctypes.c_void_p),
        ("reference", ctypes.c_void_p),
    )


def write_beside(gpus: SimulatedGpus, victims: list[torch.Tensor]) -> set[int]:
    """Change a byte of each of `victims` whenever the kernel runs. Return the set to which each thread that runs it is
    added.

    Call this before wrapping, which loads the kernels.
    """
    count = gpus._kernels.sim_kernel_count()
    references = (KernelReference * count).from_buffer_copy(
        (KernelReference * count).from_address(gpus._kernels.sim_kernel_references())
    )
    threads: set[int] = set()
    for entry in references:
        if entry.name == KERNEL:
            honest = Reference(entry.reference)

            def reference(args: int) -> None:
                honest(args)
                for victim in victims:
                    ctypes.c_ubyte.from_address(victim.data_ptr()).value += 1
                threads.add(threading.get_ident())

            _kept.append(Reference(reference))
            entry.reference = ctypes.cast(_kept[-1], ctypes.c_void_p).value
    _kept.append(references)
    gpus._cuda.sim_get_controls.restype = ctypes.POINTER(ctypes.c_void_p)
    use_kernels = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(gpus._cuda.sim_get_controls()[1])
    use_kernels(ctypes.addressof(references), count)
    return threads


def test_a_kernel_that_leaves_its_ranges_in_torchs_memory_is_a_report(teams: Any, paths: dict[str, str]) -> None:
    with pytest.raises(RanksFailed, match=f"undeclared write: {KERNEL.decode()}"):
        run(teams, 2, paths, strays, policy="eager")  # as it is launched, so by the host


def strays(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    write_beside(gpus, [gpus.adopt(torch.zeros(8))])
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    wrapped(batch(rank, 6, 7)).square().mean().backward()


@pytest.mark.parametrize("options", [{}, {"zero": 1}], ids=["zero=0", "zero=1"])
def test_what_torch_writes_while_another_thread_makes_kernels_run_is_none(
    teams: Any, paths: dict[str, str], options: dict[str, Any]
) -> None:
    run(teams, 2, paths, beside, options, policy="on demand")


def beside(gpus: SimulatedGpus, rank: int, world_size: int, options: dict[str, Any]) -> None:
    """torch writes to parameters, whose memory may be the engine's."""
    victims: list[torch.Tensor] = []
    threads = write_beside(gpus, victims)
    wrapped = sw.wrap(gpus.adopt_module(Mlp()), **options)
    victims += [parameter.detach() for parameter in wrapped.parameters()]
    wrapped(batch(rank, 6, 7)).square().mean().backward()
    while not threads:  # time passes, for which a thread of the simulation's own stands
        time.sleep(0.01)
    assert threading.get_ident() not in threads
    victims.clear()

"""Tests of torch's source that start ranks: each in a process of its own, its ranks as forks on the CPU."""

from __future__ import annotations

import logging
import multiprocessing
import os
import unittest
import warnings
from typing import Any

import stand_in
import torch
from outcomes import run_case


def fork_ranks_on_cpu(limit_s: float) -> None:
    """Make torch's test cases fork their ranks, with the CPU in place of GPUs and `limit_s` for each test."""
    from torch.testing._internal import common_distributed as common

    common.logger.setLevel(logging.CRITICAL)
    common.TIMEOUT_DEFAULT = limit_s
    fork = torch.multiprocessing.get_context("fork").Process
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    run_test = common.MultiProcessTestCase.run_test

    def run_on_cpu(self: Any, test_name: str, pipe: Any) -> None:
        torch.set_num_threads(1)
        with stand_in.gpus_on_cpu():
            run_test(self, test_name, pipe)

    common.MultiProcessTestCase.run_test = run_on_cpu


def run_case_apart(case: unittest.TestCase, limit_s: float) -> tuple[str, str]:
    """Run a test in its own process, since some tests change what torch keeps for a whole process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(case, sender))
    process.start()
    sender.close()
    outcome = receiver.recv() if receiver.poll(limit_s * 2) else ("failed", f"Error: no end within {limit_s * 2} s")
    process.kill()
    process.join()
    return outcome


def _answer(case: unittest.TestCase, sender: Any) -> None:
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with stand_in.gpus_on_cpu():
        outcome = run_case(case)
    if getattr(case, "world_size", 1) == 0:  # the test starts one rank per GPU
        outcome = "skipped", "no rank ran: the test starts one a GPU"
    sender.send(outcome)

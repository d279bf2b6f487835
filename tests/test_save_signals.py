"""Law of the handlers of `save_on`: closed in any order, or collected, they leave the program's signal handling as it
was. While one is open, the signal ends nothing.
"""

import gc
import signal

import pytest
import shardwright as sw
import torch
from shardwright.comm.signals import SaveSignals


@pytest.fixture(params=["the default", "a handler"])
def heard(request):
    """Install the program's own handler of SIGUSR1. Return the list of signals that it receives."""
    heard = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if request.param == "a handler":
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append("own"))
    yield heard
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("first", [0, 1])
def test_two_closed_in_any_order_leave_the_handler_before(heard, first):
    before = signal.getsignal(signal.SIGUSR1)
    both = [SaveSignals((signal.SIGUSR1,), lambda each=each: heard.append(each)) for each in (0, 1)]
    both[first].close()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [1 - first] + ["own"] * callable(before)
    both[1 - first].close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_an_interrupt_is_noted_and_no_error():
    asked = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signals = SaveSignals((signal.SIGINT,), lambda: asked.append(1))
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signals.close()
        after = signal.signal(signal.SIGINT, before)
    assert asked == [1] and after is signal.default_int_handler


def test_a_collected_checkpointer_gives_the_signals_back(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    saver = sw.Checkpointer(tmp_path, torch.nn.Linear(2, 2), save_on=(signal.SIGUSR1,))
    assert signal.getsignal(signal.SIGUSR1) != before
    del saver
    gc.collect()
    assert signal.getsignal(signal.SIGUSR1) == before

"""Law: benchmarks/powersgd_promises.py finds that our hook keeps every law, on the gradients that torch's hook gets."""

import re
import sys
from pathlib import Path

import pytest
from harness import LONG, on_every_rank
from peer import PEER

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import powersgd_promises as promises  # noqa: E402

pytestmark = pytest.mark.skipif(PEER == "torch", reason="both arms are in it")


@pytest.mark.timeout(180 if LONG else 60)
@on_every_rank(exactly=2, deadline_s=150 if LONG else 45)
def test_ours_keeps_each_law(rank, world_size):
    rows = promises.try_all(rank, world_size, but=() if LONG else (promises.GROWTH,))
    off, ratios, zero, infinite, *growth, resumed = [ours for ours, _ in rows.values()]
    assert float(off) <= 1e-5
    assert all(abs(float(ratio) - 1) <= 0.01 for ratio in re.findall(r"[\d.]+", ratios))
    assert (zero, infinite, resumed) == ("clean", "clean", "same bits")
    assert all(float(each) < 1.5 for each in growth)
    assert all(theirs for _, theirs in rows.values())  # every row reports torch's result

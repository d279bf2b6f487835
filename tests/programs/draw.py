"""Draws programs by hypothesis, which shrinks the one that fails."""

from __future__ import annotations

from hypothesis import strategies as st

from . import others, statements  # noqa: F401  fill KINDS
from .text import KINDS, MODELS, OPTIMIZERS, OPTIONS, STAGES, WEIGHTS, Draw, Program, render

_kinds = st.sampled_from([kind for kind in KINDS for _ in range(WEIGHTS[kind])])
_draws = st.builds(Draw, _kinds, st.integers(0, 11), st.integers(0, 5))


def programs(max_statements: int = 14) -> st.SearchStrategy[Program]:
    return st.builds(
        render,
        st.lists(_draws, min_size=1, max_size=max_statements),
        st.sampled_from([2, 3]),
        st.sampled_from(STAGES),
        st.sampled_from(sorted(MODELS, key=lambda name: name != "mlp")),
        st.sampled_from([*OPTIMIZERS]),
        st.sampled_from([0, 0, 1, 2]),
        st.sampled_from(OPTIONS),
    )

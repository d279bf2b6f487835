"""The fold over hosts: contributions of a host in rank order, then hosts in order; scaled once, rounded once."""

from collections.abc import Sequence

import torch

from .fold import WIDER


def fold_over_hosts(contributions: Sequence[torch.Tensor], host_of: Sequence[int], op: str) -> torch.Tensor:
    """Fold like fold() with rank r on host host_of[r]. Partial results are in the accumulation dtype."""
    dtype = contributions[0].dtype
    if dtype.is_complex:
        parts = [torch.view_as_real(contribution.resolve_conj().contiguous()) for contribution in contributions]
        return torch.view_as_complex(fold_over_hosts(parts, host_of, op))
    accumulation = WIDER.get(dtype, dtype)

    def joined(terms: list[torch.Tensor]) -> torch.Tensor:
        total = terms[0]
        for term in terms[1:]:
            if op in ("sum", "mean"):
                total = total + term
            else:
                total = torch.minimum(total, term) if op == "min" else torch.maximum(total, term)
        return total

    wide = [contribution.to(accumulation) for contribution in contributions]
    hosts = range(max(host_of) + 1)
    total = joined([joined([term for term, its_host in zip(wide, host_of) if its_host == host]) for host in hosts])
    if op == "mean":
        total = total * torch.tensor(1 / len(contributions), dtype=accumulation)
    return total.to(dtype)

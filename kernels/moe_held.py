"""Routing of a rank that holds some of the experts: the rows of the others are left out.

    held = experts first .. first + E - 1 of all;   a row of one of them stays where it was, the others' stay unwritten

What is left out is a line of `active`: no program works on it. Rows keep their places, so nothing is sorted anew, and a
token's sum over its k rows is right as long as rows that nobody writes are 0: a Routing that is partial makes the last
product see to that. The ranks' sums add up to what one rank with all experts computes.

A few small operations of torch, all of which may be captured: no kernel is worth it while ranks cut experts' inner
dimension by default.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.moe_routing import MANY, Routing


def hold_experts(routing: Routing, held: range) -> Routing:
    """Return the routing, of all experts, for weights of `held` only. Raises ValueError for one that is partial."""
    if routing.is_partial:
        raise ValueError(f"routing among experts from {routing.first_expert} on has been cut before")
    active = _kept(routing.active, held, has_many=not routing.is_sorted and routing.x_many is not None)
    token, weight = routing.token, routing.weight
    if not routing.is_sorted:
        token, weight = token[held.start : held.stop], weight[held.start : held.stop]
    return dataclasses.replace(
        routing, token=token, weight=weight, active=active, first_expert=held.start, is_partial=True
    )


def _kept(active: Tensor, held: range, *, has_many: bool) -> Tensor:
    """Return `active` with the entries of held experts only, in their order, numbered from 0."""
    entries = active[4:].view(-1, 4)
    count = entries.shape[0]
    is_kept = torch.arange(count, device=active.device) < active[0]
    is_kept &= (entries[:, 0] >= held.start) & (entries[:, 0] < held.stop)
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, count)
    out = torch.zeros(count + 2, 4, dtype=torch.int32, device=active.device)  # the header, entries, what is left out
    moved = torch.stack([entries[:, 0] - held.start, *entries[:, 1:].unbind(1)], 1)
    out[1:].index_copy_(0, place, torch.where(is_kept[:, None], moved, 0))
    out[0, 0] = is_kept.sum()
    if has_many:
        out[0, 1] = (is_kept & (entries[:, 2] > MANY)).sum()
    return out[:-1].flatten()

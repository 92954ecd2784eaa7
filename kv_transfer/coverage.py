"""Coverage: which units of a landing have been written, and whether a plan may be."""

from __future__ import annotations

from kv_transfer.landing import GroupManifest, Landing
from kv_transfer.layout import KVLayout
from kv_transfer.plan import TransferPlan


class Coverage:
    """The units that a landing consists of: the blocks of its prompt in every block group, its slot in the others."""

    def __init__(self, layout: KVLayout, landing: Landing) -> None:
        self._layout = layout
        self._landing = landing
        blocks = set(landing.block_ids[: layout.num_blocks_for(landing.num_tokens)])
        self._wanted = {g.name: blocks if g.unit == "block" else {landing.slot} for g in layout.groups}
        self._written: dict[str, set[int]] = {g.name: set() for g in layout.groups}

    def problem(self, plan: TransferPlan, *, is_last: bool) -> str:
        """Return why a plan must not be written into this landing, "" if it may.

        It may touch whole units of the landing only; the last must leave no unit unwritten.
        """
        landing, layout = self._landing, self._layout
        if landing.layout != layout.fingerprint():
            return f"landing {landing.key} has layout {landing.layout}, this rank has {layout.fingerprint()}"
        if len(landing.block_ids) < layout.num_blocks_for(landing.num_tokens) or landing.num_tokens < 1:
            return f"landing {landing.key} holds {len(landing.block_ids)} blocks for {landing.num_tokens} tokens"
        for piece in plan.pieces:
            group = layout.group(piece.pool)
            if group is None:
                return f"pool {piece.pool!r} is no group of the layout"
            if any(number % group.unit_bytes for number in (piece.source, piece.target, piece.num_bytes)):
                return f"{piece}: not whole units of {group.unit_bytes} bytes"
        units = self._units(plan)
        for pool, touched in units.items():
            if foreign := touched - self._wanted[pool]:
                return f"unit {min(foreign)} of {pool!r} does not belong to landing {landing.key}"
        for pool, wanted in self._wanted.items() if is_last else ():
            if missing := wanted - self._written[pool] - units.get(pool, set()):
                return f"last push leaves {pool!r} incomplete: {len(missing)} of {len(wanted)} units are missing"
        return ""

    def add(self, plan: TransferPlan) -> None:
        """Count a plan as written."""
        for pool, units in self._units(plan).items():
            self._written[pool] |= units

    def counts_with(self, plan: TransferPlan) -> tuple[GroupManifest, ...]:
        """Return what will have been written once `plan` has, in the layout's order."""
        units = self._units(plan)
        numbers = [(g, len(self._written[g.name] | units.get(g.name, set()))) for g in self._layout.groups]
        return tuple(GroupManifest(g.name, n, n * g.unit_bytes) for g, n in numbers)

    def _units(self, plan: TransferPlan) -> dict[str, set[int]]:
        units: dict[str, set[int]] = {}
        for piece in plan.pieces:
            group = self._layout.group(piece.pool)
            assert group is not None
            first = piece.target // group.unit_bytes
            units.setdefault(piece.pool, set()).update(range(first, first + piece.num_bytes // group.unit_bytes))
        return units

"""HostWish: which host of a joined Ray a group wants, from its section of the configuration.

prefill: {node: 10.0.0.11, numa_node: 0}         # by address
decode:  {ray_resources: {decode_host: 1}}       # by what `ray start --resources='{"decode_host": 1}'` offers
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.flags import ConfigError

KEYS = ("node", "ray_resources")
_SHARE = 0.001  # of a host's node:ADDRESS resource: any number of groups may want the same one


class HostWish(msgspec.Struct, frozen=True, kw_only=True):
    """node: address of the host as Ray knows it; "" for any.   ray_resources: amounts that the group takes there."""

    node: str = ""
    ray_resources: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.node or self.ray_resources)

    @property
    def all_resources(self) -> dict[str, float]:
        """What to ask Ray for."""
        return {**self.ray_resources, **({f"node:{self.node}": _SHARE} if self.node else {})}


def take_wish(section: dict[str, Any], *, where: str) -> HostWish:
    """Remove a section's keys of a wish and return it. Raises ConfigError for values of another kind."""
    found = {key: section.pop(key) for key in KEYS if key in section}
    try:
        wish = msgspec.convert(found, HostWish)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}; write `node: 10.0.0.11`, or `ray_resources: {{NAME: AMOUNT}}` as in `ray start "
            "--resources`"
        ) from None
    for name, amount in wish.ray_resources.items():
        if not amount > 0:
            raise ConfigError(f"{where}: ray_resources: {name} = {amount}: must be above 0")
    return wish

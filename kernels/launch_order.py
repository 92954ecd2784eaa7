"""How a launch follows those before it on its stream: in the chain, as one that leads, or aside of the one that leads.

With programmatic dependent launch a kernel begins once every program of the one before has said so or ended, and waits
for it to end where it needs that. In the CHAIN every kernel says so at once, and writes nothing before it has waited.
Two launches that do not need each other then still take turns. A `Pair` lets them run side by side, on one stream:

    pair = Pair()
    q = linear_decode(latent, ..., order=pair.lead)        LEAD: waits, and only then lets the next launch begin,
    pooled = linear_decode(x, ..., order=pair.aside)       ASIDE: which knows that all before the first one has ended.

The second one reads and writes without waiting: a launch sees what had ended when it began. One of its programs waits
at its end, so that whoever waits for it waits for both; what comes next is in the CHAIN, or LEADs in turn.

What makes this wrong, silently, is memory that both touch and one of them writes. Hence a pair holds all that the
first launch touches until the pair itself goes: keep it until the second is launched, and the allocator can't hand that
memory on. Tensors that both are given are compared. Counters of the second are its own (scratch.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

CHAIN, LEAD, ASIDE = 0, 1, 2  # as launch_order_triton.py has them


class Order:
    """The place of a launch: here, in the chain, where it writes nothing before all before it has ended."""

    def take(self, *, reads: Iterable[Tensor | None], writes: Iterable[Tensor | None]) -> int:
        """Return ORDER of the launch that comes now, which reads and writes these tensors and no others but weights.

        Temporary ones count. Raises ValueError if an ASIDE launch would touch what its LEAD one writes, or write what
        that one reads.
        """
        return CHAIN

    def behind(self) -> Order:
        """Return the order of a launch behind a first one of the same operation."""
        return self


IN_CHAIN = Order()


class Pair:
    """A launch that leads and the very next one of its stream, each given its order once, in this order.

    A lead may be several launches, which lead one after the other. If none has led, as where there are no kernels, or
    something else was launched aside already, `aside` is the chain's. takes_turns: both in the chain, to compare with.
    """

    def __init__(self, *, takes_turns: bool = False) -> None:
        self._takes_turns = takes_turns
        self.leads = False
        self.read: list[Tensor] = []
        self.written: list[Tensor] = []

    # Made anew each time: a pair that they kept alive, and it them, would hold its memory until garbage is collected.
    @property
    def lead(self) -> Order:
        return IN_CHAIN if self._takes_turns else _Lead(self)

    @property
    def aside(self) -> Order:
        return IN_CHAIN if self._takes_turns else _Aside(self)


class _Lead(Order):
    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def take(self, *, reads: Iterable[Tensor | None], writes: Iterable[Tensor | None]) -> int:
        self._pair.leads = True
        self._pair.read += [x for x in reads if x is not None]
        self._pair.written += [x for x in writes if x is not None]
        return LEAD


class _Aside(Order):
    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def take(self, *, reads: Iterable[Tensor | None], writes: Iterable[Tensor | None]) -> int:
        if not self._pair.leads:
            return CHAIN
        self._pair.leads = False
        written, led = _places(self._pair.written), _places(self._pair.read)
        both = (_places(reads) | (own := _places(writes))) & written | own & led
        if both:
            raise ValueError(
                f"a launch aside touches memory of the one that leads, at {[hex(place) for place in sorted(both)]}: "
                "give it tensors of its own, or launch both in the chain"
            )
        return ASIDE

    def behind(self) -> Order:
        self._pair.leads = False
        return IN_CHAIN


def _places(tensors: Iterable[Tensor | None]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if x is not None and x.numel()}

"""Rows of steps, on any device, and what is wrong with what begin_step and end_step make of them."""

import dataclasses

import torch

from kernels.step import begin_step, begin_step_reference, end_step, end_step_reference

POSITIONS = (0, 1, 2, 3, 126, 127, 128, 8191, 105616, 131071, 1048575, 2**24)
TURNS = ("window", "compressed", "csa", "hca")


@dataclasses.dataclass
class Step:
    """rows, last_token: of more sequences than the step runs.   tokens, x: what it gives."""

    size: int
    rows: torch.Tensor
    last_token: torch.Tensor
    frequencies: dict
    tokens: torch.Tensor
    x: torch.Tensor

    def begin(self, run=begin_step):
        return run(self.rows, self.last_token, size=self.size, **self.frequencies)

    def end(self, run=end_step):
        return run(self.rows, self.last_token, self.tokens, self.x)


def make_step(*, size=12, spare=2, rope=64, hidden=100, seed=0, device="cpu"):
    """Return a step; every fourth row is inactive and full of numbers that lead nowhere, its x NaN, as are rows 1 and 6
    of x in one channel, infinite and NaN."""
    draw = torch.Generator().manual_seed(seed)
    count = size + spare
    number = torch.arange(count)
    is_active = number % 4 != 3

    def numbers():
        return torch.randint(0, 129280, (count,), generator=draw)

    position = torch.tensor(POSITIONS).repeat(-(-count // len(POSITIONS)))[:count]
    token = torch.where(number % 2 == 0, -1, numbers())
    columns = (is_active.long(), position, number.flip(0), token)
    rows = torch.stack([torch.where(is_active, x, 2**30) if i else x for i, x in enumerate(columns)], 1).int()
    x = torch.randn(size, hidden, generator=draw)
    x[~is_active[:size]] = float("nan")
    x[1:2, hidden - 1], x[6:7, 0] = float("-inf"), float("nan")
    exponent = torch.arange(0, rope, 2, device=device) / rope
    return Step(
        size,
        rows.to(device),
        torch.where(is_active, numbers(), 2**62).to(device),
        {"window": 10000.0**-exponent, "compressed": 160000.0**-exponent},
        numbers()[:size].to(device),
        x.to(device),
    )


def begin_fault(step):
    """Return what is wrong with the inputs made for a step, "" if nothing. Bound of cos and sin: 8 ulp of 1."""
    before = step.rows.clone(), step.last_token.clone()
    got, wanted = step.begin(), step.begin(begin_step_reference)
    if not torch.equal(step.rows, before[0]) or not torch.equal(step.last_token, before[1]):
        return "rows were changed"
    for name, right in vars(wanted).items():
        mine = getattr(got, name)
        if mine.dtype != right.dtype or mine.shape != right.shape or not mine.is_contiguous():
            return f"{name} {tuple(mine.shape)} {mine.dtype}"
        off = float((mine - right).abs().max())
        if off > (1e-6 if name in TURNS else 0) or off != off:
            return f"{name} is {off} off"
    return ""


def end_fault(step):
    """Return what is wrong with rows and results after a step, "" if nothing."""
    rows, last = step.rows.clone(), step.last_token.clone()
    wanted = end_step_reference(rows, last, step.tokens, step.x)
    got = step.end()
    for name, mine, right in (("out", got, wanted), ("rows", step.rows, rows), ("last_token", step.last_token, last)):
        if mine.dtype != right.dtype or not torch.equal(mine, right):
            return f"{name} {mine.tolist()}, wanted {right.tolist()}"
    return ""

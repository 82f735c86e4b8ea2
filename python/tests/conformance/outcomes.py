"""Cases that come to each outcome, for the runner's own test: not of the table."""

import os
import time

import torch
import torch.distributed as dist

from .case import equal, topic

case = topic("Outcomes")


@case("outcome: right")
def right() -> None:
    x = torch.ones(1)
    dist.all_reduce(x)
    equal(x, torch.full((1,), 4.0))


@case("outcome: wrong")
def wrong() -> None:
    equal(torch.ones(1), torch.full((1,), 2.0))


@case("outcome: refused")
def refused() -> None:
    raise ValueError("the reason")


@case("outcome: an accident")
def accident() -> None:
    raise KeyError("it")


@case("outcome: hang", seconds=2)
def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@case("outcome: crash")
def crash() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


case("outcome: right after that")(right)

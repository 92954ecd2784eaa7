"""What ranks with GPUs decide without one: which way a sum goes, in which order gathered columns lie, what is tried."""

import os

import pytest
import torch

from engine.device_group import _ANOTHER, DeviceGroup, _environment, _settings, join_devices
from engine.exchange_choice import SETTINGS, Choice
from engine.parallel import ExchangeFailed
from engine.peer_memory import NoPeerMemory, require_peer_access
from kernels.one_shot import CAPACITY_BYTES
from router.protocol import ExchangeInfo


class Host:
    index, count = 1, 3

    def agree(self, flags):
        return [not flag for flag in flags]


class Comm:
    """Adds one for each call, and gathers x, x + 10, x + 20."""

    def __init__(self, name):
        self.name, self.closed, self.sizes = name, 0, []

    def all_reduce(self, x):
        self.sizes.append(x.numel() * x.element_size())
        x += 1

    def all_gather(self, out, x):
        self.sizes.append(out.numel() * out.element_size())
        for rank in range(3):
            out[rank] = x + 10 * rank

    def close(self):
        self.closed += 1


@pytest.fixture
def comms():
    return {name: Comm(name) for name in ("small", "large")}


def group(comms, choice, regions=None):
    return DeviceGroup(Host(), comms, regions, choice, ExchangeInfo(backend="nccl"))


def test_sums_go_by_their_size_in_bytes(comms, monkeypatch):
    class Regions:
        dtype = torch.bfloat16

    monkeypatch.setattr("engine.device_group.one_shot.one_shot_sum", lambda x, regions: x + 100)
    ranks = group(comms, Choice(64, "small", "large", 1024), Regions())
    assert ranks.all_reduce(torch.zeros(32, dtype=torch.bfloat16))[0] == 100
    assert ranks.all_reduce(torch.zeros(33, dtype=torch.bfloat16))[0] == 1
    assert ranks.all_reduce(torch.zeros(16))[0] == 1, "64 bytes, but of another dtype than the regions'"
    assert ranks.all_reduce(torch.zeros(255))[0] == ranks.all_reduce(torch.zeros(256))[0] == 1
    assert comms["small"].sizes == [66, 64, 1020] and comms["large"].sizes == [1024]
    assert ranks.all_reduce(torch.zeros(0, 4)).shape == (0, 4)


def test_gathered_columns_lie_in_the_order_of_ranks(comms):
    ranks = group(comms, Choice(0, "small", "small", 0))
    x = torch.arange(4.0).view(2, 2)
    assert ranks.all_gather(x).tolist() == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]]
    assert ranks.all_gather(torch.zeros(0, 2)).shape == (0, 6)


def test_one_communicator_for_both_is_given_back_once(comms):
    group(comms, Choice(0, "small", "small", 0)).close()
    assert (comms["small"].closed, comms["large"].closed) == (1, 0)


def test_agreement_is_the_hosts(comms):
    assert group(comms, Choice(0, "small", "small", 0)).agree([True, False]) == [False, True]


def test_what_is_set_in_the_environment_is_tried_alone():
    assert _settings({}) == SETTINGS
    assert _settings({"NCCL_PROTO": "LL", "NCCL_DEBUG": "INFO"}) == {"NCCL_PROTO=LL": {}}


def test_settings_are_in_the_environment_only_while_a_communicator_is_made(monkeypatch):
    monkeypatch.setenv("NCCL_PROTO", "before")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with _environment({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}):
        assert (os.environ["NCCL_PROTO"], os.environ["NCCL_ALGO"]) == ("LL", "Ring")
    assert os.environ["NCCL_PROTO"] == "before" and "NCCL_ALGO" not in os.environ


def test_gpus_without_access_to_their_peers_are_named():
    require_peer_access(0, 3, lambda a, b: True)
    with pytest.raises(NoPeerMemory, match="GPU 1 has no peer access to GPU 0, GPU 2"):
        require_peer_access(1, 3, lambda a, b: False)


@pytest.fixture
def join_with(monkeypatch):
    """A function of (all_reduce, why there is no peers' memory) that joins without GPUs; all ways take as long."""

    def join(all_reduce, reason=""):
        monkeypatch.setattr("engine.device_group.NcclComm", lambda store, name, settings, rank, count: Comm(name))
        monkeypatch.setattr("engine.device_group._measure", lambda host, run, sizes, dtype: dict.fromkeys(sizes, 1.0))
        monkeypatch.setattr("engine.device_group._open_regions", lambda *_: (None if reason else object(), reason))
        return join_devices(Host(), None, dtype=torch.bfloat16, all_reduce=all_reduce, progress=print).exchange

    return join


def test_a_way_that_is_asked_for_is_the_one_taken(join_with):
    assert join_with("one-shot").one_shot_bytes == CAPACITY_BYTES
    nccl = join_with("nccl")
    assert (nccl.one_shot_bytes, nccl.one_shot) == (0, "all_reduce is nccl")
    assert join_with("auto", "no access").one_shot == "no access"


def test_one_shot_sums_that_are_asked_for_and_cannot_be_end_the_start(join_with):
    with pytest.raises(NoPeerMemory, match="all_reduce = 'one-shot': GPU 1 has no access; else take auto or nccl"):
        join_with("one-shot", "GPU 1 has no access")
    with pytest.raises(ExchangeFailed, match="its log says why"):
        join_with("one-shot", _ANOTHER)

"""Memory that launches share: one for each stream, made before a graph is captured. Streams here are numbers."""

import types

import pytest
import torch

from kernels import scratch

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Return what stands for the device: its current stream, and whether that is capturing."""
    state = types.SimpleNamespace(stream=0, captures=False)
    plain = torch.zeros
    monkeypatch.setattr(scratch, "_free", {})
    monkeypatch.setattr(scratch, "_taken", {})
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: plain(*args, **kwargs | {"device": "cpu"}))
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: types.SimpleNamespace(cuda_stream=state.stream, synchronize=lambda: None),
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    return state


def test_a_stream_gets_the_same_zeros_again(gpu):
    first = scratch.zeros("op", GPU, 4)
    assert first.tolist() == [0] * 4
    assert scratch.zeros("op", GPU, 4) is first


def test_each_stream_has_zeros_of_its_own(gpu):
    found = []
    for gpu.stream in range(2 * scratch.STREAMS + 1):
        found.append(scratch.zeros("op", GPU, 4))
    assert len({one.data_ptr() for one in found}) == 2 * scratch.STREAMS + 1


def test_operations_and_sizes_share_nothing(gpu):
    found = [scratch.zeros("a", GPU, 4), scratch.zeros("b", GPU, 4), scratch.zeros("a", GPU, 5)]
    assert len({one.data_ptr() for one in found}) == 3


def test_a_capture_on_a_stream_of_its_own_takes_what_an_earlier_call_made(gpu):
    before = scratch.zeros("op", GPU, 4)
    gpu.stream, gpu.captures = 1, True
    assert scratch.zeros("op", GPU, 4).data_ptr() != before.data_ptr()


def test_a_first_call_inside_a_capture_is_refused(gpu):
    gpu.captures = True
    with pytest.raises(RuntimeError, match="inside a graph capture: nothing has called it before"):
        scratch.zeros("op", GPU, 4)


def test_a_capture_on_a_stream_too_many_is_refused(gpu):
    for gpu.stream in range(scratch.STREAMS):
        scratch.zeros("op", GPU, 4)
    gpu.stream, gpu.captures = scratch.STREAMS, True
    with pytest.raises(RuntimeError, match=f"{scratch.STREAMS} streams have used it"):
        scratch.zeros("op", GPU, 4)

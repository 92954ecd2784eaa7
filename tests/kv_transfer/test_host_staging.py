"""The memory that two processes share: neither can pull it from under the other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kv_transfer import host_staging
from kv_transfer.host_staging import Staging

SIZE = 4096


@pytest.fixture
def sealed() -> Iterator[tuple[Staging, int]]:
    staging, fd = host_staging.create(buffer_bytes=SIZE, num_buffers=2)
    yield staging, fd
    staging.close()
    os.close(fd)


@pytest.fixture
def unsealed() -> Iterator[int]:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 2 * SIZE)
    yield fd
    os.close(fd)


def test_both_ends_see_the_same_bytes(sealed: tuple[Staging, int]) -> None:
    staging, fd = sealed
    other = Staging(fd, buffer_bytes=SIZE, num_buffers=2)
    ctypes.memset(staging.address(1), 7, SIZE)
    assert ctypes.string_at(other.address(1), SIZE) == bytes([7]) * SIZE
    assert ctypes.string_at(other.address(0), SIZE) == bytes(SIZE)
    other.close()


def test_a_buffer_that_the_other_end_holds_shows(sealed: tuple[Staging, int]) -> None:
    staging, fd = sealed
    other = Staging(fd, buffer_bytes=SIZE, num_buffers=2)
    other.hold(0)
    other.hold(1)
    assert (staging.is_held, other.is_held) == (True, False)
    other.let_go(0)
    assert staging.is_held
    other.let_go(1)
    assert not staging.is_held
    other.close()


def test_a_process_that_ends_holds_nothing_any_more(sealed: tuple[Staging, int]) -> None:
    staging, fd = sealed
    hold = (
        "import sys; from kv_transfer.host_staging import Staging\n"
        f"s = Staging({fd}, buffer_bytes={SIZE}, num_buffers=2); s.hold(1); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold], pass_fds=[fd], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert staging.is_held
        process.kill()
        process.wait()
        assert not staging.is_held


@pytest.mark.parametrize("size", [SIZE, 4 * SIZE])
def test_its_size_is_final(sealed: tuple[Staging, int], size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(sealed[1], size)


def test_memory_that_could_be_cut_short_is_refused(unsealed: int) -> None:
    with pytest.raises(ValueError, match="no sealed memory of 8192 bytes"):
        Staging(unsealed, buffer_bytes=SIZE, num_buffers=2)


def test_memory_smaller_than_announced_is_refused(sealed: tuple[Staging, int]) -> None:
    with pytest.raises(ValueError, match="no sealed memory of 12288 bytes"):
        Staging(sealed[1], buffer_bytes=SIZE, num_buffers=3)


@pytest.mark.parametrize(("buffer_bytes", "num_buffers"), [(0, 2), (SIZE, 0), (-SIZE, -2), (1 << 40, 1)])
def test_an_absurd_size_is_refused(sealed: tuple[Staging, int], buffer_bytes: int, num_buffers: int) -> None:
    with pytest.raises(ValueError, match="are no staging memory"):
        Staging(sealed[1], buffer_bytes=buffer_bytes, num_buffers=num_buffers)


def test_something_that_is_no_memory_is_refused() -> None:
    read, write = os.pipe()
    with pytest.raises(ValueError, match="no sealed memory"):
        Staging(read, buffer_bytes=SIZE, num_buffers=2)
    os.close(read)
    os.close(write)

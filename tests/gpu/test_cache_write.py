"""cache_write compiled, at the model's sizes: see cache_write.py, which also runs without pytest."""

import pytest

from tests.gpu.cache_write import jobs_of

pytestmark = pytest.mark.gpu
JOBS = jobs_of("cuda")


@pytest.mark.parametrize("fault", [fault for _, fault in JOBS], ids=[name for name, _ in JOBS])
def test_compiled_writes_equal_the_reference(fault):
    assert fault() == ""

"""Linear layers of the model: several matrices as one, those that can't be, and prompts beside decode steps."""

from __future__ import annotations

import pytest
import torch

from engine.model.layers import GatedLinear, GroupedLinear, Linear, Linears, Matrix, RMSNorm, narrow
from kernels.quant import dequantize_block_fp8


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(name: str, rows: int, *, is_e4m3: bool, channels: int = 64) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a matrix as it is loaded, and its values."""
    weight = draw(rows, rows, channels)
    if not is_e4m3:
        return {f"{name}.weight": weight}, weight
    codes = weight.to(torch.float8_e4m3fn)
    scale = 0.5 + torch.rand(-(-rows // 128), -(-channels // 128), generator=torch.Generator().manual_seed(rows))
    return {f"{name}.weight": codes, f"{name}.scale": scale}, dequantize_block_fp8(codes, scale)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        pytest.param((128, True), (40, True), 1, id="e4m3"),
        pytest.param((128, False), (40, False), 1, id="float"),
        pytest.param((128, True), (40, False), 2, id="both"),
        pytest.param((40, True), (8, True), 2, id="cut tile"),
    ],
)
def test_matrices_that_read_one_input_are_one_where_they_can_be(first, second, parts, decodes):
    weights, values = {}, []
    for name, (rows, is_e4m3) in (("a", first), ("b", second)):
        stored, value = matrix(name, rows, is_e4m3=is_e4m3)
        weights |= stored
        values.append(value)
    layer, x = Linears(*(Matrix.take(weights, name) for name in "ab")), draw(1, 3, 64)
    assert (len(layer.parts), weights) == (parts, {})
    for which, (out, value) in enumerate(zip(layer(x, decodes=decodes), values, strict=True)):
        torch.testing.assert_close(out, x @ value.T, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(layer.only(which, x), x @ value.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("is_e4m3", [(True, True), (True, False)], ids=["e4m3", "both"])
def test_gates_act_on_values_whether_they_are_one_matrix_or_not(is_e4m3, decodes):
    weights, values = {}, []
    for name, kind in zip("ab", is_e4m3, strict=True):
        stored, value = matrix(name, 128, is_e4m3=kind)
        weights |= stored
        values.append(value)
    layer, x = GatedLinear(*(Matrix.take(weights, name) for name in "ab")), draw(1, 3, 64)
    gate, up = (x @ value.T for value in values)
    wanted = torch.nn.functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
    torch.testing.assert_close(layer(x, limit=2.0, decodes=decodes), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("decodes", [False, True])
def test_wide_sums_of_narrow_activations_are_not_rounded(decodes):
    weight, x = (draw(seed, 3, 64).to(torch.bfloat16) for seed in (1, 2))
    (out,) = Linears(Matrix(weight), is_wide=True)(x, decodes=decodes)
    torch.testing.assert_close(out, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_a_norm_in_front_is_the_same_in_prompts_and_in_decode_steps():
    weights, _ = matrix("a", 24, is_e4m3=True)
    norm = RMSNorm({"norm.weight": 1 + draw(2, 64) / 10}, "norm", 1e-6)
    layer, x = Linear(weights, "a"), draw(1, 3, 64)
    torch.testing.assert_close(layer(x, norm=norm, decodes=True), layer(norm(x)), rtol=1e-5, atol=1e-4)


def test_weights_that_bfloat16_holds_are_kept_so():
    weight = draw(3, 40, 64).to(torch.bfloat16).float()
    assert narrow(weight).dtype == torch.bfloat16
    assert torch.equal(narrow(weight).float(), weight)


def test_weights_that_bfloat16_rounds_are_kept_as_they_are():
    weight = draw(3, 40, 64).to(torch.bfloat16).float()
    weight[39, 63] += 2**-20
    assert narrow(weight) is weight


@pytest.mark.parametrize("decodes", [False, True])
def test_each_group_has_a_matrix_of_its_own(decodes):
    weights, value = matrix("a", 256, is_e4m3=True)
    layer, x = GroupedLinear(weights, "a", 2), draw(1, 3, 2, 64)
    wanted = torch.stack([x[:, g] @ value[128 * g :][:128].T for g in range(2)], 1)
    torch.testing.assert_close(layer(x, decodes=decodes), wanted, rtol=1e-5, atol=1e-4)

"""Checkpoints in the other four-bit format: MXFP4 experts of an official one turned into NVFP4, without loss."""

from __future__ import annotations

import re

import torch

from kernels.expert_weights import nvfp4_from_mxfp4

EXPERTS = re.compile(r"layers\.\d+\.ffn\.experts\.\d+\.w\d\.weight")
# What a published NVFP4 checkpoint adds to config.json's quantization_config.
NVFP4_CONFIG = {
    "moe_quant_algo": "NVFP4",
    "quant_algo": "MIXED_PRECISION",
    "group_size": 16,
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
}


def to_nvfp4(tensors, pattern=EXPERTS, *, input_scale=0.01):
    """Turn the stored matrices whose names match into NVFP4, in place; w1 and w3 get factors of their own.

    input_scale: of every matrix; None: a checkpoint for weights only. Drafting blocks stay as they are.
    """
    for name in [n for n in tensors if re.fullmatch(pattern, n)]:
        base = name.removesuffix(".weight")
        codes = tensors[name].view(torch.uint8)
        scales, factors = nvfp4_from_mxfp4(codes[None], tensors.pop(f"{base}.scale")[None], parts=1, name=name)
        tensors[name] = codes
        tensors[f"{base}.weight_scale"] = scales[0]
        tensors[f"{base}.weight_scale_2"] = factors.reshape(())
        if input_scale is not None:
            tensors[f"{base}.input_scale"] = torch.tensor(input_scale)
    return tensors


def nvfp4_config(config):
    """Return the config.json of such a checkpoint."""
    return config | {"quantization_config": config["quantization_config"] | NVFP4_CONFIG}

"""What SGLang's versions call things and can do: data, read from each version's `--help` and sources.

A new version is a new entry here, beside its list of options in tests/data/flags/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ATTENTION_0_5_17 = (
    "triton torch_native flex_attention dsa nsa dsv4 compressed cutlass_mla fa3 fa4 flashinfer flashmla trtllm_mla "
    "cutedsl_mla tokenspeed_mla trtllm_mha dual_chunk_flash_attn hpc_ops aiter wave intel_amx ascend intel_xpu"
)
_ATTENTION_0_5_23 = (
    "triton torch_native flex_attention dsa nsa qsa dsv4 compressed fa3 fa4 flashinfer llada2_cfg_flashinfer flashmla "
    "trtllm_mla cutedsl_mla tokenspeed_mla trtllm_mha hpc_ops minicpm_flashattn minicpm_flashinfer aiter wave "
    "intel_amx ascend intel_xpu"
)
_QUANTIZATION_0_5_23 = (
    "awq fp8 mxfp8 gptq gptq_marlin awq_marlin bitsandbytes gguf modelopt modelopt_fp8 modelopt_fp4 nvfp4_online "
    "modelopt_mixed petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8 mxfp4 auto-round auto-round-int8 "
    "compressed-tensors modelslim mxfp_w4a8 quark quark_int4fp8_moe quark_mxfp4 mlx_q4 mlx_q8 unquant humming"
)

# Page sizes that an attention backend takes; SGLang replaces any other with one warning in its log.
_PAGES: Mapping[str, tuple[int, ...]] = {
    "flashmla": (64,),
    "hpc_ops": (64,),
    "trtllm_mla": (32, 64),
    "tokenspeed_mla": (32, 64),
    "cutedsl_mla": (32, 64),
    "trtllm_mha": (16, 32, 64, 128),
}


@dataclass(frozen=True)
class Version:
    """One version's table.

    `attention` and `quantization` are the values its options take; `pages` see `_PAGES`. `ready` is the path that
    answers 200 when a generation would start now. `draft_kv_dtype` is the option for the drafter's own KV precision,
    None in versions where it always follows the target's.
    """

    name: str
    attention: tuple[str, ...]
    quantization: tuple[str, ...]
    pages: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: _PAGES)
    ready: str = "/health"
    draft_kv_dtype: str | None = None


VERSIONS: Mapping[str, Version] = {
    version.name: version
    for version in (
        Version(
            name="0.5.17",
            attention=tuple(_ATTENTION_0_5_17.split()),
            quantization=(*_QUANTIZATION_0_5_23.split(), "marlin"),
            pages={**_PAGES, "cutlass_mla": (128,)},
        ),
        Version(
            name="0.5.23",
            attention=tuple(_ATTENTION_0_5_23.split()),
            quantization=tuple(_QUANTIZATION_0_5_23.split()),
            ready="/ready",
            draft_kv_dtype="--speculative-draft-kv-cache-dtype",
        ),
    )
}
NEWEST = VERSIONS["0.5.23"]

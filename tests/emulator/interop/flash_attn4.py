"""Compiles kernels of flash-attn-4, in a process of its own for every architecture."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import types
from typing import Any, Literal

from tests.emulator.interop import torch_stand_in
from tests.emulator.interop.host_code import Compiled

_PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
_TILE = 128


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is fixed when a kernel is compiled.

    Attributes:
      head_dim, head_dim_v: of queries and keys, and of values.
      two_ctas: None lets flash-attn-4 choose.
      multiprocessors: of the device; a constant of persistent kernels.
    """

    arch: str
    head_dim: int
    head_dim_v: int
    is_causal: bool
    two_ctas: bool | None = None
    multiprocessors: int = 4


_ROW_SUMS = ("o", "do", "row_sums", "lse", "lse_log2")
_OPERANDS = ("q", "k", "v", "do", "lse_log2", "row_sums")


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch of a backward.

    Attributes:
      names: of its tensors, in the order of its arguments.
      stationary: what a CTA of a main kernel holds while the others pass by.
    """

    code: Compiled
    names: tuple[str, ...]
    stationary: Literal["", "queries", "keys"] = ""


def versions() -> dict[str, str]:
    """Versions of what is compiled, and by what."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def prepare_process(arch: str) -> None:
    """Readies this process for one architecture. Must run before cutlass is first imported."""
    if "cutlass" in sys.modules:
        raise RuntimeError(f"cutlass was imported before CUTE_DSL_ARCH={arch} was set")
    os.environ |= {"CUTE_DSL_ARCH": arch, "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    os.environ |= {"FLASH_ATTENTION_ARCH": arch, "QUACK_ARCH": arch}
    torch_stand_in.install()
    for name in ("quack", "flash_attn.cute"):
        _bare_package(name)
    importlib.import_module("quack.dsl")


def _bare_package(name: str) -> None:
    """Makes a package's modules importable without its __init__, which wants all of torch."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    module = types.ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = module


def compile_forward(variant: Variant) -> Compiled:
    """Compiles the forward kernel as flash-attn-4 configures it for long sequences."""
    kernel = _forward(variant)
    from tests.emulator.interop import hosts

    return _compile(hosts.Forward(kernel), variant)


def compile_backward(variant: Variant) -> tuple[Step, ...]:
    """Compiles the backward for Blackwell, in the order of its launches.

    Pairs of CTAs from head dim 128 on, where `two_ctas` does not say otherwise.
    """
    dims = variant.head_dim, variant.head_dim_v
    return _backward_256(variant) if dims == (256, 256) else _backward(variant)


def _backward(variant: Variant) -> tuple[Step, ...]:
    """What comes before the main kernel, itself, and what comes after."""
    from tests.emulator.interop import hosts

    cutlass = importlib.import_module("cutlass")
    before = importlib.import_module("flash_attn.cute.flash_bwd_preprocess")
    main = importlib.import_module("flash_attn.cute.flash_bwd_sm100").FlashAttentionBackwardSm100
    after = importlib.import_module("flash_attn.cute.flash_bwd_postprocess")
    d, dv, dtype = variant.head_dim, variant.head_dim_v, cutlass.BFloat16
    paired = d >= 128 if variant.two_ctas is None else variant.two_ctas
    capability = int(re.sub(r"\D", "", variant.arch))
    first = hosts.Preprocess(before.FlashAttentionBackwardPreprocess(dtype, d, dv, _TILE))
    second = hosts.Backward(
        main(
            d,
            dv,
            is_causal=variant.is_causal,
            tile_m=_TILE,
            tile_n=_TILE,
            cluster_size=2 if paired else 1,
            use_2cta_instrs=paired,
            spt=False,
        )
    )
    third = hosts.Postprocess(
        after.FlashAttentionBackwardPostprocess(
            dtype,
            d,
            capability,
            _TILE,
            num_threads=128,
            use_2cta_instrs=paired,
            accum_order=main.accum_tile_orders(paired, _TILE)[0],
        )
    )
    return (
        Step(_compile(first, variant), (*_ROW_SUMS, "dq_sums")),
        Step(_compile(second, variant), (*_OPERANDS, "dq_sums", "dk", "dv"), "keys"),
        Step(_compile(third, variant), ("dq_sums", "dq")),
    )


def _backward_256(variant: Variant) -> tuple[Step, ...]:
    """What comes before, dQ's kernel, dK's and dV's: both of pairs, neither adds to memory."""
    from tests.emulator.interop import hosts

    cutlass = importlib.import_module("cutlass")
    before = importlib.import_module("flash_attn.cute.flash_bwd_preprocess")
    main = importlib.import_module("flash_attn.cute.sm100_hd256_2cta_fmha_backward")
    d, dv = variant.head_dim, variant.head_dim_v
    if variant.two_ctas is False:
        raise NotImplementedError(f"flash-attn-4 has no kernel of single CTAs for {variant}")
    both = main.BlackwellFusedMultiHeadAttentionBackward(
        d, dv, is_causal=variant.is_causal, cluster_size=2, use_2cta_instrs=True
    )
    first = hosts.RowSums(before.FlashAttentionBackwardPreprocess(cutlass.BFloat16, d, dv, _TILE))
    second, third = hosts.QueryGradient(both.dq_kernel), hosts.KeyValueGradient(both.dkdv_kernel)
    return (
        Step(_compile(first, variant), _ROW_SUMS),
        Step(_compile(second, variant), (*_OPERANDS, "dq"), "queries"),
        Step(_compile(third, variant), (*_OPERANDS, "dk", "dv"), "keys"),
    )


def _forward(variant: Variant) -> Any:
    selection = importlib.import_module("flash_attn.cute.config")
    capability = int(re.sub(r"\D", "", variant.arch))
    length = 8192
    inputs = selection.FwdHeuristicInputs(
        device_arch=capability,
        num_sms=variant.multiprocessors,
        dtype="bfloat16",
        head_dim=variant.head_dim,
        head_dim_v=variant.head_dim_v,
        num_heads=1,
        num_heads_kv=1,
        batch_size=1,
        total_q=length,
        total_k=length,
        max_seqlen_q=length,
        max_seqlen_k=length,
        causal=variant.is_causal,
        has_lse=True,
        requested_num_splits=1,
        disable_2cta=variant.two_ctas is False,
    )
    chosen = selection.select_fwd_config(inputs)
    if variant.two_ctas and not chosen.use_2cta_instrs:
        raise NotImplementedError(f"flash-attn-4 has no pairs of CTAs for {variant}")
    if capability == 90:
        module = importlib.import_module("flash_attn.cute.flash_fwd_sm90")
        cutlass = importlib.import_module("cutlass")
        return module.FlashAttentionForwardSm90(
            cutlass.BFloat16,
            variant.head_dim,
            variant.head_dim_v,
            is_causal=variant.is_causal,
            tile_m=chosen.tile_m,
            tile_n=chosen.tile_n,
            num_stages=2,
            num_threads=(chosen.tile_m // 64 + 1) * 128,
            intra_wg_overlap=chosen.intra_wg_overlap,
            mma_pv_is_rs=chosen.mma_pv_is_rs,
        )
    module = importlib.import_module("flash_attn.cute.flash_fwd_sm100")
    return module.FlashAttentionForwardSm100(
        variant.head_dim,
        variant.head_dim_v,
        is_causal=variant.is_causal,
        m_block_size=chosen.tile_m,
        n_block_size=chosen.tile_n,
        q_stage=chosen.q_stage,
        is_static_persistent=chosen.is_static_persistent,
        use_2cta_instrs=chosen.use_2cta_instrs,
        use_s_ping_pong=chosen.use_s_ping_pong,
    )


def _compile(host: Any, variant: Variant) -> Compiled:
    import cutlass
    import cutlass.cute as cute

    from tests.emulator.interop import hosts

    hosts.Hardware.multiprocessors = variant.multiprocessors
    schedulers = importlib.import_module("flash_attn.cute.tile_scheduler")
    for module in (cutlass.utils, schedulers):
        vars(module)["HardwareInfo"] = hosts.Hardware
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {variant.arch} --keep-ptx --dump-dir {folder}"
        compiled = cute.compile(host, *hosts.arguments(host), options=options)
        compiled.export_to_c(folder, "host", function_prefix="host")
        header = pathlib.Path(folder, "host.h").read_text()
        entry = re.search(r"void (_mlir_\w*_mlir_ciface_\w+)\(void \*\*args", header)
        if entry is None:
            raise ValueError("no entry point in the header of the host code")
        return Compiled(
            compiled.__ptx__, pathlib.Path(folder, "host.o").read_bytes(), entry[1], "host"
        )

"""FlashInfer's decoding from pages (PyTorch) as a contender; it compiles its kernels when asked."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import torch_peer
from benchmarks.contenders import Foreign, Inputs
from benchmarks.shapes import Case

FLASHINFER = "FlashInfer, pages"

_WORKSPACE_BYTES = 512 << 20


@functools.cache
def load() -> Any:
    """Returns the module `flashinfer`, or why it cannot be imported."""
    try:
        return importlib.import_module("flashinfer")
    except Exception as error:  # It raises more than ImportError where CUDA is missing.
        return f"cannot be imported: {error}"


def chained(case: Case, inputs: Inputs, page: int) -> Callable[[], Foreign]:
    """Returns a call of case.chained forwards, each with the output before as its query.

    It replays a CUDA graph; keys and values lie in pages of `page` tokens in random order, and
    what FlashInfer plans on the host is done before.

    Raises:
      RuntimeError: it cannot be imported.
    """
    flashinfer, torch = load(), torch_peer.load_torch()
    for module in (flashinfer, torch):
        if isinstance(module, str):
            raise RuntimeError(f"FlashInfer {module}")
    jax.block_until_ready(inputs)
    query, key, value, _ = (torch.from_dlpack(x).clone() for x in inputs)
    query = query.reshape(-1, *query.shape[2:])
    pages = tuple(x.reshape(-1, page, *x.shape[2:]) for x in (key, value))
    plan = _planned_decode if case.query_length == 1 else _planned_prefill
    attend = plan(flashinfer, torch, case, page, query)

    def run() -> Any:
        result = query
        for _ in range(case.chained):
            result = attend.run(result, pages)
        return result

    return torch_peer.captured(torch, run)


def _table(torch: Any, case: Case, page: int, query: Any) -> tuple[Any, ...]:
    """Returns each entry's first page in the list of pages, the list, and tokens on last pages."""
    each = case.key_length // page
    order = np.random.default_rng(0).permutation(case.batch * each)
    lists = (np.arange(case.batch + 1) * each, order, np.full(case.batch, page))
    return tuple(torch.tensor(x, dtype=torch.int32, device=query.device) for x in lists)


def _planned_decode(flashinfer: Any, torch: Any, case: Case, page: int, query: Any) -> Any:
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_table(torch, case, page, query),
        *case.heads,
        case.head_dim,
        page,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    return wrapper


def _planned_prefill(flashinfer: Any, torch: Any, case: Case, page: int, query: Any) -> Any:
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    rows = torch.arange(case.batch + 1, dtype=torch.int32, device=query.device)
    wrapper.plan(
        rows * case.query_length,
        *_table(torch, case, page, query),
        *case.heads,
        case.head_dim,
        page,
        causal=case.is_causal,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    return wrapper

"""flash-attn-4's kernels (PyTorch) as contenders; nothing else in the benchmarks imports PyTorch.

PyTorch launches them eagerly: in short cases the time of its host code shows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.contenders import (
    AS_GIVEN,
    Abilities,
    Absent,
    Contender,
    Eager,
    Foreign,
    Inputs,
    Results,
    longest,
    packed,
    sinks,
    starts,
)
from benchmarks.shapes import Case

FA4 = "flash-attn-4"
FA4_DETERMINISTIC = "flash-attn-4 deterministic"

_ABILITIES = Abilities(
    value_dim=True,
    windows=True,
    lengths=True,
    last_key=True,
    documents=True,
    sinks=True,
    soft_cap=True,
)


@dataclasses.dataclass(frozen=True)
class Modules:
    """The modules `torch` and `flash_attn.cute`."""

    torch: Any
    flash: Any


@functools.cache
def load_torch() -> Any:
    """Imports PyTorch as `load` does, alone."""
    try:
        return importlib.import_module("torch")
    except Exception as error:
        return f"cannot be imported: {error}"


@functools.cache
def load() -> Modules | str:
    """Imports PyTorch and flash-attn-4; returns why it cannot, if it cannot.

    Call it before JAX starts its devices: CUDA's libraries are loaded once in a process, and JAX
    accepts those of PyTorch.
    """
    try:
        return Modules(importlib.import_module("torch"), importlib.import_module("flash_attn.cute"))
    except Exception as error:  # Its runtime raises more than ImportError where a GPU is missing.
        return f"cannot be imported: {error}"


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Tensors of PyTorch, perhaps not computed yet, as `contenders.Foreign` has it."""

    torch: Any
    tensors: tuple[Any, ...]

    def block_until_ready(self) -> Tensors:
        """Waits until the GPU has nothing left to do."""
        self.torch.cuda.synchronize()
        return self

    def arrays(self) -> Results:
        """Returns them as arrays of JAX, in the same memory."""
        self.block_until_ready()
        return [jax.dlpack.from_dlpack(x.detach().contiguous()) for x in self.tensors]


def flash_attn_4(case: Case) -> list[Contender | Absent]:
    """Returns flash-attn-4's fast and its deterministic contender, or why they are absent."""
    refusal = _ABILITIES.refusal(case)
    if refusal is not None:
        return [Absent(FA4, refusal)]
    modules = load()
    if isinstance(modules, str):
        return [Absent(FA4, modules)]
    layout = AS_GIVEN if case.pieces is None else packed(case)
    found: list[Contender | Absent] = []
    for name, deterministic in ((FA4, False), (FA4_DETERMINISTIC, True)):
        eager = Eager(functools.partial(_bind, modules, case, deterministic))
        found.append(Contender(name, eager, layout, backward_only=deterministic))
    return found


def chained(case: Case, inputs: Inputs) -> Callable[[], Foreign]:
    """Returns a call of case.chained forwards of flash-attn-4, each with the output before as its
    query: a CUDA graph, so that the host's time does not show.

    Raises:
      RuntimeError: it cannot be imported.
    """
    modules = load()
    if isinstance(modules, str):
        raise RuntimeError(f"{FA4} {modules}")
    torch = modules.torch
    jax.block_until_ready(inputs)
    query, key, value, _ = (torch.from_dlpack(x).clone() for x in inputs)
    attend = _attention(modules, case, False, query.device)

    def run() -> Any:
        result = query
        with torch.no_grad():
            for _ in range(case.chained):
                result = _output(attend(result, key, value))
        return result

    return captured(torch, run)


def captured(torch: Any, run: Callable[[], Any]) -> Callable[[], Foreign]:
    """Returns a call that replays a CUDA graph of what `run` launches; it returns its tensor."""
    # What is compiled at the first call must not be within the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensors:
        graph.replay()
        return Tensors(torch, (result,))

    return replay


def _bind(
    modules: Modules, case: Case, deterministic: bool, inputs: Inputs, direction: str
) -> Callable[[], Foreign]:
    torch = modules.torch
    jax.block_until_ready(inputs)
    # Copies: PyTorch must not be given memory of JAX's that it could write to.
    *operands, cotangent = (torch.from_dlpack(x).clone() for x in inputs)
    operands = [x.requires_grad_() for x in operands]
    attend = _attention(modules, case, deterministic, operands[0].device)
    if direction == "forward":

        def forward() -> Tensors:
            with torch.no_grad():
                return Tensors(torch, (_output(attend(*operands)),))

        return forward
    output = _output(attend(*operands))

    def backward() -> Tensors:
        gradients = torch.autograd.grad(output, operands, cotangent, retain_graph=True)
        return Tensors(torch, tuple(gradients))

    return backward


def _attention(
    modules: Modules, case: Case, deterministic: bool, device: Any
) -> Callable[..., Any]:
    """Returns the function of query, key and value."""
    # A window holds causality, too: its right side is then 0.
    options: dict[str, Any] = {
        "causal": case.is_causal and case.window is None,
        "window_size": case.window or (None, None),
        "deterministic": deterministic,
    }
    if case.soft_cap is not None:
        options["softcap"] = case.soft_cap
    torch = modules.torch
    if (of_heads := sinks(case)) is not None:
        options["learnable_sink"] = torch.tensor(of_heads, dtype=torch.bfloat16, device=device)
    if case.pieces is None:
        return functools.partial(modules.flash.flash_attn_func, **options)
    bounds = torch.tensor(starts(case), dtype=torch.int32, device=device)
    return functools.partial(
        modules.flash.flash_attn_varlen_func,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=longest(case),
        max_seqlen_k=longest(case),
        **options,
    )


def _output(result: Any) -> Any:
    """Returns the output, without the log-sum-exp that may come with it."""
    return result[0] if isinstance(result, tuple) else result

"""The front door: any PTX, parameters as raw bytes, memory as buffers at addresses."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kernels.emulator.errors import PtxError
from kernels.emulator.instructions.binding import bind_program
from kernels.emulator.machine.cta import SHARED_BASE
from kernels.emulator.machine.geometry import Geometry
from kernels.emulator.machine.machine import Machine
from kernels.emulator.machine.tally import executed
from kernels.emulator.machine.trace import Trace
from kernels.emulator.memory import GlobalMemory, Region
from kernels.emulator.names import Names
from kernels.emulator.policy import Policy
from kernels.emulator.ptx.costs import Costs, costs
from kernels.emulator.ptx.parser import parameter_offsets, parse
from kernels.emulator.ptx.program import Program
from kernels.emulator.ptx.syntax import Kernel
from kernels.emulator.ptx.windows import PARAMETER_BASE
from kernels.emulator.report import Report, check_roles

MOST_SHARED_BYTES = 227 * 1024
_MOST_THREADS = 1024


def launch(
    ptx: str,
    kernel: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] = (1, 1, 1),
    dynamic_smem: int = 0,
    params: Sequence[bytes] = (),
    memory: Mapping[int, Any] | None = None,
    policy: Policy | None = None,
    seed: int = 0,
    names: Names | None = None,
    trace: Trace | None = None,
) -> Report:
    """Runs a kernel; what it writes is in the buffers of `memory` afterwards.

    Args:
      ptx: the module's text.
      kernel: name of one of its entries.
      grid: CTAs.
      block: threads of a CTA.
      cluster: CTAs of a cluster.
      dynamic_smem: bytes of dynamic shared memory.
      params: value of each parameter, as the driver would get it.
      memory: buffers by their address on the device; the kernel must not write read-only ones.
      policy: the scheduling adversary.
      seed: of every choice that the policy leaves open.
      names: of warps and mbarriers.
      trace: filled with what its CTAs execute, for a timing estimate.

    Raises:
      PtxError: the text is not PTX that the emulator can run.
      ValueError: the launch does not fit the kernel.
      EmulationError: the kernel broke a rule.
    """
    start = time.perf_counter()
    prepare(ptx, kernel)
    entry = parse(ptx).kernels[kernel]
    program, static_bytes, static = _program(ptx, kernel)
    _check_launch(entry, grid, block, static_bytes + dynamic_smem)
    _check_cluster(entry, grid, cluster)
    names = names or Names()
    roles = check_roles(names.roles, math.prod(block) // 32)
    parameters = Region("parameters", PARAMETER_BASE, _pack(entry, params))
    machine = Machine(
        program,
        Geometry(grid, block, cluster, static_bytes + dynamic_smem, dynamic_smem),
        GlobalMemory(memory or {}, (parameters, *_variables(entry))),
        policy or Policy(),
        seed,
    )
    dynamic = SHARED_BASE + static_bytes
    machine.barrier_names = {dynamic + place: name for place, name in names.barriers.items()}
    if trace is not None:
        trace.program, machine.trace = program, trace
        trace.cluster_size = math.prod(cluster)
    with np.errstate(all="ignore"):
        machine.run()
    return Report(
        kernel=kernel,
        grid=grid,
        roles=roles,
        kinds=static.kinds,
        instructions=tuple(tally.instructions(static) for tally in machine.tallies),
        quantities=tuple(tally.quantities(static) for tally in machine.tallies),
        executed=executed(program, machine.tallies),
        shared_bytes=static_bytes + dynamic_smem,
        tensor_columns=machine.most_tensor_columns,
        seconds=time.perf_counter() - start,
    )


def prepare(ptx: str, kernel: str) -> None:
    """Does what the first launch of a kernel does before anything runs.

    Raises:
      PtxError: the text is not PTX that the emulator can run.
    """
    if kernel not in parse(ptx).kernels:
        raise PtxError(f"no kernel {kernel}; there are {', '.join(parse(ptx).kernels) or 'none'}")
    _program(ptx, kernel)


@functools.lru_cache(maxsize=16)
def _program(ptx: str, kernel: str) -> tuple[Program, int, Costs]:
    """Programs are kept: making one takes longer than a small launch, tens of megabytes each."""
    program, static_bytes = bind_program(parse(ptx).kernels[kernel])
    return program, static_bytes, costs(program)


def _check_launch(
    entry: Kernel,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
) -> None:
    threads = block[0] * block[1] * block[2]
    if min(grid) < 1:
        raise ValueError(f"{grid=}: every size must be at least 1")
    if not 1 <= threads <= _MOST_THREADS or threads % 32:
        raise ValueError(f"{block=}: a multiple of 32 threads, at most {_MOST_THREADS}")
    if entry.block is not None and entry.block != block:
        raise ValueError(f"{block=}: {entry.name} was compiled for {entry.block}")
    if shared_bytes > MOST_SHARED_BYTES:
        raise ValueError(f"{shared_bytes} bytes of shared memory: at most {MOST_SHARED_BYTES}")


def _check_cluster(
    entry: Kernel, grid: tuple[int, int, int], cluster: tuple[int, int, int]
) -> None:
    if entry.cluster is not None and entry.cluster != cluster:
        raise ValueError(f"{cluster=}: {entry.name} was compiled for clusters of {entry.cluster}")
    if min(cluster) < 1 or math.prod(cluster) > entry.most_ctas:
        raise ValueError(f"{cluster=}: {entry.name} takes 1 to {entry.most_ctas} CTAs")
    if any(n % size for n, size in zip(grid, cluster, strict=True)):
        raise ValueError(f"{grid=} is no multiple of {cluster=}")


def _pack(entry: Kernel, params: Sequence[bytes]) -> np.ndarray:
    if len(params) != len(entry.parameters):
        raise ValueError(
            f"{entry.name} takes {len(entry.parameters)} parameters, {len(params)} were given"
        )
    offsets = parameter_offsets(entry.parameters)
    size = offsets[-1] + entry.parameters[-1].size if offsets else 0
    data = np.zeros(size, np.uint8)
    for parameter, offset, value in zip(entry.parameters, offsets, params, strict=True):
        if len(value) != parameter.size:
            raise ValueError(
                f"{parameter.name} takes {parameter.size} bytes, {len(value)} were given"
            )
        data[offset : offset + parameter.size] = np.frombuffer(value, np.uint8)
    return data


def _variables(entry: Kernel) -> Iterator[Region]:
    """The module's variables in global and constant memory."""
    for variable in entry.variables:
        data = np.frombuffer(variable.data, np.uint8)
        shared = variable.space == "global"
        yield Region(variable.name, variable.address, data.copy() if shared else data, shared)

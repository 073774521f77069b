"""Golden test: the handler's launch of every kernel equals that of CuTe-DSL's own host code.

The tests compare grid, block, cluster, shared memory and every parameter byte, for several shapes.
They compare tensor maps field by field; these differ by design in one flag bit alone
(tensor_map.DSL_FLAG), and in the 64 bytes after the encoded ones, which are undefined.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import json
import multiprocessing
import pathlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from fa4_jax import bias_buffer, runtime, splits
from fa4_jax.key import (
    BIAS_GRADIENT_TILES,
    SPLIT_ROWS,
    STATISTICS_ROWS,
    KernelKey,
    Pass,
)
from fa4_jax.manifest import Cubin, Param, evaluate_size
from fa4_jax.masks.table import TILE_ROWS
from kernels.build import cache, compile, cubin_info
from kernels.emulator import tensor_map
from tests.build import remote
from tests.ffi import compiler, stand_in
from tests.ffi.stand_in import Array, Call

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("the host code comes from CuTe-DSL, which is not here", allow_module_level=True)

MULTIPROCESSORS = 132  # the number of multiprocessors of the stand-in's device
SCALARS = {"f32": itertools.cycle((0.125, 8.0, 1.5)), "i32": itertools.cycle((0, 7, 1 << 30))}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sizes of one attention call; `narrower` is subtracted from the tile's head dim,
    `narrower_value` from value's.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    narrower: int = 0
    narrower_value: int = 0


PROBLEMS = (
    Problem(1, 128, 128, 1, 1),
    Problem(2, 1, 1, 4, 2, narrower=8),
    Problem(3, 517, 1030, 6, 2),
    Problem(2, 60, 70, 4, 2, narrower_value=16),
    Problem(5, 33, 7, 8, 1, narrower=24),
    Problem(2, 4096, 3000, 16, 16),
)


def huge(head_dim: int) -> Problem:
    """Makes keys whose batch stride is beyond 2^31 elements. Their memory is never touched."""
    kv_heads = 256
    return Problem(1, 64, (1 << 31) // (kv_heads * head_dim) + 100, kv_heads, kv_heads)


CAPABILITIES = {"sm_90a": (9, 0), "sm_100f": (10, 0)}
"""The compute capability of a device that runs an architecture's kernels."""


@functools.cache
def entries() -> list[cache.Entry]:
    """Lists the kernels of the installation whose host code is available."""
    installed = runtime.manifest()
    if installed is None:
        return []
    found = (cache.find(key) for key in sorted(installed.cubins))
    return [entry for entry in found if entry is not None]


def test_host_code_is_at_hand() -> None:
    """A stale build would leave nothing to compare."""
    installed = runtime.manifest()
    assert installed is not None, "run python -m kernels.build"
    assert {entry.cubin.key for entry in entries()} == set(installed.cubins)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Builds the recording shim and loads it: host code that is loaded later calls it."""
    path = tmp_path_factory.mktemp("shim") / "libhost_shim.so"
    compiler.shared_library(path, pathlib.Path(__file__).parent / "host_shim.cc")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.cubin.key.name)
def test_launch_equals_host_code(
    entry: cache.Entry,
    shim: ctypes.CDLL,
    stand_in_process: ProcessPoolExecutor,
    tmp_path: pathlib.Path,
) -> None:
    info = cubin_info.read(entry.code)[entry.cubin.symbol]
    host = HostCode(entry.host, shim, tmp_path, info.param_bytes)
    installed = runtime.manifest()
    assert installed is not None
    calls = [
        make_call(
            entry.cubin,
            installed.directory,
            info.param_bytes,
            buffer_shapes(entry.cubin.key, problem),
        )
        for problem in (*PROBLEMS, huge(entry.cubin.key.head_dim))
    ]
    check_launches(calls, host, stand_in_process)


SAMPLE_SHAPES = (64, 64), (1, 4), (1000, 132), (70_000, 68)


def test_launches_of_sample_kernel(
    sample: cache.Entry,
    shim: ctypes.CDLL,
    stand_in_process: ProcessPoolExecutor,
    tmp_path: pathlib.Path,
) -> None:
    """The sample has clusters, a capped grid, sizes, the processor count, fp32 maps without
    swizzle.
    """
    info = cubin_info.read(sample.code)[sample.cubin.symbol]
    (tmp_path / sample.cubin.file).write_bytes(sample.code)
    host = HostCode(sample.host, shim, tmp_path, info.param_bytes)
    calls = [
        make_call(sample.cubin, tmp_path, info.param_bytes, {"x": Array("f32", shape)})
        for shape in SAMPLE_SHAPES
    ]
    check_launches(calls, host, stand_in_process)


@pytest.fixture(scope="module")
def sample() -> cache.Entry:
    """Makes a kernel that uses what the real ones do not."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(compile.prepare_process, "sm_90a").result()
        return pool.submit(remote.compile_scale).result()


def check_launches(calls: Sequence[Call], host: HostCode, process: ProcessPoolExecutor) -> None:
    """Fails unless the handler and the host code launch the same for each call of a kernel."""
    numbers = CAPABILITIES[calls[0].cubin.key.arch]
    attributes = zip(stand_in.CAPABILITY_ATTRIBUTES, numbers, strict=True)
    steer = [("set_attribute", (0, *number)) for number in attributes]
    outcomes = process.submit(stand_in.run_all, calls, steer).result()
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.error == "", call
        assert len(outcome.launches) == len(calls)
        check_launch(call, outcome, host.launch(call, outcome.addresses))


def check_launch(call: Call, outcome: stand_in.Outcome, theirs: dict[str, Any]) -> None:
    """Fails unless one launch of the outcome has the call's operands and equals the host code's."""
    launch = call.cubin.launch
    arrays = dict(zip(launch.operands, call.operands, strict=True))
    arrays |= results(call.cubin, arrays)
    empty = {name for name, array in arrays.items() if 0 in array.shape}
    place, anchor = next(
        (place, param)
        for place, param in enumerate(launch.params)
        if param.kind in ("pointer", "tensor_map") and param.buffer not in empty
    )
    addresses = [address(anchor, x["params"][place]) for x in outcome.launches]
    assert addresses.count(outcome.addresses[anchor.buffer]) == 1, (call.operands, anchor.name)
    ours = outcome.launches[addresses.index(outcome.addresses[anchor.buffer])]
    for field in ("symbol", "grid", "block", "cluster", "programmatic", "smem"):
        assert ours[field] == theirs[field], (call.operands, field)
    for param, mine, other in zip(launch.params, ours["params"], theirs["params"], strict=True):
        if param.kind == "pointer" and param.buffer in empty:
            continue  # Nothing is there, and the two addresses of it may differ.
        assert comparable(param, mine) == comparable(param, other), (call.operands, param.name)


def address(param: Param, text: str) -> int:
    """Returns where the buffer of a pointer or a tensor map lies."""
    data = bytes.fromhex(text)
    if param.kind == "pointer":
        return int.from_bytes(data, "little")
    return tensor_map.decode(data).address


def comparable(param: Param, text: str) -> Any:
    """Returns a parameter's bytes, or the fields of a tensor map."""
    data = bytes.fromhex(text)
    if param.kind != "tensor_map":
        return data
    fields = tensor_map.decode(data)
    return dataclasses.replace(fields, other_flags=fields.other_flags & ~tensor_map.DSL_FLAG)


def make_call(
    cubin: Cubin,
    directory: pathlib.Path,
    param_bytes: tuple[int, ...],
    shapes: dict[str, Array],
) -> Call:
    """Returns the call of a kernel on operands of these shapes."""
    attributes = {p.name: next(SCALARS[p.kind]) for p in cubin.launch.params if p.kind in SCALARS}
    operands = tuple(shapes[name] for name in cubin.launch.operands)
    attributes["kernel"] = cubin.key.name
    return Call(cubin, directory, param_bytes, operands, attributes)


def buffer_shapes(key: KernelKey, problem: Problem) -> dict[str, Array]:
    """Returns operands by name: the user's arrays, and what the passes before this one return."""
    p, h = problem, key.head_dim - problem.narrower
    value_dim = key.head_dim - problem.narrower_value
    rows, keys = (p.batch, p.query_length, p.heads), (p.batch, p.key_length, p.kv_heads)
    per_row = Array("f32", (p.batch, p.heads, p.query_length))
    shapes = {"q": (*rows, h), "dq": (*rows, h), "k": (*keys, h), "v": (*keys, value_dim)}
    shapes |= {"o": (*rows, value_dim), "do": (*rows, value_dim)}
    shapes |= {f"{name}_tangent": shapes[name] for name in ("q", "k", "v")}
    arrays = {name: Array(key.dtype, shape) for name, shape in shapes.items()}
    arrays |= {"extents": Array("i32", (p.batch, 4)), "lse": per_row, "dlse": per_row}
    padded = -(-p.query_length // STATISTICS_ROWS) * STATISTICS_ROWS
    arrays |= {"row_statistics": Array("f32", (p.batch, p.heads, padded, 4))}
    is_split = key.kernel in (Pass.FORWARD_SPLIT, Pass.FORWARD_JOIN)
    if key.ranges or key.sinks or is_split:
        tiles = -(-p.query_length // TILE_ROWS)
        of_rows, of_tiles = Array("i32", (p.batch, p.query_length)), Array("i32", (p.batch, tiles))
        arrays |= dict.fromkeys(("row_low", "row_high", "tag_low", "tag_high"), of_rows)
        arrays |= {
            "row_table": Array("i32", (p.batch, tiles, 4)),
            "tag_key": Array("i32", (p.batch, p.key_length)),
            "tag_tiles": of_tiles,
            "query_order": of_tiles,
            "key_order": Array("i32", (p.batch, p.key_length)),
            "soft_cap": Array("f32", (p.batch % 2 if is_split else 1,)),
            "sinks": Array("f32", (0 if is_split and p.batch % 2 else p.heads,)),
            "max_logit": Array("f32", (p.batch, p.heads if p.batch % 2 else 0)),
            "mask_bits": Array("i32", (p.batch, p.heads, tiles, 4, 64)),
            "mask_some": Array("i32", (p.batch, p.kv_heads, tiles, 1)),
            "mask_every": Array("i32", (p.batch, p.kv_heads, tiles, 1)),
        }
    row_blocks = -(-p.query_length * p.heads // p.kv_heads // SPLIT_ROWS)
    parts = splits.shape(1 + p.key_length % 40, row_blocks, p.heads if p.batch % 2 else 0)
    tail = p.key_length % 7, p.key_length % 7 * p.batch, 0
    arrays |= {"parts": Array("i32", parts), "tail": Array("i32", tail)}
    arrays |= {"dq_order": Array("i32", (p.batch % 2, p.heads, 1))}
    arrays |= {"page_table": Array("i32", (p.batch, 1 + p.key_length % 9))}
    of_bias = (1, p.heads, *((p.query_length, p.key_length) if p.batch % 2 else (1, 900)))
    if p.key_length > 1000:
        of_bias = (1, 1, 1, p.key_length)  # More would take time and memory.
    lengths, tile = (p.query_length, p.key_length), BIAS_GRADIENT_TILES[key.arch]
    shape = bias_buffer.gradient_shape(of_bias, lengths, tile)
    arrays |= {"bias": Array("f32", of_bias), "dbias_shape": Array("i32", shape)}
    if key.kernel is Pass.FORWARD_JOIN:
        arrays |= results(earlier(key, Pass.FORWARD_SPLIT), arrays)
    if key.kernel in (Pass.BACKWARD, Pass.BACKWARD_POST, Pass.BIAS_GRADIENT):
        arrays |= results(earlier(key, Pass.BACKWARD_PRE), arrays)
    return arrays


def earlier(key: KernelKey, kernel: Pass) -> Cubin:
    """Returns the kernel of an earlier pass whose results this key's kernel reads."""
    installed = runtime.manifest()
    assert installed is not None
    plain = dict.fromkeys(("band", "ranges", "soft_cap", "bias", "pair"), False)
    want = dataclasses.replace(key, kernel=kernel, **plain)
    return installed.cubins[want]


def results(cubin: Cubin, arrays: dict[str, Array]) -> dict[str, Array]:
    """Returns what a kernel returns for operands of these shapes."""
    shapes = {name: array.shape for name, array in arrays.items()}
    return {
        r.name: Array(r.dtype, tuple(evaluate_size(size, shapes) for size in r.shape))
        for r in cubin.launch.results
    }


class HostCode:
    """The CuTe-DSL host code of one kernel, on the shim, which records the launches of the last."""

    def __init__(
        self,
        code: compile.HostCode,
        shim: ctypes.CDLL,
        folder: pathlib.Path,
        param_bytes: tuple[int, ...],
    ) -> None:
        self._arguments = code.arguments
        self._shim = shim
        (folder / "host.o").write_bytes(code.object_file)
        compiler.library_of_object(folder / "libhost.so", folder / "host.o")
        library = ctypes.CDLL(str(folder / "libhost.so"))
        self._shim.shim_log.restype = ctypes.c_char_p
        self._entry = getattr(library, code.entry)
        sizes = (ctypes.c_int * len(param_bytes))(*param_bytes)
        self._shim.shim_set_params(sizes, len(param_bytes))
        self._module = ctypes.c_void_p()
        module, status, device = ctypes.pointer(self._module), ctypes.c_int(), ctypes.c_int()
        library._mlir_host_cuda_init(_pointers(module, status))
        assert status.value == 0
        library._mlir_host_cuda_load_to_device(_pointers(module, device, status))
        assert status.value == 0

    def launch(self, call: Call, addresses: dict[str, int]) -> dict[str, Any]:
        """Returns what the host code launches for the same call."""
        names = call.cubin.launch.operands
        shapes = {n: a.shape for n, a in zip(names, call.operands, strict=True)}
        values = [host_value(p, shapes, call, addresses) for p in self._arguments]
        stream, status = ctypes.c_void_p(), ctypes.c_int()
        pointers = _pointers(*values, stream, status)
        self._entry(pointers, len(pointers))
        assert status.value == 0
        return json.loads(self._shim.shim_log().decode())


def host_value(
    param: Param, shapes: dict[str, tuple[int, ...]], call: Call, addresses: dict[str, int]
) -> Any:
    """Returns a host argument as a ctypes value.

    Host functions of one family share a signature; what this kernel lacks is never read.
    """
    match param.kind:
        case "pointer":
            return ctypes.c_void_p(addresses.get(param.buffer))
        case "dim":
            shape = shapes.get(param.buffer)
            return ctypes.c_int32(0 if shape is None else shape[param.axes[0]])
        case "size":
            return ctypes.c_int32(evaluate_size(param.size, shapes))
        case "f32":
            return ctypes.c_float(float(call.attributes[param.name]))
        case "i32":
            return ctypes.c_int32(int(call.attributes.get(param.name, 0)))
        case "sm_count":
            return ctypes.c_int32(MULTIPROCESSORS)
        case _:
            raise ValueError(f"host argument {param.name} has unknown kind {param.kind}")


def _pointers(*values: Any) -> Any:
    """Returns the void*[] that DSL entry points expect; the values must outlive it."""
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

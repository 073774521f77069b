"""Tests the handler on real devices: several GPUs, several threads, CUDA graphs, many runs."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import fa4_jax
from fa4_jax.target import current_target

GRAPH_FLAGS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"
    " --xla_gpu_graph_min_graph_size=1"
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    target = current_target()
    if target.arch is None:
        pytest.skip(target.unavailable)


def operands(seed: int, length: int, head_dim: int = 64, heads: int = 4) -> list[jax.Array]:
    """Makes random q, k, v and output cotangent, bf16."""
    shape = (2, length, heads, head_dim)
    return [
        jax.random.normal(k, shape, jnp.bfloat16) for k in jax.random.split(jax.random.key(seed), 4)
    ]


@jax.jit
def gradients(q: jax.Array, k: jax.Array, v: jax.Array, output_bar: jax.Array):
    """Returns output, dq, dk, dv of a causal, deterministic call on the kernels."""

    def call(*primals: jax.Array) -> jax.Array:
        return fa4_jax.attention(
            *primals, is_causal=True, deterministic=True, implementation="kernel"
        )

    output, pull_back = jax.vjp(call, q, k, v)
    return output, *pull_back(output_bar)


def same(results, expected) -> bool:
    """Returns whether two values are bitwise equal."""
    return all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_over_200_runs_and_batch_neighbours(head_dim: int, seed: int):
    inputs = operands(seed, 700, head_dim)
    first = gradients(*inputs)
    for _ in range(200):
        assert same(gradients(*inputs), first)
    alone = gradients(*(x[:1] for x in inputs))
    assert same(alone, [x[:1] for x in first])


def test_threads(seed: int):
    problems = [operands(seed + i, 200 + 97 * i, (64, 128)[i % 2]) for i in range(8)]
    expected = [gradients(*p) for p in problems]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            for result, truth in zip(
                pool.map(lambda p: gradients(*p), problems), expected, strict=True
            ):
                assert same(result, truth)


def test_two_devices(seed: int):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    inputs = operands(seed, 500)
    expected = gradients(*inputs)
    for device in jax.devices()[:2]:
        there = [jax.device_put(x, device) for x in inputs]
        results = gradients(*there)
        assert results[0].devices() == {device}
        assert same(results, expected)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = PartitionSpec("data")
    sharded = jax.jit(
        jax.shard_map(gradients, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4)
    )
    assert same(sharded(*inputs), expected)


def test_cuda_graphs(seed: int, tmp_path: pathlib.Path):
    """A fresh process in which XLA captures every launch in one graph gives the same bits."""
    script = (
        "import numpy as np, sys\n"
        "from tests.gpu.test_runtime import gradients, operands\n"
        "import jax\n"
        f"inputs = operands({seed}, 600)\n"
        "for _ in range(5):\n"
        "    results = jax.block_until_ready(gradients(*inputs))\n"
        "np.savez(sys.argv[1], *(np.asarray(x, np.float32) for x in results))\n"
    )
    path, dump = tmp_path / "results.npz", tmp_path / "dump"
    flags = f"{GRAPH_FLAGS} --xla_dump_to={dump}"
    environment = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, "-c", script, str(path)], env=environment, check=True)
    (thunks,) = dump.glob("*.jit_gradients.*thunk_sequence_after_thunk_passes.txt")
    graph, *inside = thunks.read_text().strip().splitlines()
    assert "kCommandBuffer" in graph
    assert sum("kCustomCall" in line for line in inside) == 4
    with np.load(path) as saved:
        captured = [saved[name] for name in saved.files]
    expected = [np.asarray(x, np.float32) for x in gradients(*operands(seed, 600))]
    assert same(captured, expected)

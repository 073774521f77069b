"""Context parallelism refuses bad input and says what to do instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fa4_jax import attention, parallel
from fa4_jax.parallel import AllGather, Ring, RingUlysses, Ulysses
from tests.parallel_cases import make_mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SEQ = P(None, "seq")


def operands(length: int = 16, heads: tuple[int, int] = (4, 2)) -> list[jax.Array]:
    return [jnp.ones((2, length, n, 8)) for n in (heads[0], heads[1], heads[1])]


@pytest.mark.parametrize(
    ("scheme", "specs", "message"),
    [
        (Ring("sequence"), SEQ, "axis 'sequence' is not in the mesh, which has 'seq', 'other'"),
        (RingUlysses("seq", "x"), SEQ, "axis 'x' is not in the mesh"),
        (Ring("seq"), None, r"specs must be given on a mesh of Auto axes.*PartitionSpec\('data'"),
        (Ring("seq"), P(), r"query is sharded along its length over mesh axes \(\), but Ring"),
        (Ring("seq"), P(None, "other"), "reshard it, or choose the scheme for these axes"),
        (Ring("seq"), P(None, "seq", None, "other"), "head_dim, over mesh axis 'other': shard its"),
        (Ring("seq"), (SEQ, SEQ, P("other", "seq")), "key and value are sharded differently"),
        (Ring("seq"), (SEQ, P("other", "seq"), P("other", "seq")), "reshard one of them"),
        (Ring("seq"), (SEQ, P(None, "seq", "other"), P(None, "seq", "other")), "key's heads are"),
        (Ring("seq"), (SEQ, SEQ), "one PartitionSpec or three"),
        (Ring("seq"), P(None, "seq", None, None, None), "more entries than its 4 dimensions"),
        (Ring("seq"), P("data", "seq"), "specs name the axis 'data', which is not in the mesh"),
    ],
)
def test_meshes_and_specs(scheme, specs, message):
    mesh = make_mesh(AUTO, seq=4, other=2)
    with pytest.raises(ValueError, match=message):
        parallel.attention(*operands(), scheme=scheme, mesh=mesh, specs=specs)


def test_a_traced_scale():
    mesh = make_mesh(AUTO, seq=4)

    def run(scale: Any) -> Any:
        options = {"scheme": Ring("seq"), "mesh": mesh, "specs": SEQ}
        return parallel.attention(*operands(), **options, scale=scale)

    with pytest.raises(NotImplementedError, match="scale is traced"):
        jax.jit(run)(0.5)


def test_no_mesh():
    with pytest.raises(ValueError, match="there is no mesh: pass mesh="):
        parallel.attention(*operands(), scheme=Ring("seq"), specs=SEQ)


@pytest.mark.parametrize(
    ("scheme", "heads", "message"),
    [
        (Ulysses("seq"), (6, 2), "query has 6 heads .* the 4 devices of mesh axis 'seq': use Ring"),
        (Ulysses("seq"), (12, 6), "key has 6 heads on a device, which Ulysses cannot share out"),
        (RingUlysses("other", "seq"), (6, 2), "RingUlysses with a smaller Ulysses axis"),
    ],
)
def test_heads_that_ulysses_cannot_share_out(scheme, heads, message):
    mesh = make_mesh(AUTO, other=2, seq=4)
    with pytest.raises(ValueError, match=message):
        parallel.attention(
            *operands(heads=heads), scheme=scheme, mesh=mesh, specs=P(None, scheme.axes)
        )


@pytest.mark.parametrize("scheme", [Ring("seq", "zigzag"), AllGather("seq", "zigzag")])
def test_odd_numbers_of_chunks(scheme):
    x = jnp.ones((2, 12, 4, 8))
    message = "takes 8 equal chunks, but axis 1 of shape .* has length 12: pad it"
    with pytest.raises(ValueError, match=message):
        parallel.to_zigzag(x, 4)
    with pytest.raises(ValueError, match=message):
        parallel.from_zigzag(x, 4)
    mesh = make_mesh(AUTO, seq=4)
    with pytest.raises(ValueError, match="multiples of 8, got 12: pad before to_zigzag"):
        parallel.attention(x, x, x, scheme=scheme, mesh=mesh, specs=SEQ)
    local = jax.shard_map(
        lambda x: parallel.local_attention(x, x, x, scheme=scheme),
        mesh=mesh,
        in_specs=SEQ,
        out_specs=SEQ,
    )
    with pytest.raises(ValueError, match="the shards have 3 rows and 3 keys: pad the sequences"):
        local(x)


def test_layouts_and_axes():
    with pytest.raises(ValueError, match="layout must be one of"):
        Ring("seq", "striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are both 'seq'"):
        RingUlysses("seq", "seq")


def test_outside_and_inside_shard_map():
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"axis 'seq' is no manual axis here .*: none"):
        parallel.local_attention(q, k, v, scheme=Ring("seq"))
    mesh = make_mesh(AUTO, seq=4)

    def body(*x: Any) -> Any:
        return parallel.attention(*x, scheme=Ring("seq"), specs=SEQ)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(SEQ,) * 3, out_specs=SEQ)
    with pytest.raises(ValueError, match=r"is manual here, .*: call fa4_jax.parallel.local_att"):
        mapped(q, k, v)


def test_explicit_sequence_axis_outside_of_this_module():
    mesh = make_mesh(EXPLICIT, seq=4)
    placed = [jax.device_put(np.asarray(x), NamedSharding(mesh, SEQ)) for x in operands()]
    with pytest.raises(ValueError, match=r"fa4_jax\.parallel\.attention"):
        attention(*placed)


def test_arguments_are_checked_as_in_attention():
    mesh = make_mesh(AUTO, seq=4)
    options: dict[str, Any] = {"scheme": Ring("seq"), "mesh": mesh, "specs": SEQ}
    q, k, v = operands()
    wrong: dict[str, Any]
    with pytest.raises(ValueError, match="key_value_seq_lengths must have shape"):
        parallel.attention(q, k, v, key_value_seq_lengths=np.ones(1, np.int32), **options)
    with pytest.raises(ValueError, match="return_residual must be True or False"):
        wrong = {"return_residual": 1}
        parallel.attention(q, k, v, **options, **wrong)
    with pytest.raises(ValueError, match="implementation must be one of"):
        wrong = {"implementation": "fast"}
        parallel.attention(q, k, v, **options, **wrong)
    with pytest.raises(NotImplementedError, match="implementation='kernel'"):
        parallel.attention(q, k, v, implementation="kernel", **options)

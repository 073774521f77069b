"""Trains a small diffusion transformer that makes an image in one step (MeanFlow).

    python examples/meanflow.py --output build/meanflow

The model predicts the average velocity u(z, r, t) between times r and t on the straight path
z = (1 - t) image + t noise, whose velocity is v = noise - image. Its loss needs the derivative of
u along the path, which is a jvp through attention, and a gradient over that jvp with the target
held constant (Geng et al. 2025, "Mean Flows for One-step Generative Modeling"):

    target = v - (t - r) du/dt,    du/dt = the jvp of u at (z, r, t) along (v, 0, 1)

`fa4_jax.attention` is differentiated from outside, with no argument for it. The images are rings of
random size at random places. The script takes 130 seconds on two cores; it ends with a picture of
samples below rings, and with how far samples are from the nearest ring, before and after training.
It exits with 1 unless they have come much nearer.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import fa4_jax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIDE, PATCH = 16, 4
TOKENS, PIXELS = (SIDE // PATCH) ** 2, PATCH * PATCH


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model; its width is divided among the heads."""

    layers: int
    width: int
    heads: int


class Batch(NamedTuple):
    """Images and noise [B, 16, 16], times r <= t [B]."""

    images: jax.Array
    noise: jax.Array
    r: jax.Array
    t: jax.Array


def rings(key: jax.Array, count: int) -> jax.Array:
    """Returns images [count, 16, 16] in [-1, 1] of one bright ring each."""
    where, size = jax.random.split(key)
    center = jax.random.uniform(where, (count, 2, 1, 1), minval=5.5, maxval=SIDE - 6.5)
    radius = jax.random.uniform(size, (count, 1, 1), minval=2.5, maxval=4.5)
    pixels = jnp.stack(jnp.meshgrid(jnp.arange(SIDE), jnp.arange(SIDE), indexing="ij"))[None]
    distance = jnp.sqrt(((pixels - center) ** 2).sum(1))
    return 2 * jnp.exp(-((distance - radius) ** 2)) - 1


def patches(images: jax.Array) -> jax.Array:
    """Images [B, 16, 16] -> patches [B, 16 of them, 16 pixels]."""
    parts = images.reshape(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    return parts.transpose(0, 1, 3, 2, 4).reshape(-1, TOKENS, PIXELS)


def joined(tokens: jax.Array) -> jax.Array:
    """The images that have these patches; the inverse of `patches`."""
    parts = tokens.reshape(-1, SIDE // PATCH, SIDE // PATCH, PATCH, PATCH)
    return parts.transpose(0, 1, 3, 2, 4).reshape(-1, SIDE, SIDE)


def frequencies(times: jax.Array, width: int) -> jax.Array:
    """Sines and cosines [B, width] of times [B] in [0, 1]."""
    scales = 2.0 ** jnp.linspace(0, 6, width // 2)[None]
    angles = times[:, None] * scales
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Block(nnx.Module):
    """Attention and a perceptron, whose inputs and outputs the times scale and shift (adaLN)."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width = sizes.width
        self.heads = sizes.heads
        self.norm = nnx.LayerNorm(width, use_bias=False, use_scale=False, rngs=rngs)
        self.project_in = nnx.Linear(width, 3 * width, rngs=rngs)
        self.project_out = nnx.Linear(width, width, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)
        zeros = nnx.initializers.zeros_init()
        self.modulate = nnx.Linear(width, 6 * width, kernel_init=zeros, rngs=rngs)

    def attended(self, x: jax.Array) -> jax.Array:
        """Self-attention of x [B, 16, width]."""
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = jnp.unstack(self.project_in(x).reshape(heads), axis=2)
        return self.project_out(fa4_jax.attention(q, k, v).reshape(x.shape))

    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        shift, scale, gate, *others = jnp.split(self.modulate(times)[:, None], 6, axis=-1)
        x = x + gate * self.attended(self.norm(x) * (1 + scale) + shift)
        shift, scale, gate = others
        y = self.norm(x) * (1 + scale) + shift
        return x + gate * self.narrow(nnx.gelu(self.widen(y)))


class Velocity(nnx.Module):
    """The average velocity u(z, r, t) [B, 16, 16]."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        width = sizes.width
        self.embed = nnx.Linear(PIXELS, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, TOKENS, width)))
        self.times = nnx.Linear(2 * width, width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.predict = nnx.Linear(width, PIXELS, rngs=rngs)
        self.width = width

    def __call__(self, z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
        known = [frequencies(times, self.width) for times in (t, t - r)]
        times = nnx.silu(self.times(jnp.concatenate(known, axis=-1)))
        x = self.embed(patches(z)) + self.positions[...]
        for block in self.blocks:
            x = block(x, times)
        return joined(self.predict(self.norm(x)))


def make_batch(key: jax.Array, size: int) -> Batch:
    """Images, noise and times; half of the pairs of times are equal."""
    keys = jax.random.split(key, 4)
    times = jax.nn.sigmoid(jax.random.normal(keys[2], (2, size)) - 0.4)
    r, t = jnp.sort(times, axis=0)
    r = jnp.where(jax.random.bernoulli(keys[3], 0.5, (size,)), t, r)
    noise = jax.random.normal(keys[1], (size, SIDE, SIDE))
    return Batch(rings(keys[0], size), noise, r, t)


def loss(model: Velocity, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the squared error to MeanFlow's target with each image's divided by itself as a
    constant, so that all images weigh alike; and the mean squared error.
    """
    graph, state = nnx.split(model)
    images, noise, r, t = batch
    z = images + t[:, None, None] * (noise - images)

    def velocity(z: jax.Array, r: jax.Array, t: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(z, r, t)

    tangents = (noise - images, jnp.zeros_like(r), jnp.ones_like(t))
    u, du_dt = jax.jvp(velocity, (z, r, t), tangents)
    target = noise - images - (t - r)[:, None, None] * du_dt
    error = ((u - jax.lax.stop_gradient(target)) ** 2).mean((1, 2))
    return (error / (jax.lax.stop_gradient(error) + 1e-2)).mean(), error.mean()


def train(model: Velocity, options: argparse.Namespace) -> list[float]:
    """Trains a model in place; returns the error of each step."""
    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule, b2=0.99), wrt=nnx.Param)

    @nnx.jit
    def step(model: Velocity, optimizer: Any, key: jax.Array) -> jax.Array:
        batch = make_batch(key, options.batch)
        (_, error), gradients = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        optimizer.update(model, gradients)
        return error

    keys = jax.random.split(jax.random.key(options.seed), options.steps)
    errors = [step(model, optimizer, key) for key in tqdm(keys, unit="step")]
    return [float(error) for error in errors]


def sample(model: Velocity, key: jax.Array, count: int) -> jax.Array:
    """Makes images [count, 16, 16] of noise, in one step."""
    noise = jax.random.normal(key, (count, SIDE, SIDE))
    return noise - model(noise, jnp.zeros(count), jnp.ones(count))


def distance_to_rings(images: jax.Array) -> float:
    """Returns the mean, over images, of the smallest root mean square distance to a ring."""
    known = rings(jax.random.key(2), 4096).reshape(4096, -1)
    images = images.reshape(len(images), -1)
    squares = (images**2).sum(1)[:, None] - 2 * images @ known.T + (known**2).sum(1)[None]
    return float(jnp.sqrt(jnp.maximum(squares.min(1), 0) / known.shape[1]).mean())


def picture(samples: jax.Array, path: Path) -> None:
    """Draws samples below rings."""
    images = jnp.concatenate([rings(jax.random.key(4), 20), samples])
    rows = np.asarray(images).reshape(-1, 10, SIDE, SIDE)
    figure, axes = plt.subplots(len(rows), 10, figsize=(10, len(rows)))
    for line, images in zip(axes, rows, strict=True):
        for axis, image in zip(line, images, strict=True):
            axis.imshow(image, cmap="gray", vmin=-1, vmax=1)
            axis.axis("off")
    figure.suptitle("two rows of rings, then samples of one step each")
    figure.savefig(path, dpi=100)


def main() -> int:
    """Returns 1 if the samples are no rings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/meanflow"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    model = Velocity(Sizes(options.layers, options.width, options.heads), nnx.Rngs(options.seed))
    before = distance_to_rings(sample(model, jax.random.key(3), 40))
    errors = train(model, options)
    samples = sample(model, jax.random.key(3), 40)
    picture(samples, options.output / "samples.png")
    after = distance_to_rings(samples)
    tenth = max(1, len(errors) // 10)
    print(f"error: {np.mean(errors[:tenth]):.3f}, at last {np.mean(errors[-tenth:]):.3f}")
    print(f"distance of samples to the nearest ring: {before:.3f}, after training {after:.3f}")
    print(f"samples: {options.output / 'samples.png'}")
    return int(not after < 0.6 * before)


if __name__ == "__main__":
    sys.exit(main())

"""Draws what the warps of a CTA do, block by block, by the emulator's timing estimate.

    python -m tests.emulator.pipelines    # writes docs/diagrams/<kernel>_pipeline.svg

One picture a kernel: a few key blocks (forward) or query blocks (backward) of one CTA or pair. The
drawing is a function of the kernel's text and of the rates, so that the test beside this file can
compare the committed pictures with what the kernels give today.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from benchmarks.grid_model.recording import Sizes, operands, problem_of
from fa4_jax.key import KernelKey, Pass
from fa4_jax.plan import scalars
from kernels import emulator
from kernels.emulator import Policy
from kernels.emulator.driver import arguments
from kernels.emulator.machine.trace import Trace
from kernels.emulator.timing.rates import RATES
from kernels.emulator.timing.replay import Timing, estimate
from kernels.emulator.timing.timeline import svg
from tests.emulator import attention

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs/diagrams"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A kernel of head dim 128, and the sizes of the attention whose first CTA or pair is drawn."""

    key: KernelKey
    sizes: Sizes

    @property
    def path(self) -> pathlib.Path:
        """The committed file."""
        return FOLDER / f"{self.key.name}_pipeline.svg"

    def timing(self) -> Timing:
        """The estimate of the first CTA, or of the first cluster's CTAs."""
        key, code = self.key, attention.ptx(self.key)
        problem = problem_of(key, self.sizes)
        packed = arguments.pack(
            code.launch, operands(key, problem, self.sizes), scalars(problem), multiprocessors=1
        )
        trace = Trace(frozenset(range(code.launch.cluster[0])))
        emulator.launch(
            code.text,
            code.symbol,
            **packed.keywords,
            policy=Policy(races=False),
            names=attention.names(key),
            trace=trace,
        )
        return estimate(trace, RATES[key.arch])

    def drawn(self) -> str:
        """The SVG."""
        sizes = self.sizes
        title = f"{self.key.name}: {sizes.query_length} queries, {sizes.key_length} keys"
        return svg(self.timing(), title, attention.names(self.key).roles)


PICTURES = (
    Picture(KernelKey("sm_90a", Pass.FORWARD, "bf16", 128), Sizes(1, 192, 480)),
    Picture(KernelKey("sm_90a", Pass.BACKWARD, "bf16", 128), Sizes(1, 256, 128)),
    Picture(KernelKey("sm_100f", Pass.FORWARD, "bf16", 128), Sizes(1, 256, 512)),
    Picture(KernelKey("sm_100f", Pass.BACKWARD, "bf16", 128), Sizes(1, 512, 128)),
)


def main() -> None:
    """Entry point."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        picture.path.write_text(picture.drawn())
        print(picture.path.name)
    attention.close()


if __name__ == "__main__":
    main()

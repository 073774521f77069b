"""python -m kernels.diagrams docs: a page and pictures of the kernels, from their descriptions.

Writes `kernels.md` and `diagrams/*.svg` into the folder: for a kernel of each family its roles and
barriers as a graph, its tables, and maps of its memories. A test compares them with what lies in
the repository, so that they stay as the kernels are. Nothing here needs CuTe-DSL.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Sequence

from fa4_jax.key import KernelKey, Pass
from kernels import memory_maps
from kernels.description import Arrival, Barrier, Columns, Description, Region, Role, Signal
from kernels.descriptions import describe

PAGE, PICTURES = "kernels.md", "diagrams"

_HEAD = """# The kernels

`python -m kernels.diagrams docs` writes this page from `kernels/*/*_description.py`, and a test
compares the two. It shows a kernel of each family. The others of a family differ in sizes; a
backward that is not deterministic has neither `dq_turn` nor `dq_added`: no warp orders its dQ. A
persistent forward of a band on Hopper also has `tile`, 4 bytes after the barriers: the index of the
tile that a ticket has dealt.

In the graphs an arrow goes from the role that completes a phase of an mbarrier to the roles that
wait for it. A thick arrow is a copy by TMA, which announces its bytes; a dotted one is a commit of
the tensor core, which arrives when the products issued before are complete; a thin one is an
arrival of threads; a line without a head is a named barrier, at which both sides meet. A number in
brackets says how many barriers of a name there are. In the maps of memory what is orange lies in
memory that something else has, too. Arrivals are those that complete a phase; "16 bits" is the
kernel's storage type, bf16 or fp16.
"""
_ARROWS = {Arrival.BYTES: "==>", Arrival.COMMIT: "-.->"}
"""The arrow of a kind of arrival, where it is not a thin one."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A kernel that the page shows, as the example of its family."""

    title: str
    key: KernelKey

    @property
    def slug(self) -> str:
        """The name of its pictures."""
        return self.key.name


def _key(
    arch: str, kernel: Pass, head_dim: int, value_dim: int, ordered: bool, pair: bool = False
) -> KernelKey:
    return KernelKey(
        arch=arch,
        kernel=kernel,
        dtype="bf16",
        head_dim=head_dim,
        value_dim=value_dim,
        band=False,
        deterministic=ordered,
        pair=pair,
    )


SHOWN = (
    Shown("Hopper forward", _key("sm_90a", Pass.FORWARD, 128, 128, False)),
    Shown(
        "Hopper forward, rows with ranges of keys",
        KernelKey("sm_90a", Pass.FORWARD, "bf16", 128, band=True, ranges=True),
    ),
    Shown("Split forward, Hopper", _key("sm_90a", Pass.FORWARD_SPLIT, 128, 128, False)),
    Shown("Kernel after a split forward", _key("sm_90a", Pass.FORWARD_JOIN, 128, 128, False)),
    Shown(
        "Gradient of a bias, Hopper",
        KernelKey("sm_90a", Pass.BIAS_GRADIENT, "bf16", 128, band=True),
    ),
    Shown("Hopper tangents", _key("sm_90a", Pass.TANGENT, 128, 128, False)),
    Shown("Hopper Hessian, of queries", _key("sm_90a", Pass.HESSIAN_QUERY, 128, 128, False)),
    Shown("Hopper Hessian, of keys", _key("sm_90a", Pass.HESSIAN_KEY, 128, 128, False)),
    Shown("Hopper backward", _key("sm_90a", Pass.BACKWARD, 128, 128, True)),
    Shown("Hopper backward, a pair of CTAs", _key("sm_90a", Pass.BACKWARD, 256, 256, True)),
    Shown("Blackwell forward, two query tiles", _key("sm_100f", Pass.FORWARD, 128, 128, False)),
    Shown("Blackwell forward, a pair of CTAs", _key("sm_100f", Pass.FORWARD, 256, 256, False)),
    Shown("Blackwell tangents", _key("sm_100f", Pass.TANGENT, 128, 128, False)),
    Shown("Blackwell backward", _key("sm_100f", Pass.BACKWARD, 128, 128, True)),
    Shown("Blackwell backward, query tiles of 64", _key("sm_100f", Pass.BACKWARD, 192, 128, True)),
    Shown("Blackwell backward, a pair of CTAs", _key("sm_100f", Pass.BACKWARD, 256, 256, True)),
    Shown(
        "Blackwell backward, a pair of CTAs with 128 keys each",
        _key("sm_100f", Pass.BACKWARD, 128, 128, True, pair=True),
    ),
    Shown(
        "Blackwell backward, a pair of CTAs with 128 keys each, query tiles of 64",
        _key("sm_100f", Pass.BACKWARD, 192, 128, True, pair=True),
    ),
    Shown(
        "Kernel after a Blackwell backward", _key("sm_100f", Pass.BACKWARD_POST, 128, 128, False)
    ),
)


def files() -> dict[str, str]:
    """The text of every file, by its path in the folder of the documentation."""
    texts, sections = dict[str, str](), [_HEAD]
    for shown in SHOWN:
        description = describe(shown.key)
        pictures = {"shared": memory_maps.shared_memory(description)}
        if description.tensor_memory:
            pictures["tensor"] = memory_maps.tensor_memory(description)
        for kind, memory in pictures.items():
            texts[f"{PICTURES}/{shown.slug}_{kind}.svg"] = memory_maps.svg(memory)
        sections.append(_section(shown, description, tuple(pictures)))
    return {PAGE: "\n".join(sections), **texts}


def _section(shown: Shown, description: Description, pictures: Sequence[str]) -> str:
    """What the page says of one kernel."""
    ctas = "A pair of CTAs" if description.ctas == 2 else "A CTA"
    persistent = ", which takes tile after tile" if description.division.persistent else ""
    each = " each" if description.ctas == 2 else ""
    has = f"{ctas} of {description.threads} threads{each}{persistent}."
    shown_maps = [f"![{kind} memory]({PICTURES}/{shown.slug}_{kind}.svg)" for kind in pictures]
    tables = [
        _table("Roles", ("role", "warps", "registers", "job"), map(_role, description.roles)),
        _table(
            "mbarriers",
            ("name", "number", "arrivals", "completed by", "waited for by", "once per"),
            (_barrier(description, barrier) for barrier in description.barriers),
        ),
        _table(
            "Named barriers",
            ("name", "numbers", "threads", "roles", "meaning"),
            (
                (
                    barrier.name,
                    _range(barrier.first, barrier.first + barrier.count),
                    str(barrier.threads),
                    ", ".join(barrier.roles),
                    barrier.meaning,
                )
                for barrier in description.named_barriers
            ),
        ),
        _table(
            "Shared memory",
            ("region", "first byte", "bytes", "shape", "type", "memory of", "holds"),
            (_region(description, region) for region in description.regions),
        ),
        _table(
            "Tensor memory",
            ("name", "columns", "some of", "holds"),
            map(_columns, description.tensor_memory),
        ),
        _table(
            "Tensor maps",
            ("name", "buffer", "box", "swizzle", "used to"),
            (
                (
                    wanted.name,
                    wanted.buffer,
                    f"{wanted.rows} x {wanted.columns}",
                    f"{wanted.span_bytes} bytes",
                    "store" if wanted.store else "load",
                )
                for wanted in description.maps
            ),
        ),
    ]
    parts = [f"## {shown.title}", f"`{shown.key.name}`. {has}", graph(description)]
    return "\n\n".join([*parts, *filter(None, tables), *shown_maps]) + "\n"


def graph(description: Description) -> str:
    """Roles and barriers as a Mermaid flow chart."""
    lines = ["```mermaid", "flowchart LR"]
    for role in description.roles:
        if role.name != "idle":
            lines.append(f'  {role.name}["{role.name}<br/>{_warps(role)}"]')
    arrows = dict[tuple[str, str, str], list[str]]()
    for barrier in description.barriers:
        for signal in barrier.signals:
            for role in barrier.waits:
                arrow = signal.role, _ARROWS.get(signal.arrival, "-->"), role
                arrows.setdefault(arrow, []).append(_counted(barrier.name, barrier.count))
    for barrier in description.named_barriers:
        arrow = barrier.roles[0], "---", barrier.roles[-1]
        arrows.setdefault(arrow, []).append(_counted(barrier.name, barrier.count))
    for (begin, arrow, end), names in arrows.items():
        lines.append(f'  {begin} {arrow}|"{"<br/>".join(names)}"| {end}')
    return "\n".join([*lines, "```"])


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{name} [{count}]"


def _warps(role: Role) -> str:
    word = "warp" if len(role.all_warps) == 1 else "warps"
    return f"{word} {_range(role.all_warps.start, role.all_warps.stop)}"


def _range(begin: int, end: int) -> str:
    return str(begin) if end - begin == 1 else f"{begin} to {end - 1}"


def _role(role: Role) -> tuple[str, ...]:
    warps = _range(role.all_warps.start, role.all_warps.stop)
    groups = f" in {role.groups} groups" if role.groups > 1 else ""
    return role.name, warps + groups, str(role.registers or "as compiled"), role.job


def _signal(signal: Signal) -> str:
    return {
        Arrival.ONE: f"a thread of {signal.role}",
        Arrival.BYTES: f"TMA for {signal.role}",
        Arrival.COMMIT: f"the tensor core for {signal.role}",
        Arrival.GROUP: f"the warps of a group of {signal.role}",
        Arrival.WARPS: f"the warps of {signal.role}",
    }[signal.arrival]


def _barrier(description: Description, barrier: Barrier) -> tuple[str, ...]:
    arrivals = str(description.arrivals(barrier))
    if barrier.of_pair:
        arrivals = f"even CTA {arrivals}, odd {description.arrivals(barrier, even_cta=False)}"
    return (
        barrier.name,
        str(barrier.count),
        arrivals,
        ", ".join(map(_signal, barrier.signals)),
        ", ".join(barrier.waits),
        barrier.per,
    )


def _region(description: Description, region: Region) -> tuple[str, ...]:
    return (
        region.name,
        str(description.offsets[region.name]),
        str(region.num_bytes),
        " x ".join(map(str, region.shape)) or "1",
        "16 bits" if region.element == "operand" else region.element,
        region.shares,
        region.holds,
    )


def _columns(columns: Columns) -> tuple[str, ...]:
    spans = ", ".join(_range(first, first + columns.width) for first in columns.firsts)
    return columns.name, spans, columns.shares, columns.holds


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table under its title; nothing where there are no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    rule = f"|{'---|' * len(heads)}"
    return "\n".join([f"**{title}**", "", f"| {' | '.join(heads)} |", rule, *lines])


def maps_in(folder: pathlib.Path) -> set[str]:
    """Returns the paths of the maps of memory in a folder; it may have other pictures, too."""
    kinds = ("shared", "tensor")
    return {
        f"{PICTURES}/{path.name}"
        for kind in kinds
        for path in (folder / PICTURES).glob(f"*_{kind}.svg")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.diagrams", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="the folder of the documentation")
    folder = parser.parse_args(arguments).folder
    texts = files()
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for old in maps_in(folder) - texts.keys():
        (folder / old).unlink()
    for path, text in texts.items():
        (folder / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes the list of assumptions from their table and from the litmus programs."""

from __future__ import annotations

import textwrap

from benchmarks.day_one.assumptions import ASSUMPTIONS
from benchmarks.day_one.parts import programs


def note() -> str:
    """Returns the text of benchmarks/results/assumptions.md."""
    known = programs()
    lines = [
        "# What no emulator can decide",
        "",
        "`python -m benchmarks.day_one --note` makes this list from `benchmarks/day_one`; a "
        "test compares the two.",
        "Our Blackwell kernels rely on each of these claims, except where it says that they do "
        "not. The PTX ISA does not settle them, or only silicon can show them.",
        "`python -m benchmarks.day_one` tests them on a GPU: the programs are in "
        "`benchmarks/day_one/litmus_*.py`, each with a broken variant that differs from the right "
        "one on the emulator, or the reason why it cannot be.",
        "What other people's kernels do was read in their sources: flash-attn-4 (0251105a), "
        "CUTLASS (7107b055), DeepGEMM (54e2261), ThunderKittens (0b55588d).",
        "Descriptors, swizzles and majors of operands are not in the list: they are documented, "
        "and flash-attn-4's kernels, which are right on a B200, are right with the same reading "
        "of them on the emulator ([flash-attn-4-emulated.md](flash-attn-4-emulated.md)). "
        "tcgen05.cp and shift are not used.",
    ]
    for assumption in ASSUMPTIONS:
        lines += ["", f"## {assumption.id}"]
        for name, text in (
            ("Claim", assumption.claim),
            ("Relied on by", assumption.relied or "none of our kernels"),
            ("Evidence", assumption.evidence),
            ("What falls if it is wrong", assumption.falls),
            ("What to change first", assumption.change),
        ):
            lines += _wrapped(f"- *{name}*: {text}")
        if not assumption.litmus:
            lines += _wrapped(f"- *Tested by* no litmus program, but by {assumption.instead}")
        for name in assumption.litmus:
            litmus = known[name]
            noticed = litmus.noticed.replace("|", ", ") or f"no ({litmus.unnoticed})"
            lines += _wrapped(
                f"- *Tested by* `{name}`, for {', '.join(litmus.archs)}. Refuted by "
                f"{litmus.refuted}. Broken variant: {litmus.broken}; noticed by the emulator: "
                f"{noticed}"
            )
    return "\n".join(lines) + "\n"


def summary() -> str:
    """Returns the table of docs/emulator/rules.md: assumptions, claims, what depends on them."""
    lines = ["| assumption | claim | what falls if it is wrong |", "|---|---|---|"]
    for x in ASSUMPTIONS:
        link = f"[{x.id}](../../benchmarks/results/assumptions.md#{x.id})"
        lines.append(f"| {link} | {x.claim} | {x.falls} |")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 160, subsequent_indent="  ", break_on_hyphens=False)

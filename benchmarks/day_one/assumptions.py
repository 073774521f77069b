"""Claims that our Blackwell kernels rely on and that no emulator can decide, as data.

`python -m benchmarks.day_one --note` makes benchmarks/results/assumptions.md from this table, and
the report of a first day names the same claims.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Assumption:
    """One claim about hardware or its compiler.

    Attributes:
      relied: kernels and files that rely on it; empty where ours do not.
      evidence: what the PTX ISA says and what other people's kernels do, as facts.
      falls: what is wrong if the claim is.
      change: what to change first, by file and name.
      litmus: the programs of the first day that test it.
      instead: what decides the claim where no program can.
      parts: the parts of the first day that do so.
    """

    id: str
    claim: str
    relied: str
    evidence: str
    falls: str
    change: str
    litmus: tuple[str, ...] = ()
    instead: str = ""
    parts: tuple[str, ...] = ()


ASSUMPTIONS = (
    Assumption(
        "remote-store",
        "A row that one CTA of a pair stores into the other's shared memory (st.shared::cluster) "
        "is what a tcgen05.mma of the even CTA reads there, once the writer has executed "
        "fence.proxy.async.shared::cluster and arrived with release at cluster scope, and the "
        "issuing thread has waited with acquire at cluster scope.",
        "backward of pairs: `dst` in kernels/sm100/backward_pair_rows.py and "
        "backward_m256_rows.py, `store_swizzled_row` and `fence_proxy_of_cluster` in "
        "kernels/sm100/ptx.py",
        "The PTX ISA defines fence.proxy.async between the proxies and names .shared::cluster, "
        "but has no rule for an async-proxy reader in another CTA than the writer's fence. "
        "flash-attn-4's backward of pairs exchanges dS otherwise: an ordinary store into its own "
        "memory, fence.proxy.async, then a bulk copy into the other CTA that completes on a "
        "barrier there. Triton can emit the fence with .shared::cluster. In CUTLASS, DeepGEMM and"
        " ThunderKittens no st.shared::cluster before a tcgen05.mma was found.",
        "wrong dQ of pairs: head dims 192 and 256, and where pairs are chosen",
        "kernels/sm100/products.py: `wait` of a pair, a fence.proxy.async.shared::cluster by the "
        "issuing thread after it, if remote-operand-fenced holds; else "
        "kernels/sm100/backward_pair_rows.py: `compute_step`, and backward_m256_rows.py: `send`, "
        "store dS into memory of its own and copy it over (cp.async.bulk.shared::cluster), as "
        "flash-attn-4 does",
        ("remote-operand", "remote-operand-fenced", "remote-store-read"),
    ),
    Assumption(
        "relayed-load",
        "A bulk or tensor copy into the odd CTA, completed on the odd CTA's barrier and waited "
        "for by a warp there, is ordered before a tcgen05.mma of the even CTA by that warp's "
        "arrival (release, cluster) and the issuing thread's wait (acquire, cluster), without a "
        "proxy fence.",
        "all kernels of pairs: `relay_loads` in kernels/sm100/forward_products.py, "
        "kernels/sm100/backward_pair.py and kernels/sm100/backward_m256.py",
        "The PTX ISA makes a copy's writes visible to the thread that observes its barrier and "
        "says nothing of the async proxy of a third thread. flash-attn-4's backward of pairs has "
        "a relay warp that waits for a bulk copy's barrier and arrives at the even CTA's for it. "
        "CUTLASS and "
        "DeepGEMM let the copy itself complete on the even CTA's barrier.",
        "wrong results of all pairs: forward and backward at head dims 192 and 256",
        "kernels/sm100/products.py: `wait` of a pair, a fence.proxy.async.shared::cluster by the "
        "issuing thread after it, if relayed-load-fenced holds; else kernels/sm100/forward.py and"
        " kernels/sm100/backward_pair.py: loads with cta_group::2 that complete on the even CTA's"
        " barrier",
        ("relayed-load", "relayed-load-fenced"),
    ),
    Assumption(
        "pair-arrival",
        "An arrival at the even CTA's barrier and the wait there, both at the scope of the CTA, "
        "order a tcgen05.mma of the even CTA after tcgen05.st and tcgen05.ld of the odd CTA that "
        "tcgen05.wait and tcgen05.fence have completed, after copies that the arriving warp has "
        "waited for, and after its ordinary loads, whose values it has used.",
        "forward of pairs, and backward with M = 256: `products.arrive(..., stores=False)` in "
        "kernels/sm100",
        "The PTX ISA orders nothing between CTAs at the scope of a CTA, but its scopes are of the "
        "memory consistency model, and tensor memory has fences of its own. Ordinary stores, zeros "
        "for padding, are handed over by fence.acq_rel.cluster on both sides. The emulator takes "
        "every arrival for one of the scope of the cluster. All arrivals of "
        "flash-attn-4's and CUTLASS's pairs have the scope of the CTA (ClusterBarrier::arrive), and"
        " these kernels are right on a B200. At the scope of the cluster ptxas stops the warp with "
        "MEMBAR.ALL.GPU.",
        "wrong output of pairs: the forward at head dims 192 and 256, and where pairs are chosen",
        "kernels/sm100/forward_products.py, forward_rows.py, backward_m256.py and "
        "backward_m256_rows.py: drop `stores=False`, and wait with `ctas`",
        ("relayed-load-of-cta", "tensor-arrival-of-cta"),
    ),
    Assumption(
        "pair-layout",
        "After a product of a pair with M = 128, a CTA has its 64 rows in lanes 0 to 63 for the "
        "first half of the columns and in lanes 64 to 127 for the second; with M = 256, it has "
        "its 128 rows. With A in tensor memory and M = 256, each CTA's rows of A lie in its own "
        "lanes. Each CTA has half of B.",
        "M = 128: kernels/sm100/backward_pair.py, and dQ in kernels/sm100/backward_m256.py; M = "
        "256, A in tensor memory: that one, and the forward of pairs, "
        "kernels/sm100/forward_products.py",
        "PTX ISA, tcgen05, data path layouts A and B, by figures. CUTLASS has accumulator layouts"
        " for pairs with M = 128 and 256; flash-attn-4's backward of pairs computes dQ with M = "
        "128 and all else with M = 256, and is right on a B200; on the emulator it is, too.",
        "wrong gradients at head dims 192 and 256",
        "kernels/sm100/backward_pair_rows.py: `half` and the columns that a thread takes",
        ("pair-layout-128", "pair-layout-256"),
    ),
    Assumption(
        "pair-commit",
        "A tcgen05.commit of the even CTA with a multicast mask of both arrives exactly once in "
        "each CTA of the pair, at the same offset, after its products have read the operands and "
        "written the accumulators of both.",
        "all kernels of pairs: `commit` in kernels/sm100/products.py",
        "PTX ISA, tcgen05.commit: .multicast::cluster signals the barriers at the same offset in "
        "the CTAs of the mask. CUTLASS (umma_arrive_multicast_2x1SM), DeepGEMM and flash-attn-4 "
        "do so. Ours wait for every commit before a CTA ends, so none comes to a CTA that has "
        "ended; flash-attn-4's may.",
        "wrong results or hangs of all pairs",
        "kernels/sm100/products.py: `commit`",
        ("relayed-load", "pair-layout-128", "pair-layout-256"),
    ),
    Assumption(
        "load-wait",
        "No instruction that uses a register of tcgen05.ld is moved before its tcgen05.wait::ld "
        "by ptxas, and several loads may be complete with one wait.",
        "every kernel with tensor memory: `tmem_load` in kernels/sm100/ptx.py has loads and wait "
        "in one statement",
        "PTX ISA, tcgen05.wait: registers are undefined before it. flash-attn-4's forward has no "
        "tcgen05.wait::ld at all and is right on a B200, so hardware or ptxas waits by itself; "
        "DeepGEMM and CUTLASS wait as we do.",
        "wrong values anywhere",
        "kernels/sm100/ptx.py: `tmem_load`",
        ("load-wait",),
    ),
    Assumption(
        "product-order",
        "Products of one thread read and write tensor memory in the order of their issue, "
        "whatever their shapes and accumulators: S(i+1) may be issued over the columns of P(i) "
        "right after the product that reads P(i).",
        "forward and backward of one CTA, backward of pairs with M = 256: Note [what needs no "
        "barrier] in kernels/sm100/forward.py, kernels/sm100/backward.py and backward_m256.py",
        "PTX ISA, tcgen05, pipelined instructions: the order of two products is promised for the "
        "same shape and accumulator; a later revision is reported to order an earlier one's reads"
        " of A before a later one's writes of D, too. flash-attn-4's forward issues S(i+1) over "
        "P(i) without a wait and says why in a comment; it is right on a B200. A public "
        "microbenchmark on a GB300 found that products of different shapes never overlap.",
        "wrong output and gradients at head dims up to 128",
        "kernels/sm100/forward_products.py: `finish_tile` waits for o_full before S over P",
        ("product-order",),
    ),
    Assumption(
        "commit-order",
        "Commits of one thread arrive in the order of their issue.",
        "",
        "The PTX ISA says nothing of the order of two commits. flash-attn-4's forward with "
        "head_dim 256 is right only if they do. Ours do not need it: the emulator runs them with "
        "commits in any order, and every phase is waited for.",
        "nothing of ours",
        "nothing",
        ("commit-order",),
    ),
    Assumption(
        "commit-carries",
        "The arrival of a tcgen05.commit is ordered after what the committing thread had waited "
        "for before it issued: a thread that waits for the commit alone sees the bulk copy of "
        "row statistics that the MMA warp waited for, and a copy over them comes after the reads "
        "of warps that arrived at the MMA warp. In a pair also through the odd CTA's relay, with a "
        "wait of .cta scope.",
        "all backward kernels: Note [what needs no barrier] in kernels/sm100/backward.py, "
        "kernels/sm100/backward_pair.py (lse_log2 and delta after s_full) and backward_m256.py "
        "(lse_log2 after s_full, delta after dp_full)",
        "PTX ISA, tcgen05.commit: the arrival implies tcgen05.fence::before_thread_sync; release "
        "semantics for ordinary memory are not promised. flash-attn-4 and CUTLASS have barriers "
        "of their own for row statistics. CUTLASS waits for arrivals of other CTAs with .cta "
        "scope, too.",
        "wrong gradients, rarely: statistics of another step",
        "kernels/sm100/backward_rows.py and backward_pair_rows.py: compute warps wait for q_full "
        "before `statistics` (41 cycles a step on an H200, where the wait need not wait)",
        ("commit-carries", "commit-carries-pair"),
    ),
    Assumption(
        "tensor-base",
        "tcgen05.alloc of all 512 columns returns address 0.",
        "all kernels with tensor memory: `lane_base` in kernels/sm100/products.py, constant "
        "columns",
        "The PTX ISA does not say so, but 512 consecutive columns of 512 can begin nowhere else. "
        "flash-attn-4's forward relies on it and says so.",
        "all results are wrong",
        "kernels/sm100/products.py: `lane_base` adds the address that alloc has left",
        ("tensor-base",),
    ),
    Assumption(
        "registers",
        "A thread of a CTA of 512 starts with 128 registers; setmaxnreg.inc to 192 is granted as "
        "soon as other warpgroups have given theirs up, and no register changes by it.",
        "all kernels: `set_registers` in kernels/sm100/ptx.py, budgets in kernels/sm100/tiles.py",
        "PTX ISA, setmaxnreg: .inc blocks until enough registers are in the CTA's pool; what a "
        "thread starts with is the compiler's choice (the cubins say 128). FlashAttention-3, "
        "flash-attn-4 and CUTLASS do the same.",
        "kernels that hang, or spill",
        "kernels/sm100/tiles.py: `RegisterBudget`, `BackwardRegisters`",
        ("registers", "cubins"),
    ),
    Assumption(
        "reuse",
        "A bulk copy over shared memory that ordinary loads have read needs no proxy fence: an "
        "arrival of the readers and the issuing thread's wait order the two.",
        "row statistics (lse_log2, delta) of all backward kernels, of Hopper's, too",
        "PTX ISA, proxies: a fence between a generic read and a later async write is not asked "
        "for in any example. CUTLASS's consumer_release is an arrival alone; every TMA pipeline "
        "relies on it.",
        "wrong gradients, rarely",
        "kernels/common/ptx.py: a fence.proxy.async before the readers arrive",
        ("reuse",),
    ),
    Assumption(
        "store-at-exit",
        "The data that a bulk store has read by wait_group.read are written although the CTA has "
        "ended, and the next launch in the stream sees them.",
        "outputs and gradients of all kernels: kernels/sm100/forward.py `store_tile`, "
        "backward_rows.py and backward_pair_rows.py `write_gradients`, backward_ends.py",
        "PTX ISA, cp.async.bulk.wait_group: .read is about sources alone; a grid's end completes "
        "its memory operations (CUDA programming guide). CUTLASS's tma_store_wait is .read. Our "
        "kernels wait for all other pending operations (commits, arrivals); flash-attn-4's do "
        "not.",
        "outputs that lack tiles",
        "the wait_group before a CTA's end without .read",
        ("store-at-exit",),
    ),
    Assumption(
        "dependent-launch",
        "After griddepcontrol.wait a programmatic launch sees everything that earlier launches of"
        " the stream wrote, by ordinary loads, bulk copies and additions alike, and so does the "
        "one after it.",
        "Blackwell's backward: `await_launch_before` in kernels/common/ptx.py, `take_ticket`"
        " in kernels/sm100/backward_data.py; kernels/common/forward_join.py on both architectures",
        "PTX ISA, griddepcontrol.wait: all prerequisite grids have completed and their memory "
        "operations are performed and made visible; it does not speak of proxies. flash-attn-4's "
        "backward launches its kernels so, and loads by TMA after the wait.",
        "wrong gradients: accumulators or statistics of the launch before; of few query rows wrong"
        " outputs",
        "kernels/sm100/backward_description.py, kernels/common/split_description.py:"
        " programmatic=False",
        ("dependent-launch",),
    ),
    Assumption(
        "ordered-additions",
        "Tickets by atom.relaxed are unique; what CTAs add (red.relaxed.add.v4.f32) before they "
        "arrive at the order warp, which then releases a counter, is in memory before what a CTA "
        "adds that acquired it; a started CTA goes on while others wait in loops.",
        "deterministic backward: `take_ticket`, `take_turns` in kernels/sm100/backward_data.py",
        "PTX ISA, memory consistency model: release and acquire are cumulative, so this is "
        "promised; that additions of vectors take part is said element by element. Hopper's "
        "kernels do the same and were bitwise deterministic on H200s.",
        "gradients that differ from run to run, or a hang",
        "kernels/sm100/backward_data.py: `take_turns`, a fence.acq_rel.gpu before the release",
        ("ordered-additions",),
    ),
    Assumption(
        "family",
        "Cubins for sm_100f run on every GPU of compute capability 10.x, sm_103 too.",
        "the manifest has one architecture for all of Blackwell: fa4_jax/runtime.py `device_arch`",
        "CUDA documentation, family-specific features: code for sm_100f runs on 10.0 and 10.3. "
        "ptxas keeps programs with other features from being built for the family.",
        "no kernels on B300",
        "fa4_jax/catalogue.py: sm_103a as an architecture of its own",
        ("cubins",),
    ),
    Assumption(
        "accumulation",
        "Sums of the tensor core in fp32 are as exact as the conformance bound asks for, and have"
        " the same bits from run to run; ex2, lg2 and rcp are within the documented errors.",
        "all kernels; deterministic gradients",
        "The order and width of additions inside a product are not documented; the emulator has "
        "numpy's. flash-attn-4's kernels have the usual errors on a B200.",
        "conformance cases fail; gradients differ from run to run",
        "fa4_jax/conformance/compare.py says which bound; kernels/sm100/softmax.py the "
        "exponentials",
        instead="the selftest's errors and the bitwise runs",
        parts=("selftest", "bitwise"),
    ),
    Assumption(
        "rates",
        "L2, copies, arrivals between SMs and the other fields of rates.BLACKWELL.assumed are as "
        "on an H200.",
        "estimates alone: choices of tiles and of pairs that rest on them",
        "One H200 was measured (docs/emulator/proof.md); of a B200 documented rates are known, "
        "and four that others measured. Estimates for flash-attn-4 are 5 % off on the mean.",
        "estimates, and with them the choice of pairs at head dims up to 128",
        "kernels/emulator/timing/rates.py: `BLACKWELL`",
        instead="the microbenchmarks, one for each field",
        parts=("constants",),
    ),
)

"""One-line sabotages of the device protocol; see gpu_mutants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    file: str
    name: str
    line: str  # a part of the source that occurs once
    instead: str
    short: bool  # of those that a case or one of the first schedules catches, some of each kind
    kinds: tuple[str, ...]  # of plays, of which one catches it: see gpu_mutants
    place: int | None = None  # where the part begins, if it may occur more than once


CI = True


def of(file: str, rows: Sequence[tuple[Any, ...]], kind: str = "mapped") -> list[Mutant]:
    """Make the mutants of a source from rows: name, line, its replacement, and CI for one of the short run."""
    return [Mutant(file, *row[:3], CI in row, (kind,)) for row in rows]


LISTED = (
    *of("link.cu", rows=[
        ("put: block 0 signals before the others are done",
         "const bool ends = far ? arrived % A_VOID_BLOCK == gridDim.x : ", "const bool ends = ", CI),
        ("put: a block arrives before its threads have stored",
         "sync_block();\n    if (threadIdx", "if (threadIdx", CI),
        ("put: blocks arrive unordered", "add_acq_rel", "add_relaxed"),
        ("put: a step is sent although the pass has failed", "if (is_void(status, failed, seq, m.flag))", "if (false)"),
        ("put: an empty step is sent",
         "(live ? load_l2(reinterpret_cast<const int*>(live)) : entries) == 0", "false", CI),
        ("put: a block that found its pass void does not arrive",
         "signal(k, p.sent, m, 0, 0, seq, true);\n        return;", "return;"),
        ("put: each thread looks whether the pass is void",
         "if (!failed) return status;", "return is_void(status, failed, seq);"),
        ("put: a step is sent that a block found void", "is_void ? A_VOID_BLOCK + 1 : 1", "1"),
        ("put: an empty step keeps the last one's seq", "if (thread == 0) store(p.sent, 0ull);", "", CI),
        ("wait: what a failed pass has sent is left behind",
         "status != LINK_OK && status != LINK_FAILED", "status != LINK_OK", CI),
        ("wait: the answer's epoch is ignored", "LORA_SIGNAL_EPOCH(word) == (epoch & 0xffff) && ", "", CI),
        ("wait: the signal is read without an acquire", "load_acquire_system", "load_system", CI),
        ("wait: no deadline", "now_ns() - began > budget", "false", CI),
        ("wait: the watchdog's word is not read", "load_system(abort)", "false"),
        ("wait: a refusal counts as an answer", "first >> 48 == LORA_OK ? LINK_OK : LINK_FAILED", "LINK_OK", CI),
        ("add: a failed pass gets deltas", "flag || entries == 0", "entries == 0", CI),
        ("put: the last block signals without an acquire of the others' arrivals", "add_acq_rel", "add_release")]),
    *of("poller.cuh", rows=[
        ("poller: the signal is read without an acquire", "load_acquire_system", "load_system", CI),
        ("poller: an acquire at the scope of one GPU", "load_acquire_system", "load_acquire", CI),
        ("poller: weights that were here in another scan are taken for here", "            is_ready = -1;\n", "", CI),
        ("poller: an unknown adapter is taken for here", "if (!votes(lacks.unknown)) is_ready", "is_ready"),
        ("poller: another's tables are taken for its own",
         "if (whose == l) return;\n", "if (whose >= 0) return;\n", CI),
        ("poller: what is ready is another's at hand", "if (l != whose) return -1;", ""),
        ("poller: the workers' tables lack what lies near", "if (also && at < units)", "if (false)", CI),
        ("poller: the site is the one of the step before", "whose = l, sited = false;", "whose = l;", CI),
        ("poller: a signal beyond the slots is believed", "pushed >= seq + k.depth", "false", CI),
        ("poller: tables are overwritten while a turn uses them", "if (done < load(&k.busy)) return false;", ""),
        ("poller: the clients of a lane are one", "1u << l / LANES", "1u"),
        ("poller: a lane picks the first of its own", "0 || goes_first(key, age, best.key, best.age)", "0"),
        ("poller: what a lane's other clients had does not count", "begin < begins ? begin : begins", "begin"),
        ("poller: a client that goes takes those behind it along", "while (rounds && !votes(", "if (rounds && votes(~"),
        ("poller: the next launch forgets the clients of the last", "s.num_links;", "LANES;"),
        ("poller: the header of another's step is taken for this one's", "whose == l", "whose >= 0"),
        ("poller: what was checked is not what is used",
         "tables + at.in_map", "reinterpret_cast<uint64>(request_slot(seq)) + at.in_map"),
        ("poller: an order is not released", "store_release", "store"),
        ("poller: an order is released before all lanes have stored it", "seq);\n        sync_warp();", "seq);"),
        ("poller: orders overtake the workers", "< done + 2", "< done + 9"),
        ("poller: a client that had less waits for one that had more", "< than ||", "> than ||"),
        ("poller: a client that was away saves its share up", "had > least ? had : least", "had"),
        ("poller: age wraps",
         "static_cast<int>(static_cast<unsigned>(age) - static_cast<unsigned>(its)) < 0", "age < its"),
        ("poller: a blocked step has no deadline", "(now_ns()) >= (lacking ? patience_ends() : expires)", "(0)"),
        ("poller: done is read without an acquire", "load_acquire(&s.done)", "load_l2(&s.done)", CI),
        ("weights: no time is left to tell what a client holds", " + HELD_NS;", ";"),
        ("tenants: clients alone share", "several ? of_tenant(tenant, left) : left", "left", CI),
        ("tenants: weights do not count", "rows_of(first) * load(&links[first].slowness)", "rows_of(first)"),
        ("tenants: what one has had is not noted", "load(&its.had) + cost", "load(&its.had)"),
        ("tenants: one that was away saves its share up", "before < tenants_share ? tenants_share : before", "before"),
        ("tenants: clients of all have one share", "several ? load(&s.tenants[m.link.tenant].share) : share", "share"),
        ("classes: deadlines do not count", "if (!votes(has_class)) return fair;", "return fair;"),
        ("classes: a client is as far ahead as it likes", " && finish <= least + AHEAD_ROWS", ""),
        ("classes: prefill has a deadline", "h.step_class == LORA_DECODE && k.step_ns", "k.step_ns"),
        ("weights: each client waits for as long as it has",
         "m.request.flags & LORA_WAITS_FOR_WEIGHTS || of_budget < of_client", "true"),
        ("weights: no client waits for as long as it has", "m.request.flags & LORA_WAITS_FOR_WEIGHTS || ", ""),
        ("weights: each step of a pass waits anew", "used < WEIGHTS_NS ? WEIGHTS_NS - used : 0", "WEIGHTS_NS")]),
    *of("mailbox.cuh", rows=[
        ("poller: no client behind the first 32 is looked at",
         "if (rounds <= l / LANES) rounds = l / LANES +", "rounds ="),
        ("mailbox: pages are given back a turn early", "], turn);", "], turn ? turn - 1 : 0);"),
        ("mailbox: a revoked client goes on", "if (together(load(&s.links[l].epoch)) == its_epoch) forget(l);", ""),
        ("mailbox: abort is not heard", "together(load_system(&s.mailbox->abort))", "false", CI)]),
    *of("answer.cuh", rows=[
        ("poller: a refusal's signal overtakes its text", "0) store_release_system", "0) store_system"),
        ("weights: a refusal does not name what is missing", "text[at] != '#'", "true"),
        ("work: an answer goes out before the block has stored its rows",
         "sync_block();\n    if (threadIdx", "if (threadIdx"),
        ("work: block 0 answers for all", "far ? before + 1 == target : blockIdx", "blockIdx"),
        ("work: the answer's signal overtakes its header", "far) store_release_system", "far) store_system", CI),
        ("work: the answer goes to another slot",
         "seq % k.depth * k.response_bytes", "(seq - 1) % k.depth * k.response_bytes", CI),
        ("work: the last block answers without an acquire of the others' arrivals",
         "add_acq_rel", "add_release", CI),
        ("work: done is not released", "0) store_release(&", "0) store(&"),
        ("work: the header is stored behind its block's arrival",
         "if (blockIdx.x == 0) write_header(order);\n    sync_block()",
         "sync_block();\n    if (blockIdx.x == 0) write_header(order)")]),
    *of("request.cuh", rows=[
        ("check: a map is not looked at",
         "if (!why && h.flags & LORA_HAS_OUT_MAP) why = check_map(tables, at.out_map, h.num_entries, "
         "h.num_out_rows, lane);",
         ""),
        ("check: experts are not counted", "| one.y >= experts ||", "|", CI),
        ("check: the payload may exceed the slot",
         "if (at.end > slot_bytes || h.payload_bytes != at.end - LORA_HEADER_BYTES) return BAD_SIZE;", ""),
        ("weights: a handle's generation is ignored", "0 && generation == generation_of(handle)", "0"),
        ("weights: what a client does not hold is served",
         "lacks.foreign |= known && !is_held;", "", CI),
        ("weights: what a shard may still be told of is refused at once",
         "lacks.untold |= !known", "lacks.untold |= false", CI),
        ("weights: what was dropped is waited for", "ready >= (GONE | generation_of(handle))", "false"),
        ("weights: a client that holds one generation has them all",
         "its[i] == generation_of(handle) &&", "its[i] &&", CI),
        ("weights: READY is read without an acquire",
         "if (first == static_cast<unsigned>(lane) || !all_ready) fence_system();", ""),
        ("weights: READY does not count",
         "if (!lacks.weights && known && ready[i] != generation[i]) lacks.weights = true, lacks.handle = handle;",
         "", CI),
        ("weights: what is gone by its turn is served", "unknown |= !entries.is_known(some[i].x, ready[i]);", ""),
        ("weights: experts that differ are taken for alike", "if (votes(uneven))", "if (false)"),
        ("weights: uses of adapters are not reported", "if (used) store(used + index_of(some[i].x), turn);", ""),
        ("weights: of a lane's segments the first alone is translated", "first + i * LANES >= num", "i"),
        ("check: of a map's values each fourth is not looked at",
         " || (at + 3 < count && is_wrong(some[i].w));", ";")]),
    *of("serve.cu", rows=[
        ("work: copies do not see what copy engines wrote", "        copy_acquire();\n", ""),
        ("work: a turn is read without an acquire", "(load_acquire(&s.turn", "(load_l2(&s.turn", CI),
        ("work: a live barrier is initialised again",
         "copy_acquire();", "copy_acquire();\n        copy_init(&m.compute.warps[thread / LANES].barriers[0]);", CI)]),
    *of("step.cuh", rows=[
        ("step: a barrier publishes nothing", "add_release", "add_directly"),
        ("step: a barrier is seen without an acquire", "load_acquire(arrivals)", "load_l2(arrivals)"),
        ("step: blocks come through a stale cache", "load(&its_pairs[i])", "load_constant(&its_pairs[i])"),
        ("step: a barrier has no patience's end",
         "if (now_ns() > deadline) store_release(arrivals + 1, 1);", "", CI)]),
    *of("shrink.cuh", rows=[
        ("step: rows come through a stale cache",
         "load_l2(reinterpret_cast<const uint4", "load_constant(reinterpret_cast<const uint4", CI)]),
    *of("lora_step.cuh", rows=[
        ("step: partial sums are read before all are there",
         "if (!grid_barrier(a.arrivals, flag)) return false;\n        const", "const", CI)]),
    *of("lora_step.cuh", kind="lora_step.cu", rows=[
        ("step: sums of partials are read before all are there",
         "if (PHASES & EXPAND_ONLY && !grid_barrier(a.arrivals, flag)) return false;", ""),
        ("step: deltas are summed before all are there",
         "if (!grid_barrier(a.arrivals, flag)) return false;\n    combine", "combine"),
        ("step: each reader adds the partial sums, however many", "partials > FEW_PARTIALS", "false")]),
    *of("serve.cu", rows=[
        ("work: the next turn's partial sums are written over those that are read",
         "turn % 2 ? s.other_partial : s.partial", "s.partial", CI)]),
    *of("poller.cuh", kind="nvshmem", rows=[
        ("network: the poller reads what may not be there yet",
         "        if (lane == 0) confirm(its, word);\n", "", CI)]),
    *of("link.cu", kind="nvshmem", rows=[
        ("network: the wait returns before the rows are there", "confirm(signal, load_acquire_system(signal));",
         "load_acquire_system(signal);", CI),
        ("network: a step is put before the other blocks have stored",
         "blockIdx.x == 0 && arrived % A_VOID_BLOCK < gridDim.x", "false"),
        ("network: the last block puts, whichever that is",
         "const bool ends = far ? arrived % A_VOID_BLOCK == gridDim.x : blockIdx.x == 0;",
         "const bool ends = arrived % A_VOID_BLOCK == gridDim.x;"),
        ("network: a step is put without an acquire of the others' arrivals",
         "arrived = load_acquire(&k.arrived)", "arrived = load_l2(&k.arrived)"),
        ("send: rows stay behind", "LORA_HEADER_BYTES + payload", "payload"),
        ("send: the step of another slot", "(&k.request_slots) + seq", "(&k.request_slots) + (seq + 1)"),
        ("send: the signal of the step before", "(load(&k.epoch), seq),", "(load(&k.epoch), seq - 1),"),
        ("send: an epoch that is over", "(load(&k.epoch), seq),", "(load(&k.epoch) - 1, seq),")]),
    *of("answer.cuh", kind="nvshmem", rows=[
        ("network: an answer is put before the other blocks have stored",
         "!far && flag && load_acquire(&s.sent) < target", "false"),
        ("network: others' arrivals are seen without an acquire", "& load_acquire", "& load_l2"),
        ("network: answers are put by the last block to store, and overtake each other",
         "far ? before + 1 == target : blockIdx.x == 0", "before + 1 == target", CI),
        ("network: the header is put before it is stored",
         "if (blockIdx.x == 0) write_header(order);\n    sync_block()",
         "sync_block();\n    if (blockIdx.x == 0) write_header(order)"),
        ("network: a refusal is put before it is stored",
         "if (lane == 0) fence_system();\n    sync_warp();\n    put_warp", "put_warp")]),
    *of("peer.cuh", kind="nvshmem", rows=[
        ("network: the signal is an operation of its own",
         "nvshmemx_putmem_signal_nbi_block(reinterpret_cast<void*>(slot), reinterpret_cast<void*>(slot), nbytes,\n  "
         "                                   ",
         "nvshmemx_putmem_nbi_block(reinterpret_cast<void*>(slot), reinterpret_cast<void*>(slot), nbytes, "
         "pe);\n    if (threadIdx.x == 0) nvshmemx_signal_op(", CI),
        ("network: what is mapped already is looked for in a heap",
         "    if (pe == HERE) return reinterpret_cast<unsigned char*>(address);\n", ""),
        ("network: a PE is taken for one whose memory is mapped already", "pe == HERE", "pe <= 0")]),
    *of("request.cuh", kind="e4m3", rows=[
        ("codes: rows of the other wire are taken", "    if (!is_of_wire(s, h)) return BAD_WIRE;\n", "", CI),
        ("codes: scales are not looked at",
         "    if (!why && h.dtype == LORA_E4M3) why = check_scales(tables, at.scales, h.num_rows, lane);\n", ""),
        ("codes: a scale may be no number",
         "!(scale >= 0.0f && scale <= LARGEST_FLOAT)", "scale < 0.0f || scale > LARGEST_FLOAT", CI)]),
    *of("poller.cuh", kind="e4m3", rows=[
        ("codes: more scales are copied than fit",
         "(h.num_rows <= most && is_of_wire(s, h))", "is_of_wire(s, h)"),
        ("codes: scales that were checked are not those that are used",
         "LORA_E4M3 ? tables", "LORA_E4M3 ? reinterpret_cast<uint64>(request_slot(seq))", CI)]),
    *of("answer.cuh", kind="e4m3", rows=[
        ("codes: results are taken before all blocks have stored them",
         "if (!grid_barrier(s.arrivals, memory.warps[0].flag)) return false;\n    const", "const", CI)]),
    *of("e4m3.cuh", kind="e4m3", rows=[
        ("codes: results come through a stale cache",
         "load_l2(reinterpret_cast<const uint4*>(x) + i);\n        largest",
         "load_constant(reinterpret_cast<const uint4*>(x) + i);\n        largest"),
        ("codes: a lane has the largest of its own", "i));\n    const RowScale its = scale_of<T>(most(largest)",
         "i));\n    const RowScale its = scale_of<T>(largest")]),
    *of("shrink.cuh", kind="e4m3", rows=[
        ("codes: a scale is that of the entry, not of its row",
         "(a.in_map ? load_l2(a.in_map + entry) : entry)", "entry")]),
    *of("poller.cuh", kind="led", rows=[
        ("leader: what it refuses has no number", "settle(l, seq);\n        note",
         "if (is_mine(l)) blocked &= ~bit_of(l), ready &= ~bit_of(l), store(&s.links[l].served, seq);\n     "
         "   sync_warp();\n        note", CI),
        ("leader: a follower that comes hears of no client that is there", "        claim_rows();\n", ""),
        ("poller: the epoch of a signal is ignored", "LORA_SIGNAL_EPOCH(word) != (k.epoch & 0xffff) || ", ""),
        ("follower: what has no number is served", "s.role != FOLLOWS || is_numbered(l)", "true", CI),
        ("follower: what a step costs goes before its number", "s.role == FOLLOWS ? 0 : cost()", "cost()"),
        ("follower: what has no number has no deadline",
         "draining && together(now_ns()) < load(&k.expires)", "draining")]),
    *of("mailbox.cuh", kind="led", rows=[
        ("follower: tenants and classes go before its leader's numbers",
         "    if (lane == 0 && s.role == FOLLOWS) store(&k.tenant, 0ull), store(&k.step_ns, 0ull);", "")]),
    *of("leader.cuh", kind="led", rows=[
        ("leader: numbers do not count up", "(load_l2(&s.number) + 1)", "load_l2(&s.number)"),
        ("leader: a client's steps have one number", "number_at(l, seq),", "1,"),
        ("leader: a client ahead there loses numbers", "(2 * load(&s.links[l].depth))", "load(&s.links[l].depth)"),
        ("leader: a row is not empty before it is another's",
         "    for (int i = 1; table && i < s.row_words; i++) store_system(numbers_at(table, l) + i, 0ull);\n", ""),
        ("leader: rows are told apart by clients alone", "32 | (load(&k.epoch) & 0xffffffff)", "32", CI),
        ("follower: the least number does not count",
         "    if (is_mine(l)) store(&s.links[l].ticket, static_cast<int>(word));\n", "", CI),
        ("follower: a number is of any step of its slot", ">> 32 == (seq & 0xffffffff)", "!= 0"),
        ("follower: a row is its client's for ever", "|| together(load_system(row)) != owner_of(l)", ""),
        ("follower: any row is its client's", "== owner_of(l)", "!= 0"),
        ("follower: rows behind the first are not looked at", "(first + LANES) % MAX_LINKS", "0")]),
    *of("link.cu", kind="led", rows=[
        ("led: a step without rows is not sent",
         "(live ? load_l2(reinterpret_cast<const int*>(live)) : entries)", "entries"),
        ("led: a link goes on after another's failure", " || (newest && seq > newest);", ";"),
        ("led: another's failure keeps this one's part of a step back", "(newest && seq > newest)", "newest"),
        ("led: no other link hears of a failure", "    if (failed) store_release(failed, load_l2(&k.pushed));\n", "")]),
)  # fmt: skip

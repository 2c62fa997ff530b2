"""One-line sabotages of the device protocol; see gpu_mutants. Lines are the sources' own, however long."""
# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    line: str  # a part of the source that occurs once
    instead: str
    nvshmem: bool = False  # seen over a network alone


MUTANTS = (
    # the client
    Mutant("put: block 0 signals before the others are done", "link.cu",
           "m.last = (add_acq_rel(&k.arrived, 1) + 1) % gridDim.x == 0;", "m.last = blockIdx.x == 0;"),
    Mutant("put: a block arrives before its threads have stored", "link.cu",
           "    sync_block();\n    if (threadIdx.x == 0) {\n        fence_system();\n        m.last", "    if (threadIdx.x == 0) {\n        fence_system();\n        m.last"),
    Mutant("put: no fence, and blocks arrive unordered", "link.cu",
           "        fence_system();\n        m.last = (add_acq_rel(&k.arrived, 1) + 1)", "        m.last = (add_relaxed(&k.arrived, 1) + 1)"),
    Mutant("put: a step is sent although the pass has failed", "link.cu",
           "if (entries == 0 || load_l2(&k.status)) return;", "if (entries == 0) return;"),
    Mutant("put: an empty step is sent", "link.cu",
           "if (entries == 0 || load_l2(&k.status)) return;", "if (load_l2(&k.status)) return;"),
    Mutant("wait: the answer's epoch is ignored", "link.cu",
           "if (LORA_SIGNAL_EPOCH(word) == (epoch & 0xffff) && LORA_SIGNAL_SEQ(word) >= seq) {",
           "if (LORA_SIGNAL_SEQ(word) >= seq) {"),
    Mutant("wait: the signal is read without an acquire", "link.cu",
           "const uint64 word = load_acquire_system(signal);", "const uint64 word = load_system(signal);"),
    Mutant("wait: no deadline", "link.cu", "late = now_ns() - began > budget;", "late = false;"),
    Mutant("wait: the watchdog's word is not read", "link.cu", "const bool aborted = load_system(&k.abort),",
           "const bool aborted = false,"),
    Mutant("wait: a refusal counts as an answer", "link.cu", "return first >> 48 == LORA_OK ? LINK_OK : LINK_FAILED;",
           "return LINK_OK;"),
    Mutant("add: a failed pass gets deltas", "link.cu",
           "if (load_l2(&k.status) || load_l2(counts + 1) == 0) return;", "if (load_l2(counts + 1) == 0) return;"),
    # the poller
    Mutant("poller: the signal is read without an acquire", "poller.cuh",
           "const uint64 word = load_acquire_system(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)));",
           "const uint64 word = load_system(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)));"),
    Mutant("poller: an acquire at the scope of one GPU", "poller.cuh",
           "const uint64 word = load_acquire_system(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)));",
           "const uint64 word = load_acquire(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)));"),
    Mutant("poller: the epoch of a signal is ignored", "poller.cuh",
           "if (LORA_SIGNAL_EPOCH(word) != (epoch & 0xffff) || LORA_SIGNAL_SEQ(word) <= served) return false;",
           "if (LORA_SIGNAL_SEQ(word) <= served) return false;"),
    Mutant("poller: a signal beyond the slots is believed", "poller.cuh",
           "if (LORA_SIGNAL_SEQ(word) > served + load(&s.links[lane].depth)) {", "if (false) {"),
    Mutant("poller: tables are overwritten while a turn uses them", "poller.cuh",
           "if (epoch == 0 || state != NO_STEP || done < busy) return false;",
           "if (epoch == 0 || state != NO_STEP) return false;"),
    Mutant("poller: what was checked is not what is used", "poller.cuh",
           "o.in_map = h.flags & LORA_HAS_IN_MAP ? tables + at.in_map : 0;",
           "o.in_map = h.flags & LORA_HAS_IN_MAP ? reinterpret_cast<uint64>(request_slot(l, seq)) + at.in_map : 0;"),
    Mutant("poller: an order is not released", "poller.cuh",
           "if (lane == 0) store_release(&s.turn, turn);", "if (lane == 0) store(&s.turn, turn);"),
    Mutant("poller: orders overtake the workers", "poller.cuh",
           "const int next = turn < done + 2 ? pick() : -1;", "const int next = turn < done + 9 ? pick() : -1;"),
    Mutant("poller: who had less waits for who had more", "poller.cuh", "if (end < ends ||", "if (end > ends ||"),
    Mutant("poller: who was away saves its share up", "poller.cuh", "start = had > share ? had : share", "start = had"),
    Mutant("poller: age wraps", "poller.cuh",
           "const bool older = static_cast<int>(static_cast<unsigned>(age) - static_cast<unsigned>(its)) < 0;", "const bool older = age < its;"),
    Mutant("poller: a blocked step has no deadline", "poller.cuh",
           "const bool late = shuffle(together(now_ns()) >= expires, l);", "const bool late = false;"),
    Mutant("poller: a refusal's signal overtakes its text", "answer.cuh",
           "if (lane == 0) store_release_system(far, word);", "if (lane == 0) store_system(far, word);"),
    # checks, and weights
    Mutant("check: a map is not looked at", "request.cuh",
           "if (!why && h.flags & LORA_HAS_OUT_MAP) why = check_map(tables + at.out_map, h.num_entries, h.num_out_rows, lane);", ""),
    Mutant("check: experts are not counted", "request.cuh", "one.x >> 31 || one.y >= experts ||", "one.x >> 31 ||"),
    Mutant("check: the payload may exceed the slot", "request.cuh",
           "if (at.end > slot_bytes || h.payload_bytes != at.end - LORA_HEADER_BYTES) return BAD_SIZE;", ""),
    Mutant("weights: a handle's generation is ignored", "request.cuh",
           "if (generation == 0 || generation != handle >> HANDLE_BITS) return WEIGHTS_UNKNOWN;", ""),
    Mutant("weights: READY is read without an acquire", "request.cuh",
           "const uint64 ready = load_acquire_system(&entry->ready);", "const uint64 ready = load_system(&entry->ready);"),
    Mutant("weights: READY does not count", "request.cuh",
           "return ready == generation ? WEIGHTS_READY : WEIGHTS_LOADING;", "return WEIGHTS_READY;"),
    Mutant("mailbox: pages are given back a turn early", "mailbox.cuh",
           "store_system(&s.mailbox->acks[taken % COMMANDS], turn);",
           "store_system(&s.mailbox->acks[taken % COMMANDS], turn ? turn - 1 : 0);"),
    Mutant("mailbox: a revoked client goes on", "mailbox.cuh", "epoch = 0, state = NO_STEP;", ";"),
    Mutant("mailbox: abort is not heard", "mailbox.cuh", "if (together(load_system(&s.mailbox->abort))) {", "if (false) {"),
    # the workers
    Mutant("work: copies do not see what copy engines wrote", "serve.cu", "        copy_acquire();\n", ""),
    Mutant("work: a live barrier is initialised again", "serve.cu", "        copy_acquire();\n",
           "        copy_acquire();\n        copy_init(&m.compute.warps[thread / LANES].barriers[0]);\n"),
    Mutant("work: an answer goes out before the block has stored its rows", "answer.cuh",
           "    sync_block();\n    if (threadIdx.x == 0) {\n        fence_system();\n        const uint64 grid", "    if (threadIdx.x == 0) {\n        fence_system();\n        const uint64 grid"),
    Mutant("work: block 0 answers for all", "answer.cuh",
           "flag = far ? before + 1 == target : blockIdx.x == 0;", "flag = blockIdx.x == 0;"),
    Mutant("work: the answer's signal overtakes its header", "answer.cuh",
           "if (flag && far) store_release_system(far, order.signal_value);",
           "if (flag && far) store_system(far, order.signal_value);"),
    Mutant("work: the answer goes to another slot", "answer.cuh", "return load(&k.response_slots) + seq % load(&k.depth)",
           "return load(&k.response_slots) + (seq - 1) % load(&k.depth)"),
    Mutant("step: rows come through a stale cache", "shrink.cuh",
           "load_l2(reinterpret_cast<const uint4*>(row + k))", "load_constant(reinterpret_cast<const uint4*>(row + k))"),
    Mutant("step: blocks come through a stale cache", "step.cuh", "return load(&its_pairs[i]);", "return load_constant(&its_pairs[i]);"),
    Mutant("step: a barrier has no patience's end", "step.cuh",
           "if (now_ns() > deadline) store_release(arrivals + 1, 1);", ""),
    Mutant("step: partial sums are read before all are there", "lora_step.cuh",
           "if (!grid_barrier(a.arrivals, flag)) return false;\n        sum_partials(a);", "sum_partials(a);"),
    # beyond a network
    Mutant("network: the poller reads what may not be there yet", "poller.cuh",
           "        confirm(reinterpret_cast<const uint64*>(load(&s.links[lane].request_signal)), word);\n", "", True),
    Mutant("network: the wait returns before the rows are there", "link.cu", "            confirm(signal, word);\n", "", True),
    Mutant("network: a step is put before the other blocks have stored", "link.cu",
           "m.last = (add_acq_rel(&k.arrived, 1) + 1) % gridDim.x == 0;", "m.last = blockIdx.x == 0;", True),
    Mutant("network: an answer is put before the other blocks have stored", "answer.cuh",
           "while (!far && flag && load_acquire(&s.sent) < target)", "while (false)", True),
    Mutant("network: the header is put before it is stored", "answer.cuh", "        if (flag && !far) fence_system();\n", "", True),
    Mutant("network: a refusal is put before it is stored", "answer.cuh",
           "    if (lane == 0) fence_system();\n    sync_warp();\n    put_warp", "    put_warp", True),
)  # fmt: skip

"""Harm to a server, seeded and counted: `make chaos` (python -m tests.chaos [--short] [--seed N]).

faults   processes killed and stopped, under engines that check themselves
fuzz     malformed slots, control messages, HTTP requests and adapter files
floods   clients and unauthenticated peers that ask for too much, beside a client that behaves (processes: `caller`,
         `attacker`)
report   the table, and what must hold
"""

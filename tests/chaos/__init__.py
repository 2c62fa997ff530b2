"""What hurts a server, seeded and counted: `make chaos` (python -m tests.chaos [--short] [--seed N]).

faults   processes killed and stopped, under engines that check themselves
fuzz     slots, control messages, HTTP requests and adapter files that nobody should send
floods   clients and strangers that ask for too much, beside one that behaves (`caller`, `attacker`: its processes)
report   the table, and what must hold
"""

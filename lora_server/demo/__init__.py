"""The demo: a server, two engine processes, sixteen adapters, and the check against PEFT.

run      starts everything, shows progress, judges        report   the table and the JSON
launch   servers and engines as child processes           engine   one engine process
check    PEFT's tokens beside ours                        tiny     small local models and adapters
children what ends with its parent
"""

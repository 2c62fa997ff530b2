"""The demo: a server, two engine processes, sixteen adapters, and the check against PEFT.

run      starts everything, shows progress, judges        report   PEFT's tokens beside ours, as a table and JSON
launch   servers and engines as child processes           engine   one engine process
tiny     small local models and adapters
files    adapters in every layout on disk                 oracle   what they must do to a model
serve_vllm   vLLM beside a server, to try by hand   vllm_process   vLLM as a child
styles   a model and adapters that answer in words  words    prompts and answers as text
ask      one question through a running server
profile  what `lora-server profile` measures       profiled_engine   one of its engines
vllm_profile   what `lora-server profile-vllm` measures   profiled_vllm   one of its engines
cluster_check   what `doctor --cluster` finds
children what ends with its parent                  inproc   shards inside the caller's own process
"""

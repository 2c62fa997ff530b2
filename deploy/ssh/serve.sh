#!/bin/bash
# Start one node per host by ssh. They stop when this script does, by Ctrl-C, SIGTERM or otherwise:
#     deploy/ssh/serve.sh "HOST0 HOST1" --base-model M --layout ep2-pp2 --insecure
# Hosts are names or addresses by which they reach each other; the first has node 0. Arguments are flags of `lora-server
# serve` for every node; `lora-server` has to be on every host's PATH, and paths have to be the same.
# PORT: of the controller, 7400; the next one is the HTTP port of every node. SSH: the command, "ssh -o BatchMode=yes".
set -euo pipefail
read -ra hosts <<< "$1"
shift
port=${PORT:-7400}
pipe=$(mktemp -u)
mkfifo -m 0600 "$pipe"
exec 8<> "$pipe" 9< "$pipe"  # 9 is the nodes' stdin, which ends with 8, of this script alone
rm "$pipe"
nodes=()
for rank in "${!hosts[@]}"; do
    host=${hosts[rank]}
    printf -v command '%q ' lora-server serve --nodes "${#hosts[@]}" --node-rank "$rank" \
        --controller "${hosts[0]}:$port" --listen "$host:$port" --http "$host:$((port + 1))" --advertise "$host" "$@"
    ${SSH:-ssh -o BatchMode=yes} "$host" "bash -c $(printf %q "
        exec 3<&0
        $command < /dev/null 3<&- & node=\$!
        { cat <&3 > /dev/null 2>&1; kill \$node; } & watch=\$!
        wait \$node; code=\$?; kill \$watch 2> /dev/null; exit \$code")" <&9 8>&- 9<&- &
    nodes+=($!)
done
stop() {
    exec 8>&-
    wait "${nodes[@]}" || true
}
trap 'trap - EXIT; stop; exit' INT TERM
trap stop EXIT
wait -n "${nodes[@]}"  # a node that ends ends all

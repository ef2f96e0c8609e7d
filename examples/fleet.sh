#!/usr/bin/env bash
# Starts etcd, two prefill nodes and two decode nodes on this machine, until Ctrl-C.
#
#     examples/fleet.sh [OPTIONS of corella serve]
#
# The prefill nodes listen on $PORT (8000) and the port after it, the decode nodes on the two after those, etcd on
# $ETCD_PORT (2379) and the port after it.
set -euo pipefail

port=${PORT:-8000}
etcd_port=${ETCD_PORT:-2379}
registry=etcd:127.0.0.1:$etcd_port/corella
logs=$(mktemp -d)

for program in etcd corella; do
    if ! command -v "$program" >/dev/null; then
        echo "fleet.sh: $program is not in PATH" >&2
        exit 1
    fi
done

# shellcheck disable=SC2046 # The process numbers are words.
trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null; wait; rm -rf "$logs"' EXIT
trap 'exit 0' INT TERM

client=http://127.0.0.1:$etcd_port
peer=http://127.0.0.1:$((etcd_port + 1))
etcd --data-dir "$logs/etcd" --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer" \
    >"$logs/etcd.log" 2>&1 &

number=0
for role in prefill prefill decode decode; do
    corella serve --role $role --threads 1 --registry "$registry" --port $((port + number)) "$@" \
        >"$logs/$role-$number.log" 2>&1 &
    number=$((number + 1))
done

metrics_of() (
    exec 3<>"/dev/tcp/127.0.0.1/$1"
    printf 'GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n' >&3
    cat <&3
)

is_ready() {
    for number in 0 1; do
        metrics_of $((port + number)) 2>/dev/null |
            grep '^corella_decode_nodes{.*standing="healthy".*} 2$' >/dev/null || return 1
    done
}

until is_ready; do
    sleep 0.2
    if [ "$(jobs -rp | wc -l)" -lt 5 ]; then
        tail -n 3 "$logs"/*.log >&2
        exit 1
    fi
done
echo "ready: prefill nodes http://127.0.0.1:$port and http://127.0.0.1:$((port + 1))"

# Ends with the first process that ends.
wait -n || true
tail -n 3 "$logs"/*.log >&2
exit 1

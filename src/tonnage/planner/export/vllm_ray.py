"""The scripts around `vllm.sh`: Ray's head and workers for a replica on several hosts, or all replicas of one host.

`start-head.sh` starts Ray, waits for every host and then serves; `start-worker.sh` waits for the head, joins it and
stays. The flags are those of Ray 2.60. Neither script stops Ray: a retry or other work may need it.
"""

from tonnage.planner.export.launch import ServingLaunch
from tonnage.planner.export.vllm import PORT, RAY_PORT

HEAD = "start-head.sh"
WORKER = "start-worker.sh"
COPIES = "start-copies.sh"

_ADDRESS = """VLLM_HOST_IP=${VLLM_HOST_IP:-$(python3 check.py address)}
export HEAD VLLM_HOST_IP
"""


def render(launch: ServingLaunch) -> dict[str, str]:
    """Return each script that this launch needs, by name."""
    if launch.hosts > 1:
        return {HEAD: _head(launch), WORKER: _worker(launch)}
    return {COPIES: _copies(launch)} if launch.copies_on_a_host > 1 else {}


def _head(launch: ServingLaunch) -> str:
    return f"""#!/usr/bin/env bash
# HEAD=ADDRESS [HOSTS="ADDRESS ADDRESS ..."] bash start-head.sh [FLAG]...: Ray's head, and vLLM when all hosts are there.
# HEAD is this host as the others reach it; HOSTS are all of them, so that those that are missing can be named.
set -euo pipefail
cd "$(dirname "$0")"
: "${{HEAD:?set HEAD to the address of this host, as the others reach it}}"
{_ADDRESS}if ! ray status --address="$HEAD:{RAY_PORT}" >/dev/null 2>&1; then
  ray start --head --node-ip-address="$VLLM_HOST_IP" --port={RAY_PORT} --num-gpus={launch.host_gpus} \\
    --include-dashboard=false --disable-usage-stats
fi
python3 check.py cluster
exec bash vllm.sh "$@"
"""


def _worker(launch: ServingLaunch) -> str:
    return f"""#!/usr/bin/env bash
# HEAD=ADDRESS bash start-worker.sh: joins Ray's head and stays, on every host but the head.
set -euo pipefail
cd "$(dirname "$0")"
: "${{HEAD:?set HEAD to the address of the head, the same on every host}}"
{_ADDRESS}python3 check.py head
exec ray start --address="$HEAD:{RAY_PORT}" --node-ip-address="$VLLM_HOST_IP" --num-gpus={launch.host_gpus} \\
  --disable-usage-stats --block
"""


def _copies(launch: ServingLaunch) -> str:
    last = launch.copies_on_a_host - 1
    return f"""#!/usr/bin/env bash
# bash start-copies.sh [FLAG]...: every copy of this host, on ports {PORT} to {PORT + last}. When one ends, so do all.
set -euo pipefail
cd "$(dirname "$0")"
started=()
trap 'kill "${{started[@]}}" 2>/dev/null || true' EXIT
for copy in $(seq 0 {last}); do
  COPY=$copy bash vllm.sh "$@" &
  started+=($!)
done
wait -n
"""

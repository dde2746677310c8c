"""The scripts around `vllm.sh`: Ray's head and workers for a replica on several hosts, or all replicas of one host.

`start-head.sh` starts Ray, waits for every host and then serves; `start-worker.sh` waits for the head, joins it and
stays. The flags are those of Ray 2.60. Neither script stops Ray: a retry or other work may need it. `check.py` waits for
the hosts of a copy and for its server, and says who is missing; it runs beside vLLM, so it takes nothing but the standard
library and, on several hosts, Ray itself.
"""

from tonnage.planner.export.launch import ServingLaunch
from tonnage.planner.export.text import template
from tonnage.planner.export.vllm import PORT, RAY_PORT

HEAD = "start-head.sh"
WORKER = "start-worker.sh"
COPIES = "start-copies.sh"
CHECK = "check.py"
_USAGE = {
    "server": "python3 check.py server [SECONDS]    waits until vLLM answers",
    "cluster": "python3 check.py cluster [SECONDS]   waits until Ray has every host; says who is missing",
    "head": "python3 check.py head [SECONDS]      waits until the head answers, on another host",
    "address": "python3 check.py address             this host's address on the way to HEAD",
}
_ADDRESS = """    if words == ["address"]:
        print(address())
        return 0
"""


def render(launch: ServingLaunch) -> dict[str, str]:
    """Return each script that this launch needs, by name."""
    if launch.hosts > 1:
        known = {"port": RAY_PORT, "gpus": launch.host_gpus}
        scripts = {HEAD: template("start-head").format(**known), WORKER: template("start-worker").format(**known)}
    elif launch.copies_on_a_host > 1:
        last = launch.copies_on_a_host - 1
        scripts = {COPIES: template("start-copies").format(port=PORT, last=last, end=PORT + last)}
    else:
        scripts = {}
    return scripts | {CHECK: _check(launch)}


def _check(launch: ServingLaunch) -> str:
    many = launch.hosts > 1
    hosts = f"{launch.hosts} hosts with {launch.host_gpus} GPUs each" if many else "one host"
    known = tuple(_USAGE) if many else ("server",)
    settings = (
        "HEAD is the address of the head; HOSTS, where set, names all hosts; SERVER is vLLM's address where it is another.\n"
        if many
        else "SERVER is vLLM's address where it is not on this host; COPY is which copy of several.\n"
    )
    start = template("check_start").format(
        words=f"Whether all is there: {hosts}, as planned.",
        usage="\n".join(f"    {_USAGE[name]}" for name in known),
        settings=settings.rstrip(),
        sockets="import socket\n" if many else "",
        planned=f"PLANNED_HOSTS, GPUS_PER_HOST = {launch.hosts}, {launch.host_gpus}\nRAY_PORT = {RAY_PORT}\n"
        if many
        else "",
        port=PORT,
    )
    middle = template("check_many" if many else "check_one")
    return start + middle + template("check_end").replace("{address}", _ADDRESS if many else "")

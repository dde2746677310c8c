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
    scripts, many = {}, launch.hosts > 1
    if many:
        known = {"port": RAY_PORT, "gpus": launch.host_gpus}
        scripts = {HEAD: template("start-head").format(**known), WORKER: template("start-worker").format(**known)}
    elif launch.copies_on_a_host > 1:
        last = launch.copies_on_a_host - 1
        scripts = {COPIES: template("start-copies").format(port=PORT, last=last, end=PORT + last)}
    # The check, with what it knows of several hosts.
    hosts, planned = "one host", ""
    settings = "SERVER is vLLM's address where it is not on this host; COPY is which copy of several."
    if many:
        hosts = f"{launch.hosts} hosts with {launch.host_gpus} GPUs each"
        planned = f"PLANNED_HOSTS, GPUS_PER_HOST = {launch.hosts}, {launch.host_gpus}\nRAY_PORT = {RAY_PORT}\n"
        where = "SERVER is vLLM's address where it is another."
        settings = f"HEAD is the address of the head; HOSTS, where set, names all hosts; {where}"
    start = template("check_start").format(
        words=f"Whether all is there: {hosts}, as planned.",
        usage="\n".join(f"    {_USAGE[name]}" for name in (_USAGE if many else ("server",))),
        settings=settings, sockets="import socket\n" if many else "", planned=planned, port=PORT,
    )  # fmt: skip
    middle = template("check_many" if many else "check_one")
    return scripts | {CHECK: start + middle + template("check_end").replace("{address}", _ADDRESS if many else "")}

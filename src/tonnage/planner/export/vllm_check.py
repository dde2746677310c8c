"""`check.py`: waits for the hosts of a copy and for its server, and says who is missing.

It runs beside vLLM, so it takes nothing but the standard library and, on several hosts, Ray itself.
"""

from tonnage.planner.export.launch import ServingLaunch
from tonnage.planner.export.vllm import PORT, RAY_PORT

FILE = "check.py"

_USAGE = {
    "server": "python3 check.py server [SECONDS]    waits until vLLM answers",
    "cluster": "python3 check.py cluster [SECONDS]   waits until Ray has every host; says who is missing",
    "head": "python3 check.py head [SECONDS]      waits until the head answers, on another host",
    "address": "python3 check.py address             this host's address on the way to HEAD",
}

_START = '''#!/usr/bin/env python3
"""{words}

{usage}

{settings}
Exits 1 when so many seconds have passed (900 where none are given).
"""

import os
{sockets}import sys
import time
import urllib.error
import urllib.request

{planned}PORT = {port}
PAUSE_S = 2.0


def wait(missing, seconds):
    """Ask until nothing is missing; print what is whenever that changes. Whether all came in time."""
    said, end = [], time.monotonic() + seconds
    while True:
        now = missing()
        if not now:
            return True
        if now != said:
            print("\\n".join(["waiting:", *(f"  {{words}}" for words in now)]), flush=True)
            said = now
        if time.monotonic() >= end:
            print("gave up after", f"{{seconds:g}} s", file=sys.stderr)
            return False
        time.sleep(PAUSE_S)


def unanswered():
    """What of the server does not answer."""
    url = f"{{os.environ.get('SERVER') or default_server()}}/health"
    try:
        with urllib.request.urlopen(url, timeout=10):
            return []
    except (urllib.error.URLError, OSError) as error:
        return [f"vLLM does not answer at {{url}}: {{getattr(error, 'reason', error)}}"]
'''

_ONE = """

def default_server():
    return f"http://localhost:{PORT + int(os.environ.get('COPY', '0'))}"


CHECKS = {"server": unanswered}
"""

_MANY = '''

def default_server():
    return f"http://{head()}:{PORT}"


def head():
    found = os.environ.get("HEAD")
    if not found:
        sys.exit("check.py: set HEAD to the address of the head")
    return found


def address():
    """Of this host, on the way to the head; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(head(), RAY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)
        return way.getsockname()[0]


def deaf_head():
    try:
        with socket.create_connection((head(), RAY_PORT), timeout=10):
            return []
    except OSError as error:
        return [f"Ray's head does not answer at {head()}:{RAY_PORT} ({error}): has start-head.sh run there?"]


def missing_hosts():
    """Words for every host that Ray does not have, or not with all of its GPUs."""
    # Ray itself waits for a dead head for minutes.
    if silent := deaf_head():
        return silent
    import ray

    try:
        if not ray.is_initialized():
            ray.init(address=f"{head()}:{RAY_PORT}", log_to_driver=False, logging_level="ERROR")
        alive = [node for node in ray.nodes() if node["Alive"]]
    except (ConnectionError, RuntimeError) as error:
        return [f"Ray does not answer at {head()}:{RAY_PORT}: {error}"]
    return list(absent({node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in alive}))


def absent(gpus_by_host):
    named = os.environ.get("HOSTS", "").split()
    if named and len(named) != PLANNED_HOSTS:
        sys.exit(f"check.py: HOSTS names {len(named)} hosts, the plan has {PLANNED_HOSTS}")
    for name in named:
        if resolved(name) not in gpus_by_host:
            yield f"{name} has not joined: run start-worker.sh there"
    if not named and len(gpus_by_host) < PLANNED_HOSTS:
        there = ", ".join(sorted(gpus_by_host)) or "none"
        yield f"{len(gpus_by_host)} of {PLANNED_HOSTS} hosts have joined ({there}): run start-worker.sh on the others"
    for host, gpus in sorted(gpus_by_host.items()):
        if gpus < GPUS_PER_HOST:
            yield f"{host} gives Ray {gpus} GPUs, the plan has {GPUS_PER_HOST}"


def resolved(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def unready():
    """A host that has left is the likeliest reason why the server is silent."""
    silent = unanswered()
    return silent and [*missing_hosts(), *silent]


CHECKS = {"server": unready, "cluster": missing_hosts, "head": deaf_head}
'''

_END = """

def main(words):
    name, seconds = (words + ["900"])[:2] if words else ("", "")
{address}    if name not in CHECKS or len(words) > 2 or not seconds.replace(".", "", 1).isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    if not wait(CHECKS[name], float(seconds)):
        return 1
    print(f"{name}: all is there")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""

_ADDRESS = """    if words == ["address"]:
        print(address())
        return 0
"""


def render(launch: ServingLaunch) -> str:
    """Return the script."""
    many = launch.hosts > 1
    hosts = f"{launch.hosts} hosts with {launch.host_gpus} GPUs each" if many else "one host"
    known = tuple(_USAGE) if many else ("server",)
    settings = (
        "HEAD is the address of the head; HOSTS, where set, names all hosts; SERVER is vLLM's address where it is another.\n"
        if many
        else "SERVER is vLLM's address where it is not on this host; COPY is which copy of several.\n"
    )
    start = _START.format(
        words=f"Whether all is there: {hosts}, as planned.",
        usage="\n".join(f"    {_USAGE[name]}" for name in known),
        settings=settings.rstrip(),
        sockets="import socket\n" if many else "",
        planned=f"PLANNED_HOSTS, GPUS_PER_HOST = {launch.hosts}, {launch.host_gpus}\nRAY_PORT = {RAY_PORT}\n"
        if many
        else "",
        port=PORT,
    )
    return start + (_MANY if many else _ONE) + _END.replace("{address}", _ADDRESS if many else "")

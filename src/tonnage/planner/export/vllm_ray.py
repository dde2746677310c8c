"""What stands around a server's own script: Ray's scripts for a replica on several hosts, and README.txt of every server.

`start-head.sh` starts Ray, waits for every host and then serves; `start-worker.sh` waits for the head, joins it and
stays; `start-copies.sh` starts all replicas of one host. The flags are those of Ray 2.60. Neither script stops Ray: a retry or
other work may need it. `check.py` waits for the hosts of a copy and for its server, and says who is missing; it runs beside
vLLM, so it takes nothing but the standard library and, on several hosts, Ray itself. README.txt has the numbers of the plan,
and what to run on which host, in order.
"""

from collections.abc import Iterator
from textwrap import wrap

from tonnage.planner.export.launch import ServingLaunch
from tonnage.planner.export.text import template
from tonnage.planner.export.vllm import FILE, PORT, RAY_PORT
from tonnage.units import format_bytes

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


_HEAD = "HEAD=10.0.0.1"
NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp",
    "tonnage": "Tonnage",
}


def headline(launch: ServingLaunch) -> str:
    """Return model, cards and hosts in one line."""
    cards = f"{launch.gpus * launch.copies} × {launch.card}" if launch.card else f"{launch.gpus * launch.copies} GPUs"
    hosts = -(-launch.gpus * launch.copies // launch.gpus_per_host)
    where = f" in {hosts} hosts of {launch.gpus_per_host}" if hosts > 1 else ""
    return f"{launch.model} on {cards}{where}, served by {NAMES.get(launch.engine, 'vLLM')} as planned."


def parts(launch: ServingLaunch) -> list[str]:
    """Return the chapters, each with its heading."""
    chapters = (("The plan", _numbers(launch)), ("What to run", _steps(launch)))
    return ["\n".join([heading, "-" * len(heading), *lines]) for heading, lines in chapters]


def _numbers(launch: ServingLaunch) -> Iterator[str]:
    layout = [f"tensor parallelism {launch.tp}", f"pipeline parallelism {launch.pp}"]
    yield f"{_count(launch.copies, 'copy', 'copies')} of {_count(launch.gpus, 'GPU')}: {', '.join(layout)}."
    if launch.stage_layers:
        yield from wrap(f"Layers of the stages: {', '.join(map(str, launch.stage_layers))}.", 80)
    if launch.users:
        users = f"{_count(launch.users, 'user')} of {launch.context:,} tokens at once"
        yield f"Planned for {users}; a copy caches {launch.cache_tokens:,} tokens."
    if launch.card_bytes and launch.engine == "vllm":
        sizes = (launch.card_bytes, int(launch.card_bytes * launch.utilization))
        whole, share = (format_bytes(size, "GiB") for size in sizes)
        yield f"vLLM's share of a GPU: {launch.utilization:g} × {whole} = {share}."
    if launch.ledger:
        yield "On the fullest GPU:"
        yield from (f"  {word:<16}{format_bytes(size, 'GiB'):>12}" for word, size in launch.ledger)


def _steps(launch: ServingLaunch) -> Iterator[str]:
    if launch.engine != "vllm":
        name, hosts = f"{launch.engine.replace('-', '_').replace('.', '_')}.sh", launch.hosts
        many = f"On each of {hosts} hosts, with RANK from 0 on: {_HEAD} RANK=0 bash {name}"
        yield many if hosts > 1 else f"On the host: bash {name}"
        return
    for number, lines in enumerate(_many_hosts(launch) if launch.hosts > 1 else _one_host(launch), start=1):
        yield f"{number}. {lines[0]}"
        yield from (f"   {line}" for line in lines[1:])


def _one_host(launch: ServingLaunch) -> Iterator[list[str]]:
    side_by_side = launch.copies_on_a_host
    hosts = launch.copies // side_by_side
    where = f"On each of {hosts} hosts" if hosts > 1 else "On the host"
    if side_by_side == 1:
        yield [f"{where}:", f"bash {FILE}"]
        yield ["Wait until it answers:", "python3 check.py server"]
    else:
        last = PORT + side_by_side - 1
        yield [f"{where}, {side_by_side} copies, on ports {PORT} to {last}:", f"bash {COPIES}"]
        yield [f"Wait until each answers, with COPY from 0 to {side_by_side - 1}:", "COPY=0 python3 check.py server"]
    if launch.copies > 1:
        yield ["Put a balancer before the copies: each serves its own users."]
    yield ["Ask:", f"curl http://localhost:{PORT}/v1/models"]


def _many_hosts(launch: ServingLaunch) -> Iterator[list[str]]:
    others = launch.hosts - 1
    yield ["Have this folder, vLLM, Ray (pip install 'ray[cgraph]') and the model at the", "same paths on all hosts."]
    if launch.copies > 1:
        yield [
            f"Make {launch.copies} groups of {launch.hosts} hosts, one for each copy, each with a head of its own.",
            "What follows is for one group.",
        ]
    yield [
        "On the first host, the head (HEAD is its address in a network that only",
        "these hosts share: nothing is encrypted, and whoever reaches Ray runs code):",
        f"{_HEAD} bash {HEAD}",
        "It waits for the others, then serves. HOSTS, the addresses of all hosts with",
        "spaces between, lets it name those that are missing.",
    ]
    where = "the other host" if others == 1 else f"each of the {others} others"
    yield [f"On {where}:", f"{_HEAD} bash {WORKER}"]
    yield ["Wait, on the head, until vLLM answers:", f"{_HEAD} python3 check.py server"]
    yield ["Ask:", f"curl http://10.0.0.1:{PORT}/v1/models"]
    yield ["To end: Ctrl-C on the head, then on every host:", "ray stop"]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"

"""`tonnage serve`: a model over OpenAI's API, from a paged KV cache. Its words are parsed by argparse, as those of plan are."""

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, TextIO

from tonnage.commands.options import Parser
from tonnage.errors import MissingPart, RequestError

if TYPE_CHECKING:
    from tonnage.serve import Engine

SUMMARY = "Serve a model over OpenAI's API from a paged KV cache with continuous batching."
_EPILOG = (
    "SIGTERM or Ctrl-C takes no more requests, finishes what runs, and stops; a second one stops at once. "
    "Exits 1 where the model does not fit."
)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def command(words: list[str]) -> int:
    """Parse the words after `tonnage serve`, start, serve until a signal comes; the exit status."""
    options = _parser().parse_args(words)
    _check(options)
    import asyncio

    keys = _keys(options)
    from tonnage.models.files import find_folder

    folder = find_folder(options.model, online=options.online)
    from tonnage.serve.server.running import listen

    socket = listen(options.host, options.port)
    engine = _engine(str(folder), options)
    name = options.served_name or options.model.rstrip("/").rpartition("/")[2]
    stream = sys.stderr if options.json == "-" else sys.stdout
    _announce(engine, name, options, stream)
    from tonnage.serve.server.watching import serve

    address = socket.getsockname()
    print(f"\n  serving {name} on http://{options.host}:{address[1]}/v1", file=stream, flush=True)
    if options.host not in _LOOPBACK and not keys:
        print("  no key is set: whoever reaches this address can use it (--api-key)", file=sys.stderr, flush=True)
    serving = serve(engine, name, socket, keys=keys, drain_s=options.drain, watch_s=options.watch, stream=stream)
    if not asyncio.run(serving):
        print("tonnage: A step has not come to its end; it is left behind.", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly end would wait for the device
    return 0


def _parser() -> ArgumentParser:
    usage = "tonnage serve MODEL [--budget 0.9] [--context 32k] [--kv fp8] [FLAG]..."
    parser = Parser("tonnage serve", usage=usage, description=SUMMARY, epilog=_EPILOG)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, or an id that the hub's cache holds")
    add("--budget", default="0.9", help='share of the card, or a size like "60 GiB" (default: 0.9)')
    add("--context", metavar="TOKENS", help="tokens of the longest sequence, like 8192 or 32k (default: the model's)")
    add("--kv", choices=("bf16", "fp16", "fp32", "fp8"), help="the KV cache (default: as the model computes)")
    add("--weights", choices=("int8", "fp8"), help="keep the matrices in eight bits")
    add("--max-seqs", type=int, default=256, metavar="N", help="sequences that run at once (default: 256)")
    add("--batched-tokens", default="8192", metavar="N", help="tokens of one step (default: 8192)")
    add("--block", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    add("--swap", default="0", metavar="SIZE", help="host memory for preempted sequences (default: recompute them)")
    add("--no-prefix-cache", action="store_true", help="forget a prompt with its request")
    add("--eager", action="store_true", help="no CUDA graphs")
    add("--device", help="like cuda, cuda:1 or cpu (default: a GPU where there is one)")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    add("--api-key", action="append", metavar="KEY", help="let in who has it; may be repeated (or TONNAGE_API_KEY)")
    add("--served-name", default="", metavar="NAME", help="the model's name in the API (default: the folder's)")
    add("--max-waiting", type=int, default=1024, metavar="N", help="sequences in the queue (default: 1024)")
    add("--drain", type=float, default=30.0, metavar="SECONDS", help="for what runs when told to stop (default: 30)")
    add("--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="show the KV cache at this interval")
    add("--online", action="store_true", help="download the model where the cache does not hold it")
    add("--json", default="", metavar="FILE", help="write the card's ledger as JSON ('-': standard output)")
    return parser


def _check(options: Namespace) -> None:
    numbers = {"max-waiting": options.max_waiting, "watch": options.watch}
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise RequestError(f"--{name} {number} makes no sense.", hint=f"Give --{name} more than 0.")
    if not options.drain >= 0:
        raise RequestError(f"--drain {options.drain} makes no sense.", hint="Give --drain 0 or more.")


def _keys(options: Namespace) -> list[str]:
    """From the flags, or from the environment, there without the line's end that files of secrets have."""
    secret = os.environ.get("TONNAGE_API_KEY", "")
    keys: list[str] = options.api_key or ([secret.strip()] if secret else [])
    if any(not key.isascii() or not key.strip() for key in keys):
        raise RequestError("An API key is empty or not plain ASCII.", hint="Headers carry ASCII; choose such a key.")
    return keys


def _engine(folder: str, options: Namespace) -> "Engine":
    from tonnage.units import parse_bytes, parse_count

    try:
        from tonnage.serve.engine import Engine
    except ModuleNotFoundError as error:
        raise MissingPart(f"Serving needs {error.name}.", hint="Install it: pip install 'tonnage[serve]'") from None
    return Engine(
        folder,
        budget=_budget(options.budget),
        context=parse_count(options.context) if options.context else None,
        kv=options.kv,
        weights=options.weights,
        max_seqs=options.max_seqs,
        batched_tokens=parse_count(options.batched_tokens),
        block=options.block,
        swap=parse_bytes(options.swap),
        prefix_cache=not options.no_prefix_cache,
        eager=options.eager,
        device=options.device,
        max_waiting=options.max_waiting,
    )


def _budget(text: str) -> float | str:
    """A plain number up to 1 is a share; all else is a size."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if share <= 1 else text


def _announce(engine: "Engine", name: str, options: Namespace, stream: TextIO) -> None:
    from tonnage.report.lines import print_lines
    from tonnage.report.serve import card_figures, card_lines

    if options.json:
        from tonnage.report.output import write_json

        write_json(options.json, card_figures(engine.card))
    print_lines(["", *card_lines(engine.card, model=name)], stream)

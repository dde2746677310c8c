"""`tonnage serve`: a model over OpenAI's API, from a paged KV cache. Its words are parsed by argparse, as those of plan are."""

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from tonnage.commands.options import parser_of
from tonnage.errors import MissingPart, RequestError

if TYPE_CHECKING:
    from tonnage.serve import Engine

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def command(words: list[str]) -> int:
    """Parse the words after `tonnage serve`, start, serve until a signal comes; the exit status."""
    options = parser_of("serve").parse_args(words)
    for flag, number in (("max-waiting", options.max_waiting), ("watch", options.watch)):
        if number is not None and not number > 0:
            raise RequestError(f"--{flag} {number} makes no sense.", hint=f"Give --{flag} more than 0.")
    if not options.drain >= 0:
        raise RequestError(f"--drain {options.drain} makes no sense.", hint="Give --drain 0 or more.")
    import asyncio

    keys = _keys(options)
    from tonnage.models.files import find_folder

    folder = find_folder(options.model, online=options.online)
    from tonnage.serve.server.running import listen, serve, url_of

    socket = listen(options.host, options.port)
    engine = _engine(str(folder), options)
    name = options.served_name or options.model.rstrip("/").rpartition("/")[2]
    stream = sys.stderr if options.json == "-" else sys.stdout
    from tonnage.report.lines import print_lines
    from tonnage.report.serve import card_figures, card_lines

    if options.json:
        from tonnage.report.output import write_json

        write_json(options.json, card_figures(engine.card))
    print_lines(["", *card_lines(engine.card, model=name)], stream)

    def tell() -> None:
        print(f"\n  serving {name} on {url_of(options.host, socket)}/v1", file=stream, flush=True)
        if options.host not in _LOOPBACK and not keys:
            words = "  no key is set: whoever reaches this address can use it (--api-key)"
            print(words, file=sys.stderr, flush=True)

    serving = serve(
        engine, name, socket, keys=keys, drain_s=options.drain, watch_s=options.watch, stream=stream, ready=tell
    )
    if not asyncio.run(serving):
        print("tonnage: A step has not come to its end; it is left behind.", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly end would wait for the device
    return 0


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
    names = ("kv", "weights", "max_seqs", "block", "eager", "device", "max_waiting")
    return Engine(
        folder,
        budget=_budget(options.budget),
        context=parse_count(options.context) if options.context else None,
        batched_tokens=parse_count(options.batched_tokens),
        swap=parse_bytes(options.swap),
        prefix_cache=not options.no_prefix_cache,
        **{name: getattr(options, name) for name in names},
    )


def _budget(text: str) -> float | str:
    """A plain number up to 1 or a percentage is a share; all else is a size."""
    number, is_percentage = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number)
    except ValueError:
        return text
    if is_percentage:
        return share / 100
    return share if share <= 1 else text

"""`tonnage record`: an unmodified script on the real GPU, with the report of what it took."""

from argparse import REMAINDER, ArgumentParser
from pathlib import Path

from tonnage.commands.pages import add_page_options, page_of
from tonnage.commands.run import check_paths

SUMMARY = "Run a script on this machine's GPU, and report what it allocated."
_EXIT_STATUS = "Exits with the script's own status where it failed for its own reasons, 1 where it did not fit, else 0."


def command(words: list[str]) -> int:
    """Parse the words after `tonnage record`, record, report; the exit status."""
    options = _parser().parse_args(words)
    check_paths(options)
    page = page_of(options)
    from tonnage.recording import write_recording
    from tonnage.recording.cuda import record_script
    from tonnage.report.output import publish
    from tonnage.report.streams import data_on_stdout

    with data_on_stdout(options.json == "-"):
        recording = record_script(options.script, options.arguments, most_events=options.events)
    if options.output:
        write_recording(options.output, recording, force=options.force)
    publish([recording], json_target=options.json, page=page, opens=options.open, verbose=options.verbose)
    if recording.header.outcome == "ok":
        return 0
    return recording.header.exit_status or 1


def _parser() -> ArgumentParser:
    from tonnage.recording.cuda.recorder import MOST_EVENTS

    usage = "tonnage record [OPTION]... SCRIPT [ARG]..."
    parser = ArgumentParser("tonnage record", usage=usage, description=SUMMARY, epilog=_EXIT_STATUS, allow_abbrev=False)
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="keep the recording for `tonnage show`, `diff` and `explain`")
    add("--force", action="store_true", help="replace files that are there")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add_page_options(parser)
    add("--events", type=int, default=MOST_EVENTS, metavar="N", help=f"keep the last N events ({MOST_EVENTS:,})")
    add("-v", "--verbose", action="store_true", help="show every step and assumption")
    add("script", type=Path, metavar="SCRIPT", help="the Python script to run, as it is")
    add("arguments", nargs=REMAINDER, metavar="ARG", help="the script's own words, untouched")
    return parser

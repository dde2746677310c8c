"""`tonnage record`: an unmodified script on the real GPU, with the report of what it took."""

from tonnage.commands.options import page_of, parser_of
from tonnage.commands.run import keep, read
from tonnage.errors import BadLayout


def command(words: list[str]) -> int:
    """Parse the words after `tonnage record`, record, report; the exit status."""
    options = parser_of("record").parse_args(words)
    page = page_of(options)
    launch = read(options)
    if launch.has_ranks:
        problem = f"{options.script} starts {launch.hosts * launch.per_host} processes, and one is recorded."
        hint = 'Let the script say it in each: tonnage.record_on_oom(f"oom-{rank}.tonnage"), or predict: tonnage run'
        raise BadLayout(problem, hint=hint)
    from tonnage.recorder import record_script
    from tonnage.report.streams import data_on_stdout

    with data_on_stdout(options.json == "-"):
        recording = record_script(launch.program, list(launch.arguments), most_events=options.events)
    keep(recording, [recording], options, page)
    return 0 if recording.header.outcome == "ok" else recording.header.exit_status or 1

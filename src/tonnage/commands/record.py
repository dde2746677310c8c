"""`tonnage record`: an unmodified script on the real GPU, with the report of what it took."""

from tonnage.commands.options import page_of, parser_of
from tonnage.commands.run import read, tell_failed
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
    from tonnage.recording import write_recording
    from tonnage.report.output import publish
    from tonnage.report.streams import data_on_stdout

    with data_on_stdout(options.json == "-"):
        recording = record_script(launch.program, list(launch.arguments), most_events=options.events)
    if options.output:
        write_recording(options.output, recording, force=options.force)
        tell_failed(recording.header.outcome, options)
    publish([recording], json_target=options.json, page=page, opens=options.open, verbose=options.verbose)
    if recording.header.outcome == "ok":
        return 0
    return recording.header.exit_status or 1

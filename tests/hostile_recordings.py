"""Recordings that try to be more than data: every word of them is markup."""

from support import MIB, Run
from tonnage.ledger import Category
from tonnage.recording import FailedRequest, Note, Recording, StandIn

HOSTILE = '<img src=x onerror="window.harmed=1">\'"</script><script>window.harmed=1</script><!--${window.harmed=1}'


def hostile_recording() -> Recording:
    """Each field that a page shows says `HOSTILE`."""
    words = dict.fromkeys(("operator", "module", "line", "dtype"), HOSTILE)
    run = Run(
        script=HOSTILE, arguments=(HOSTILE,), gpu_name=HOSTILE, torch_modelled=HOSTILE, torch_installed=HOSTILE,
        error=HOSTILE, overhead_bytes=MIB, overhead_parts={HOSTILE: MIB},
    )  # fmt: skip
    run.step(1)
    run.phase(HOSTILE)
    for category in Category:
        run.alloc(3 * MIB, category, stack=(HOSTILE, HOSTILE), **words)
    recording = run.recording
    recording.header.settings = HOSTILE
    recording.header.outcome = "oom"
    recording.notes.append(Note("assumption", HOSTILE, 1, HOSTILE))
    recording.stand_ins.append(StandIn(HOSTILE, HOSTILE, 1, HOSTILE))
    recording.oom = FailedRequest(
        HOSTILE, MIB, 0, MIB, MIB, operator=HOSTILE, module=HOSTILE, phase=HOSTILE, message=HOSTILE, stack=(HOSTILE,)
    )
    return recording

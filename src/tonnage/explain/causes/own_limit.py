"""A limit of the process's own (`set_per_process_memory_fraction`), which refused what the card still had."""

from tonnage.explain.case import OWN_LIMIT, Case, is_limited_by_itself
from tonnage.explain.findings import Finding
from tonnage.explain.fixes import Fix
from tonnage.units import format_bytes


def own_limit(case: Case) -> Finding | None:
    """The limit, where the request that failed met it before it met the card's."""
    death = case.death
    if death is None or not is_limited_by_itself(case.recording):
        return None
    noted = next((note for note in case.recording.notes if note.operator == OWN_LIMIT), None)
    limit = death.reserved_bytes + death.free_bytes
    beyond = noted.text.partition("; ")[2] if noted else f"the device had {format_bytes(death.device_free_bytes)} free"
    sentence = f"a limit that the process set itself allows {format_bytes(limit)}; {beyond}"
    how = "a larger torch.cuda.set_per_process_memory_fraction(), or none"
    return Finding("own-limit", sentence, limit, fixes=(Fix("a higher limit", 0, "nothing", how, True),))

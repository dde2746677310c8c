"""The report of a plan: eighty columns, nothing lost, nothing said twice."""

import io

import pytest

from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.offers import offers
from tonnage.planner.training.reasons import rejected
from tonnage.planner.training.remedies import remedies
from tonnage.planner.training.request import Offload, TrainingRequest
from tonnage.planner.training.search import PlanSearch, search
from tonnage.report.plans.training import TrainingAnswer, flags, print_plan
from tonnage.report.step_time import Campaign, hours_words

CASES = {
    "one card": ("llama-3.2-1b", "h200", TrainingRequest(seq=2048, precision="bf16")),
    "offloaded": ("llama-3.1-70b", "8xh200", TrainingRequest(seq=8192)),
    "two hosts": ("llama-3.1-8b", "16xh100", TrainingRequest(seq=8192)),
    "experts": ("mixtral-8x7b", "64xh100", TrainingRequest(seq=8192)),
    "does not fit": ("llama-3.1-405b", "8xa100-40", TrainingRequest(seq=8192, offload=Offload())),
    "too long": ("qwen3-0.6b", "a10", TrainingRequest(seq=65536)),
}


def found(case: str) -> PlanSearch:
    model, gpus, request = CASES[case]
    return search(find_model(model), find_cluster(gpus), request)


def report(findings: PlanSearch, *, explain: bool = False) -> str:
    stream = io.StringIO()
    changes = [] if findings.fits else remedies(findings)
    answer = TrainingAnswer(findings, rejected(findings), changes, offers(findings), seconds=0.1)
    print_plan(answer, stream=stream, explain=explain)
    return stream.getvalue()


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_line_fits_eighty_columns(case: str, explain: bool) -> None:
    lines = report(found(case), explain=explain).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    assert "\x1b" not in "".join(lines)


def test_a_plan_that_fits_ends_with_what_to_do() -> None:
    said = report(found("two hosts"))
    assert said.splitlines()[1].endswith("fits")
    assert "tokens/s" in said and "next best" in said and "why not" in said
    assert said.rstrip().splitlines()[-1].strip().startswith("to launch it: --export DIR")


def test_one_that_does_not_names_the_gap_and_the_change() -> None:
    findings = found("does not fit")
    said = report(findings)
    assert said.splitlines()[2].endswith("does not fit")
    assert "GiB over; its largest terms:" in said
    assert "what would fit" in said and "--gpus" in said


def test_offload_says_what_the_host_needs() -> None:
    assert "host memory" in report(found("offloaded"))


def test_positions_that_the_model_lacks_are_mentioned() -> None:
    assert "--seq 65536 is beyond the 40960 positions" in report(found("too long"))


def test_explain_gives_every_reason() -> None:
    findings = found("two hosts")
    said = report(findings, explain=True)
    assert all(f"{reason.choice} {reason.value}" in said for reason in rejected(findings))
    assert "more: --explain" not in said


def test_flags_leave_out_degrees_of_one() -> None:
    plan = found("one card").closest
    words = " ".join(flags(plan))
    assert "tp" not in words and "zero" not in words
    assert "micro-batch" in words


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    findings = found("one card")
    print_plan(TrainingAnswer(findings, [], [], [], seconds=0.1), stream=stream, explain=False)
    assert "\x1b[1;32mfits\x1b[0m" in stream.getvalue()


def test_a_faster_plan_within_the_clock_s_error_is_named() -> None:
    said = " ".join(report(found("two hosts")).split())
    assert "faster, less than the clock's error of 5 %: the simpler plan is shown" in said


def test_what_else_could_be_had_comes_with_its_flag_and_its_gain() -> None:
    said = report(found("two hosts"))
    assert "with one more flag" in said
    (line,) = (line for line in said.splitlines() if "--framework megatron:" in line)
    assert "+" in line and "%" in line
    assert "trains in other numbers" in report(
        search(find_model("bert-base"), find_cluster("h200"), TrainingRequest(seq=512))
    )


def test_the_framework_is_said_first() -> None:
    findings = found("two hosts")
    assert flags(findings.closest)[0] == findings.closest.configuration.framework
    assert f"\n  {findings.closest.configuration.framework}  zero " in report(findings)


def test_the_whole_training_is_told_where_one_is_named() -> None:
    stream, findings = io.StringIO(), found("two hosts")
    answer = TrainingAnswer(findings, [], [], [], seconds=0.1, campaign=Campaign(tokens=100e9, price=2.5))
    print_plan(answer, stream=stream, explain=False)
    hours = 100e9 / findings.closest.tokens_per_s / 3600
    assert f"100 B tokens: {hours_words(hours)}" in stream.getvalue()
    assert f"at 2.50 an hour and GPU: {hours * 2.5 * 16:,.2f}" in stream.getvalue()

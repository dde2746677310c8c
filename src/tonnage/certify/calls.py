"""Calls that have been run: what is kept of one, so that it can be replayed."""

from dataclasses import dataclass, field
from typing import Any

from tonnage.certify.outputs import Output
from tonnage.certify.program import TEMPLATE_GIVE_ARGUMENT, Program, Template

Key = tuple[Any, ...]


class Unfaithful(Exception):
    """What was replayed cannot go on as the script does: all of it must be run."""


@dataclass
class Call:
    """One that has been run, and can be replayed."""

    template: Template
    output: Output | None = None
    loose_at_once: list[int] = field(default_factory=list)  # slots that were dropped right after it, by no other call
    loose_before_backward: list[int] = field(default_factory=list)  # as what autocast keeps is, at the end of its block
    loose: list[int] = field(default_factory=list)  # and those that were dropped later
    gradients: list[tuple[Any, int]] = field(default_factory=list)  # parameters (weakly) and their gradients' slots
    left: list[int] = field(default_factory=list)  # slots that nobody outside holds, once it is over
    drop: Template | None = None

    def dropping(self, program: Program) -> Template:
        """What drops all that the call left: a graph without a backward, or gradients that are set to None."""
        if self.drop is None:
            self.drop = program.new_template(f"drop {self.template.name}")
            for slot in self.left:
                self.drop.events.extend((TEMPLATE_GIVE_ARGUMENT, 0, slot, 0))
        return self.drop


@dataclass
class Pending:
    """A forward whose backward has not come yet."""

    call: Call | None
    instance: int
    is_real: bool
    done: bool = False

"""Why memory ran out, judged by text: an error message, a traceback, a log.

Text proves less than a recording, so each cause has a certainty and its evidence, and open questions are stated.
"""

from tonnage.explain.text.diagnosis import TextDiagnosis, explain_text
from tonnage.explain.text.log import text_lines
from tonnage.explain.text.numbers import read_numbers
from tonnage.explain.text.suspects import Suspect

__all__ = ["Suspect", "TextDiagnosis", "explain_text", "read_numbers", "text_lines"]

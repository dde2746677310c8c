import sys

sys.modules["triton"] = None  # as where it is not installed

import triton  # noqa: E402, F401

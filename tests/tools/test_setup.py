"""The environment that `make setup` builds: its libraries match, outside of `tonnage run` too."""

import subprocess
import sys
from pathlib import Path


def test_trainer_and_fit_trainer_import_in_plain_python() -> None:
    """An index with torch for the CPU and torchvision for CUDA alone must not leave both in one environment."""
    ask = "import transformers, tonnage; print(transformers.Trainer.__name__, tonnage.fit_trainer.__name__)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert done.stdout.split() == ["Trainer", "fit_trainer"], done.stderr


def test_torchvision_imports_or_is_absent() -> None:
    ask = "import importlib.util; found = bool(importlib.util.find_spec('torchvision')); print(found)"
    ask += "
if found: import torchvision"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # One that does not match lies apart, for the tests that give its operators names.
    assert done.stdout.strip() == "True" or (Path(sys.prefix) / "torchvision" / "torchvision").is_dir()

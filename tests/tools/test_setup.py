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
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    # One that does not match lies apart, for the tests that give its operators names.
    apart = (Path(sys.prefix) / "torchvision" / "torchvision").is_dir()
    assert done.returncode == 0 or (apart and "No module named 'torchvision'" in done.stderr), done.stderr

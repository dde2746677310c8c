"""Which folders a redirection leaves alone."""

import os
import sys
import tempfile
from pathlib import Path

from tonnage.virtual.redirect.settings import folders_in_place, folders_of_compiled_modules, offline_environment


def test_caches_are_found_by_their_variable_or_usual_place() -> None:
    folders = folders_in_place({"TRITON_CACHE_DIR": "/fast/triton", "HF_HOME": "/data/hf"})
    assert "/fast/triton" in folders
    assert "/data/hf/hub" in folders
    assert any(os.path.basename(folder).startswith("torchinductor_") for folder in folders)


def test_user_names_further_folders() -> None:
    named = tempfile.gettempdir()
    assert os.path.realpath(named) in folders_in_place({"TONNAGE_WRITE_THROUGH": f"{named}:/another"})


def test_cached_data_sets_are_not_left_alone() -> None:
    # What a script computes on a virtual GPU must not get into the cache of `datasets`.
    cache = os.path.realpath(os.path.expanduser("~/.cache/huggingface/datasets"))
    assert not any(cache == folder or cache.startswith(f"{folder}/") for folder in folders_in_place({}))


def test_compiled_modules_of_installed_packages_are_cached_in_place() -> None:
    assert os.path.realpath(sys.prefix) in folders_of_compiled_modules()


def test_loggers_write_to_the_scratch_folder() -> None:
    variables = offline_environment(Path("/scratch"))
    assert variables["WANDB_DIR"] == "/scratch/loggers"
    assert variables["WANDB_MODE"] == "offline"

"""Leaves out uploads to the Hugging Face hub: what a script would publish holds values of a virtual GPU."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns

HUB = "huggingface_hub.hf_api"
_WORDS = "Nothing is uploaded to the hub, and no repository is created or changed there."
_COMMITS = ("create_commit", "upload_file", "upload_folder", "delete_file", "delete_files", "delete_folder")
_OTHERS = (
    "upload_large_folder",
    "delete_repo",
    "move_repo",
    "create_branch",
    "delete_branch",
    "create_tag",
    "delete_tag",
    "update_repo_settings",
    "super_squash_history",
)


def leave_out_uploads(module: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Replace the methods of `HfApi` that change the hub, and the functions made of them."""

    def repository(api: Any, repo_id: str, **options: Any) -> Any:
        return module.RepoUrl(f"{module.constants.ENDPOINT}/{repo_id}")

    def commit(api: Any, *arguments: Any, **options: Any) -> Any:
        repo_id = options.get("repo_id") or "unknown/unknown"
        made = module.CommitInfo(
            commit_url=f"{module.constants.ENDPOINT}/{repo_id}/commit/main",
            commit_message=options.get("commit_message") or "",
            commit_description="",
            oid="main",
        )
        return api.run_as_future(lambda: made) if options.get("run_as_future") else made

    def nothing(api: Any, *arguments: Any, **options: Any) -> None:
        return None

    replacements = {"create_repo": repository, **dict.fromkeys(_COMMITS, commit), **dict.fromkeys(_OTHERS, nothing)}
    for name, replacement in replacements.items():
        if not hasattr(module.HfApi, name):
            continue
        method = _telling(name, replacement, stand_ins)
        patches.set(module.HfApi, name, method)
        if hasattr(module, name):  # a function of the module is the method of its own object
            patches.set(module, name, method.__get__(module.api))


def _telling(name: str, replacement: Callable[..., Any], stand_ins: StandIns) -> Any:
    def method(api: Any, *arguments: Any, **options: Any) -> Any:
        stand_ins.assume("huggingface_hub", _WORDS)
        return replacement(api, *arguments, **options)

    method.__name__ = name
    return method

"""Nothing is uploaded to the Hugging Face hub during a virtual run."""

from pathlib import Path

from virtual_runs import run_tonnage

UPLOADS = """
import torch
from huggingface_hub import HfApi, create_repo, upload_folder
print(create_repo("me/model", exist_ok=True).repo_id)
print(HfApi().upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="me/model").oid)
print(upload_folder(folder_path=".", repo_id="me/model", run_as_future=True).result().oid)
torch.ones(8, device="cuda")
"""


def test_uploads_are_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "upload.py").write_text(UPLOADS)
    done = run_tonnage("run", "--gpu", "h200", "upload.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("me/model\nmain\nmain\n")
    assert "Nothing is uploaded to the hub" in " ".join(done.stdout.split())

"""Questions about fine-tuning: docs/questions/fine-tuning.md."""

from questions.asking import answer


# Q: Can I fine-tune an 8B model on one RTX 4090?
def test_an_8b_model_on_a_4090() -> None:
    full = answer("tonnage plan train llama-3.1-8b --gpus rtx-4090 --seq 2k")
    adapters = answer("tonnage plan train llama-3.1-8b --gpus rtx-4090 --seq 2k --qlora")
    assert adapters["status"] == 0
    assert full["best"] is None or full["best"]["tokens_per_s"] < adapters["best"]["tokens_per_s"]

from tonnage.explain.text.places import framework_of, place_of

PLAIN = [
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 41, in <module>',
    "    loss.backward()",
    '  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 581, in backward',
    "    torch.autograd.backward(",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "",
    "During handling of the above exception, another exception occurred:",
    "Traceback (most recent call last):",
    '  File "/home/me/report.py", line 9, in send',
]


def test_the_users_line_and_the_phase_of_the_first_failure() -> None:
    place = place_of(PLAIN)
    assert place.phase == "backward" and place.own_frame
    assert (place.own_frame.file, place.own_frame.line) == ("/home/me/train.py", 41)


def test_notebooks_and_boxes() -> None:
    notebook = [
        "OutOfMemoryError                          Traceback (most recent call last)",
        "Cell In[22], line 29",
        "File ~/site-packages/transformers/trainer.py:1932, in Trainer.train(self, resume)",
        "File ~/site-packages/transformers/trainer_pt_utils.py:97, in nested_concat(tensors, new_tensors)",
        "OutOfMemoryError: CUDA out of memory.",
    ]
    place = place_of(notebook)
    assert place.operator and place.operator.cause == "evaluation" and len(place.frames) == 2
    colab = [
        "[/usr/local/lib/python3.11/dist-packages/torch/nn/modules/module.py](https://localhost:8080/#) in convert(t)"
    ]
    assert place_of(colab).frames[0].function == "convert"
    box = ["│ C:\\kohya_ss\\venv\\lib\\site-packages\\torch\\cuda\\amp\\grad_scaler.py:290 in _maybe_opt_step │"]
    found = place_of(box)
    assert found.operator and found.operator.cause == "optimizer"


def test_the_innermost_telling_frame_wins() -> None:
    lines = ['  File "/x/trainer.py", line 1, in train', '  File "/x/optim/adam.py", line 2, in step']
    found = place_of(lines)
    assert found.operator and found.operator.cause == "optimizer"


def test_advice_is_in_the_frameworks_words() -> None:
    assert framework_of("File site-packages/transformers/trainer.py").words["batch"] == "per_device_train_batch_size=1"
    assert framework_of("vllm/v1/worker/gpu_worker.py").name == "vLLM"
    assert framework_of("").name == "PyTorch"


def test_steps_before_it_died_are_counted() -> None:
    assert place_of([" 12%|#   | 120/1000 [00:10<01:00, 11.2it/s]"]).steps == 120
    assert place_of(["Loading checkpoint shards: 100%|###| 5/5 [00:01<00:00,  3.13it/s]"]).steps is None

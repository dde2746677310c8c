"""Every family's logits, computed in random pieces over pages, are those of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from serve.models.tiny import CASES, Pages, expected_logits, make_model, prompts, save
from tonnage.serve.models.architecture import architecture_of, read_architecture
from tonnage.serve.models.load import load_decoder, random_decoder


@pytest.mark.parametrize("case", CASES)
def test_logits_over_pages_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    folder = save(model, tmp_path)
    decoder = load_decoder(folder, read_architecture(folder), device="cpu", dtype=torch.float32)
    given = list(prompts(seed=1))
    pages = Pages(decoder, given)
    pages.run()
    for sequence, prompt in zip(pages.sequences, given, strict=True):
        expected = expected_logits(model, prompt)
        assert expected.abs().max() > 0.5
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=1e-4, rtol=1e-4)


def test_only_rows_that_draw_have_logits() -> None:
    decoder = random_decoder(architecture_of(make_model("gemma2").config.to_dict()), "cpu", torch.float32)
    pages = [Pages(decoder, list(prompts(seed=2, shortest=6))) for _ in range(2)]
    pieces = [[(sequence, 5) for sequence in run.sequences] for run in pages]
    every, some = (run.batch([], chosen) for run, chosen in zip(pages, pieces, strict=True))
    some.samples = torch.tensor([14, 4, 9])
    expected = decoder.forward(every, pages[0].layers)[[14, 4, 9]]
    assert torch.equal(decoder.forward(some, pages[1].layers), expected)
    assert expected.dtype == torch.float32 and expected.shape == (3, decoder.architecture.vocab)


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen3_moe"])
def test_padding_rows_change_nothing(case: str) -> None:
    decoder = random_decoder(architecture_of(make_model(case).config.to_dict()), "cpu", torch.float32)
    plain, padded = (Pages(decoder, list(prompts(seed=2, shortest=6))) for _ in range(2))
    for run in (plain, padded):
        run.step([(sequence, 4) for sequence in run.sequences])
    batch = plain.batch([(sequence, 1) for sequence in plain.sequences], [])
    wide = replace(
        batch,
        token_ids=pad(batch.token_ids, (0, 2)),
        positions=pad(batch.positions, (0, 2)),
        slots=pad(batch.slots, (0, 2)),
        decodes=batch.decodes + 2,
        tables=pad(batch.tables, (0, 0, 0, 2)),
        lengths=pad(batch.lengths, (0, 2)),
        samples=torch.arange(batch.decodes + 2),
    )
    logits = decoder.forward(wide, padded.layers)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:-2], decoder.forward(batch, plain.layers))

"""LSTM, GRU and plain recurrent networks: cuDNN's reserve space and weight buffers, and the cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .spec import FLOATS, Case, Made, apply, case, module, t, without_grad


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for kind in ("LSTM", "GRU", "RNN"):
            yield from networks(kind, dtype)
        yield from cells(dtype)
    for kind in ("LSTM", "GRU", "RNN"):
        for hidden, layers in ((128, 1), (200, 2), (512, 3)):
            yield case(f"{kind}.cuda()", lambda k, h, n, x: getattr(nn, k)(64, h, n).to(x.device), kind, hidden, layers, t(1, grad=False), backward=False)
            yield case(f"{kind}.cuda()", lambda k, h, n, x: getattr(nn, k)(64, h, n, bidirectional=True).to(x.device), kind, hidden, layers, t(1, grad=False), backward=False)


def networks(kind: str, dtype: torch.dtype) -> Iterator[Case]:
    for width, hidden, layers in ((32, 48, 1), (64, 128, 2), (256, 512, 2), (100, 200, 3), (512, 1024, 1), (33, 17, 1)):
        for options in ({}, {"bidirectional": True}, {"batch_first": True}, {"dropout": 0.2}, {"batch_first": True, "bidirectional": True, "dropout": 0.2}, {"bias": False}):
            if "dropout" in options and layers == 1:
                continue
            for time, batch in ((20, 4), (128, 32), (1, 1)):
                shape = (batch, time, width) if options.get("batch_first") else (time, batch, width)
                for train in (True, False):
                    build = module(lambda w=width, h=hidden, n=layers, o=options: getattr(nn, kind)(w, h, n, **o), dtype, train)
                    extra: dict[str, Any] = {} if train else {"around": without_grad}
                    yield case(kind, apply, build, t(*shape, dtype=dtype, grad=train), note=f"train={train} {options}", **extra)
        build = module(lambda w=width, h=hidden, n=layers: getattr(nn, kind)(w, h, n, batch_first=True), dtype)
        yield case(kind, _packed, build, t(4, 30, width, dtype=dtype), note="packed")
        state = t(layers, 4, hidden, dtype=dtype)
        given = (state, state) if kind == "LSTM" else state
        yield case(kind, apply, build, t(4, 30, width, dtype=dtype), given, note="initial state")
        yield case(kind, apply, build, t(4, 30, width, dtype=dtype, grad=False), note="input without grad")
    if kind == "RNN":
        yield case("RNN", apply, module(lambda: nn.RNN(32, 48, nonlinearity="relu"), dtype), t(20, 4, 32, dtype=dtype), note="relu")
    if kind == "LSTM":
        yield case("LSTM", apply, module(lambda: nn.LSTM(32, 48, 2, proj_size=16), dtype), t(20, 4, 32, dtype=dtype), note="projection")


def _packed(m: nn.Module, x: torch.Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([30, 20, 10, 5]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m(packed)[0], batch_first=True)[0]


def cells(dtype: torch.dtype) -> Iterator[Case]:
    for width, hidden, batch in ((32, 48, 4), (256, 512, 64)):
        for kind in ("LSTMCell", "GRUCell", "RNNCell"):
            build = module(lambda k=kind, w=width, h=hidden: getattr(nn, k)(w, h), dtype)
            yield case(kind, apply, build, t(batch, width, dtype=dtype))
            state = t(batch, hidden, dtype=dtype)
            yield case(kind, apply, build, t(batch, width, dtype=dtype), (state, state) if kind == "LSTMCell" else state, note="state")
    yield case("LSTM unrolled", _unrolled, Made(lambda d: nn.LSTMCell(32, 48).to(d)), t(10, 4, 32))


def _unrolled(cell: nn.LSTMCell, x: torch.Tensor) -> Any:
    h = c = torch.zeros(x.shape[1], 48, device=x.device)
    for step in x:
        h, c = cell(step, (h, c))
    return h

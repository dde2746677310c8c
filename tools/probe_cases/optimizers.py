"""One step of every optimizer (the first call makes the state), clipping, scaling, foreach operators and averages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .spec import BF16, F16, F32, Case, Made, case

SHAPES = ((1,), (7,), (64,), (33, 65), (256, 768), (64, 3, 7, 7), (1000, 100), (), (131, 77))
LISTS = (SHAPES, ((64,), (33, 65), (100, 10)) * 40, ((512, 512),) * 2)
OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "weight_decay": 0.1}, {"weight_decay": 0.1}, {"maximize": True}],
    "Adam": [{}, {"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}], "AdamW": [{}, {"amsgrad": True}, {"weight_decay": 0.0}],
    "Adagrad": [{}, {"weight_decay": 0.1}], "Adadelta": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9}], "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}], "RAdam": [{}, {"weight_decay": 0.1}], "Rprop": [{}], "ASGD": [{}],
    "Adafactor": [{}],
}  # fmt: skip
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CAPTURABLE = ("Adam", "AdamW", "Adadelta", "RMSprop", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")


def cases() -> Iterator[Case]:
    yield from steps()
    yield from clipping()
    yield from foreach()
    yield from scaling()
    yield from averages()


def parameters(device: str, dtype: torch.dtype, shapes: tuple[Any, ...], grads: bool = True) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in shapes]
    for p in params if grads else ():
        p.grad = torch.randn_like(p)
    return params


def parameter_list(dtype: torch.dtype, shapes: tuple[Any, ...]) -> Made:
    return Made(lambda device: parameters(device, dtype, shapes))


def optimizer(name: str, dtype: torch.dtype, shapes: tuple[Any, ...], options: dict[str, Any]) -> Made:
    return Made(lambda device: getattr(torch.optim, name)(parameters(device, dtype, shapes), lr=0.01, **options))


def steps() -> Iterator[Case]:
    def step(opt: torch.optim.Optimizer) -> None:
        opt.step()

    for dtype in (F32, BF16):
        for which, shapes in enumerate(LISTS):
            for name, variants in OPTIMIZERS.items():
                for options in variants:
                    ways: list[dict[str, Any]] = [{}, {"foreach": False}]
                    ways += [{"fused": True}] if name in FUSED else []
                    ways += [{"capturable": True}, {"capturable": True, "foreach": False}] if name in CAPTURABLE else []
                    for way in ways:
                        note = f"{name} {options | way}, {str(dtype)[6:]}, parameter list {which}"
                        yield case("optimizer.step", step, optimizer(name, dtype, shapes, options | way), note=note, backward=False)
    matrices = ((64, 32), (128, 128), (256, 64), (33, 65))
    if hasattr(torch.optim, "Muon"):
        for dtype in (F32, BF16):
            for options in ({}, {"nesterov": False}, {"weight_decay": 0.0}):
                yield case("optimizer.step", step, optimizer("Muon", dtype, matrices, options), note=f"Muon {options} {str(dtype)[6:]}", backward=False)
    yield case("optimizer.step", step, Made(_mixed), note="AdamW over fp32 and bf16 parameters, two groups", backward=False)
    yield case("optimizer.step", step, Made(_tensor_rate), note="Adam with lr as a tensor on the GPU", backward=False)
    yield case("optimizer.step", step, Made(_sparse), note="SparseAdam", backward=False)
    for options in ({}, {"line_search_fn": "strong_wolfe"}, {"history_size": 3, "max_iter": 5}):
        yield case("optimizer.step", _lbfgs_step, Made(lambda d, o=options: _lbfgs(d, o)), note=f"LBFGS {options}", backward=False)
    for to_none in (True, False):
        yield case("zero_grad", lambda o, n: o.zero_grad(set_to_none=n), optimizer("SGD", F32, SHAPES, {}), to_none, note=f"set_to_none={to_none}", backward=False)
    yield case("optimizer.load_state_dict", _load_state, Made(_stepped), note="AdamW", backward=False)


def _mixed(device: str) -> torch.optim.Optimizer:
    first, second = parameters(device, F32, SHAPES), parameters(device, BF16, SHAPES)
    return torch.optim.AdamW([{"params": first + second}, {"params": parameters(device, F32, SHAPES[:4]), "weight_decay": 0.0}])


def _tensor_rate(device: str) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters(device, F32, SHAPES), lr=torch.tensor(0.01, device=device), capturable=True)


def _sparse(device: str) -> torch.optim.Optimizer:
    layer = nn.Embedding(100, 16, sparse=True).to(device)
    layer(torch.randint(0, 100, (8, 9), device=device)).sum().backward()
    return torch.optim.SparseAdam(layer.parameters())


def _lbfgs(device: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters(device, F32, SHAPES[1:5]), **options)


def _lbfgs_step(opt: Any) -> Any:
    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = torch.stack([(p**2).sum() for p in opt.param_groups[0]["params"]]).sum()
        loss.backward()
        return loss

    return opt.step(closure)


def _stepped(device: str) -> torch.optim.Optimizer:
    opt = torch.optim.AdamW(parameters(device, F32, SHAPES))
    opt.step()
    return opt


def _load_state(opt: torch.optim.Optimizer) -> None:
    opt.load_state_dict(opt.state_dict())


def clipping() -> Iterator[Case]:
    for dtype in (F32, BF16, F16):
        for which, shapes in enumerate(LISTS):
            for way in (None, True, False):
                note = f"foreach={way} {str(dtype)[6:]} parameter list {which}"
                for kind in (2.0, 1.0, float("inf")):
                    yield case("clip_grad_norm_", lambda p, k, w: nn.utils.clip_grad_norm_(p, 1.0, k, foreach=w), parameter_list(dtype, shapes), kind, way, note=note, backward=False)
                yield case("clip_grad_value_", lambda p, w: nn.utils.clip_grad_value_(p, 0.1, foreach=w), parameter_list(dtype, shapes), way, note=note, backward=False)
            yield case("grad norm by hand", lambda ps: sum(p.grad.norm() ** 2 for p in ps) ** 0.5, parameter_list(dtype, shapes[:11]), note=note, backward=False)
    yield case("clip_grad_norm_", lambda p: nn.utils.clip_grad_norm_(p, 1.0), Made(lambda d: parameters(d, F32, SHAPES) + parameters(d, BF16, SHAPES)), note="fp32 and bf16", backward=False)
    yield case("parameters_to_vector", lambda p: nn.utils.parameters_to_vector(p), parameter_list(F32, SHAPES), backward=False)


def foreach() -> Iterator[Case]:
    unary = ("sqrt", "abs", "neg", "exp", "reciprocal", "sqrt_", "zero_", "sign", "norm", "max")
    calls: dict[str, Callable[[list[Any], list[Any]], Any]] = {
        "_foreach_add": lambda a, b: torch._foreach_add(a, b), "_foreach_add_": lambda a, b: torch._foreach_add_(a, b), "_foreach_add scalar": lambda a, b: torch._foreach_add(a, 1.0),
        "_foreach_mul": lambda a, b: torch._foreach_mul(a, 0.5), "_foreach_mul_": lambda a, b: torch._foreach_mul_(a, 0.5), "_foreach_mul lists": lambda a, b: torch._foreach_mul(a, b),
        "_foreach_mul_ tensor": lambda a, b: torch._foreach_mul_(a, a[0].sum()), "_foreach_div": lambda a, b: torch._foreach_div(a, b), "_foreach_addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, a, 0.5),
        "_foreach_addcdiv": lambda a, b: torch._foreach_addcdiv(a, b, a, 0.5), "_foreach_addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, 0.5),
        "_foreach_lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.1), "_foreach_copy_": lambda a, b: torch._foreach_copy_(a, b), "_foreach_maximum_": lambda a, b: torch._foreach_maximum_(a, b),
        "_foreach_pow": lambda a, b: torch._foreach_pow(a, 2.0), "_foreach_clamp_max_": lambda a, b: torch._foreach_clamp_max_(a, 1.0), "_foreach_sub scalars": lambda a, b: torch._foreach_sub(a, [0.5] * len(a)),
    }  # fmt: skip

    def tensors(dtype: torch.dtype, shapes: tuple[Any, ...]) -> Made:
        return Made(lambda d: [torch.rand(s, device=d).to(dtype) for s in shapes])

    for dtype in (F32, BF16, F16):
        for which, shapes in enumerate(LISTS):
            note = f"tensor list {which} {str(dtype)[6:]}"
            for name in unary:
                yield case(f"_foreach_{name}", getattr(torch, f"_foreach_{name}"), tensors(dtype, shapes), note=note)
            yield case("_foreach_norm", lambda x: torch._foreach_norm(x, 2, dtype=F32), tensors(dtype, shapes), note=f"{note} to fp32")
            yield case("_foreach_norm", lambda x: torch._foreach_norm(x, float("inf")), tensors(dtype, shapes), note=f"{note} inf")
            for name, call in calls.items():
                yield case(name, call, tensors(dtype, shapes), tensors(dtype, shapes), note=note)
            yield case("_foreach_copy_", calls["_foreach_copy_"], tensors(F32, shapes), tensors(dtype, shapes), note=f"{note} into fp32")
            yield case("_foreach_add_", calls["_foreach_add_"], tensors(F32, shapes), tensors(dtype, shapes), note=f"{note} into fp32")
            yield case("_foreach_mul_", calls["_foreach_mul_"], Made(lambda d, s=shapes, t=dtype: [torch.rand((*x, 4), device=d).to(t)[..., 1] for x in s]), None, note=f"{note} strided")


def scaling() -> Iterator[Case]:
    def scaled_step(scaler: Any, opt: Any, unscale: bool) -> None:
        scaler.scale(torch.ones((), device=opt.param_groups[0]["params"][0].device))
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    scaler = Made(lambda d: torch.amp.GradScaler(d, init_scale=2.0))
    for name, options in (("SGD", {}), ("Adam", {}), ("AdamW", {"fused": True}), ("AdamW", {"foreach": False})):
        for unscale in (True, False):
            yield case("GradScaler step", scaled_step, scaler, optimizer(name, F32, SHAPES, options), unscale, note=f"{name} {options} unscale_={unscale}", backward=False)
    yield case("GradScaler.scale", lambda s, x: s.scale(x), scaler, Made(lambda d: torch.ones((), device=d)), backward=False)


def averages() -> Iterator[Case]:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 33))

    swa = torch.optim.swa_utils
    for use_buffers in (True, False):
        for average in (swa.get_ema_multi_avg_fn(0.99), swa.get_swa_multi_avg_fn(), None):
            def build(d: str, average: Any = average, buffers: bool = use_buffers) -> Any:
                model = network().to(d)
                return model, swa.AveragedModel(model, multi_avg_fn=average, use_buffers=buffers)

            yield case("AveragedModel.update_parameters", lambda pair: pair[1].update_parameters(pair[0]), Made(build), note=f"use_buffers={use_buffers}", backward=False)
    yield case("deepcopy", lambda m: copy.deepcopy(m), Made(lambda d: network().to(d)), backward=False)
    yield case("state_dict clone", lambda m: {k: v.clone() for k, v in m.state_dict().items()}, Made(lambda d: network().to(d)), backward=False)
    yield case("load_state_dict", lambda m: m.load_state_dict(m.state_dict()), Made(lambda d: network().to(d)), backward=False)
    yield case("module.half", lambda m: copy.deepcopy(m).half(), Made(lambda d: network().to(d)), backward=False)
    yield case("module.to device", lambda x: network().to(x), Made(lambda d: d), backward=False)
    yield case("module.to device, dtype", lambda x: network().to(x, BF16), Made(lambda d: d), backward=False)

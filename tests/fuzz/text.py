"""A program as Python: what is printed is what runs."""

from __future__ import annotations

from functools import singledispatch

from .program import (
    TRANSFORMS,
    AllReduce,
    Average,
    Backward,
    Clip,
    Drop,
    Flag,
    Forward,
    Freeze,
    Join,
    Layer,
    Loop,
    Mode,
    Model,
    NoSync,
    OnRank,
    Program,
    Prune,
    Reload,
    ReloadOptimizer,
    Replace,
    Rewrap,
    Save,
    Statement,
    Step,
    Swap,
    Switch,
    ZeroGrad,
)

__all__ = ["text_of"]

_LAYERS = {
    "linear": "nn.Linear(4, 4)",
    "batch_norm": "nn.BatchNorm1d(4)",
    "layer_norm": "nn.LayerNorm(4)",
    "tanh": "nn.Tanh()",
    "dropout": "nn.Dropout(0.5)",
    "tied": "Tied()",
    "scaled": "Scaled()",
    "expanded": "Scaled(rows=3)",
    "ignored": "Scaled(rows=3)",
    "lazy": "Lazy()",
    "bank": "Bank(rank)",
    "scripted": "scripted(nn.Linear(4, 4))",
    "act_norm": "ActNorm()",
}
_AROUND = {
    "twice": "Twice({})",
    "residual": "Residual({})",
    "unused": "Unused({})",
    "frozen": "frozen(nn.Sequential({}))",
    "branch": "Branch({})",
    "checkpoint": "Checkpoint({}, use_reentrant=False)",
    "reentrant": "Checkpoint({}, use_reentrant=True)",
    **{how: f"Transformed({how!r}, {{}})" for how in TRANSFORMS},
}
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.1)",
    "momentum": "torch.optim.SGD({}, lr=0.1, momentum=0.9, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW({}, lr=0.05, eps=0.01)",
}


def text_of(program: Program) -> str:
    """The program as Python; `interpreter.py` has the names that it uses."""
    lines = [f"torch.set_default_dtype(torch.{program.dtype})", _seed(program)]
    inner = [model.around for model in program.models if model.around is not None]
    for number in inner:
        lines += [_made(program, program.wrappers[number].model), _wrap(program, number)]
    inside = [program.wrappers[number].model for number in inner]
    lines += [_made(program, number) for number in range(len(program.models)) if number not in inside]
    lines += [_wrap(program, number) for number in range(len(program.wrappers)) if number not in inner]
    for number, optimizer in enumerate(program.optimizers):
        owners = " + ".join(f"list(m{model}.parameters())" for model in optimizer.models)
        owners = (
            f"distinct({owners})" if len(optimizer.models) > 1 else f"m{optimizer.models[0]}.parameters()"
        )
        lines.append(f"o{number} = {_OPTIMIZERS[optimizer.kind].format(owners)}")
    lines += _body(program.body, program)
    return "\n".join(lines) + "\n"


def _seed(program: Program) -> str:
    """Ranks begin with other values, unless nothing makes them equal."""
    vouches = any(("init_sync", False) in wrapper.options for wrapper in program.wrappers)
    return f"torch.manual_seed({'0' if vouches else 'rank or 0'})"


def _made(program: Program, number: int) -> str:
    return f"m{number} = {_model(program.models[number])}"


def _model(model: Model) -> str:
    layers = [_layer(layer) for layer in model.layers]
    if model.encoder_of is not None:
        layers.insert(0, f"m{model.encoder_of}[0]")
    if model.around is not None:
        layers.insert(1, f"w{model.around}")
    if model.has_heads:
        return f"Heads(nn.Sequential({layers[0]}), nn.Sequential({', '.join(layers[1:])}))"
    if model.returns != "tensor":
        return f"Returning({model.returns!r}, {', '.join(layers)})"
    return f"nn.Sequential({', '.join(layers)})"


def _layer(layer: Layer) -> str:
    if layer.kind in _LAYERS:
        return _LAYERS[layer.kind]
    return _AROUND[layer.kind].format(", ".join(_layer(inner) for inner in layer.inner))


def _wrap(program: Program, number: int) -> str:
    wrapper = program.wrappers[number]
    options = "".join(f", {name}={value!r}" for name, value in wrapper.options)
    model = program.models[wrapper.model]
    ignores = model.around is not None or any(layer.kind == "ignored" for layer in model.layers)
    module = f"ignoring(m{wrapper.model})" if ignores else f"m{wrapper.model}"
    return f"w{number} = DDP({module}, process_group=group{options})"


def _body(body: tuple[Statement, ...], program: Program) -> list[str]:
    return [line for statement in body for line in _lines(statement, program)] or ["pass"]


def _block(head: str, body: tuple[Statement, ...], program: Program) -> list[str]:
    return [head, *(f"    {line}" for line in _body(body, program))]


@singledispatch
def _lines(statement: Statement, program: Program) -> list[str]:
    raise TypeError(statement)


@_lines.register
def _(s: Forward, program: Program) -> list[str]:
    called = f"w{s.wrapper}.module" if s.is_bare else f"w{s.wrapper}"
    inputs = f"batch({s.seed}, {s.sizes})"
    if s.after is not None:
        is_packed = program.models[program.wrappers[s.after].model].returns != "tensor"
        inputs = f"unpacked(w{s.after}({inputs}))" if is_packed else f"w{s.after}({inputs})"
        inputs += ".detach()" if s.detach else ""
    output = f"{called}({inputs})"
    if program.models[program.wrappers[s.wrapper].model].returns == "view":
        output = f"halved({output})"
    line = f"penalty({called}, {inputs})" if s.kind == "penalty" else f"loss({output})"
    if s.kind in TRANSFORMS:
        line = f"loss(transformed({s.kind!r}, {called}, {inputs}))"
    if s.kind == "heads" and s.second is not None:
        line = f"{s.loss}, {s.second} = losses({called}({inputs}))"
    elif s.loss is not None:
        line = f"{s.loss} = {line}"
    heads = ["torch.no_grad()"] * s.no_grad + ["torch.autocast('cpu', torch.bfloat16)"] * s.autocast
    return [f"with {', '.join(heads)}:", f"    {line}"] if heads else [line]


@_lines.register
def _(s: Backward, program: Program) -> list[str]:
    of = s.losses[0] if len(s.losses) == 1 else f"({' + '.join(s.losses)})"
    options = ["retain_graph=True"] * s.retain + ["create_graph=True"] * s.create_graph
    options += [f"inputs=part(m0.{s.part})"] if s.part else []
    models = ", ".join(f"m{number}" for number in range(len(program.models)))
    heads = [f"hooked({s.hook!r}, {models})"] if s.hook else []
    heads += ["compiled()"] * s.compiled
    line = f"{of}.backward({', '.join(options)})"
    return [f"with {', '.join(heads)}:", f"    {line}"] if heads else [line]


@_lines.register
def _(s: Drop, program: Program) -> list[str]:
    return [f"del {s.loss}"]


@_lines.register
def _(s: ZeroGrad, program: Program) -> list[str]:
    return [f"w{s.wrapper}.zero_grad({'' if s.set_to_none else 'set_to_none=False'})"]


@_lines.register
def _(s: Step, program: Program) -> list[str]:
    return [f"o{s.optimizer}.step()"]


@_lines.register
def _(s: Clip, program: Program) -> list[str]:
    return [f"seen(torch.nn.utils.clip_grad_norm_(w{s.wrapper}.parameters(), 0.5))"]


@_lines.register
def _(s: Mode, program: Program) -> list[str]:
    return [f"w{s.wrapper}.{'train' if s.train else 'eval'}()"]


@_lines.register
def _(s: Flag, program: Program) -> list[str]:
    return [f"w{s.wrapper}.require_backward_grad_sync = {s.on}"]


@_lines.register
def _(s: Freeze, program: Program) -> list[str]:
    return [f"w{s.wrapper}.requires_grad_({not s.on})"]


@_lines.register
def _(s: Switch, program: Program) -> list[str]:
    return [f"switch(m{s.model}, {s.to})"]


@_lines.register
def _(s: Swap, program: Program) -> list[str]:
    return [f"swap(m{s.model})"]


@_lines.register
def _(s: Prune, program: Program) -> list[str]:
    return [f"pruned(m{s.model})"]


@_lines.register
def _(s: Replace, program: Program) -> list[str]:
    return [f"replace(m{s.model}, {s.seed}{'' if s.is_equal else ' + (rank or 0)'})"]


@_lines.register
def _(s: Average, program: Program) -> list[str]:
    return [f"average(m{program.wrappers[s.wrapper].model})"]


@_lines.register
def _(s: Reload, program: Program) -> list[str]:
    state = f"w{s.wrapper}.state_dict()"
    return [f"w{s.wrapper}.load_state_dict({f'through_bytes({state})' if s.bytes else state})"]


@_lines.register
def _(s: ReloadOptimizer, program: Program) -> list[str]:
    return [f"o{s.optimizer}.load_state_dict(through_bytes(o{s.optimizer}.state_dict()))"]


@_lines.register
def _(s: Save, program: Program) -> list[str]:
    return [f"through_bytes(w{s.wrapper}.state_dict())"]


@_lines.register
def _(s: Rewrap, program: Program) -> list[str]:
    return [_wrap(program, s.wrapper)]


@_lines.register
def _(s: AllReduce, program: Program) -> list[str]:
    return [f"seen(total(m{program.wrappers[s.wrapper].model}))"]


@_lines.register
def _(s: NoSync, program: Program) -> list[str]:
    return _block(f"with w{s.wrapper}.no_sync():", s.body, program)


@_lines.register
def _(s: Join, program: Program) -> list[str]:
    return _block(f"with w{s.wrapper}.join():", s.body, program)


@_lines.register
def _(s: OnRank, program: Program) -> list[str]:
    return _block(f"if rank == {s.rank}:", s.body, program)


@_lines.register
def _(s: Loop, program: Program) -> list[str]:
    times = str(s.counts[0]) if s.counts[0] == s.counts[1] else f"{s.counts}[rank]"
    return _block(f"for _ in range({times}):", s.body, program)

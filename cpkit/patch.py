"""Patching a transformers model, and taking the patch off again: the one file that assigns to foreign objects.

Modules get a subclass of their own class with the same name by ``module.__class__``; weights are sharded by
transformers' own tensor- and expert-parallel code. Nothing process-wide changes, and every change is undone by
``remove``.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from .balance import Kept, Work
from .boundary import BaseModelBoundary, CausalLMBoundary, HeadBoundary
from .cache import PREFILL_CACHES
from .communicators import choose_communicator
from .errors import ConfigurationError, UnsupportedModel
from .kernels import KINDS
from .layout import strategies
from .session import Options, Session
from .topology import Topology, head_dim, num_experts

__all__ = ["Family", "apply", "disabled", "family_of", "register_family", "remove"]


def _attention_head_dim(config: Any) -> dict[str, int]:
    return {"attention": head_dim(config)}


@dataclass(frozen=True)
class Family:
    """What cpkit must know of a model family of transformers.

    ``module`` is its modeling module, ``base_model`` the class that runs the layers, ``classes`` maps the names of
    further classes to what is mixed in front of them. ``versions`` are the transformers releases it was checked with.
    ``refuse(config)`` returns why a config cannot be served, or ''. ``head_dims(config)`` names the kinds of kernels
    that a layer uses, with their head size; ``work(config)`` says what a layer costs, ``kept(config)`` what a row
    leaves in the caches. With ``own_decoding``, decoding steps run on our kernels.
    """

    model_type: str
    module: str
    base_model: str
    classes: dict[str, type]
    versions: str = ">=5.24,<5.25"
    refuse: Callable[[Any], str] = lambda config: ""
    head_dims: Callable[[Any], dict[str, int]] = _attention_head_dim
    work: Callable[[Any], Work] = Work.of
    kept: Callable[[Any], list[Kept]] = Kept.of
    own_decoding: bool = False


_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make a family known under its ``model_type``."""
    _FAMILIES[family.model_type] = family


def family_of(config: Any) -> Family:
    """The family of a config. Raises ``UnsupportedModel`` for one that cpkit does not know, with those it does."""
    importlib.import_module("cpkit.models")  # fills the registry; the only way up from here
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModel(
            f"model type {config.model_type!r} is not supported; supported are {sorted(_FAMILIES)}. To add one, see "
            "docs/adding-a-model.md"
        )
    if not SpecifierSet(family.versions).contains(transformers.__version__, prereleases=True):
        raise UnsupportedModel(
            f"{config.model_type} was checked with transformers {family.versions}, and {transformers.__version__} is "
            f"installed; pip install 'transformers{family.versions}'"
        )
    reason = family.refuse(config) or _refused_rope(config)
    if reason:
        raise UnsupportedModel(f"{config.model_type}: {reason}")
    return family


def _refused_rope(config: Any) -> str:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return (
            f"rope type {kind!r} changes its frequencies with the longest position that a rank happens to hold; use a "
            "checkpoint with default, linear, llama3 or yarn scaling"
        )
    return ""


def open_session(
    config: Any,
    topology: Topology | None,
    options: Options,
    dtype: torch.dtype,
    device_type: str,
) -> Session:
    """Check every option against the model and the run, and connect the process groups."""
    strategy, cache = options.strategy, options.cache
    topology = topology or Topology()
    family = family_of(config)
    topology.check_model(config)
    if strategy != "auto" and strategy not in strategies():
        raise ConfigurationError(f"strategy {strategy!r} is not known; use 'auto' or one of {strategies()}")
    if cache not in PREFILL_CACHES:
        raise ConfigurationError(f"cache {cache!r} is not known; use one of {sorted(PREFILL_CACHES)}")
    sizes = family.head_dims(config)
    if extra := sorted(kind for kind, name in options.kernels.items() if name != "auto" and kind not in sizes):
        raise ConfigurationError(f"{config.model_type} has no {' and no '.join(extra)}; leave {', '.join(extra)} out")
    kernels, reasons = {}, {}
    for kind, size in sizes.items():
        asked = options.kernels.get(kind, "auto")
        kernels[kind], reasons[kind] = KINDS[kind].choose(asked, device_type, dtype, size)
    top_k = getattr(config, "num_experts_per_tok", None) or 0
    name, communicator_reason = choose_communicator(
        options.communicator, num_experts(config), top_k, topology.ep, device_type
    )
    reasons |= {
        "strategy": "decided for each forward by work and bytes" if strategy == "auto" else "asked for",
        "communicator": communicator_reason,
        "cache": "every rank holds the whole cache, so decoding needs no other rank",
    }
    groups = topology.connect(device_type)
    return Session(config, groups, options, kernels, family.work(config), family.own_decoding, name, reasons)


def apply(
    model: nn.Module,
    topology: Topology | None = None,
    *,
    strategy: str = "auto",
    attention: str = "auto",
    sparse_attention: str = "auto",
    indexer: str = "auto",
    communicator: str = "auto",
    cache: str = "replicated",
    check_inputs: bool = True,
) -> nn.Module:
    """Make a loaded model, whole on every rank, run context-parallel; returns the same model.

    ``strategy`` is "zigzag", "interleave", "auto" or a registered name. ``attention``, and for families that select
    keys ``sparse_attention`` and ``indexer``, are a backend's name or "auto". ``communicator`` is "all_to_all",
    "gather", "local" or "auto"; ``cache`` says what prefill leaves behind. With ``check_inputs`` each forward compares
    a checksum of its inputs over the ranks. With ``tp`` or ``ep`` above 1 each rank keeps its part of the weights only.
    Call it after transformers has loaded, quantised and placed the model, and before ``torch.compile``. A model that is
    patched already is patched anew.

    Raises ``ConfigurationError`` or ``UnsupportedModel``, and changes nothing then.
    """
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise UnsupportedModel("the model is compiled; call cpkit.apply first and torch.compile after")
    base = base_model(model)
    if session_of(model) is None and session_of(base) is not None:
        raise UnsupportedModel("a part of this model is patched already: cpkit.remove(model.base_model) first")
    first = next(base.parameters())
    kernels = {"attention": attention, "sparse_attention": sparse_attention, "indexer": indexer}
    options = Options(strategy, kernels, communicator, cache, check_inputs)
    session = open_session(base.config, topology, options, first.dtype, _device_of(model).type)
    if session_of(model) is not None:
        remove(model)
    plan = plan_swaps(model, session)
    try:
        shard(model, session)
        swap(plan, model, session)
    except BaseException:
        _undo(session)
        raise
    return model


def _device_of(model: nn.Module) -> torch.device:
    """Where the model computes: accelerate's hooks know it when its weights are elsewhere."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((d for d in devices if d is not None), next(model.parameters()).device))


def base_model(model: nn.Module) -> nn.Module:
    """The part of a transformers model that runs the layers: ``model.model`` of a causal LM."""
    if not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedModel(f"{type(model).__name__} is not a transformers model")
    return model.base_model


def session_of(model: nn.Module) -> Session | None:
    """The session of a patched model, or None."""
    return model.__dict__.get("cp_session")


def plan_swaps(model: nn.Module, session: Session) -> list[tuple[nn.Module, type]]:
    """Every module that changes and what is mixed in front of its class, checked before anything is touched."""
    family = family_of(session.config)
    home = importlib.import_module(family.module)
    mixins: dict[type, type] = {getattr(home, name): mixin for name, mixin in family.classes.items()}
    mixins[getattr(home, family.base_model)] = BaseModelBoundary
    devices = set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"device_map spreads the model over {sorted(map(str, devices))}: each rank needs one device; load with "
            "cpkit.from_pretrained, or device_map={'': device}"
        )
    planned = [(m, mixins[type(m)]) for m in model.modules() if type(m) in mixins]
    if not any(mixin is BaseModelBoundary for _, mixin in planned):
        raise UnsupportedModel(
            f"found {type(base_model(model)).__name__}, expected transformers' own {family.base_model}: another kit "
            "has changed the model; apply cpkit to the model as transformers loads it"
        )
    missing = set(mixins.values()) - {mixin for _, mixin in planned}
    if missing:
        names = [cls.__name__ for cls, mixin in mixins.items() if mixin in missing]
        raise UnsupportedModel(f"the model has no {' or '.join(names)}: its classes were replaced by another kit")
    if model is not base_model(model):
        planned.append((model, CausalLMBoundary if hasattr(model, "generate") else HeadBoundary))
    for module, _ in planned:
        _accelerate_forward(module)
    return planned


def _accelerate_forward(module: nn.Module) -> bool:
    """Whether accelerate wrapped this instance's forward; raises for a wrapper of anyone else."""
    if "forward" not in module.__dict__:
        return False
    if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward"):
        return True
    raise UnsupportedModel(
        f"{type(module).__name__} has an instance-level forward of unknown origin, which would bypass the patch; "
        "remove that wrapper, or apply it after cpkit.apply"
    )


@functools.cache
def _mixed(cls: Any, mixin: Any) -> type:
    """``mixin`` in front of ``cls`` under the name, module and forward signature of ``cls``."""

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        return mixin.forward(self, *args, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), {**names, "forward": forward})


def swap(planned: list[tuple[nn.Module, type]], model: nn.Module, session: Session) -> None:
    for module in {id(m): m for m in (model, *(m for m, _ in planned))}.values():
        module.cp_session = session
        session.undo.append(functools.partial(module.__dict__.pop, "cp_session", None))
    for module, mixin in planned:
        plain = type(module)
        module.__class__ = _mixed(plain, mixin)  # type: ignore[arg-type]
        session.undo.append(functools.partial(setattr, module, "__class__", plain))
        if _accelerate_forward(module):  # it calls the bound forward of the class that it saw
            session.undo.append(functools.partial(setattr, module, "_old_forward", module._old_forward))
            module._old_forward = types.MethodType(type(module).forward, module)


def shard(model: nn.Module, session: Session) -> None:
    """Keep this rank's part of the weights, by transformers' own TP and EP plans; of a loaded or of a meta model."""
    topology, groups = session.groups.topology, session.groups
    if topology.tp == 1 and topology.ep == 1:
        return
    wanted = DistributedConfig()
    wanted.tp_size, wanted.ep_size = topology.tp, topology.ep  # set afterwards: its own checks know no CP axis
    tp_plan, ep_plan, _ = model._resolve_parallel_plans(wanted)
    modules = dict(model.named_modules())
    for name in {"", *(n if n in modules else n.rpartition(".")[0] for n in (*tp_plan, *ep_plan))}:
        session.undo.append(functools.partial(_restore, modules[name], _attributes(modules[name])))
    model._tp_size = topology.tp
    session.undo.append(functools.partial(_make_whole, model))
    _untie(model, modules, (*tp_plan, *ep_plan))
    if topology.tp > 1:
        apply_tensor_parallelism(model, groups.tp_mesh, tp_plan)
    if topology.ep > 1:
        for name, style in ep_plan.items():
            if style == "ep_dispatch_experts":
                modules[name].cp_session = session
        apply_expert_parallelism(
            model, groups.ep_mesh, groups.tp_mesh, ep_plan, ep_implementation=f"cpkit_{session.communicator}"
        )
    for parameter in model.parameters():  # a slice would keep the whole weight alive
        if isinstance(parameter, DTensor) and not parameter.is_meta:
            parameter._local_tensor = parameter._local_tensor.clone()


def _untie(model: nn.Module, modules: dict[str, nn.Module], names: Iterable[str]) -> None:
    """Give tied weights that the plans name a parameter each, over the same memory, so that each can be sharded."""
    known = dict(model.named_parameters())
    for name in names:
        module, _, parameter = name.rpartition(".")
        if name not in known and name not in modules and not known[next(iter(known))].is_meta:
            tied = modules[module]._parameters[parameter]
            modules[module]._parameters[parameter] = nn.Parameter(tied.detach(), tied.requires_grad)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in set(_attributes(module)) - set(attributes):
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _make_whole(model: nn.Module) -> None:
    """Gather every sharded weight; all ranks must call it. Tied weights stay tied."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    whole[id(parameter)] = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
                module._parameters[name] = whole[id(parameter)]
    model.tie_weights()


def remove(model: nn.Module) -> nn.Module:
    """Take the patch off and return the model: plain transformers again, with the whole weights on every rank.

    Where ``tp`` or ``ep`` sharded the weights, they are gathered: every rank must call it, and have room for them.
    """
    session = session_of(model)
    if session is None:
        raise ConfigurationError(f"{type(model).__name__} is not patched by cpkit; there is nothing to remove")
    _undo(session)
    return model


def _undo(session: Session) -> None:
    while session.undo:
        session.undo.pop()()


@contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """The same model without context parallelism while the block runs: every rank computes every row.

    Tensor and expert parallelism go on, as the weights are where they are.
    """
    session = session_of(model)
    if session is None:
        raise ConfigurationError(f"{type(model).__name__} is not patched by cpkit; there is nothing to disable")
    before, session.enabled = session.enabled, False
    try:
        yield model
    finally:
        session.enabled = before

"""How the ranks of a run are divided: data, context, tensor, pipeline and expert parallel groups.

Ranks are laid out with tp fastest, then cp, then dp, then pp. With ``Topology(dp=2, cp=2, tp=2, ep=4)``::

    rank      0    1    2    3    4    5    6    7
    dp        [======= 0 =======] [======= 1 =======]    one DP group is called with the same inputs
    cp        [== 0 ==] [== 1 ==] [== 0 ==] [== 1 ==]    holds these rows of the prompt
    tp          0    1    0    1    0    1    0    1     holds these heads
    ep          0    1    2    3    0    1    2    3     holds these experts, in rank order
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import ConfigurationError

__all__ = ["Group", "Groups", "Topology"]


@dataclass(frozen=True)
class Topology:
    """Sizes of the parallel axes; ``world = pp * dp * cp * tp`` and ``ep`` divides ``dp * cp * tp``.

    Raises ``ConfigurationError`` for a size below 1 or an ``ep`` that does not divide.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigurationError(f"Topology({name}={size!r}): a size is a whole number of at least 1")
        stage = self.dp * self.cp * self.tp
        if stage % self.ep:
            fits = [n for n in range(1, stage + 1) if stage % n == 0]
            raise ConfigurationError(
                f"Topology(ep={self.ep}) does not divide dp * cp * tp = {self.dp} * {self.cp} * {self.tp} = {stage}; "
                f"ep can be one of {fits}"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def experts_inside_replica(self) -> bool:
        """Whether every expert group lies inside one DP group; decided for all ranks at once."""
        return (self.cp * self.tp) % self.ep == 0

    def members(self, axis: str) -> list[list[int]]:
        """The groups of ranks along ``axis`` ("dp", "cp", "tp", "pp", "ep" or "replica"), each in rank order.

        A replica group is all ranks of one DP group: those called with the same inputs.
        """
        grid = torch.arange(self.world).view(self.pp, self.dp, self.cp, self.tp)
        if axis == "replica":
            return grid.reshape(-1, self.cp * self.tp).tolist()
        if axis == "ep":
            return grid.reshape(-1, self.ep).tolist()
        dim = ("pp", "dp", "cp", "tp").index(axis)
        return grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()

    def check_world(self, world: int) -> None:
        """Raise ``ConfigurationError`` unless ``world`` ranks are what these sizes need."""
        if self.world != world:
            raise ConfigurationError(
                f"{self} needs pp * dp * cp * tp = {self.pp} * {self.dp} * {self.cp} * {self.tp} = {self.world} ranks, "
                f"and {world} {'is' if world == 1 else 'are'} running; start it with "
                f"torchrun --nproc-per-node {self.world}, or choose sizes whose product is {world}"
            )

    def check_model(self, config) -> None:
        """Raise ``ConfigurationError`` where a model's heads or experts do not divide by these sizes."""
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if heads is not None and heads % self.tp:
                raise ConfigurationError(
                    f"tp={self.tp} does not divide {name}={heads}; tp can be one of {_divisors(heads)}"
                )
        block = _scale_block(config)
        for name, size in _divided_sizes(config).items() if block and self.tp > 1 else ():
            if size // self.tp % block:
                raise ConfigurationError(
                    f"tp={self.tp} leaves a rank {size // self.tp} rows of {name}, and the checkpoint has one FP8 "
                    f"scale for each {block}; use a smaller tp, or a 16-bit checkpoint"
                )
        if self.ep > 1:
            experts = num_experts(config)
            if not experts:
                raise ConfigurationError(f"ep={self.ep}, but {config.model_type} has no experts; use ep=1")
            if experts % self.ep:
                raise ConfigurationError(
                    f"ep={self.ep} does not divide the model's {experts} experts; ep can be one of {_divisors(experts)}"
                )

    def connect(self, device_type: str | None = None, timeout: timedelta | None = None) -> Groups:
        """Build the process groups (once per process group and topology), starting ``torch.distributed`` if needed.

        Works under torchrun and ``accelerate launch`` (both set RANK, WORLD_SIZE and the rendezvous address), and
        with a process group that the caller initialised. One rank needs no process group at all.
        """
        if self.pp > 1:
            raise ConfigurationError(f"Topology(pp={self.pp}): pipeline stages are not supported yet; use pp=1")
        device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        if not dist.is_initialized():
            world = int(os.environ.get("WORLD_SIZE", 1))
            self.check_world(world)
            if world == 1:
                return Groups.alone(self, device_type)
            if device_type == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
            atexit.register(_close)  # else gloo's threads may abort an interpreter that ends
        self.check_world(dist.get_world_size())
        built = _BUILT.setdefault(dist.group.WORLD, {})
        if (self, device_type) not in built:
            built[self, device_type] = Groups.build(self, device_type)
        return built[self, device_type]

    def __str__(self) -> str:
        return "Topology(" + ", ".join(f"{k}={v}" for k, v in asdict(self).items() if v > 1) + ")"


_BUILT: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # default process group -> {(topology, device): groups}


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _scale_block(config) -> int:
    """Rows that share an FP8 scale, 0 where the checkpoint has none a block."""
    quantization = getattr(config, "quantization_config", None) or {}
    given = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return (given.get("weight_block_size") or [0])[0] if given.get("quant_method") == "fp8" else 0


def _divided_sizes(config) -> dict[str, int]:
    """The narrowest sides of the projections that TP divides, whole."""
    heads = config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        shared = config.moe_intermediate_size * config.n_shared_experts
        width = config.qk_nope_head_dim + config.v_head_dim
        return {"kv_b_proj": heads * width, "o_proj": heads * config.v_head_dim, "shared_experts": shared}
    return {"k_proj": config.num_key_value_heads * head_dim(config)}


def head_dim(config) -> int:
    """Size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_experts(config) -> int:
    """Routed experts of a model, 0 for a dense one."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((n for n in (getattr(config, name, None) for name in names) if n), 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Group:
    """Some ranks that exchange rows. ``handle`` is None for a group of one without a process group."""

    ranks: tuple[int, ...]
    rank: int  # this process's place in the group
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups that this rank belongs to, and transformers' view of two of them (1-D device meshes)."""

    topology: Topology
    device_type: str
    rank: int
    cp: Group
    tp: Group
    ep: Group
    replica: Group
    world: Group
    tp_mesh: DeviceMesh | None
    ep_mesh: DeviceMesh | None

    @classmethod
    def alone(cls, topology: Topology, device_type: str) -> Groups:
        one = Group((0,), 0)
        return cls(topology, device_type, 0, one, one, one, one, one, None, None)

    @classmethod
    def build(cls, topology: Topology, device_type: str) -> Groups:
        shape = (topology.pp, topology.dp, topology.cp, topology.tp)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("pp", "dp", "cp", "tp"))
        experts = init_device_mesh(
            device_type,
            (topology.pp, math.prod(shape[1:]) // topology.ep, topology.ep),
            mesh_dim_names=("pp", "ep_copy", "ep"),
        )
        replica = mesh["cp", "tp"]._flatten("replica")

        def group(of: DeviceMesh) -> Group:
            return Group(tuple(of.mesh.flatten().tolist()), of.get_local_rank(), of.get_group())

        return cls(
            topology,
            device_type,
            dist.get_rank(),
            cp=group(mesh["cp"]),
            tp=group(mesh["tp"]),
            ep=group(experts["ep"]),
            replica=group(replica),
            world=Group(tuple(range(topology.world)), dist.get_rank(), dist.group.WORLD),
            tp_mesh=mesh["tp"],
            ep_mesh=experts["ep"],
        )

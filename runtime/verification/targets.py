"""What a plan can be compiled for without its devices: names, the wheels they need, the devices."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax

from autopar.base import hardware
from autopar.base.cluster import Cluster
from autopar.base.errors import AutoparError, DeviceError, OptionError, did_you_mean

TPUS = {"v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p"}
"""The presets of TPUs by their generation."""

PLANAR = ("v5e",)
"""The generations whose slices have two axes."""

MEMORY_LIMIT = "xla_tpu_max_hbm_size_mib"
"""A flag of XLA:TPU: how much memory a device has."""

CUDA_WHEELS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclass(frozen=True)
class Target:
    """Devices that a compiler makes programs for.

    Args:
      name: as the user says it.
      platform: "cpu", "gpu" or "tpu".
      kind: the GPU, or the TPU's generation; "" of CPUs.
      shape: of a TPU slice; "" of others, of which there are as many as a plan needs.
      limit_mib: MiB of memory that a TPU's compiler shall count on; 0: those of its generation.
    """

    name: str
    platform: str
    kind: str = ""
    shape: str = ""
    limit_mib: int = 0

    @property
    def memory_bytes(self) -> int | None:
        """What a program may use on each device; None: it is up to the plan."""
        if self.limit_mib:
            return self.limit_mib << 20
        preset = {"gpu": self.kind, "tpu": TPUS.get(self.kind, "")}.get(self.platform)
        if not preset:
            return None
        device = Cluster.preset(preset).device
        return int(device.memory_bytes * device.memory_fraction)

    @property
    def compiler(self) -> str:
        """What its programs are compiled by, with the release; its wheel is installed."""
        installed = next(filter(importlib.util.find_spec, self.wheels), self.wheels[0])
        distribution = installed.replace("_", "-")
        return f"XLA:{self.platform.upper()} of {distribution} {metadata.version(distribution)}"

    @property
    def wheels(self) -> tuple[str, ...]:
        """The modules with its compiler, one of which must be there."""
        return {"gpu": CUDA_WHEELS, "tpu": ("libtpu",)}.get(self.platform, ("jaxlib",))

    @property
    def compiler_options(self) -> Mapping[str, str | bool]:
        """What its compiler is told beside a program's own options."""
        return {MEMORY_LIMIT: str(self.limit_mib)} if self.limit_mib else {}

    def require(self, num_devices: int) -> None:
        """Refuse early what is certain to fail.

        Raises:
          AutoparError: the wheel with the compiler is not installed.
          DeviceError: the plan needs more devices.
        """
        if not any(map(importlib.util.find_spec, self.wheels)):
            extra = f"autopar[{self.platform}-check]"
            raise AutoparError(
                f"The compiler for {self.name!r} is not installed.",
                where=f"target={self.name!r}",
                why=f"it comes with a wheel ({' or '.join(self.wheels).replace('_', '-')}); no "
                "accelerator is needed.",
                hint=f"pip install '{extra}'.",
            )
        if self.shape and num_devices > self.num_devices:
            raise DeviceError(
                f"The plan needs {num_devices} devices, and {self.name!r} has {self.num_devices}.",
                where=f"target={self.name!r}",
                hint=f"a larger slice, such as 'tpu:{self.kind}:4x4'.",
            )

    @property
    def num_devices(self) -> int:
        """Of a slice of TPUs: those of its shape, of which each is one (v4, v5p: one chip)."""
        total = 1
        for size in self.shape.split("x"):
            total *= int(size)
        return total

    @property
    def device_name(self) -> str:
        """A name that says what kind of device it is."""
        return {"gpu": self.kind.upper(), "tpu": f"TPU {self.kind}"}.get(self.platform, "cpu")

    def environment(self) -> Mapping[str, str]:
        """What the environment of a process that compiles for it must have."""
        own = {"JAX_PLATFORMS": "cpu"}
        if self.platform == "tpu":
            # Nobody asks the cloud's servers what machine this is, and several may compile.
            own |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                "TPU_STDERR_LOG_LEVEL": "2",
            }
        return own

    def devices(self, num_devices: int) -> list[jax.Device]:
        """So many of them, in a process with its `environment`, before JAX is used there."""
        if self.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", num_devices)
            return jax.devices("cpu")[:num_devices]
        from jax.experimental import topologies

        if self.platform == "gpu":
            topology = topologies.get_topology_desc(
                self.name,
                "cuda",
                target_config=gpu_target_text(self.kind),
                topology=f"1x1x{num_devices}",
            )
        else:
            # A chip of this generation has two cores, which JAX's users see as one device.
            more = {"chip_config_name": "megacore"} if self.kind == "v4" else {}
            topology = topologies.get_topology_desc(f"{self.kind}:{self.shape}", "tpu", **more)
        return list(topology.devices)[:num_devices]


def target_named(name: Any, where: str = "verify") -> Target:
    """The target of a name.

    Raises:
      OptionError: there is none, and which there are; or its devices have less memory.
    """
    gpus = hardware.gpu_targets()["gpus"]
    known = ["cpu", *(f"gpu:{gpu}" for gpu in gpus), *(f"tpu:{kind}:2x4" for kind in TPUS)]
    text = name.lower() if isinstance(name, str) else ""
    if text == "cpu":
        return Target(text, "cpu")
    if text.startswith("gpu:") and text[4:] in gpus:
        return Target(text, "gpu", text[4:])
    slice_of = re.fullmatch(r"tpu:(\w+):([1-9]\d*(?:x[1-9]\d*){1,2})(?::([1-9]\d*)mib)?", text)
    if slice_of and slice_of[1] in TPUS:
        whole = Target(text, "tpu", slice_of[1], slice_of[2])
        most = math.ceil((whole.memory_bytes or 0) / 2**20)
        if int(slice_of[3] or 0) > most:
            raise OptionError(
                f"The target {name!r} has more memory than there is.",
                where=where,
                why=f"programs on a {slice_of[1]} have {most} MiB.",
                hint=f"'tpu:{slice_of[1]}:{slice_of[2]}' has them all.",
            )
        return replace(whole, limit_mib=int(slice_of[3] or 0))
    hint = did_you_mean(name, known)
    if text.startswith("gpu:"):  # which of these is closest in letters says nothing
        hint = f"{' or '.join(repr(f'gpu:{gpu}') for gpu in gpus)}: XLA is told of no other GPU."
    raise OptionError(
        f"There is no target {name!r}.",
        where=where,
        why=f"the targets are 'cpu', {', '.join(repr(f'gpu:{gpu}') for gpu in gpus)}, and slices "
        f"of TPUs such as 'tpu:v5e:2x4', 'tpu:v4:2x2x1' and 'tpu:v5p:2x2x1', which may have less "
        "memory than they come with ('tpu:v5e:2x4:4000MiB').",
        hint=hint,
    )


def target_for(name: Any, cluster: Cluster) -> Target:
    """The target of a name, or for True the one with the devices of a cluster.

    Raises:
      OptionError: there is none of that name, or none with such devices.
    """
    if name is not True:
        return target_named(name, where="confirm")
    if cluster.device.name.lower().startswith("cpu"):
        return target_named("cpu")
    kinds = {x: x for x in hardware.gpu_targets()["gpus"]} | TPUS
    known = {Cluster.preset(preset).device.name: kind for kind, preset in kinds.items()}
    kind = known.get(cluster.device.name)
    if kind is None:
        raise OptionError(
            f"confirm=True is not possible for {cluster.device.name}.",
            why=f"the devices whose compilers are known are {', '.join(sorted(known))}.",
            hint="name the target that is nearest, such as confirm='gpu:h100', or leave it out.",
        )
    if kind not in TPUS:
        return target_named(f"gpu:{kind}")
    axes = 2 if kind in PLANAR else 3
    return target_named(f"tpu:{kind}:{_slice_of(cluster.num_devices, axes)}")


def _slice_of(num_devices: int, axes: int) -> str:
    """The shape of a slice of TPUs: as even as it can be, axes of one last.

    >>> _slice_of(8, 2), _slice_of(64, 2), _slice_of(4, 3), _slice_of(16, 3)
    ('2x4', '8x8', '2x2x1', '2x2x4')
    """
    sizes = [1] * axes
    for _ in range(num_devices.bit_length() - 1):
        sizes[sizes.index(min(sizes))] *= 2
    if math.prod(sizes) != num_devices:
        raise OptionError(
            "confirm=True is not possible for this cluster.",
            why=f"a slice of {num_devices} TPUs has a shape that is not known.",
            hint="name it: confirm='tpu:v5e:4x4'.",
        )
    return "x".join(map(str, sorted(sizes, key=lambda size: (size == 1, size))))


def with_memory(target: Target, size: int) -> Target:
    """The target as its compiler is told of devices with so many bytes: TPUs' is."""
    if target.platform != "tpu":
        return target
    return target_named(f"tpu:{target.kind}:{target.shape}:{max(size >> 20, 1)}MiB")


def gpu_target_text(kind: str) -> str:
    """What XLA is told of a GPU, as the text of its `GpuTargetConfigProto`."""
    tables = hardware.gpu_targets()
    fields = {**tables["gpus"][kind], **tables["limits"]}
    name, major = fields.pop("name"), fields.pop("compute_capability_major")
    more = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = [f"  {key}: {value}" for key, value in sorted(fields.items())]
    return "\n".join(
        [
            "gpu_device_info {",
            f"  cuda_compute_capability {{ major: {major}{more} }}",
            *lines,
            "}",
            'platform_name: "CUDA"',
            f'device_description_str: "{name}"',
            "",
        ]
    )
